"""The config of a GGUF file, with the keys of config.json, from its metadata. Nothing there is ignored."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from octavo.weights.formats import dequantise
from octavo.weights.gguf_file import GgufFile
from octavo.weights.gguf_names import FAMILIES, Family
from octavo.weights.spec import CheckpointError, why_unserved

FREQUENCIES, SHORT, LONG = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"
TABLES = (FREQUENCIES, SHORT, LONG)
"""Tensors that belong to the config."""

_SCALING = {
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
    "yarn_attn_factor": "attention_factor",
}
"""Metadata under `rope.scaling.` -> key of config.json."""

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "tensor_data_layout": ("jploski", "Meta AI original pth"),
    "logit_scale": (1.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.clamp_kqv": (0.0,),
}
"""Metadata that a family need not read, with the values under which it changes nothing."""


class GgufConfig:
    """Reads the metadata of one file: `family` says how its tensors are named, `values` is the config."""

    def __init__(self, gguf: GgufFile, path: str) -> None:
        self._gguf, self._path = gguf, path
        self._architecture = str(gguf.metadata.get("general.architecture"))
        self._read: set[str] = set()
        self.family = self._family()
        self._layers = self._count_layers()
        self.values = self._make()
        self._refuse_unread()

    def _family(self) -> Family:
        architectures = dict.fromkeys(key.split(" ")[0] for key in FAMILIES)
        if self._architecture not in architectures:
            raise CheckpointError(
                f"{self._path}: GGUF architecture {self._architecture!r} {why_unserved(self._architecture, architectures)}"
            )
        for key, family in FAMILIES.items():
            name, _, marker = key.partition(" with ")
            if marker and name == self._architecture and f"blk.0.{marker}.weight" in self._gguf.tensors:
                return family
        return FAMILIES[self._architecture]

    def _value(self, key: str, *default: Any) -> Any:
        self._read.add(key)
        key = f"{self._architecture}.{key}"
        if key in self._gguf.metadata:
            return self._gguf.metadata[key]
        if not default:
            raise CheckpointError(f"{self._path}: metadata {key!r} is missing")
        return default[0]

    def _count_layers(self) -> Any:
        """Without those behind the last that only predict further tokens."""
        blocks, drafts = self._value("block_count"), self._value("nextn_predict_layers", 0)
        return blocks - drafts if type(blocks) is type(drafts) is int else blocks

    def _make(self) -> dict[str, Any]:
        """Sources of defaults: the GGUF specification."""
        family, value, tensors = self.family, self._value, self._gguf.tensors
        values: dict[str, Any] = {
            "intermediate_size": value("feed_forward_length", None),
            "num_hidden_layers": self._layers,
            "hidden_act": "silu",
            "max_position_embeddings": value("context_length"),
            "rms_norm_eps": _float32(value("attention.layer_norm_rms_epsilon", None)),
            "layer_norm_eps": _float32(value("attention.layer_norm_epsilon", None)),
            "rope_theta": value("rope.freq_base", 10000.0),
            "tie_word_embeddings": "output.weight" not in tensors,
            "attention_bias": "blk.0.attn_q.bias" in tensors,
            "mlp_bias": "blk.0.ffn_up.bias" in tensors,
            **{key: tensor in tensors or f"blk.0.{tensor}" in tensors for tensor, key in family.switches.items()},
            **family.config,
            **self._heads(),
            **self._windows(),
        }
        local = value("rope.freq_base_swa", values["rope_theta"])
        if local != values["rope_theta"]:
            self._read.discard("rope.freq_base_swa")  # for a family that knows of it
        self._read.update(family.of_images)
        values |= {hf: found for key, hf in family.keys.items() if (found := value(key, None)) is not None}
        renamed = {family.renamed.get(key, key): found for key, found in values.items() if found is not None}
        tokens = self._gguf.size("tokenizer.ggml.tokens")
        return {
            "architectures": [family.architecture],
            "gguf_architecture": self._architecture,
            "vocab_size": value("vocab_size", tokens or self._rows("token_embd.weight")),
            "rope_scaling": self._rope_scaling(),
            **renamed,
        }

    def _heads(self) -> dict[str, Any]:
        value, family = self._value, self.family
        hidden, heads = value("embedding_length"), value("attention.head_count")
        kv_heads = value("attention.head_count_kv", heads)
        for key, count in (("embedding_length", hidden), ("head_count", heads), ("head_count_kv", kv_heads)):
            if not isinstance(count, int) or count < 1:
                raise CheckpointError(f"{self._path}: {key} must be one number above 0 for all layers; found {count!r}")
        head_dim = value("attention.key_length", hidden // heads)
        if head_dim == 0:
            raise CheckpointError(f"{self._path}: head_count {heads} is more than embedding_length {hidden}")
        found: dict[str, Any] = {"hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
        if "attention.kv_lora_rank" in family.keys:  # the file's heads are those of the latent
            value("attention.value_length", None)
            return {**found, "num_key_value_heads": heads}
        rotated = value("rope.dimension_count", head_dim)
        partial = family.partial and all(type(n) is int and n > 0 for n in (rotated, head_dim))
        for key in ("attention.value_length", "rope.dimension_count")[: 1 if partial else 2]:
            if value(key, head_dim) != head_dim:
                raise CheckpointError(f"{self._path}: {key} {value(key)} differs from the head size {head_dim}")
        found |= {"head_dim": head_dim, "partial_rotary_factor": rotated / head_dim if partial else 1.0}
        if family.wide_layers:
            wide = self._layers == family.wide_layers
            found["query_pre_attn_scalar"] = hidden // heads if wide else head_dim
        return found

    def _windows(self) -> dict[str, Any]:
        window = self._value("attention.sliding_window", 0)
        pattern = self._value("attention.sliding_window_pattern", self.family.period)
        found = {"sliding_window": window or None, "use_sliding_window": bool(window)}
        if not window or pattern == 0:
            return found
        if isinstance(pattern, int):
            pattern = [(i + 1) % pattern != 0 for i in range(self._layers if isinstance(self._layers, int) else 0)]
        if not isinstance(pattern, list) or len(pattern) != self._layers or not all(p in (0, 1) for p in pattern):
            raise CheckpointError(
                f"{self._path}: attention.sliding_window_pattern is {pattern!r:.100}, expected a number, or true or false "
                f"for each of {self._layers} layers"
            )
        kinds = {True: "sliding_attention", False: "full_attention"}
        return {**found, "layer_types": [kinds[bool(sliding)] for sliding in pattern]}

    def _rope_scaling(self) -> dict[str, Any] | None:
        """`factors` divides the inverse frequency of pair i by factors[i]; such files hold llama3 scaling this way."""
        prefix = f"{self._architecture}.rope.scaling."
        keys = [key.removeprefix(prefix) for key in self._gguf.metadata if key.startswith(prefix)]
        found = {key: self._value(f"rope.scaling.{key}") for key in keys}
        factor = self._value("rope.scale_linear", 1.0)  # the older spelling
        kind = found.pop("type", "linear" if factor != 1 else "none")
        found.pop("finetuned", None)
        scaling = {hf: found.pop(key) for key, hf in _SCALING.items() if key in found}
        attention = found.pop("attn_factor", None)
        if "attention.kv_lora_rank" in self.family.keys and "yarn_log_multiplier" in found:
            weight = 10 * found.pop("yarn_log_multiplier")  # of YaRN's 0.1 ln(factor), in the scale of the scores
            scaling |= {"mscale": weight, "mscale_all_dim": weight}
        elif "yarn_log_multiplier" in found and "mscale" in self.family.scaling:
            scaling["mscale_all_dim"] = found.pop("yarn_log_multiplier")
        if (beta := self._value("attention.temperature_scale", None)) is not None:
            scaling["llama_4_scaling_beta"] = beta
        if found:
            raise CheckpointError(f"{self._path}: {prefix}{min(found)} is not supported")
        if self._has(SHORT):
            factors = {
                "short_factor": self._table(SHORT),
                "long_factor": self._table(LONG) if self._has(LONG) else None,
            }
            return {**scaling, **factors, "attention_factor": attention, "rope_type": "longrope"}  # whatever its type
        if kind == "none" and attention in (None, 1):
            return {"rope_type": "factors", "factors": self._table(FREQUENCIES)} if self._has(FREQUENCIES) else None
        if attention not in (None, 1) or self._has(FREQUENCIES):
            raise CheckpointError(
                f"{self._path}: rope scaling {kind!r} with attn_factor or rope_freqs is not supported"
            )
        return {"factor": factor, **scaling, **(self.family.scaling if kind == "yarn" else {}), "rope_type": kind}

    def _refuse_unread(self) -> None:
        prefix = f"{self._architecture}."
        for name, found in self._gguf.metadata.items():
            key = name.removeprefix(prefix)
            if key != name and key not in self._read and found not in _NEUTRAL.get(key, ()):
                raise CheckpointError(f"{self._path}: metadata {name} = {found!r:.100} is not supported")

    def _rows(self, tensor: str) -> int | None:
        found = self._gguf.tensors.get(tensor)
        return found.shape[0] if found else None

    def _has(self, table: str) -> bool:
        return table in self._gguf.tensors

    def _table(self, name: str) -> list[float]:
        tensor = self._gguf.tensors[name]
        data = tensor.file.data[tensor.start : tensor.stop].reshape(1, -1)
        factors: list[float] = dequantise(tensor.source, data, math.prod(tensor.shape)).ravel().tolist()
        return factors


def _float32(value: Any) -> Any:
    """Files that hold a double mean the float32 that kernels compute with."""
    return float(np.float32(value)) if isinstance(value, float) else value
