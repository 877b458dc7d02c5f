"""GGUF files of every family that is read: the fixtures written as llama.cpp's converter writes them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from octavo.backends.reference import ReferenceBackend, forward_logits
from octavo.models import build_graph, rope
from octavo.weights.address import Addressed
from octavo.weights.checkpoint import open_checkpoint
from octavo.weights.formats import dequantise
from octavo.weights.gguf_names import FAMILIES as FAMILIES_OF_FILES
from octavo.weights.spec import CheckpointError
from tests.random_model import InMemory
from tests.test_fixtures import Case
from tests.test_models import check_expected

Change = Callable[[gguf.GGUFWriter], None]
INTERLEAVED = ("llama", "smollm3", "olmo", "granite")


def convert(folder: Path, path: Path, change: Change = lambda writer: None, rotated: int | None = None) -> Path:
    """The fixture in `folder` as a GGUF file of float32; `change` adds metadata and tensors."""
    source = open_checkpoint(folder)
    c: dict[str, Any] = source.config
    kind = {"cohere": "command-r", "olmo3": "olmo2"}.get(c["model_type"], c["model_type"])
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == kind)
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    head_dim = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    writer.add_block_count(c["num_hidden_layers"])
    writer.add_context_length(c["max_position_embeddings"])
    writer.add_embedding_length(c["hidden_size"])
    writer.add_feed_forward_length(c["intermediate_size"])
    writer.add_head_count(c["num_attention_heads"])
    writer.add_head_count_kv(c["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(rotated or head_dim)
    if "rms_norm_eps" in c:
        writer.add_layer_norm_rms_eps(c["rms_norm_eps"])
    else:
        writer.add_layer_norm_eps(c.get("layer_norm_eps", 1e-5))
    writer.add_rope_freq_base(c["rope_parameters"]["rope_theta"] if "rope_parameters" in c else c["rope_theta"])
    if c["model_type"] == "phi3":
        writer.add_sliding_window(c["sliding_window"])
    names = gguf.get_tensor_name_map(arch, c["num_hidden_layers"])
    for name in source.names():
        info, data, _ = source.read(name)
        tensor = dequantise(info.source, data, info.shape[-1]).reshape(info.shape)
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
        if heads and c["model_type"] in INTERLEAVED:
            halves = tensor.reshape(c[heads], 2, head_dim // 2, -1)
            tensor = halves.swapaxes(1, 2).reshape(info.shape)
        new = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert new is not None, name
        writer.add_tensor(new, np.ascontiguousarray(tensor, np.float32))
    change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def yarn(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(64)
    writer.add_rope_scaling_finetuned(True)


def test_families(data: Path, tmp_path: Path) -> None:
    changes: dict[str, Change] = {"llama_rope_yarn": yarn}
    for name in ("qwen2", "smollm3", "ernie4_5", "phi3", "llama_rope_yarn"):
        folder = data / "arch" / name
        path = convert(folder, tmp_path / f"{name}.gguf", changes.get(name, lambda writer: None))
        check_expected(open_checkpoint(path), np.load(folder / "expected.npz"))


def granite(writer: gguf.GGUFWriter) -> None:
    writer.add_embedding_scale(6.0)
    writer.add_attention_scale(0.2)
    writer.add_residual_scale(0.6)
    writer.add_logit_scale(1.5)


def every_fourth_layer(writer: gguf.GGUFWriter) -> None:
    writer.add_sliding_window(32)
    writer.add_sliding_window_pattern([True, True, True, False])


FAMILIES: dict[str, Change] = {
    "qwen3": lambda writer: None,
    "olmo": lambda writer: None,
    "olmo2": lambda writer: None,
    "olmo3": every_fourth_layer,
    "exaone4": every_fourth_layer,
    "cohere": lambda writer: writer.add_logit_scale(1.1),
    "cohere2": lambda writer: (writer.add_logit_scale(1.2), writer.add_sliding_window(32))[0],
    "glm4": lambda writer: None,
    "granite": granite,
    "stablelm": lambda writer: writer.add_parallel_residual(False),
}
"""What each says beside the sizes. `scripts/gguf-families` does the same with llama.cpp's own converter."""


@pytest.mark.parametrize("name", FAMILIES)
def test_more_families(fixtures: Path, tmp_path: Path, name: str) -> None:
    folder = fixtures / "arch" / name
    rotated = {"glm4": 16, "stablelm": 4}.get(name)
    case = Case(folder)
    case.checkpoint = open_checkpoint(convert(folder, tmp_path / "model.gguf", FAMILIES[name], rotated))
    graph = build_graph(case.checkpoint, "f32")
    weights = ReferenceBackend().pack(graph, case.checkpoint)
    case.check(1, forward_logits(graph, weights, case.whole(1)))


def longrope(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_orig_ctx_len(128)
    writer.add_rope_scaling_attn_factors(1.25)
    writer.add_tensor("rope_factors_short.weight", np.arange(1, 9, dtype=np.float32))
    writer.add_tensor("rope_factors_long.weight", np.full(8, 40, np.float32))


def test_longrope(data: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(convert(data / "arch/phi3", tmp_path / "model.gguf", longrope))
    found = rope.read(checkpoint.config, 16, "p")
    assert found.inv_freq == pytest.approx([10000.0 ** (-i / 8) / (i + 1) for i in range(8)])
    assert found.scale == 1.25
    graph = build_graph(checkpoint)
    assert (graph.max_positions, graph.bounded) == (128, True)


def test_heads_rotated_in_part(data: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(convert(data / "arch/phi3", tmp_path / "model.gguf", rotated=12))
    assert len(rope.read(checkpoint.config, 16, "p").inv_freq) == 6
    with pytest.raises(CheckpointError, match=r"rope\.dimension_count 12 differs from the head size 16"):
        open_checkpoint(convert(data / "arch/qwen2", tmp_path / "other.gguf", rotated=12))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.add_rope_scaling_yarn_ext_factor(0.5), "rope.scaling.yarn_ext_factor is not supported"),
        (lambda w: w.add_rope_scaling_yarn_log_mul(0.1), "rope.scaling.yarn_log_multiplier is not supported"),
        (lambda w: (yarn(w), w.add_rope_scaling_attn_factors(1.5)), "'yarn' with attn_factor or rope_freqs"),
        (
            lambda w: (yarn(w), w.add_tensor("rope_freqs.weight", np.ones(8, np.float32))),
            "'yarn' with attn_factor or rope_freqs",
        ),
        (lambda w: w.add_sliding_window(64), "no max_window_layers"),
        (lambda w: w.add_expert_count(4), r"metadata qwen2\.expert_count = 4 is not supported"),
        (lambda w: w.add_tensor("blk.0.attn_qkv.weight", np.ones((4, 4), np.float32)), "attn_qkv.weight' has no known"),
    ],
)
def test_what_is_refused(data: Path, tmp_path: Path, change: Change, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        build_graph(open_checkpoint(convert(data / "arch/qwen2", tmp_path / "model.gguf", change)))


MIXTURES = {
    "mixtral": "llama with ffn_gate_inp", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "olmoe": "olmoe",
    "granitemoe": "granitemoe", "glm4_moe": "glm4moe", "phimoe": "phimoe", "minimax_m2": "minimax-m2",
    "deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2", "glm4_moe_lite": "deepseek2",
    "ernie4_5_moe": "ernie4_5-moe",
}  # fmt: skip


def test_names_of_experts(fixtures: Path, data: Path) -> None:
    """With the experts of a layer in three tensors, as files have them, models find all that they read, and every other
    tensor of a layer has a name that a file gives."""
    for name, key in MIXTURES.items():
        folder = data / "arch" / name
        source = open_checkpoint(folder if folder.exists() else fixtures / "arch" / name)
        names = FAMILIES_OF_FILES[key].layer
        tensors: dict[str, Any] = {}
        experts: dict[str, dict[int, Any]] = {}
        for tensor in source.names():
            info, stored, _ = source.read(tensor)
            values = dequantise(info.source, stored, info.shape[-1]).reshape(info.shape)
            layer, _, module = tensor.partition("block_sparse_moe.")
            found = re.fullmatch(r"(model\.layers\.\d+\.)\w+\.experts\.(\d+)\.(\w+)\.weight", tensor)
            if found:
                part = {"w1": "gate", "w3": "up", "w2": "down"}.get(found[3], found[3].removesuffix("_proj"))
                stem = names[f"ffn_{part}_exps"]
                experts.setdefault(f"{found[1]}{stem}.weight", {})[int(found[2])] = values
            elif module == "input_linear.weight":  # of Granite: gate and up of all
                for part, half in zip(("gate", "up"), np.split(values, 2, axis=1), strict=True):
                    tensors[f"{layer}{names[f'ffn_{part}_exps']}.weight"] = half
            elif module == "output_linear.weight":
                tensors[f"{layer}{names['ffn_down_exps']}.weight"] = values
            else:
                tensors[tensor] = values
        tensors |= {stacked: np.stack([of[i] for i in sorted(of)]) for stacked, of in experts.items()}
        build_graph(Addressed(InMemory(dict(source.config), tensors)), "f32")
        given = {stem + end for stem in names.values() for end in ("", ".weight", ".bias")}
        inner = {re.sub(r"^model\.layers\.\d+\.", "", each) for each in tensors if each.startswith("model.layers.")}
        assert inner <= given, (name, inner - given)
