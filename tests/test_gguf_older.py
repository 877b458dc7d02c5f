"""GGUF files of Gemma and the older families: norms, joined matrices and names as llama.cpp's converter writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from octavo.backends.reference import ReferenceBackend, forward_logits
from octavo.models import build_graph
from octavo.models.config import usual_keys
from octavo.weights.checkpoint import open_checkpoint
from octavo.weights.formats import dequantise
from tests.test_fixtures import Case, folders_of

F32 = NDArray[np.float32]

ARCHITECTURES = {
    "bloom": "bloom", "falcon_mq": "falcon", "falcon_new": "falcon", "gemma": "gemma", "gemma2": "gemma2",
    "gemma3_text": "gemma3", "gpt2": "gpt2", "gpt_bigcode": "starcoder", "gpt_neox": "gptneox", "mpt": "mpt",
    "nemotron": "nemotron", "phi": "phi2", "starcoder2": "starcoder2",
}  # fmt: skip
TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
ROTATED = {"gpt_neox": 4, "nemotron": 8, "phi": 8}


def as_written(family: str, name: str, tensor: F32, kv_heads: int, group: int) -> F32:
    """The tensor as the converter writes it: 1 + w in norms, GPT-2's matrices the usual way, rows of q, then k, then v."""
    if family in ("gemma", "gemma2", "gemma3_text", "nemotron") and "norm" in name and name.endswith("weight"):
        return tensor + 1
    if family == "gpt2" and name.endswith(TRANSPOSED):
        return tensor.T
    if "query_key_value" in name and kv_heads > 1:
        heads = tensor.reshape(kv_heads, group + 2, -1, *tensor.shape[1:])
        parts = (heads[:, :group], heads[:, group : group + 1], heads[:, group + 1 :])
        return np.concatenate([part.reshape(-1, *tensor.shape[1:]) for part in parts])
    return tensor


def write(case: Case, family: str, path: Path) -> Path:
    source = case.checkpoint
    c: dict[str, Any] = usual_keys(source.config, "")
    layers, hidden, heads = c["num_hidden_layers"], c["hidden_size"], c["num_attention_heads"]
    kv_heads = c.get("num_kv_heads" if c.get("new_decoder_architecture") else "num_key_value_heads") or heads
    kv_heads = 1 if c.get("multi_query") and not c.get("new_decoder_architecture") else kv_heads
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == ARCHITECTURES[family])
    writer = gguf.GGUFWriter(path, ARCHITECTURES[family])
    writer.add_block_count(layers)
    writer.add_context_length(c.get("max_position_embeddings") or 512)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(c.get("intermediate_size") or 4 * hidden)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_vocab_size(c["vocab_size"])
    if "head_dim" in c:
        writer.add_key_length(c["head_dim"])
        writer.add_value_length(c["head_dim"])
    if "rms_norm_eps" in c:
        writer.add_layer_norm_rms_eps(c["rms_norm_eps"])
    else:
        writer.add_layer_norm_eps(c.get("layer_norm_eps") or 1e-5)
    if c.get("rope_theta"):
        writer.add_rope_freq_base(c["rope_theta"])
    if family in ROTATED:
        writer.add_rope_dimension_count(ROTATED[family])
    if c.get("sliding_window"):
        writer.add_sliding_window(c["sliding_window"])
    if family == "gpt_neox":
        writer.add_parallel_residual(c["use_parallel_residual"])
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if c.get(key):
            getattr(writer, "add_" + key)(c[key])
    if family == "mpt":
        writer.add_clamp_kqv(c["attn_config"]["clip_qkv"])
        writer.add_max_alibi_bias(8.0)
    names = gguf.get_tensor_name_map(arch, layers)
    for name in source.names():
        info, data, _ = source.read(name)
        tensor = dequantise(info.source, data, info.shape[-1]).reshape(info.shape)
        tensor = as_written(family, name, tensor, kv_heads, heads // kv_heads)
        known = name.removeprefix("transformer.") if family == "bloom" else name
        new = names.get_name(known, try_suffixes=(".weight", ".bias"))
        assert new is not None, name
        writer.add_tensor(new, np.ascontiguousarray(tensor, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Without --fixtures those of tests/data."""
    if "family" in metafunc.fixturenames:
        there = folders_of(metafunc.config.getoption("fixtures"))
        metafunc.parametrize("family", [family for family in ARCHITECTURES if family in there])


def test_older_families(family: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    case = Case(folders_of(request.config.getoption("fixtures"))[family])
    scalar = case.checkpoint.config.get("query_pre_attn_scalar")
    case.checkpoint = open_checkpoint(write(case, family, tmp_path / "model.gguf"))
    if scalar:  # files do not say it: what all published models of that size have is taken
        assert case.checkpoint.config["query_pre_attn_scalar"] == case.checkpoint.config["head_dim"]
        case.checkpoint.config["query_pre_attn_scalar"] = scalar
    graph = build_graph(case.checkpoint, "f32")
    case.check(1, forward_logits(graph, ReferenceBackend().pack(graph, case.checkpoint), case.whole(1)))
