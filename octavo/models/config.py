"""Reading a config: numbers and switches by name, and keys that no family serves."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any

from octavo.weights.spec import CheckpointError

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "sliding_window": (),
    "attention_multiplier": (),
    "embedding_multiplier": (1, 1.0),
    "residual_multiplier": (1, 1.0),
    "logits_scaling": (1, 1.0),
    "final_logit_softcapping": (),
    "attn_logit_softcapping": (),
    "qk_norm": (False,),
    "use_qk_norm": (False,),
    "qk_layernorm": (False,),
    "clip_qkv": (),
    "logit_scale": (1, 1.0),
    "use_parallel_residual": (False,),
    "rope_interleaved": (False,),
    "partial_rotary_factor": (1, 1.0),
    "use_mrope": (False,),
    "no_rope_layers": (),
    "num_local_experts": (0,),
    "num_experts": (0,),
    "routed_scaling_factor": (0, 0.0, 1, 1.0),
    "n_group": (0, 1),
    "topk_group": (0, 1),
    "quantization_config": (),
    "is_causal": (True,),
    "use_bidirectional_attention": (False,),
    "add_cross_attention": (False,),
    "apply_residual_connection_post_layernorm": (False,),
    "alibi": (False,),
}
"""Keys that change results, with the values under which they do not; absent and null never do."""

_SPELLINGS = {
    "hidden_size": ("n_embd", "n_embed", "d_model"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size"),
    "max_position_embeddings": ("n_positions", "max_seq_len", "seq_length"),
    "hidden_act": ("activation_function", "activation"),
    "layer_norm_eps": ("layer_norm_epsilon", "norm_epsilon", "norm_eps"),
}
"""Usual key -> what older families call it."""

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "gelu_quick",
    "relu": "relu",
    "relu2": "relu2",
    "sigmoid": "sigmoid",
    "tanh": "tanh",
}
"""Names of activations in configs -> those of `graph.ops.ACTS`."""

SMALLEST, LARGEST = 1.2e-38, 3.4e38  # normal float32


def usual_keys(config: dict[str, Any], path: str) -> dict[str, Any]:
    """A copy of the config with the usual key beside each other spelling. CheckpointError where the two differ."""
    found = copy.copy(config)
    for key, others in _SPELLINGS.items():
        for other in others:
            value = config.get(other)
            if value is None:
                continue
            if found.get(key) is None:
                found[key] = value
            if found[key] != value:
                raise CheckpointError(f"{path}: config has {key} = {found[key]!r:.100} and {other} = {value!r:.100}")
    return found


def refuse_unknown(config: dict[str, Any], path: str, served: Collection[str] = ()) -> None:
    """Raise CheckpointError where a key has a value that would change results and is neither served nor in `served`."""
    rope = [value for key in ("rope_scaling", "rope_parameters") if isinstance(value := config.get(key), dict)]
    for key, values in _NEUTRAL.items():
        found = (place.get(key) for place in (config, *rope) if key not in served)
        for value in found:
            if value is not None and value not in values:
                hint = f"served: {', '.join(map(str, values))}" if values else "it must be absent"
                raise CheckpointError(f"{path}: config has {key} = {value!r}, which is not supported ({hint})")


_MOST = {
    **dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "num_kv_heads"), 2**12),
    **dict.fromkeys(("head_dim", "qk_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 2**12),
    **dict.fromkeys(("first_k_dense_replace", "decoder_sparse_step", "moe_layer_start_index"), 2**12),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "rotary_dim"), 2**16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 2**16),
    **dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size", "vocab_size"), 2**24),
}
"""Key -> many times what any model has: what is above is no size of a model, and nothing need be built to say so."""


def count(config: Mapping[str, Any], key: str, path: str, default: int | None = None, least: int = 1) -> int:
    """A whole number, `least` or more, up to what the key may be; absent or null, the default. CheckpointError where it
    is not."""
    value: Any = default if config.get(key) is None else config[key]
    most = _MOST.get(key, 2**31 - 1)
    if type(value) is not int or not least <= value <= most:
        raise _bad(config, key, path, f"a whole number between {least} and {most}")
    return value


def number(config: Mapping[str, Any], key: str, path: str, default: float | None = None) -> float:
    """A number within float32; absent or null, the default. CheckpointError where it is anything else."""
    value: Any = default if config.get(key) is None else config[key]
    if type(value) not in (int, float) or not abs(value) <= LARGEST:
        raise _bad(config, key, path, f"a number up to {LARGEST}")
    return float(value)


def positive(config: Mapping[str, Any], key: str, path: str, default: float | None = None) -> float:
    """A number above 0 within float32; absent or null, the default. CheckpointError where it is anything else."""
    value: Any = default if config.get(key) is None else config[key]
    if type(value) not in (int, float) or not SMALLEST <= value <= LARGEST:
        raise _bad(config, key, path, f"a number between {SMALLEST} and {LARGEST}")
    return float(value)


def flag(config: Mapping[str, Any], key: str, path: str) -> bool:
    """True or false; absent or null, false. CheckpointError where it is anything else."""
    value = config.get(key)
    if value not in (None, False, True):
        raise _bad(config, key, path, "true or false")
    return bool(value)


def activation(config: Mapping[str, Any], key: str, path: str, default: str | None = None) -> str:
    """One of `graph.ops.ACTS`. CheckpointError where the config names another activation, or none."""
    value: Any = default if config.get(key) is None else config[key]
    if not isinstance(value, str) or value not in _ACTIVATIONS:
        raise _bad(config, key, path, f"an activation: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[value]


def _bad(config: Mapping[str, Any], key: str, path: str, expected: str) -> CheckpointError:
    key = next((other for other in _SPELLINGS.get(key, ()) if other in config), key)
    found = f"{key} = {config[key]!r:.100}" if key in config else f"no {key}"
    return CheckpointError(f"{path}: config has {found}, expected {expected}")
