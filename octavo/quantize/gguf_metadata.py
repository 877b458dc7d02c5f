"""The metadata of a GGUF file from a config of the Hugging Face layout: the inverse of weights.gguf_config.

Keys and their types are those of the GGUF specification and of llama.cpp's converter. What a file cannot say is refused
by name; and whatever was written is read back and compared with the model (`gguf_output`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gguf import GGUFWriter

from octavo.graph import ops
from octavo.graph.ir import Graph
from octavo.models import rope
from octavo.models.config import usual_keys
from octavo.quantize.grid import F32
from octavo.weights.gguf_config import FREQUENCIES
from octavo.weights.gguf_names import FAMILIES, Family
from octavo.weights.spec import CheckpointError

DENSE = (
    "arcee", "cohere2", "chatglm", "command-r", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3", "glm4", "granite", "hunyuan-dense",
    "llama", "nemotron", "olmo", "olmo2", "phi2", "phi3", "qwen2", "qwen3", "seed_oss", "smollm3", "stablelm",
    "starcoder2",
)  # fmt: skip
"""GGUF architectures that are written: a file holds the tensors of the checkpoint one by one."""

_ALSO = {"MistralForCausalLM": "llama", "Ernie4_5_ForCausalLM": "ernie4_5", "Olmo3ForCausalLM": "olmo2"}
"""Architectures of config.json that another one's files hold."""


def family_of(config: Mapping[str, Any], path: str) -> tuple[str, Family]:
    """The GGUF architecture of a model, and how its files are read. Raises CheckpointError."""
    names = {FAMILIES[key].architecture: key for key in DENSE} | _ALSO
    found = next((names[name] for name in config.get("architectures") or [] if name in names), None)
    if found is None:
        raise CheckpointError(
            f"{path}: architecture {config.get('architectures')} is not written as GGUF; these are: {', '.join(names)}"
        )
    return found, FAMILIES[found]


def write_metadata(
    writer: GGUFWriter, family: Family, graph: Graph, config: dict[str, Any], path: str
) -> dict[str, F32]:
    """Adds the keys of the architecture; returns tensors that belong to the config. Raises CheckpointError."""
    c = usual_keys(config, path)
    hidden, heads = int(c["hidden_size"]), int(c["num_attention_heads"])
    head_dim = int(c.get("head_dim") or hidden // heads)
    writer.add_block_count(int(c["num_hidden_layers"]))
    writer.add_context_length(int(c["max_position_embeddings"]))
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(int(c["intermediate_size"]))
    writer.add_head_count(heads)
    writer.add_head_count_kv(int(c.get("num_key_value_heads") or heads))
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_vocab_size(graph.vocab_size)
    _write_norm(writer, graph)
    _write_windows(writer, family, graph, path)
    for key, name in family.keys.items():
        value = c.get(name)
        if type(value) is bool:
            writer.add_bool(f"{writer.arch}.{key}", value)
        elif value is not None:
            writer.add_float32(f"{writer.arch}.{key}", float(value))
    return _write_rope(writer, family, graph, c, head_dim, path)


def _write_norm(writer: GGUFWriter, graph: Graph) -> None:
    for attrs in (node.attrs for node in graph.nodes):
        if isinstance(attrs, ops.RmsNorm):
            writer.add_layer_norm_rms_eps(attrs.eps)
            return
        if isinstance(attrs, ops.LayerNorm):
            writer.add_layer_norm_eps(attrs.eps)
            return


def _write_windows(writer: GGUFWriter, family: Family, graph: Graph, path: str) -> None:
    """Which layers have a window is known by the architecture: every period-th has none."""
    windows = {layer: group.window for group in graph.groups for layer in group.layers}
    sizes = {window for window in windows.values() if window is not None}
    if not sizes:
        return
    fits = [(layer + 1) % family.period != 0 if family.period else True for layer in sorted(windows)]
    if len(sizes) > 1 or writer.arch == "llama" or [windows[i] is not None for i in sorted(windows)] != fits:
        raise CheckpointError(
            f"{path}: windows of {sorted(sizes)} tokens in {sum(w is not None for w in windows.values())} of "
            f"{len(windows)} layers: a GGUF file of architecture {writer.arch} cannot say that"
        )
    writer.add_sliding_window(sizes.pop())


def _write_rope(
    writer: GGUFWriter, family: Family, graph: Graph, c: dict[str, Any], head_dim: int, path: str
) -> dict[str, F32]:
    turns = [node.attrs for node in graph.nodes if isinstance(node.attrs, ops.Rope)]
    if not turns:
        raise CheckpointError(f"{path}: a model without rotary positions is not written as GGUF")
    found = rope.parameters(c, path, rope.FULL)
    theta = float(found.get("rope_theta") or 10000.0)
    dims = round(head_dim * float(found.get("partial_rotary_factor") or 1.0))
    kind = found.get("rope_type") or found.get("type") or "default"
    writer.add_rope_dimension_count(dims)
    writer.add_rope_freq_base(theta)
    if kind == "default":
        return {}
    if kind == "llama3":  # the factors are the tensor; a file says no more of it
        frequencies = turns[0].inv_freq
        factors = [theta ** (-2 * i / dims) / f for i, f in enumerate(frequencies)]
        return {FREQUENCIES: np.array(factors, np.float32)}
    if kind not in ("linear", "yarn"):
        raise CheckpointError(
            f"{path}: rope type {kind!r} is not written as GGUF; default, linear, llama3 and yarn are"
        )
    prefix = f"{writer.arch}.rope.scaling."
    writer.add_string(f"{prefix}type", kind)
    writer.add_float32(f"{prefix}factor", float(found["factor"]))
    if kind == "yarn":
        length = int(found.get("original_max_position_embeddings") or c["max_position_embeddings"])
        writer.add_uint32(f"{prefix}original_context_length", length)
        for key in ("beta_fast", "beta_slow"):
            if found.get(key) is not None:
                writer.add_float32(f"{prefix}yarn_{key}", float(found[key]))
    return {}
