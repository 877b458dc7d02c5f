"""The packed formats of native/kernels.h: how codes and their numbers lie in memory. The native packer gives the same bytes."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.weights.formats.codes import E4M3, Codes
from octavo.weights.formats.numbers import F32, U8, as_bytes, f32_to_bf16, fields, up
from octavo.weights.formats.sources import read_codes, to_native
from octavo.weights.spec import DECODED, CheckpointError

LINE = 64
"""Bytes: 16 columns of four K, a cache line."""
PANEL_COLS = 16
"""Columns of a panel of a quantised format."""


class Layout(NamedTuple):
    """A unit is 16 columns of `unit` K: the lines of each plane, then the fields, then zeros to a whole line."""

    unit: int  # K
    planes: tuple[int, ...]  # widths in bits of the parts of a code, the lowest first
    fields: tuple[tuple[str, str, int], ...]  # of `Codes`, how a number is stored, columns of K that share it
    factor: bool = False  # a float32 for every output column follows the panels: all of the column is multiplied by it

    @property
    def bytes(self) -> int:
        """Of a unit."""
        numbers = sum(self.unit // cols * PANEL_COLS * _WIDTH[stored] for _, stored, cols in self.fields)
        return sum(self.planes) * self.unit * PANEL_COLS // 8 + up(numbers, LINE)


_WIDTH = {"f16": 2, "bf16": 2, "f32": 4, "e4m3": 1, "u8": 1, "i8": 1, "u4u4": 1}

_SUB = (("scale", "f16", 256), ("minimum_scale", "f16", 256))

LAYOUTS = {
    "w8": Layout(64, (8,), (("scale", "f16", 32),)),
    "w4": Layout(64, (4,), (("scale", "f16", 32),)),
    "w4f": Layout(64, (4,), (("scale", "f16", 32), ("minimum", "f16", 32))),
    "w5": Layout(64, (4, 1), (("scale", "f16", 32),)),
    "w5f": Layout(64, (4, 1), (("scale", "f16", 32), ("minimum", "f16", 32))),
    "w4n": Layout(64, (4,), (("scale", "f16", 32),)),
    "w4m": Layout(64, (4,), (("scale", "bf16", 32),)),
    "w4v": Layout(64, (4,), (("scale", "e4m3", 16),), factor=True),
    "w4z": Layout(64, (4,), (("scale", "f16", 32), ("zero", "u8", 32)), factor=True),
    "w4z64": Layout(64, (4,), (("scale", "f16", 64), ("zero", "u8", 64)), factor=True),
    "w4c": Layout(256, (4,), (("zero", "u8", 256),), factor=True),
    "w8z64": Layout(64, (8,), (("scale", "f16", 64), ("zero", "u8", 64)), factor=True),
    "f8": Layout(64, (8,), (("scale", "f32", 64),)),
    "w2k": Layout(256, (2,), (("sub_scale", "u4u4", 16), *_SUB)),
    "w3k": Layout(256, (2, 1), (("sub_scale", "i8", 16), _SUB[0])),
    "w4k": Layout(256, (4,), (("sub_scale", "u8", 32), ("sub_minimum", "u8", 32), *_SUB)),
    "w5k": Layout(256, (4, 1), (("sub_scale", "u8", 32), ("sub_minimum", "u8", 32), *_SUB)),
    "w6k": Layout(256, (4, 2), (("sub_scale", "i8", 16), _SUB[0])),
    "w4x": Layout(256, (4,), (("sub_scale", "i8", 32), _SUB[0])),
}

_FLOAT_BYTES = {"f32": 4, "f16": 2, "bf16": 2}
_FLOAT_COLS = 32
"""Columns of a panel of a float format: [K][32], bf16 [K / 2][32][2]."""


def panel_bytes(packed: str, rows: int, cols: int) -> int:
    """Bytes of the panels of a packed weight: rows padded to 32, columns to 64 or the unit."""
    n = up(rows, 32)
    if packed in _FLOAT_BYTES:
        return n * up(cols, 64) * _FLOAT_BYTES[packed]
    layout = LAYOUTS[packed]
    return n // PANEL_COLS * (up(cols, layout.unit) // layout.unit) * layout.bytes


def packed_bytes(packed: str, rows: int, cols: int) -> int:
    """Bytes of a packed weight: its panels and, where the format has them, the factors."""
    factors = packed not in _FLOAT_BYTES and LAYOUTS[packed].factor
    return panel_bytes(packed, rows, cols) + (4 * up(rows, 32) if factors else 0)


def pack(packed: str, source: str, data: U8, rows: int, cols: int, factor: F32 | None = None) -> U8:
    """The packed weight as flat bytes [packed_bytes(packed, rows, cols)]; padding is zero bytes.

    `data` [rows, bytes per row] is in the source format. CheckpointError where a `factor` [rows] has no place.
    """
    if packed in _FLOAT_BYTES:
        check_factor(packed, source, factor)
        return _pack_floats(packed, to_native(packed, source, data, cols, factor), rows, cols)
    layout = LAYOUTS[packed]
    c = read_codes(source, data)
    n, units = up(rows, 32), up(cols, layout.unit) // layout.unit
    q = _pad(c.q, n, units * layout.unit).reshape(n // 16, 16, units, layout.unit // 32, 8, 4)
    q = q.transpose(0, 2, 3, 4, 1, 5)  # [panel, unit, group of 32 K, quad, column, K of the quad]
    parts, shift = [], 0
    for width in layout.planes:
        parts.append(_plane(q >> np.uint8(shift), width).reshape(n // 16, units, -1))
        shift += width
    for name, stored, per in layout.fields:
        numbers = _pad(_stored(c, name, stored), n, units * layout.unit // per)
        numbers = numbers.reshape(n // 16, 16, units, layout.unit // per).transpose(0, 2, 3, 1)
        parts.append(as_bytes(numbers).reshape(n // 16, units, -1))
    unit = np.concatenate(parts, axis=2)
    unit = np.pad(unit, ((0, 0), (0, 0), (0, layout.bytes - unit.shape[2])))
    return np.concatenate([unit.ravel(), as_bytes(column_factors(packed, source, rows, factor))])


def check_factor(packed: str, source: str, factor: F32 | None) -> None:
    """CheckpointError where a factor per output column has no place: not multiplied in while decoding, nor packed."""
    if factor is not None and source not in DECODED and (packed in _FLOAT_BYTES or not LAYOUTS[packed].factor):
        raise CheckpointError(f"weight format {source} has no factors per output column")


def column_factors(packed: str, source: str, rows: int, factor: F32 | None) -> F32:
    """What follows the panels: [rows padded to 32], or nothing where the format has no factors."""
    check_factor(packed, source, factor)
    if packed in _FLOAT_BYTES or not LAYOUTS[packed].factor:
        return np.empty(0, np.float32)
    factors = np.ones(up(rows, 32), np.float32)
    if factor is not None:
        factors[:rows] = factor
    return factors


def _plane(q: U8, width: int) -> U8:
    """Lines [..., lines, column, 4] of the lowest `width` bits of [..., quad, column, 4].

    Bytes: line j has quad j. Nibbles: quad j low, quad j + 4 high. Pairs: line j has quads 4 j .. 4 j + 3, lowest
    first. Bits: all quads in one line, lowest first.
    """
    q = q & np.uint8((1 << width) - 1)
    if width == 8:
        return q
    quads = 8 // width  # of a line
    shape = (*q.shape[:-3], 8 // quads, quads, *q.shape[-2:])
    lines: U8 = q.reshape(*q.shape[:-3], 2, 4, *q.shape[-2:]).swapaxes(-4, -3) if width == 4 else q.reshape(shape)
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None, None]
    packed: U8 = np.bitwise_or.reduce(lines << shifts, axis=-3)
    return packed


def _stored(c: Codes, name: str, stored: str) -> NDArray[Any]:
    numbers: F32 = getattr(c, name)
    if stored == "u4u4":  # sub-scale and sub-minimum
        assert c.sub_minimum is not None
        return (numbers + 16 * c.sub_minimum).astype(np.uint8)
    if stored == "bf16":
        return f32_to_bf16(numbers)
    if stored == "e4m3":  # of twice the scale
        return np.searchsorted(E4M3[:127], 2 * numbers).astype(np.uint8)
    types = {"f16": np.float16, "f32": np.float32, "u8": np.uint8, "i8": np.int8}
    return numbers.astype(types[stored])


def _pack_floats(packed: str, data: U8, rows: int, cols: int) -> U8:
    n, k = up(rows, _FLOAT_COLS), up(cols, 64)
    matrix = _pad(fields(data, np.uint32 if packed == "f32" else np.uint16), n, k)
    if packed == "bf16":
        return as_bytes(matrix.reshape(n // 32, 32, k // 2, 2).transpose(0, 2, 1, 3)).ravel()
    return as_bytes(matrix.reshape(n // 32, 32, k).transpose(0, 2, 1)).ravel()


def _pad(matrix: NDArray[Any], rows: int, cols: int) -> NDArray[Any]:
    """[rows, cols]; a last block may have passed the end."""
    matrix = matrix[:, :cols]
    return np.pad(matrix, ((0, rows - matrix.shape[0]), (0, cols - matrix.shape[1])))
