"""Grids: the values that the weights of a quantised matrix may have, and rounding to the nearest of them.

N rows (outputs), K columns (inputs), G groups of K / G neighbouring columns in a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
I16 = NDArray[np.int16]

NOTHING: Mapping[str, NDArray[Any]] = MappingProxyType({})


class Grid(NamedTuple):
    """w = scale * code + offset, or scale * table[code] + offset, with the scale and offset of the group."""

    scale: F32  # [N, G]
    low: int  # codes [low, high]
    high: int
    offset: F32 | None = None  # [N, G]
    table: F32 | None = None  # ascending, of the codes from 0 on
    stored: Mapping[str, NDArray[Any]] = NOTHING  # what the format keeps of scale and offset, by its own names

    def round(self, w: F32) -> I16:
        """Codes [N, K] of the values nearest to w [N, K]."""
        grouped = w.reshape(*self.scale.shape, -1)
        offset = None if self.offset is None else self.offset[..., None]
        return self.nearest(grouped, self.scale[..., None], offset)[0].reshape(w.shape)

    def nearest(self, w: F32, scale: F32, offset: F32 | None) -> tuple[I16, F32]:
        """Codes and values of numbers whose scales and offsets are given, in any shapes that broadcast."""
        shifted = w if offset is None else w - offset
        steps = np.divide(shifted, scale, out=np.zeros_like(shifted), where=scale != 0)
        if self.table is None:
            points: F32 = np.clip(np.rint(steps, out=steps), self.low, self.high, out=steps)
            codes = points.astype(np.int16)
        else:
            codes = nearest_in(self.table, steps)
            points = self.table[codes]
        values = scale * points
        return codes, values if offset is None else values + offset

    def values(self, codes: I16) -> F32:
        """float32 [N, K] that codes [N, K] mean."""
        points = codes.astype(np.float32) if self.table is None else self.table[codes]
        w = points.reshape(*self.scale.shape, -1) * self.scale[..., None]
        if self.offset is not None:
            w += self.offset[..., None]
        return w.reshape(codes.shape).astype(np.float32, copy=False)


def concatenate(grids: Sequence[Grid]) -> Grid:
    """The grid of the rows of all of them, one below the other; they are of one format."""
    first = grids[0]
    if len(grids) == 1:
        return first
    offsets = [grid.offset for grid in grids if grid.offset is not None]
    return first._replace(
        scale=np.concatenate([grid.scale for grid in grids]),
        offset=np.concatenate(offsets) if offsets else None,
        stored={name: np.concatenate([grid.stored[name] for grid in grids]) for name in first.stored},
    )


def nearest_in(table: F32, x: F32) -> I16:
    """Index of the entry of an ascending table nearest to each x; of two as near the lower one."""
    middles = (table[1:] + table[:-1]) / 2
    return np.searchsorted(middles, x.ravel()).reshape(x.shape).astype(np.int16)
