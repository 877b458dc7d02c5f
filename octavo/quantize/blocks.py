"""GGUF's block formats from the writing side: a grid for a matrix, and the bytes of its codes.

Blocks of 32 columns have an fp16 scale each, and some an fp16 minimum. Super-blocks of 256 ("K-quants") have integer
scales of 16 or 32 columns under an fp16 scale. What the bytes mean is defined by weights.formats.codes; here is its
inverse. N rows, K columns, B blocks of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.quantize.fit import F32, fit_range, fit_scale, fit_table_scale, largest
from octavo.quantize.grid import I16, Grid
from octavo.weights.formats.codes import IQ4_NL

U8 = NDArray[np.uint8]

_SUPER = 256
"""Columns of a super-block."""


class BlockFormat(NamedTuple):
    name: str  # GGUF's, as weights.formats.BLOCKS has it
    cols: int  # of a block: rows are a multiple of it
    fit: Callable[[F32, F32], Grid]  # (w [N, K], importance [K])
    encode: Callable[[Grid, I16], U8]  # codes [N, K] to [N, bytes per row]


# ---- grids


def _groups(w: F32, importance: F32, size: int) -> tuple[F32, F32]:
    """[N, G, size] and [1, G, size]."""
    return w.reshape(len(w), -1, size), importance.reshape(1, -1, size)


def _halves(x: F32) -> NDArray[np.float16]:
    return np.clip(x, -65504, 65504).astype(np.float16)


def _scaled(low: int, high: int, w: F32, importance: F32) -> Grid:
    stored = _halves(fit_scale(*_groups(w, importance, 32), low, high, signed=True))
    return Grid(stored.astype(np.float32), low, high, stored={"d": stored})


def _ranged(levels: int, w: F32, importance: F32) -> Grid:
    scale, offset = map(_halves, fit_range(*_groups(w, importance, 32), levels, below_zero=False))
    stored = {"d": scale, "m": offset}
    return Grid(scale.astype(np.float32), 0, levels - 1, offset.astype(np.float32), stored=stored)


def _tabled(w: F32, importance: F32) -> Grid:
    stored = _halves(fit_table_scale(*_groups(w, importance, 32), IQ4_NL))
    return Grid(stored.astype(np.float32), 0, 15, table=IQ4_NL, stored={"d": stored})


def _sub_scaled(size: int, low: int, high: int, most: int, w: F32, importance: F32, table: F32 | None = None) -> Grid:
    """Integer scales in [-most, most) of `size` columns; the largest is -most."""
    groups = _groups(w, importance, size)
    scale = fit_scale(*groups, low, high, signed=True) if table is None else fit_table_scale(*groups, table)
    in_block = scale.reshape(len(w), -1, _SUPER // size)
    d = _halves(largest(in_block) / np.float32(-most))
    sub = np.clip(np.rint(_ratio(in_block, d)), -most, most - 1)
    of_group = (sub * d.astype(np.float32)[..., None]).reshape(len(w), -1).astype(np.float32)
    return Grid(of_group, low, high, table=table, stored={"d": d, "sub": sub.astype(np.int8)})


def _sub_ranged(size: int, levels: int, most: int, w: F32, importance: F32) -> Grid:
    """Integer scales and minima in [0, most] of `size` columns."""
    found = fit_range(*_groups(w, importance, size), levels, below_zero=True)
    scale, minimum = (part.reshape(len(w), -1, _SUPER // size) for part in (found[0], -found[1]))
    stored: dict[str, NDArray[Any]] = {}
    numbers = []
    for name, part in (("d", scale), ("m", minimum)):
        d = _halves(part.max(axis=-1) / np.float32(most))
        sub = np.clip(np.rint(_ratio(part, d)), 0, most)
        stored |= {name: d, f"sub_{name}": sub.astype(np.uint8)}
        numbers.append((sub * d.astype(np.float32)[..., None]).reshape(len(w), -1).astype(np.float32))
    return Grid(numbers[0], 0, levels - 1, -numbers[1], stored=stored)


def _ratio(parts: F32, d: NDArray[np.float16]) -> F32:
    whole = np.broadcast_to(d.astype(np.float32)[..., None], parts.shape)
    return np.divide(parts, whole, out=np.zeros_like(parts), where=whole != 0)


# ---- bytes


def _joined(*parts: NDArray[Any]) -> U8:
    """Arrays [N, B, ...] as bytes side by side in each block: [N, bytes per row]."""
    n, count = parts[0].shape[:2]
    data = [np.ascontiguousarray(part).view(np.uint8).reshape(n, count, -1) for part in parts]
    return np.concatenate(data, axis=2).reshape(n, -1)


def _fields(codes: NDArray[Any], width: int) -> U8:
    """[..., 8 / width, n] fields to [..., n] bytes, the first lowest."""
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    data: U8 = np.bitwise_or.reduce((codes & np.uint8(2**width - 1)) << shifts, axis=-2)
    return data


def _number(x: NDArray[Any]) -> NDArray[Any]:
    """[N, B] as [N, B, 1]: bytes of their own."""
    return x[..., None]


def _split(codes: I16, plus: int, *shape: int) -> U8:
    """Codes [N, K], `plus` added, as [N, B, *shape]."""
    return (codes + np.int16(plus)).astype(np.uint8).reshape(len(codes), -1, *shape)


def _q8_0(grid: Grid, codes: I16) -> U8:
    return _joined(_number(grid.stored["d"]), codes.astype(np.int8).reshape(len(codes), -1, 32))


def _nibbles(plus: int, numbers: str, grid: Grid, codes: I16) -> U8:
    """Q4_0, Q4_1 and IQ4_NL: numbers, and columns i and i + 16 in byte i."""
    return _joined(*(_number(grid.stored[name]) for name in numbers), _fields(_split(codes, plus, 2, 16), 4))


def _fives(plus: int, numbers: str, grid: Grid, codes: I16) -> U8:
    """Q5_0 and Q5_1: a word of fifth bits before the nibbles."""
    q = _split(codes, plus, 32)
    fifth = np.packbits(q >> 4, axis=-1, bitorder="little")
    return _joined(*(_number(grid.stored[n]) for n in numbers), fifth, _fields(q.reshape(*q.shape[:2], 2, 16), 4))


def _pairs(q: U8) -> U8:
    """Q2_K and Q3_K: two runs of 32 bytes, each of four runs of 32 columns."""
    return _fields(q.reshape(*q.shape[:2], 2, 4, 32), 2)


def _q2_k(grid: Grid, codes: I16) -> U8:
    s = grid.stored
    sub = s["sub_d"] | s["sub_m"] << np.uint8(4)
    return _joined(sub, _pairs(_split(codes, 0, 256)), _number(s["d"]), _number(s["m"]))


def _q3_k(grid: Grid, codes: I16) -> U8:
    q, sub = _split(codes, 4, 256), (grid.stored["sub"] + np.int8(32)).view(np.uint8)
    third = _fields((q >> 2).reshape(*q.shape[:2], 8, 32), 1)
    low = _fields(sub.reshape(*sub.shape[:2], 2, 8), 4)
    high = _fields((sub >> 4).reshape(*sub.shape[:2], 4, 4), 2)
    return _joined(third, _pairs(q), low, high, _number(grid.stored["d"]))


def _sixes(grid: Grid) -> U8:
    """8 scales and 8 minima of 6 bits in 12 bytes (weights.formats.codes.q4_k_sub)."""
    scales, minima = grid.stored["sub_d"], grid.stored["sub_m"]
    first, last = slice(0, 4), slice(4, 8)
    upper = [part[..., first] | part[..., last] >> 4 << np.uint8(6) for part in (scales, minima)]
    return np.concatenate([*upper, scales[..., last] & 15 | (minima[..., last] & 15) << np.uint8(4)], axis=-1)


def _q4_k(grid: Grid, codes: I16) -> U8:
    nibbles = _fields(_split(codes, 0, 4, 2, 32), 4)
    return _joined(_number(grid.stored["d"]), _number(grid.stored["m"]), _sixes(grid), nibbles)


def _q5_k(grid: Grid, codes: I16) -> U8:
    q = _split(codes, 0, 8, 32)
    fifth, nibbles = _fields(q >> 4, 1), _fields(q.reshape(*q.shape[:2], 4, 2, 32), 4)
    return _joined(_number(grid.stored["d"]), _number(grid.stored["m"]), _sixes(grid), fifth, nibbles)


def _q6_k(grid: Grid, codes: I16) -> U8:
    q = _split(codes, 32, 2, 128)
    low, high = _fields(q.reshape(*q.shape[:3], 2, 64), 4), _fields((q >> 4).reshape(*q.shape[:3], 4, 32), 2)
    return _joined(low, high, grid.stored["sub"], _number(grid.stored["d"]))


def _iq4_xs(grid: Grid, codes: I16) -> U8:
    sub = (grid.stored["sub"] + np.int8(32)).view(np.uint8)
    high = ((sub >> 4).astype(np.uint16) << np.arange(0, 16, 2, dtype=np.uint16)).sum(axis=-1, dtype=np.uint16)
    low = sub[..., 0::2] & 15 | (sub[..., 1::2] & 15) << np.uint8(4)
    return _joined(_number(grid.stored["d"]), _number(high), low, _fields(_split(codes, 0, 8, 2, 16), 4))


FORMATS = {
    f.name: f
    for f in (
        BlockFormat("Q8_0", 32, partial(_scaled, -127, 127), _q8_0),
        BlockFormat("Q4_0", 32, partial(_scaled, -8, 7), partial(_nibbles, 8, "d")),
        BlockFormat("Q4_1", 32, partial(_ranged, 16), partial(_nibbles, 0, "dm")),
        BlockFormat("Q5_0", 32, partial(_scaled, -16, 15), partial(_fives, 16, "d")),
        BlockFormat("Q5_1", 32, partial(_ranged, 32), partial(_fives, 0, "dm")),
        BlockFormat("IQ4_NL", 32, _tabled, partial(_nibbles, 0, "d")),
        BlockFormat("Q2_K", 256, partial(_sub_ranged, 16, 4, 15), _q2_k),
        BlockFormat("Q3_K", 256, partial(_sub_scaled, 16, -4, 3, 32), _q3_k),
        BlockFormat("Q4_K", 256, partial(_sub_ranged, 32, 16, 63), _q4_k),
        BlockFormat("Q5_K", 256, partial(_sub_ranged, 32, 32, 63), _q5_k),
        BlockFormat("Q6_K", 256, partial(_sub_scaled, 16, -32, 31, 128), _q6_k),
        BlockFormat("IQ4_XS", 256, partial(_sub_scaled, 32, 0, 15, 32, table=IQ4_NL), _iq4_xs),
    )
}
"""By GGUF's name of the type."""
