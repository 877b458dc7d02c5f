"""The meaning of sampling, in numpy: noise, penalties, truncation, the draw, and scores. Slow on purpose.

One row of logits x[V] gives one token. In order, on float32 logits:

1.  scores (logprob, rank, alternatives) are of the model's own distribution: log softmax of the unmodified x.
2.  x = -inf where a mask does not allow the token, then x[id] += bias. A row with a chain goes on in `by_chain`.
3.  for every token of the history: x > 0 ? x / repetition : x * repetition, then, where it occurred in the output,
    x -= presence and x -= frequency * count; then x[id] -= DRY's penalties.
4.  temperature 0 or top_k 1: argmax, ties to the lowest id; nothing below applies.
5.  truncation keeps a prefix of the order (logit descending, id ascending): the top_k first, of those the ones with
    probability >= min_p * the greatest, of those the fewest whose probability reaches top_p of what is left.
6.  argmax over the kept of (x - max) / temperature + g(token): a draw from their softmax (Gumbel-max; Maddison et
    al. 2014). g depends on (seed, choice, position, token) alone, so a draw repeats whatever else happens.

A row with NaN or without a finite greatest logit is invalid: it has no token, and its neighbours do not change.
The native kernels compute 6. in float32: equal tokens except where the two best sums are closer than rounding.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.sampling.chain import Op

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
    mask: tuple[int, ...] | None = None  # words of 32 bits
    dry: tuple[tuple[int, float], ...] = ()
    chain: tuple[tuple[int, float, float], ...] = ()  # sampling.chain.Op, values


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


def biased(x: F32, row: Row) -> F32:
    """A copy of x with mask and biases applied."""
    y = x.copy()
    if row.mask is not None:
        bits = np.unpackbits(np.array(row.mask, "<u4").view(np.uint8), bitorder="little")[: len(x)]
        y[: len(bits)][bits == 0] = -np.inf
        y[len(bits) :] = -np.inf
    for token, bias in row.bias:
        y[token] += np.float32(bias)
    return y


def penalized(x: F32, row: Row) -> F32:
    """A copy of x with penalties and DRY's penalties applied."""
    y = x.copy()
    for token, count in row.history:
        y[token] = penalty(y[token], row, count)
    for token, value in row.dry:
        y[token] -= np.float32(value)
    return y


def penalty(x: np.float32, row: Row, count: int) -> np.float32:
    """A logit as the penalties leave it, of a token with `count` occurrences in the output."""
    repetition = np.float32(row.repetition)
    x = x / repetition if x > 0 else x * repetition
    if count > 0:
        x -= np.float32(row.presence)
        x -= np.float32(row.frequency) * np.float32(count)
    return x


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


def coin(key: int, position: int) -> float:
    """Uniform in (0, 1): the noise of a token that no vocabulary has."""
    return (int(noise_bits(key, position, np.array([0xFFFFFFFF], np.uint32))[0]) + 0.5) * 2.0**-31


def by_chain(x: F32, row: Row) -> tuple[NDArray[np.int64], F32]:
    """(ids, logits) of the candidates that the samplers of row.chain leave, in their order, of x with mask and bias.

    Probabilities are of the softmax of the candidates that are left. Sources: top-n-sigma, Tang et al. 2024; typical,
    Meister et al. 2022; XTC, p-e-w 2024; dynamic temperature and the order as a list, llama.cpp.
    """
    ids = order(x)
    ids = ids[np.isfinite(x[ids])]
    y = x[ids]
    for op, a, b in row.chain:
        ids, y = _step(Op(op), a, b, ids, y, row)
        best = np.lexsort((ids, -y))
        ids, y = ids[best], y[best]
    return ids, y


def _step(op: Op, a: float, b: float, ids: NDArray[np.int64], y: F32, row: Row) -> tuple[NDArray[np.int64], F32]:
    """One sampler on candidates in order, best first."""
    depth = (y - y[0]).astype(np.float64)
    weights = np.exp(depth)
    mass = float(weights.sum())
    mean_depth = float((weights * np.where(weights > 0, depth, 0)).sum()) / mass
    places = {int(token): place for place, token in enumerate(ids)}
    keep = np.ones(len(ids), np.bool_)
    match op:
        case Op.PENALTIES:
            y = y.copy()
            for token, count in row.history:
                if token in places:
                    y[places[token]] = penalty(y[places[token]], row, count)
        case Op.DRY:
            y = y.copy()
            for token, value in row.dry:
                if token in places:
                    y[places[token]] -= np.float32(value)
        case Op.TEMPERATURE:
            t = float(np.float32(row.temperature))
            if a > 0 and len(ids) > 1:
                low, high = max(0.0, t - a), t + a
                share = (math.log(mass) - mean_depth) / math.log(len(ids))
                t = low + (high - low) * min(max(share, 0.0), 1.0) ** b
            if np.float32(t) == 0:
                return ids[:1], y[:1]
            y = (y - y[0]) * inverse_temperature(t)
        case Op.TOP_N_SIGMA:
            finite = y[np.isfinite(y)].astype(np.float64)
            keep = y >= np.float32(float(y[0]) - a * float(finite.std()))
        case Op.TOP_K:
            keep[row.top_k or len(ids) :] = False
        case Op.MIN_P:
            if row.min_p > 0:
                keep = y >= np.float32(float(y[0]) + math.log(float(np.float32(row.min_p))))
        case Op.TYPICAL:
            by_distance = np.lexsort((ids, -y, np.abs(depth - mean_depth)))
            reached = np.cumsum(weights[by_distance]) >= a * mass
            keep[by_distance[int(np.argmax(reached)) + 1 :]] = not reached.any()
        case Op.TOP_P:
            reached = np.cumsum(weights) >= float(np.float32(row.top_p)) * mass
            keep[int(np.argmax(reached)) + 1 :] = row.top_p >= 1 or not reached.any()
        case Op.XTC:
            likely = int((weights >= b * mass).sum())
            if coin(row.noise_key, row.position) < a:
                keep[: max(0, likely - 1)] = False
    return ids[keep], y[keep]


def draw(x: F32, row: Row) -> int:
    """From step 4 on, of penalised logits; with a chain, of those with mask and bias alone."""
    if row.chain:
        ids, y = by_chain(x, row)
        sums = (y - y.max()).astype(np.float64) + gumbel(row.noise_key, row.position, ids)
        return int(ids[np.lexsort((ids, -sums))[0]])
    if row.temperature == 0 or row.top_k == 1:
        return int(np.argmax(x))
    ids = np.sort(kept(x, row))
    scaled = (x[ids] - x.max()) * inverse_temperature(row.temperature)
    return int(ids[np.argmax(scaled.astype(np.float64) + gumbel(row.noise_key, row.position, ids))])


def sample_row(x: F32, row: Row) -> Drawn:
    """Draw (or, with a target, score) one token from logits x[V]. Does not change x."""
    modified = x
    if row.target < 0:
        modified = biased(x, row)
        if not row.chain:
            modified = penalized(modified, row)
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
        dry = slice(arrays.dry_starts[r], arrays.dry_starts[r + 1])
        chain = slice(arrays.chain_starts[r], arrays.chain_starts[r + 1])
        rows.append(
            Row(
                **scalars,
                bias=tuple(zip(arrays.bias_ids[bias].tolist(), arrays.bias_values[bias].tolist(), strict=True)),
                history=tuple(
                    zip(arrays.history_ids[history].tolist(), arrays.history_counts[history].tolist(), strict=True)
                ),
                mask=tuple(arrays.masks[arrays.mask_rows[r]].tolist()) if arrays.mask_rows[r] >= 0 else None,
                dry=tuple(zip(arrays.dry_ids[dry].tolist(), arrays.dry_values[dry].tolist(), strict=True)),
                chain=tuple(
                    (op, *values)
                    for op, values in zip(
                        arrays.chain_ops[chain].tolist(), arrays.chain_values[chain].tolist(), strict=True
                    )
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
