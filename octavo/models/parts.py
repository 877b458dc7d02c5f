"""What model files share: reading a config, rotary frequencies, the attention and feed-forward blocks."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from octavo.graph.build import Builder
from octavo.graph.ir import DType, KvGroup, Value
from octavo.graph.ops import ACTS
from octavo.weights.spec import CheckpointError

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ACTS,
    "pretraining_tp": (1,),
    "sliding_window": (),
    "attention_multiplier": (),
    "embedding_multiplier": (1, 1.0),
    "residual_multiplier": (1, 1.0),
    "logits_scaling": (1, 1.0),
    "final_logit_softcapping": (),
    "attn_logit_softcapping": (),
    "qk_norm": (False,),
    "use_qk_norm": (False,),
    "rope_interleaved": (False,),
    "no_rope_layers": (),
    "num_local_experts": (0,),
    "num_experts": (0,),
    "quantization_config": (),
    "is_causal": (True,),
}
"""Keys that change results, with the values under which they do not; absent and null never do."""


_SMALLEST, _LARGEST = 1.2e-38, 3.4e38  # normal float32


class Shape(NamedTuple):
    """Sizes and switches of a decoder in the manner of Llama."""

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    act: str
    attention_bias: bool
    mlp_bias: bool
    tied: bool
    inv_freq: tuple[float, ...]  # radians per position, head_dim / 2 of them


def refuse_unknown(config: dict[str, Any], path: str, served: Collection[str] = ()) -> None:
    """Raise CheckpointError where a key has a value that would change results and is neither served nor in `served`."""
    for key, values in _NEUTRAL.items():
        value = None if key in served else config.get(key)
        if value is not None and value not in values:
            hint = f"served: {', '.join(map(str, values))}" if values else "it must be absent"
            raise CheckpointError(f"{path}: config has {key} = {value!r}, which is not supported ({hint})")


def count(config: Mapping[str, Any], key: str, path: str, default: int | None = None) -> int:
    """A whole number above 0, an int32; absent or null, the default. CheckpointError where it is anything else."""
    value: Any = default if config.get(key) is None else config[key]
    if type(value) is not int or not 1 <= value < 2**31:
        raise _bad(config, key, path, f"a whole number between 1 and {2**31 - 1}")
    return value


def positive(config: Mapping[str, Any], key: str, path: str, default: float | None = None) -> float:
    """A number above 0 within float32; absent or null, the default. CheckpointError where it is anything else."""
    value: Any = default if config.get(key) is None else config[key]
    if type(value) not in (int, float) or not _SMALLEST <= value <= _LARGEST:
        raise _bad(config, key, path, f"a number between {_SMALLEST} and {_LARGEST}")
    return float(value)


def flag(config: Mapping[str, Any], key: str, path: str) -> bool:
    """True or false; absent or null, false. CheckpointError where it is anything else."""
    value = config.get(key)
    if value not in (None, False, True):
        raise _bad(config, key, path, "true or false")
    return bool(value)


def _bad(config: Mapping[str, Any], key: str, path: str, expected: str) -> CheckpointError:
    found = f"{key} = {config[key]!r:.100}" if key in config else f"no {key}"
    return CheckpointError(f"{path}: config has {found}, expected {expected}")


def read(config: dict[str, Any], path: str) -> Shape:
    """The Shape of a config; CheckpointError names what cannot be."""
    heads, hidden = count(config, "num_attention_heads", path), count(config, "hidden_size", path)
    kv_heads = count(config, "num_key_value_heads", path, default=heads)
    head_dim = count(config, "head_dim", path, default=hidden // heads)
    if heads % kv_heads:
        raise CheckpointError(f"{path}: {heads} attention heads cannot share {kv_heads} key-value heads")
    if head_dim % 16 or not 16 <= head_dim <= 256:
        raise CheckpointError(f"{path}: head_dim {head_dim} is not supported: a multiple of 16 up to 256 is")
    return Shape(
        vocab=count(config, "vocab_size", path),
        hidden=hidden,
        intermediate=count(config, "intermediate_size", path),
        layers=count(config, "num_hidden_layers", path),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        eps=positive(config, "rms_norm_eps", path),
        act=config["hidden_act"],
        attention_bias=flag(config, "attention_bias", path),
        mlp_bias=flag(config, "mlp_bias", path),
        tied=flag(config, "tie_word_embeddings", path),
        inv_freq=rope_frequencies(config, head_dim, path),
    )


_FULL, _SLIDING = "full_attention", "sliding_attention"


def windows(config: dict[str, Any], layers: int, path: str) -> list[int | None]:
    """Tokens that a query of each layer sees, itself included: `sliding_window` where `layer_types` says so.

    None: all. Without `layer_types` every layer has the window, where there is one. Raises CheckpointError.
    """
    window = None if config.get("sliding_window") is None else count(config, "sliding_window", path)
    types = config.get("layer_types")
    if types is None:
        return [window] * layers
    if not isinstance(types, list) or len(types) != layers:
        raise CheckpointError(
            f"{path}: config has layer_types = {types!r:.100}, expected one for each of {layers} layers"
        )
    for kind in types:
        if kind not in (_FULL, _SLIDING):
            raise CheckpointError(f"{path}: layer type {kind!r} is not supported; supported: {_FULL}, {_SLIDING}")
    if window is None and _SLIDING in types:
        raise CheckpointError(f"{path}: config has layers of type {_SLIDING} and no sliding_window")
    return [window if kind == _SLIDING else None for kind in types]


def kv_groups(b: Builder, c: Shape, kv_dtype: DType, windows: Sequence[int | None] = (None,)) -> list[int]:
    """One KV group per size of window, in order of first use: its index for each entry of `windows`.

    `windows` has one entry per layer, or a single one for all of them.
    """
    groups = {}
    for window in dict.fromkeys(windows):
        name = "full" if window is None else f"window{window}"
        layers = tuple(i for i in range(c.layers) if windows[i % len(windows)] == window)
        groups[window] = b.kv_group(KvGroup(name, layers, c.kv_heads, c.head_dim, kv_dtype, window))
    return [groups[window] for window in windows]


def rope_frequencies(config: dict[str, Any], head_dim: int, path: str) -> tuple[float, ...]:
    """inv_freq of a config in the older layout (rope_theta, rope_scaling) or the newer one (rope_parameters)."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(scaling, dict):
        raise CheckpointError(f"{path}: config has rope_scaling = {scaling!r}, expected an object")
    rope = {"rope_theta": config.get("rope_theta"), **scaling}
    theta = positive(rope, "rope_theta", path, default=10000.0)
    if (config.get("partial_rotary_factor") or rope.get("partial_rotary_factor") or 1.0) != 1.0:
        raise CheckpointError(f"{path}: config has partial_rotary_factor, which is not supported")
    inv_freq = [theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    if kind not in _ROPE:
        raise CheckpointError(f"{path}: rope type {kind!r} is not supported; supported: {', '.join(_ROPE)}")
    frequencies = _ROPE[kind](inv_freq, rope, path)
    if max(frequencies) > _LARGEST:
        raise CheckpointError(f"{path}: config has rope parameters with a frequency of {max(frequencies):g}")
    return frequencies


def _default(inv_freq: list[float], rope: dict[str, Any], path: str) -> tuple[float, ...]:
    return tuple(inv_freq)


def _linear(inv_freq: list[float], rope: dict[str, Any], path: str) -> tuple[float, ...]:
    """Positions divided by a factor (Chen et al. 2023)."""
    factor = positive(rope, "factor", path)
    return tuple(f / factor for f in inv_freq)


def _llama3(inv_freq: list[float], rope: dict[str, Any], path: str) -> tuple[float, ...]:
    """Long waves are slowed by `factor`, short ones kept, with a linear ramp between (Llama 3.1)."""
    low, high = positive(rope, "low_freq_factor", path), positive(rope, "high_freq_factor", path)
    length, factor = count(rope, "original_max_position_embeddings", path), positive(rope, "factor", path)
    if low >= high:
        raise CheckpointError(f"{path}: config has low_freq_factor {low:g}, not below high_freq_factor {high:g}")

    def scaled(f: float) -> float:
        turns = length * f / (2 * math.pi)  # over the original context
        keep = min(max((turns - low) / (high - low), 0.0), 1.0)
        return float(keep * f + (1 - keep) * f / factor)

    return tuple(scaled(f) for f in inv_freq)


def _factors(inv_freq: list[float], rope: dict[str, Any], path: str) -> tuple[float, ...]:
    """One divisor per frequency, as GGUF files store them."""
    factors = rope.get("factors")
    if not isinstance(factors, list) or not all(type(d) in (int, float) for d in factors):
        raise CheckpointError(f"{path}: rope factors must be a list of numbers")
    if len(factors) != len(inv_freq):
        raise CheckpointError(f"{path}: rope has {len(factors)} factors for {len(inv_freq)} frequencies")
    if not all(_SMALLEST <= d <= _LARGEST for d in factors):
        raise CheckpointError(f"{path}: rope has a factor that is no number above 0")
    return tuple(f / d for f, d in zip(inv_freq, factors, strict=True))


_ROPE = {"default": _default, "linear": _linear, "llama3": _llama3, "factors": _factors}


def attention(b: Builder, c: Shape, p: str, group: int, h: Value) -> Value:
    # h[T, hidden] -> y[T, hidden]
    q_cols, kv_cols = c.heads * c.head_dim, c.kv_heads * c.head_dim
    qkv = b.linear(h, {p + "q_proj": q_cols, p + "k_proj": kv_cols, p + "v_proj": kv_cols}, c.attention_bias, "qkv")
    q, k, v = b.split(qkv, q_cols, kv_cols, kv_cols)
    q, k = b.rope(q, c.head_dim, c.inv_freq, "q"), b.rope(k, c.head_dim, c.inv_freq, "k")
    y = b.attention(q, k, v, group, c.head_dim**-0.5)
    return b.linear(y, {p + "o_proj": c.hidden}, c.attention_bias, "o")


def mlp(b: Builder, c: Shape, p: str, h: Value) -> Value:
    # h[T, hidden] -> y[T, hidden]
    gate_up = b.linear(h, {p + "gate_proj": c.intermediate, p + "up_proj": c.intermediate}, c.mlp_bias, "gate_up")
    gate, up = b.split(gate_up, c.intermediate, c.intermediate)
    return b.linear(b.act_mul(gate, up, c.act), {p + "down_proj": c.hidden}, c.mlp_bias, "down")
