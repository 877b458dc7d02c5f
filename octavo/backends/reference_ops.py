"""The meaning of every base operation, in numpy: float32 values, sums in float64.

n rows, K input and N output features, D head size. Arrays are float32 [rows, cols] unless said; nothing is mutated.
Rounded values are kept decoded: BF16 as float32, A8 and A16 as float64, where integer x float32 scale is exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.graph import ops
from octavo.graph.ir import DType
from octavo.weights.formats import bf16_to_f32, f32_to_bf16

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
Array = NDArray[Any]  # float32, or float64 for decoded A8 and A16

LOG2_E = np.float64(1.4426950408889634)
A8_GROUP = 32
"""Columns that share a scale (KERNELS 2.3)."""

_ROWS_AT_ONCE = 4096
"""Weight rows widened to float64 at a time: bounds memory, changes nothing."""


def round_bf16(x: F32) -> F32:
    """Nearest bf16, ties to even, as float32."""
    return bf16_to_f32(f32_to_bf16(x))


def quantise(x: F32, most: int = 127, least: float = 2.0**-120) -> tuple[NDArray[np.int16], F32]:
    """q int8 [n, groups, 32] and scale float32 [n, groups] of x[n, K], zero padded to groups of 32.

    In float32 as the kernels: scale = max|x| / most, q = rint(x * (most / max|x|)), ties to even. Where max|x| is under
    `least` all q are 0; a group with a NaN or infinity has scale NaN. The defaults are A8's.
    """
    n, cols = x.shape
    groups = -(-cols // A8_GROUP)
    padded = np.pad(x, ((0, 0), (0, groups * A8_GROUP - cols))).reshape(n, groups, A8_GROUP)
    largest = np.abs(padded).max(axis=2)
    finite = np.isfinite(largest)
    scale = np.where(finite, largest / np.float32(most), np.float32(np.nan))
    inverse = np.divide(np.float32(most), largest, out=np.zeros_like(largest), where=finite & (largest >= least))
    q = np.rint(np.where(finite[..., None], padded, np.float32(0)) * inverse[..., None])
    return q.astype(np.int16), scale


def round_to(x: F32, dtype: DType) -> Array:
    """x as a linear with rounding `dtype` sees it, decoded."""
    if dtype is DType.F32:
        return x
    if dtype is DType.BF16:
        return round_bf16(x)
    q, scale = quantise(x) if dtype is DType.A8 else quantise(x, 127 * 128, 2.0**-112)
    values: F64 = q.astype(np.float64) * scale[..., None].astype(np.float64)
    decoded: Array = values.reshape(len(x), q.shape[1] * A8_GROUP)[:, : x.shape[1]]
    return decoded


def rms_norm(x: F32, weight: F32 | None, eps: float, head_dim: int | None = None) -> F32:
    """weight [1, K] or [1, head_dim]."""
    heads = _heads(x, head_dim)
    mean = np.square(heads.astype(np.float64)).mean(axis=-1, keepdims=True)
    factor: F32 = (1 / np.sqrt(mean + eps)).astype(np.float32)
    y: F32 = heads * factor
    if weight is not None:
        y *= _heads(weight, head_dim)
    return y.reshape(x.shape)


def layer_norm(x: F32, weight: F32 | None, bias: F32 | None, eps: float, head_dim: int | None = None) -> F32:
    """weight and bias [1, K] or [1, head_dim]."""
    heads = _heads(x, head_dim).astype(np.float64)
    centred = heads - heads.mean(axis=-1, keepdims=True)
    y = centred / np.sqrt(np.square(centred).mean(axis=-1, keepdims=True) + eps)
    y = y if weight is None else y * _heads(weight, head_dim)
    y = y if bias is None else y + _heads(bias, head_dim)
    return np.asarray(y, np.float32).reshape(x.shape)


def _heads(x: F32, head_dim: int | None) -> F32:
    """[n, heads, D]; without head_dim a row is one head."""
    width = head_dim or x.shape[1]
    return x.reshape(len(x), x.shape[1] // width, width)


def linear(x: Array, weights: list[F32], bias: F32 | None) -> F32:
    """x[n, K] through stacked weights [N_i, K] -> [n, sum N_i]."""
    wide = x.astype(np.float64)
    columns = []
    for w in weights:
        for start in range(0, len(w), _ROWS_AT_ONCE):
            some = w[start : start + _ROWS_AT_ONCE].astype(np.float64)
            columns.append((wide @ some.T).astype(np.float32))
    y: F32 = np.concatenate(columns, axis=1)
    return y if bias is None else y + bias


def rope(x: F32, positions: Array, head_dim: int, inv_freq: tuple[float, ...], neox: bool, scale: float) -> F32:
    """x[n, heads * D], positions [n]."""
    heads = x.reshape(len(x), x.shape[1] // head_dim, head_dim)
    half = len(inv_freq)
    angle = positions.astype(np.float64)[:, None] * np.array(inv_freq)
    cos = (np.cos(angle) * scale).astype(np.float32)[:, None]
    sin = (np.sin(angle) * scale).astype(np.float32)[:, None]
    first, second = (slice(0, half), slice(half, 2 * half)) if neox else (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
    a, b = heads[..., first], heads[..., second]
    y = heads.copy()
    y[..., first] = a * cos - b * sin
    y[..., second] = b * cos + a * sin
    return y.reshape(x.shape)


def fixed_point(x: F32, steps: int) -> F32:
    """x[..., D] rounded to a multiple of max|x| / steps of its row, ties to even, in float32 as the kernels.

    Rows with a NaN or infinity become NaN; steps is 127 (int8) or 32767 (int16).
    """
    most = np.abs(x).max(axis=-1, keepdims=True)
    finite = np.isfinite(most)
    step = np.where(finite, most / np.float32(steps), np.float32(np.nan))
    inverse = np.divide(np.float32(steps), most, out=np.zeros_like(most), where=finite & (most >= 2.0**-100))
    return np.asarray(np.rint(np.where(finite, x, np.float32(0)) * inverse) * step, np.float32)


def round_kv(k: F32, v: F32, dtype: DType) -> tuple[F32, F32]:
    """Keys [n, kv_heads, D] and values [n, kv_heads, V] as a cache of type `dtype` holds them, decoded."""
    k, v = (round_bf16(x) if dtype is DType.BF16 else fixed_point(x, 127) if dtype is DType.I8 else x for x in (k, v))
    finite = np.isfinite(v).all(axis=2, keepdims=True)
    return np.where(finite, k, np.float32(np.nan)), np.where(finite, v, np.float32(0))


def attention(
    q: F32, k: F32, v: F32, first: int, start: int, a: ops.Attention, dtype: DType, sinks: F32 | None = None
) -> F32:
    """Tokens at positions start.. of one sequence: q[n, heads, D] -> [n, heads, V].

    k, v [m, kv_heads, D] are those of the positions from `first` to the end, already rounded to the KV type `dtype`.
    Probabilities are rounded to bf16 relative to the greatest score of the row; kernels may round them relative to the
    greatest so far, and where the cache is int8, to 16 bits. Their sum is of the unrounded ones. sinks [1, heads].
    """
    n = len(q)
    group = a.heads // a.kv_heads
    scaled = q * np.float32(a.scale * LOG2_E)
    scaled = round_bf16(scaled) if dtype is DType.BF16 else fixed_point(scaled, 32767) if dtype is DType.I8 else scaled
    distance = (first + np.arange(len(k))) - (start + np.arange(n)[:, None])  # key - query
    reach = a.window or first + len(k)
    visible = (distance > -reach) & (distance < (1 if a.causal else reach))
    y = np.empty((n, a.heads, a.v_dim), np.float32)
    for head in range(a.heads):
        keys, values = k[:, head // group].astype(np.float64), v[:, head // group].astype(np.float64)
        scores = scaled[:, head].astype(np.float64) @ keys.T  # in units of log2(e), as all that follows
        if a.softcap:
            scores = a.softcap * LOG2_E * np.tanh(scores / (a.softcap * LOG2_E))
        if a.slopes:
            scores = scores + a.slopes[head] * LOG2_E * distance
        scores = np.where(visible, scores, -np.inf)
        top = scores.max(axis=1, keepdims=True)
        p = np.exp2(scores - top).astype(np.float32)
        total = p.sum(axis=1, keepdims=True, dtype=np.float64)
        if sinks is not None:
            total += np.exp2(np.float64(sinks[0, head]) * LOG2_E - top)
        p = round_bf16(p) if dtype is DType.BF16 else p
        y[:, head] = (np.where(visible, p, 0).astype(np.float64) @ values / total).astype(np.float32)
    return y


def split_heads(x: F32, heads: int) -> F32:
    """x[n, heads * K] -> [heads * n, K], head by head."""
    return np.ascontiguousarray(x.reshape(len(x), heads, -1).swapaxes(0, 1)).reshape(heads * len(x), -1)


def head_linear(x: Array, weight: F32, heads: int) -> F32:
    """x[heads * n, K] head by head, weight [heads * N, K] -> [n, heads * N]."""
    n, each = len(x) // heads, len(weight) // heads
    columns = [linear(x[h * n : (h + 1) * n], [weight[h * each : (h + 1) * each]], None) for h in range(heads)]
    return np.concatenate(columns, axis=1)


def concat(values: list[F32], heads: int) -> F32:
    return np.concatenate([x.reshape(len(x), heads, -1) for x in values], axis=2).reshape(len(values[0]), -1)


def lora_shrink(x: F32, a: F32, scale: float) -> F32:
    """x[n, K] through a [r, K], times the scale of the adapter: [n, r]."""
    return linear(x, [a], None) * np.float32(scale)


_erfc = np.vectorize(math.erfc, otypes=[np.float64])


def _sigmoid(x: F64) -> F64:
    return np.asarray(np.exp(-np.logaddexp(0, -x)))  # without overflow


ACTIVATIONS: dict[str, Callable[[F64], F64]] = {
    "silu": lambda x: x * _sigmoid(x),
    "gelu": lambda x: x / 2 * _erfc(-x / math.sqrt(2)),
    "gelu_tanh": lambda x: x * _sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)),
    "gelu_quick": lambda x: x * _sigmoid(1.702 * x),
    "relu": lambda x: np.maximum(x, 0),
    "relu2": lambda x: np.square(np.maximum(x, 0)),
    "sigmoid": _sigmoid,
    "tanh": np.tanh,
}
"""Of ops.ACTS, in float64."""


def act(x: F32, name: str) -> F32:
    return ACTIVATIONS[name](x.astype(np.float64)).astype(np.float32)


def act_mul(gate: F32, up: F32, name: str) -> F32:
    if name == "swiglu_oai":
        gate, up = np.minimum(gate, np.float32(7)), np.clip(up, np.float32(-7), np.float32(7)) + np.float32(1)
        name = "gelu_quick"
    return act(gate, name) * up


def softcap(x: F32, cap: float) -> F32:
    return np.asarray(cap * np.tanh(x.astype(np.float64) / cap), np.float32)
