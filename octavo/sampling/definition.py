"""The meaning of sampling, in numpy: noise, penalties, truncation, the draw, and scores. Slow on purpose.

One row of logits x[V] gives one token. In order, on float32 logits:

1.  scores (logprob, rank, alternatives) are of the model's own distribution: log softmax of the unmodified x.
2.  x[id] += bias, then for every token of the history: x > 0 ? x / repetition : x * repetition, then, where it
    occurred in the output, x -= presence and x -= frequency * count.
3.  temperature 0 or top_k 1: argmax, ties to the lowest id; nothing below applies.
4.  truncation keeps a prefix of the order (logit descending, id ascending): the top_k first, of those the ones with
    probability >= min_p * the greatest, of those the fewest whose probability reaches top_p of what is left.
5.  argmax over the kept of (x - max) / temperature + g(token): a draw from their softmax (Gumbel-max; Maddison et
    al. 2014). g depends on (seed, choice, position, token) alone, so a draw repeats whatever else happens.

A row with NaN or without a finite greatest logit is invalid: it has no token, and its neighbours do not change.
The native kernels compute 5. in float32: equal tokens except where the two best sums are closer than rounding.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I32 = NDArray[np.int32]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, odd

MAX_INVERSE_TEMPERATURE = 1e30
"""Temperatures under 1e-30 act as that: (x - max) / temperature must not become 0 * inf."""


class Row(NamedTuple):
    """Parameters of one row; the fields are those of `backends.base.SamplingArrays`."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    noise_key: int = 0
    position: int = 0
    num_top: int = 0
    target: int = -1
    bias: tuple[tuple[int, float], ...] = ()
    history: tuple[tuple[int, int], ...] = ()


class Drawn(NamedTuple):
    """Result of one row; the fields are those of `backends.base.StepResult`."""

    token_id: int
    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]
    invalid: bool


class Sampled(NamedTuple):
    """Results of all rows, field by field a `backends.base.StepResult`."""

    token_ids: I32
    logprobs: F32
    ranks: I32
    top_ids: I32
    top_logprobs: F32
    invalid: NDArray[np.bool_]


def mix64(x: int) -> int:
    """Bijection of 64-bit integers that spreads every bit (SplitMix64's finaliser; Steele et al. 2014)."""
    x &= _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def noise_key(seed: int, choice: int) -> int:
    """The uint64 that stands for (seed, choice) in the noise. seed: any integer, taken modulo 2^64; choice >= 0."""
    return mix64(mix64(seed + _GOLDEN) + choice * _GOLDEN + 1)


def noise_bits(key: int, position: int, token_ids: NDArray[Any]) -> NDArray[np.uint32]:
    """31 random bits per token id, exactly as the kernels make them.

    Two rounds of a 32-bit mixer (lowbias32; Wellons 2018), each keyed by a half of a 64-bit mix of key and position.
    """
    row = mix64(key + (position + 1) * _GOLDEN)
    x = token_ids.astype(np.uint32) ^ np.uint32(row & 0xFFFFFFFF)
    x = _mix32(x) + np.uint32(row >> 32)
    return _mix32(x) >> np.uint32(1)


def _mix32(x: NDArray[np.uint32]) -> NDArray[np.uint32]:
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def gumbel(key: int, position: int, token_ids: NDArray[Any]) -> F64:
    """Standard Gumbel noise -log(-log(1 - u)) per token id, u = (bits + 1/2) / 2^31. log1p keeps the upper tail."""
    u = (noise_bits(key, position, token_ids) + 0.5) * 2.0**-31
    return np.asarray(-np.log(-np.log1p(-u)))


def penalized(x: F32, row: Row) -> F32:
    """A copy of x with biases and penalties applied."""
    y = x.copy()
    for token, bias in row.bias:
        y[token] += np.float32(bias)
    for token, count in row.history:
        repetition = np.float32(row.repetition)
        y[token] = y[token] / repetition if y[token] > 0 else y[token] * repetition
        if count > 0:
            y[token] -= np.float32(row.presence)
            y[token] -= np.float32(row.frequency) * np.float32(count)
    return y


def order(x: F32) -> NDArray[np.int64]:
    """Token ids by logit descending, ties by id ascending."""
    return np.argsort(-x, kind="stable")


def inverse_temperature(temperature: float) -> np.float32:
    return np.float32(min(1.0 / float(np.float32(temperature)), MAX_INVERSE_TEMPERATURE))


def kept(x: F32, row: Row) -> NDArray[np.int64]:
    """Token ids that truncation keeps, best first. temperature > 0."""
    ids = order(x)
    ids = ids[np.isfinite(x[ids])]
    if row.top_k > 0:
        ids = ids[: row.top_k]
    inverse = float(inverse_temperature(row.temperature))
    if row.min_p > 0:
        floor = np.float32(float(x[ids[0]]) + math.log(float(np.float32(row.min_p))) / inverse)
        ids = ids[x[ids] >= floor]
    if row.top_p < 1:
        mass = np.cumsum(np.exp((x[ids] - x[ids[0]]).astype(np.float64) * inverse))
        ids = ids[: int(np.searchsorted(mass, float(np.float32(row.top_p)) * mass[-1])) + 1]
    return ids


def draw(x: F32, row: Row) -> int:
    """Steps 3 to 5 on penalised logits."""
    if row.temperature == 0 or row.top_k == 1:
        return int(np.argmax(x))
    ids = np.sort(kept(x, row))
    scaled = (x[ids] - x.max()) * inverse_temperature(row.temperature)
    return int(ids[np.argmax(scaled.astype(np.float64) + gumbel(row.noise_key, row.position, ids))])


def sample_row(x: F32, row: Row) -> Drawn:
    """Draw (or, with a target, score) one token from logits x[V]. Does not change x."""
    modified = penalized(x, row) if row.target < 0 else x
    if not (_valid(x) and _valid(modified)):
        return Drawn(-1, 0.0, 0, [], [], True)
    token = row.target if row.target >= 0 else draw(modified, row)
    if row.num_top < 0:
        return Drawn(token, 0.0, 0, [], [], False)
    shifted = x.astype(np.float64) - float(x.max())
    logprobs = shifted - math.log(float(np.exp(shifted).sum()))
    rank = 1 + int((x > x[token]).sum()) + int((x[:token] == x[token]).sum())
    top = order(x)[: row.num_top]
    return Drawn(token, float(logprobs[token]), rank, [int(i) for i in top], [float(logprobs[i]) for i in top], False)


def _valid(x: F32) -> bool:
    return bool(not np.isnan(x).any() and np.isfinite(x.max()))


def rows_of(arrays: Any) -> list[Row]:
    """The rows of a `backends.base.SamplingArrays`."""
    rows = []
    for r in range(len(arrays.temperature)):
        scalars = {name: getattr(arrays, name)[r].item() for name in Row._fields[:11]}
        bias = slice(arrays.bias_starts[r], arrays.bias_starts[r + 1])
        history = slice(arrays.history_starts[r], arrays.history_starts[r + 1])
        rows.append(
            Row(
                **scalars,
                bias=tuple(zip(arrays.bias_ids[bias].tolist(), arrays.bias_values[bias].tolist(), strict=True)),
                history=tuple(
                    zip(arrays.history_ids[history].tolist(), arrays.history_counts[history].tolist(), strict=True)
                ),
            )
        )
    return rows


def sample(logits: F32, arrays: Any) -> Sampled:
    """All rows: logits f32[R, V] and a `backends.base.SamplingArrays`."""
    rows = rows_of(arrays)
    drawn = [sample_row(logits[r], row) for r, row in enumerate(rows)]
    width = max([0, *(row.num_top for row in rows)])
    top_ids = np.zeros((len(rows), width), np.int32)
    top_logprobs = np.zeros((len(rows), width), np.float32)
    for r, d in enumerate(drawn):
        top_ids[r, : len(d.top_ids)] = d.top_ids
        top_logprobs[r, : len(d.top_ids)] = d.top_logprobs
    return Sampled(
        np.array([d.token_id for d in drawn], np.int32),
        np.array([d.logprob for d in drawn], np.float32),
        np.array([d.rank for d in drawn], np.int32),
        top_ids,
        top_logprobs,
        np.array([d.invalid for d in drawn], np.bool_),
    )
