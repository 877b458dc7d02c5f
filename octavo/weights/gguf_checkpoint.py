"""GGUF checkpoints under Hugging Face names: tensors, config and row order."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from octavo.weights.end_tokens import end_tokens_of_gguf, gguf_token_id
from octavo.weights.formats import BLOCKS, U8, dequantise
from octavo.weights.gguf_file import read_gguf
from octavo.weights.hf_config import ModelConfig
from octavo.weights.spec import CheckpointError, SourceTensor, TensorInfo

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}
_INTERLEAVED = ("llama", "smollm3")
"""Where the converter interleaves the rotary pairs of q and k rows."""

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_OF = {"phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}}
"""Stems with a meaning of their own in one architecture."""

_FREQUENCIES, _SHORT, _LONG = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"
_SCALING = {
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
"""Metadata under `rope.scaling.` -> key of config.json."""


class GgufCheckpoint:
    """A `Checkpoint` over one GGUF file.

    Where the converter interleaves the rotary pairs of q and k rows, `read` puts them back in halves (neox order), so
    that models need not know. Everything else is a view of the mapped file.
    """

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._gguf = read_gguf(path)
        self._check()
        self._architecture = str(self._gguf.metadata["general.architecture"])
        layer = _LAYER | _LAYER_OF.get(self._architecture, {})
        tables = (_FREQUENCIES, _SHORT, _LONG)
        self._names = {_hf_name(name, layer, self.path): name for name in self._gguf.tensors if name not in tables}
        self.config: dict[str, Any] = ModelConfig(self._make_config(), self.path)
        self.generation: dict[str, Any] = {"eos_token_id": sorted(end_tokens_of_gguf(self._gguf))}
        self.notices: list[str] = []
        bos = gguf_token_id(self._gguf, "bos")
        if bos is not None:
            self.generation["bos_token_id"] = bos

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def names(self) -> Iterable[str]:
        return self._names.keys()

    def info(self, name: str) -> TensorInfo:
        tensor = self._gguf.tensors[self._gguf_name(name)]
        if tensor.source not in BLOCKS:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} has type {tensor.source}, which is not supported ({', '.join(BLOCKS)} are)"
            )
        return TensorInfo(tensor.shape, tensor.source, self.path)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> SourceTensor:
        """`data` of q and k is a copy, otherwise a view valid while the checkpoint lives; a vector is one row."""
        info = self.info(name)
        data = self._bytes(self._gguf_name(name))
        match = re.search(r"self_attn\.([qk])_proj\.(weight|bias)$", name)
        if match and self._architecture in _INTERLEAVED:
            heads = self.config["num_attention_heads" if match[1] == "q" else "num_key_value_heads"]
            if info.shape[0] % (2 * heads):
                raise CheckpointError(f"{self.path}: tensor {name!r} has {info.shape[0]} rows for {heads} heads")
            halves = np.arange(info.shape[0]).reshape(heads, info.shape[0] // heads // 2, 2).swapaxes(1, 2).ravel()
            if len(info.shape) > 1:
                return SourceTensor(info, data[halves[start:stop]])
            data = data.reshape(info.shape[0], -1)[halves].reshape(1, -1)
        return SourceTensor(info, data[start:stop])

    def release(self, name: str) -> None:
        tensor = self._gguf.tensors[self._gguf_name(name)]
        self._gguf.file.release(tensor.start, tensor.stop)

    def files(self) -> list[str]:
        return [self.path]

    @property
    def total_bytes(self) -> int:
        return sum(tensor.stop - tensor.start for tensor in self._gguf.tensors.values())

    def _bytes(self, gguf_name: str) -> U8:
        tensor = self._gguf.tensors[gguf_name]
        rows = math.prod(tensor.shape[:-1])
        return self._gguf.file.data[tensor.start : tensor.stop].reshape(rows, -1)

    def _gguf_name(self, name: str) -> str:
        if name not in self._names:
            raise CheckpointError(f"{self.path}: tensor {name!r} is missing")
        return self._names[name]

    def _check(self) -> None:
        metadata = self._gguf.metadata
        architecture = metadata.get("general.architecture")
        if str(architecture) not in _ARCHITECTURES:
            raise CheckpointError(
                f"{self.path}: GGUF architecture {architecture!r} is not supported; supported: {', '.join(_ARCHITECTURES)}"
            )
        if metadata.get("split.count", 1) not in (0, 1):
            raise CheckpointError(
                f"{self.path}: one of {metadata['split.count']} parts; merge them into one file first"
            )
        if not self._gguf.tensors:
            raise CheckpointError(f"{self.path}: the file holds no tensors, only a vocabulary")
        if metadata.get(f"{architecture}.expert_count", 0):
            raise CheckpointError(f"{self.path}: {architecture} with experts (expert_count) is not supported")

    def _value(self, key: str, *default: Any) -> Any:
        metadata = self._gguf.metadata
        if key in metadata:
            return metadata[key]
        if not default:
            raise CheckpointError(f"{self.path}: metadata {key!r} is missing")
        return default[0]

    def _make_config(self) -> dict[str, Any]:
        """config.json's keys from the metadata; sources of defaults: the GGUF specification."""

        def value(key: str, *default: Any) -> Any:
            return self._value(f"{self._architecture}.{key}", *default)

        hidden, heads = value("embedding_length"), value("attention.head_count")
        kv_heads = value("attention.head_count_kv", heads)
        for key, count in (("embedding_length", hidden), ("head_count", heads), ("head_count_kv", kv_heads)):
            if not isinstance(count, int) or count < 1:
                raise CheckpointError(f"{self.path}: {key} must be one number above 0 for all layers; found {count!r}")
        head_dim = value("attention.key_length", hidden // heads)
        rotated = value("rope.dimension_count", head_dim)
        partial = self._architecture == "phi3" and all(type(n) is int and n > 0 for n in (rotated, head_dim))
        for key in ("attention.value_length", "rope.dimension_count")[: 1 if partial else 2]:
            if value(key, head_dim) != head_dim:
                raise CheckpointError(f"{self.path}: {key} {value(key)} differs from the head size {head_dim}")
        eps = value("attention.layer_norm_rms_epsilon")
        tokens = self._gguf.size("tokenizer.ggml.tokens")
        window = value("attention.sliding_window", 0) or None
        return {
            "architectures": [_ARCHITECTURES[self._architecture]],
            "model_type": self._architecture,
            "vocab_size": value("vocab_size", tokens or self.info("model.embed_tokens.weight").shape[0]),
            "hidden_size": hidden,
            "intermediate_size": value("feed_forward_length"),
            "num_hidden_layers": value("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": value("context_length"),
            "rms_norm_eps": float(np.float32(eps)) if isinstance(eps, float) else eps,
            "rope_theta": value("rope.freq_base", 10000.0),
            "rope_scaling": self._rope_scaling(),
            "partial_rotary_factor": rotated / head_dim if partial else 1.0,
            "sliding_window": window,
            "use_sliding_window": window is not None,
            "tie_word_embeddings": "output.weight" not in self._gguf.tensors,
            "attention_bias": any(name.endswith("attn_q.bias") for name in self._gguf.tensors),
            "mlp_bias": any(name.endswith("ffn_up.bias") for name in self._gguf.tensors),
            "use_bias": any(name.endswith("attn_q.bias") for name in self._gguf.tensors),  # of ERNIE 4.5
        }

    def _rope_scaling(self) -> dict[str, Any] | None:
        """`factors` divides the inverse frequency of pair i by factors[i]; such files hold llama3 scaling this way."""
        prefix = f"{self._architecture}.rope.scaling."
        found = {key.removeprefix(prefix): v for key, v in self._gguf.metadata.items() if key.startswith(prefix)}
        factor = self._value(f"{self._architecture}.rope.scale_linear", 1.0)  # the older spelling
        kind = found.pop("type", "linear" if factor != 1 else "none")
        found.pop("finetuned", None)
        scaling = {hf: found.pop(key) for key, hf in _SCALING.items() if key in found}
        attention = found.pop("attn_factor", None)
        if found:
            raise CheckpointError(f"{self.path}: {prefix}{min(found)} is not supported")
        if self._has(_SHORT):
            short = {"short_factor": self._table(_SHORT), "attention_factor": attention}
            return {**scaling, **short, "rope_type": "longrope"}  # whatever the file says of its type
        if kind == "none" and attention in (None, 1):
            return {"rope_type": "factors", "factors": self._table(_FREQUENCIES)} if self._has(_FREQUENCIES) else None
        if attention not in (None, 1) or self._has(_FREQUENCIES):
            raise CheckpointError(f"{self.path}: rope scaling {kind!r} with attn_factor or rope_freqs is not supported")
        return {"factor": factor, **scaling, "rope_type": kind}

    def _has(self, table: str) -> bool:
        return table in self._gguf.tensors

    def _table(self, name: str) -> list[float]:
        tensor = self._gguf.tensors[name]
        factors: list[float] = dequantise(tensor.source, self._bytes(name), math.prod(tensor.shape)).ravel().tolist()
        return factors


def _hf_name(gguf_name: str, in_layer: dict[str, str], path: str) -> str:
    """model.layers.3.self_attn.q_proj.weight of blk.3.attn_q.weight."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", gguf_name)
    if match:
        layer, stem, kind = match.groups()
        hf = (_TOP if layer is None else in_layer).get(stem)
        if hf is not None:
            return f"{hf}.{kind}" if layer is None else f"model.layers.{layer}.{hf}.{kind}"
    raise CheckpointError(f"{path}: tensor {gguf_name!r} has no known meaning in this architecture")
