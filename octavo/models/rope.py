"""Rotary frequencies of a config: every scaling is a table of inverse frequencies and one factor of cos and sin."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from octavo.models.config import LARGEST, SMALLEST, count, flag, positive
from octavo.weights.spec import CheckpointError


class Rotation(NamedTuple):
    """Attributes of the op `Rope`, but for the head size."""

    inv_freq: tuple[float, ...]  # radians per position of each pair; dimensions without a pair pass
    neox: bool = True  # dimension i pairs with i + len(inv_freq); otherwise 2i pairs with 2i + 1
    scale: float = 1.0  # of cos and sin: the attention factor of YaRN and LongRoPE


FULL, SLIDING = "full_attention", "sliding_attention"
"""Layer types that may have rotations of their own."""


def read(config: dict[str, Any], head_dim: int, path: str, layer_type: str = "") -> Rotation:
    """The rotation of a config in the older layout (rope_theta, rope_scaling) or the newer one (rope_parameters).

    Of one layer type, where a family has several. In the older layout those within a window have no scaling and
    perhaps another base, `rope_local_base_freq`.
    Raises CheckpointError: a scaling that is not served, a parameter that is missing or cannot be.
    """
    rope = parameters(config, path, layer_type)
    kind = _kind(rope, path)
    theta = positive(rope, "rope_theta", path, default=10000.0)
    share = positive(rope, "partial_rotary_factor", path, default=1.0)
    dims = round(head_dim * share)
    if not math.isclose(dims, head_dim * share, rel_tol=1e-6) or dims % 2 or not 0 < dims <= head_dim:
        raise CheckpointError(
            f"{path}: config has partial_rotary_factor = {share:g}: not an even part of {head_dim} dimensions"
        )
    inv_freq = [theta ** (-2 * i / dims) for i in range(dims // 2)]
    rotation = _SCALINGS[kind](inv_freq, rope, path)
    if max(rotation.inv_freq) > LARGEST:
        raise CheckpointError(f"{path}: config has rope parameters with a frequency of {max(rotation.inv_freq):g}")
    return rotation


def positions(config: dict[str, Any], path: str) -> tuple[int, bool]:
    """Tokens that the model was made for, and whether this is the end: later ones would turn those before them.

    Dynamic NTK and LongRoPE change all frequencies as soon as a sequence is longer than `original` positions, so cached
    keys would be wrong from there on. Here the tables never change: they are those of sequences up to `original`, or,
    where the config has a greater LENGTH, those of sequences of this length (LongRoPE: of all longer ones), for all.
    Queries at positions from `original` on are larger where the config has a `llama_4_scaling_beta`: that is the end.
    """
    rope, made_for = parameters(config, path, FULL), count(config, "max_position_embeddings", path)
    if rope.get(_BETA) is not None and positive(rope, _BETA, path):
        return _original(rope, path), True
    if not can_be_longer(config, path):
        return made_for, False
    if not _longer(rope, path):
        return _original(rope, path), True
    return (count(rope, LENGTH, path), True) if _kind(rope, path) == "dynamic" else (made_for, False)


def can_be_longer(config: dict[str, Any], path: str) -> bool:
    """Whether a greater LENGTH gives other tables: of all that `positions` bounds."""
    return _kind(parameters(config, path, FULL), path) in ("dynamic", "longrope")


LENGTH = "max_model_len"
"""Key of a config for the longest sequence that will be served; see `positions`."""


_ORIGINAL = "original_max_position_embeddings"
_BETA = "llama_4_scaling_beta"
_UNSERVED = ("mrope_section",)
_OF_A_TYPE = (
    *(
        "factor",
        "alpha",
        "low_freq_factor",
        "high_freq_factor",
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "factors",
    ),
    *("mscale", "mscale_all_dim", "short_factor", "long_factor"),
)
"""Parameters that mean nothing unless a type says what."""
_OF_LONGROPE = ("short_factor", "short_mscale", "long_mscale")


def _original(rope: dict[str, Any], path: str) -> int:
    made_for = count(rope, "max_position_embeddings", path)
    return min(made_for, count(rope, _ORIGINAL, path, default=made_for))


def _longer(rope: dict[str, Any], path: str) -> bool:
    """Whether longer sequences will be served than those that the model was first made for."""
    original = _original(rope, path)
    return count(rope, LENGTH, path, default=original) > original


def parameters(config: dict[str, Any], path: str, layer_type: str) -> dict[str, Any]:
    """All keys of both layouts in one dictionary."""
    scaling, newer = config.get("rope_scaling") or {}, config.get("rope_parameters") or {}
    for name, value in (("rope_scaling", scaling), ("rope_parameters", newer)):
        if not isinstance(value, dict):
            raise CheckpointError(f"{path}: config has {name} = {value!r:.100}, expected an object")
    if scaling and newer and scaling != newer:
        raise CheckpointError(f"{path}: config has a rope_scaling and another rope_parameters")
    outside = ("rope_theta", "partial_rotary_factor", "max_position_embeddings", _ORIGINAL, LENGTH)
    found = {key: config.get(key) for key in outside}
    rope = scaling or newer
    if layer_type and isinstance(rope.get(layer_type), dict):
        rope = {**{key: v for key, v in rope.items() if key not in (FULL, SLIDING)}, **rope[layer_type]}
    elif layer_type == SLIDING:
        if config.get("rope_local_base_freq") is not None:
            positive(config, "rope_local_base_freq", path)
        bases = (config.get("rope_local_base_freq"), rope.get("rope_theta"), found["rope_theta"])
        rope, found["rope_theta"] = {}, next((base for base in bases if base is not None), None)
    for key, value in rope.items():
        if isinstance(value, dict) or (key in _UNSERVED and value is not None):
            raise CheckpointError(f"{path}: config has rope parameters with {key}, which is not supported")
    return {**found, **{key: v for key, v in rope.items() if v is not None}}


def _kind(rope: dict[str, Any], path: str) -> str:
    given = [str(name) for key in ("rope_type", "type") if (name := rope.get(key)) is not None]
    names = ["longrope" if name == "su" else name for name in given]  # "su": what Phi-3 called it first
    if len(set(names)) > 1:
        raise CheckpointError(f"{path}: config has rope parameters of two types, {' and '.join(given)}")
    kind = names[0] if names else "default"
    if not names and (lone := next((key for key in _OF_A_TYPE if key in rope), None)) is not None:
        raise CheckpointError(
            f"{path}: config has rope parameters with {lone} = {rope[lone]!r:.100} and no rope_type; "
            f"supported: {', '.join(_SCALINGS)}"
        )
    if kind == "dynamic" and rope.get("alpha") is not None:
        kind = "alpha"  # of HunYuan, under a name that means something else
    if kind not in _SCALINGS:
        raise CheckpointError(f"{path}: rope type {kind!r} is not supported; supported: {', '.join(_SCALINGS)}")
    other = next((key for key in _OF_LONGROPE if key in rope), None)
    if kind != "longrope" and other:
        raise CheckpointError(f"{path}: config has rope parameters with {other} and the rope type {kind!r}")
    return kind


def _default(inv_freq: list[float], rope: dict[str, Any], path: str) -> Rotation:
    """Su et al. 2021."""
    return Rotation(tuple(inv_freq))


def _dynamic(inv_freq: list[float], rope: dict[str, Any], path: str) -> Rotation:
    """Another base for sequences longer than the original context (dynamic NTK; Peng et al. 2023, appendix B)."""
    if not _longer(rope, path):
        return Rotation(tuple(inv_freq))
    factor, pairs = positive(rope, "factor", path), len(inv_freq)
    if pairs < 2:
        raise CheckpointError(f"{path}: config has the rope type dynamic for heads of which 2 dimensions rotate")
    longer = count(rope, LENGTH, path) / count(rope, "max_position_embeddings", path)
    stretch = max(factor * longer - (factor - 1), 1.0)
    return Rotation(tuple(f * stretch ** (-i / (pairs - 1)) for i, f in enumerate(inv_freq)))


def _linear(inv_freq: list[float], rope: dict[str, Any], path: str) -> Rotation:
    """Positions divided by a factor (Chen et al. 2023)."""
    factor = positive(rope, "factor", path)
    return Rotation(tuple(f / factor for f in inv_freq))


def _llama3(inv_freq: list[float], rope: dict[str, Any], path: str) -> Rotation:
    """Long waves are slowed by `factor`, short ones kept, with a linear ramp between (Llama 3.1)."""
    low, high = positive(rope, "low_freq_factor", path), positive(rope, "high_freq_factor", path)
    length, factor = count(rope, _ORIGINAL, path), positive(rope, "factor", path)
    if low >= high:
        raise CheckpointError(f"{path}: config has low_freq_factor {low:g}, not below high_freq_factor {high:g}")

    def scaled(f: float) -> float:
        turns = length * f / (2 * math.pi)  # over the original context
        keep = min(max((turns - low) / (high - low), 0.0), 1.0)
        return float(keep * f + (1 - keep) * f / factor)

    return Rotation(tuple(scaled(f) for f in inv_freq))


def _alpha(inv_freq: list[float], rope: dict[str, Any], path: str) -> Rotation:
    """NTK-aware: the slowest pair is slowed by alpha, the fastest kept (bloc97 2023)."""
    alpha, last = positive(rope, "alpha", path), max(len(inv_freq) - 1, 1)
    return Rotation(tuple(f * alpha ** (-i / last) for i, f in enumerate(inv_freq)))


def _yarn(inv_freq: list[float], rope: dict[str, Any], path: str) -> Rotation:
    """As llama3, with the ramp over the index of the pair, and a factor for the attention (YaRN, Peng et al. 2023)."""
    made_for = count(rope, "max_position_embeddings", path)
    length = count(rope, _ORIGINAL, path, default=made_for)
    factor = positive(rope, "factor", path, default=made_for / length)
    theta = positive(rope, "rope_theta", path, default=10000.0)
    if theta <= 1:
        raise CheckpointError(
            f"{path}: config has rope_theta = {theta:g}, expected more than 1 with the rope type yarn"
        )

    def pair(turns: float) -> float:  # that turns so often over the original context
        return len(inv_freq) * math.log(length / (turns * 2 * math.pi)) / math.log(theta)

    low, high = (pair(positive(rope, key, path, n)) for key, n in (("beta_fast", 32.0), ("beta_slow", 1.0)))
    if rope.get("truncate") is None or flag(rope, "truncate", path):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * len(inv_freq) - 1)
    width = (high - low) or 0.001
    ramp = [min(max((i - low) / width, 0.0), 1.0) for i in range(len(inv_freq))]
    return Rotation(
        tuple(f * (1 - r) + f / factor * r for f, r in zip(inv_freq, ramp, strict=True)),
        scale=positive(rope, "attention_factor", path, default=_yarn_attention(factor, rope, path)),
    )


def _yarn_attention(factor: float, rope: dict[str, Any], path: str) -> float:
    def scale(key: str) -> float:
        return 0.1 * (positive(rope, key, path) if key else 1.0) * math.log(max(factor, 1.0)) + 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return scale("mscale") / scale("mscale_all_dim")
    return scale("")


def _longrope(inv_freq: list[float], rope: dict[str, Any], path: str) -> Rotation:
    """LongRoPE (Ding et al. 2024): short factors for sequences up to the original context, else long ones."""
    made_for = count(rope, "max_position_embeddings", path)
    length = count(rope, _ORIGINAL, path, default=made_for)
    factor = positive(rope, "factor", path, default=made_for / length)
    if made_for != length and not math.isclose(factor, made_for / length, rel_tol=1e-6):
        raise CheckpointError(f"{path}: config has rope factor {factor:g} for {made_for} positions of {length} before")
    attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(max(length, 2)))
    which = "long" if _longer(rope, path) else "short"
    scale = positive(rope, "attention_factor", path, default=attention)
    return Rotation(
        _divided(inv_freq, rope, f"{which}_factor", path), scale=positive(rope, f"{which}_mscale", path, scale)
    )


def _factors(inv_freq: list[float], rope: dict[str, Any], path: str) -> Rotation:
    """As GGUF files store them."""
    return Rotation(_divided(inv_freq, rope, "factors", path))


def _divided(inv_freq: list[float], rope: dict[str, Any], key: str, path: str) -> tuple[float, ...]:
    """One divisor per frequency."""
    factors = rope.get(key)
    if not isinstance(factors, list) or not all(type(d) in (int, float) for d in factors):
        raise CheckpointError(f"{path}: rope {key} must be a list of numbers")
    if len(factors) != len(inv_freq):
        raise CheckpointError(f"{path}: rope {key} has {len(factors)} factors for {len(inv_freq)} frequencies")
    if not all(SMALLEST <= d <= LARGEST for d in factors):
        raise CheckpointError(f"{path}: rope {key} has a factor that is no number above 0")
    return tuple(f / d for f, d in zip(inv_freq, factors, strict=True))


_SCALINGS = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "alpha": _alpha,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "factors": _factors,
}
