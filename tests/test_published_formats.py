"""quantization_config as published checkpoints have it, key by key: each is read, and nothing of it is unknown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.weights.checkpoint import open_checkpoint
from octavo.weights.formats.codes import NF4
from octavo.weights.spec import CheckpointError
from tests import quant_writers as w
from tests.quant_writers import Raw, Written, save_module
from tests.test_quant_layouts import rng

NONE: dict[str, Any] = dict.fromkeys(
    ("block_name_to_quantize", "dataset", "max_input_length", "model_seqlen", "module_name_preceding_first_block",
     "modules_in_block_to_quantize", "pad_token_id", "tokenizer")
)  # fmt: skip
WEIGHTS = {"actorder": None, "block_structure": None, "dynamic": False, "group_size": 128, "num_bits": 4,
           "observer": "minmax", "observer_kwargs": {}, "strategy": "group", "symmetric": True, "type": "int"}  # fmt: skip
FP8_WEIGHTS = WEIGHTS | {"group_size": None, "num_bits": 8, "strategy": "channel", "type": "float"}
INPUTS = WEIGHTS | {"dynamic": True, "group_size": None, "num_bits": 8, "observer": None, "strategy": "token"}


def compressed(weights: dict[str, Any], inputs: dict[str, Any] | None, format: str, **more: Any) -> dict[str, Any]:
    group = {"input_activations": inputs, "output_activations": None, "targets": ["Linear"], "weights": weights}
    return {"config_groups": {"group_0": group}, "format": format, "global_compression_ratio": 1.5, "ignore": ["lm_head"],
            "kv_cache_scheme": None, "quant_method": "compressed-tensors", "quantization_status": "frozen", **more}  # fmt: skip


def statically(written: Written, scale: str) -> Written:
    written.tensors[scale] = Raw("F32", np.ones(1, np.float32))
    return written


PUBLISHED: dict[str, tuple[dict[str, Any], Written, str]] = {
    "GPTQ of AutoGPTQ, act-order": (
        {"bits": 4, "group_size": 128, "damp_percent": 0.1, "desc_act": True, "static_groups": False, "sym": True,
         "true_sequential": True, "model_name_or_path": None, "model_file_base_name": "model", "quant_method": "gptq"},
        w.gptq(rng(), 32, 256, size=128, act_order=rng(1)), "Q4_0",
    ),
    "GPTQ of Optimum (Qwen2.5)": (
        {"batch_size": 1, "bits": 4, "cache_block_outputs": True, "damp_percent": 0.01, "desc_act": False,
         "exllama_config": {"version": 1}, "group_size": 128, "quant_method": "gptq", "sym": True, "true_sequential": True,
         "use_cuda_fp16": False, "use_exllama": True, **NONE},
        w.gptq(rng(), 32, 256, size=128), "Q4_0",
    ),
    "GPTQ of GPTQModel": (
        {"bits": 4, "checkpoint_format": "gptq", "desc_act": True, "dynamic": None, "group_size": 32, "lm_head": False,
         "meta": {"damp_auto_increment": 0.0025, "damp_percent": 0.01, "mse": 0.0, "quantizer": ["gptqmodel:2.0.0"],
                  "static_groups": False, "true_sequential": True, "uri": "https://example.org"},
         "pack_dtype": "int32", "quant_method": "gptq", "sym": True},
        w.gptq(rng(), 32, 96, size=32), "Q4_0",
    ),
    "AWQ of AutoAWQ": (
        {"backend": "autoawq", "bits": 4, "do_fuse": False, "exllama_config": None, "fuse_max_seq_len": None,
         "group_size": 128, "modules_to_fuse": None, "modules_to_not_convert": None, "quant_method": "awq",
         "version": "gemm", "zero_point": True},
        w.awq(rng(), 48, 256, 128), "I4Z64",
    ),
    "AutoRound": (
        {"act_bits": 16, "act_data_type": "int", "act_dynamic": True, "act_group_size": 128, "act_sym": True, "amp": True,
         "autoround_version": "0.4.5", "batch_size": 8, "bits": 4, "block_name_to_quantize": None, "data_type": "int",
         "dataset": "NeelNanda/pile-10k", "enable_minmax_tuning": True, "enable_norm_bias_tuning": False,
         "enable_quanted_input": True, "gradient_accumulate_steps": 1, "group_size": 128, "iters": 1000,
         "low_gpu_mem_usage": True, "lr": 0.001, "minmax_lr": 0.001, "nsamples": 512,
         "packing_format": "auto_round:auto_gptq", "quant_method": "auto-round", "scale_dtype": "torch.float16",
         "seqlen": 2048, "super_bits": None, "super_group_size": None, "sym": True, "to_quant_block_names": None},
        w.gptq(rng(), 32, 256, size=128), "Q4_0",
    ),
    "W4A16 of llm-compressor": (
        compressed(WEIGHTS, None, "pack-quantized"), w.compressed_int(rng(), 32, 256, size=128), "I4Z64",
    ),
    "W4A16 with act-order inside of groups": (
        compressed(WEIGHTS | {"actorder": "weight"}, None, "pack-quantized", sparsity_config={}, transform_config={},
                   version="0.12.0"), w.compressed_int(rng(), 32, 256, size=128), "I4Z64",
    ),
    "W8A8": (
        compressed(WEIGHTS | {"group_size": None, "num_bits": 8, "strategy": "channel"}, INPUTS, "int-quantized",
                   sparsity_config={"format": "dense", "ignore": [], "registry_requires_subclass": False,
                                    "sparsity_structure": "unstructured", "targets": []}),
        w.compressed_int(rng(), 32, 128, 8, None, packed=False), "I8Z64",
    ),
    "FP8 dynamic": (
        compressed(FP8_WEIGHTS, INPUTS | {"type": "float"}, "float-quantized"),
        w.fp8(rng(), 33, 128, (1, 128), ".weight_scale", "BF16"), "F8",
    ),
    "FP8 of DeepSeek and Qwen": (
        {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "scale_fmt": "ue8m0",
         "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]}, w.fp8(rng(), 200, 320), "F8",
    ),
    "FP8 of MiniMax": (
        {"activation_scheme": "dynamic", "fmt": "float8_e4m3fn", "quant_method": "fp8", "weight_block_size": [128, 128],
         "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"]}, w.fp8(rng(), 200, 320), "F8",
    ),
    "FP8 of AutoFP8": (
        {"activation_scheme": "static", "ignored_layers": ["lm_head"], "quant_method": "fp8"},
        statically(w.fp8(rng(), 32, 128, None, ".weight_scale", flat=True), ".input_scale"), "F8",
    ),
    "FP8 of Ministral": (
        {"activation_scheme": "static", "dequantize": False, "modules_to_not_convert": ["model.vision_tower", "lm_head"],
         "quant_method": "fp8", "weight_block_size": None},
        statically(w.fp8(rng(), 32, 128, None, ".weight_scale_inv", flat=True), ".activation_scale"), "F8",
    ),
    "MXFP4 of gpt-oss": (
        {"modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
         "quant_method": "mxfp4"}, w.mxfp4(rng(), 33, 96, experts=3), "MXFP4",
    ),
    "NF4 of bitsandbytes": (
        {"_load_in_4bit": True, "_load_in_8bit": False, "bnb_4bit_compute_dtype": "bfloat16",
         "bnb_4bit_quant_storage": "uint8", "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True,
         "llm_int8_enable_fp32_cpu_offload": False, "llm_int8_has_fp16_weight": False,
         "llm_int8_skip_modules": ["lm_head"], "llm_int8_threshold": 6.0, "load_in_4bit": True, "load_in_8bit": False,
         "quant_method": "bitsandbytes"},
        w.bitsandbytes4(rng(), 24, 256, NF4, size=64, nested=256), "NF4",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_descriptions_are_read(tmp_path: Path, name: str) -> None:
    config, written, source = PUBLISHED[name]
    checkpoint = open_checkpoint(save_module(tmp_path / "m", written, config))
    assert (list(checkpoint.names()), checkpoint.notices) == (["m.weight"], [])
    assert checkpoint.info("m.weight").source == source


UNSERVED = ("fbgemm_fp8", "modelopt", "torchao", "hqq", "eetq", "quanto", "aqlm", "vptq", "higgs", "bitnet", "spqr",
            "intel/auto-round", "quark")  # fmt: skip


@pytest.mark.parametrize("method", UNSERVED)
def test_other_methods_are_refused_by_name(tmp_path: Path, method: str) -> None:
    folder = save_module(tmp_path / "m", w.fp8(rng(), 32, 128), {"quant_method": method})
    with pytest.raises(CheckpointError, match=f"quant_method '{method}' is not supported; supported: gptq, awq"):
        open_checkpoint(folder)
