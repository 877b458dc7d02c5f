"""Scales and offsets of groups of weights by weighted least squares: candidates are tried, each is solved, the best is kept.

x [..., n] are groups of n weights, `importance` [..., n] what an error of each costs, in any shape that broadcasts to x.
What is returned has the shape of x without its last axis, in float32.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]

_BEYOND = (0.0, 0.5, 1.0, 1.5)
"""How many codes behind the last the largest weight of a group is put; there it is cut off."""
_FINE = 64
"""From so many codes to a side on there is nothing to gain by that."""

_NARROWER = np.linspace(1.0, 0.7, 7)
"""The part of a group's range that the codes cover."""


def largest(x: F32) -> F32:
    """Of each group the weight of the greatest magnitude, with its sign."""
    place = np.abs(x).argmax(axis=-1)
    return np.take_along_axis(x, place[..., None], axis=-1)[..., 0]


def fit_scale(x: F32, importance: F32, low: int, high: int, signed: bool) -> F32:
    """For x = scale * code, codes in [low, high]. signed: the scale may be negative, so that the largest gets code low."""
    ends = (low, high) if signed else (high, high)
    return _best_scale(x, importance, ends[0], 1, signed, lambda steps: np.clip(np.rint(steps), low, high))


def fit_table_scale(x: F32, importance: F32, table: F32) -> F32:
    """For x = scale * table[code], the table ascending. The scale may be negative."""
    middles = (table[1:] + table[:-1]) / 2
    end, gap = float(table[0]), float(table[1] - table[0])
    return _best_scale(x, importance, end, gap, True, lambda steps: table[np.searchsorted(middles, steps)])


def _best_scale(x: F32, importance: F32, end: float, gap: float, signed: bool, points_of: Callable[[F32], F32]) -> F32:
    """end: what the largest weight of a group is rounded to; gap: from there to the next code."""
    top = largest(x) if signed else np.abs(x).max(axis=-1)
    best = np.zeros_like(top)
    gained = np.full_like(top, -1)
    for beyond in _BEYOND if abs(end) < _FINE * gap else _BEYOND[:1]:
        place = np.float32(end + np.copysign(beyond * gap, end))
        inverse = np.divide(place, top, out=np.zeros_like(top), where=top != 0)
        points = points_of(x * inverse[..., None])
        weighted = points * importance
        across, square = (weighted * x).sum(axis=-1), (weighted * points).sum(axis=-1)
        scale = np.divide(across, square, out=np.zeros_like(top), where=square > 0)
        better = scale * across > gained  # what of the weighted sum of squares is explained
        best, gained = np.where(better, scale, best), np.where(better, scale * across, gained)
    return best.astype(np.float32, copy=False)


def fit_range(x: F32, importance: F32, levels: int, below_zero: bool) -> tuple[F32, F32]:
    """(scale, offset) for x = scale * code + offset, codes in [0, levels). below_zero: the offset is never above 0."""
    low, high = x.min(axis=-1), x.max(axis=-1)
    if below_zero:
        low = np.minimum(low, 0)
    high = np.maximum(high, low)
    weights = np.broadcast_to(importance, x.shape)
    sum_w, sum_x = weights.sum(axis=-1), (weights * x).sum(axis=-1)
    found = (np.zeros_like(low), low.copy())
    least = np.full_like(low, np.inf)
    for part in _NARROWER:
        inner = low + (high - low) * np.float32((1 - part) / 2)
        step = (high - low) * np.float32(part / (levels - 1))
        inverse = np.divide(np.float32(1), step, out=np.zeros_like(step), where=step > 0)
        codes = np.clip(np.rint((x - inner[..., None]) * inverse[..., None]), 0, levels - 1)
        weighted = codes * weights
        sum_c, sum_cc, sum_cx = weighted.sum(axis=-1), (weighted * codes).sum(axis=-1), (weighted * x).sum(axis=-1)
        scale, offset = _line(sum_w, sum_c, sum_cc, sum_x, sum_cx, below_zero, low)
        error = (weights * np.square(codes * scale[..., None] + offset[..., None] - x)).sum(axis=-1)
        better = error < least
        least = np.where(better, error, least)
        found = np.where(better, scale, found[0]), np.where(better, offset, found[1])
    return found[0].astype(np.float32, copy=False), found[1].astype(np.float32, copy=False)


def _line(
    sum_w: F32, sum_c: F32, sum_cc: F32, sum_x: F32, sum_cx: F32, below_zero: bool, alone: F32
) -> tuple[F32, F32]:
    """Scale and offset of least squares; where all codes are one, no scale and the offset `alone`."""
    spread = sum_w * sum_cc - sum_c * sum_c
    usable = spread > 1e-6 * sum_w * sum_cc
    scale = np.divide(sum_w * sum_cx - sum_c * sum_x, spread, out=np.zeros_like(spread), where=usable)
    offset = np.divide(sum_x - scale * sum_c, sum_w, out=alone.copy(), where=usable & (sum_w > 0))
    if below_zero:
        through_zero = np.divide(sum_cx, sum_cc, out=np.zeros_like(spread), where=sum_cc > 0)
        above = offset > 0
        scale, offset = np.where(above, through_zero, scale), np.where(above, 0, offset)
    return np.maximum(scale, 0), offset
