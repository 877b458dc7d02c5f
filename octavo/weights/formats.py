"""What the bytes of each weight format mean: numpy definitions, which the native code is tested against.

*Source* formats are those of checkpoints, in GGUF's spelling (F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q6_K); layouts from the
GGUF specification. *Packed* formats (f32, f16, bf16, w8, w4, w4f) are those of native/kernels.h. Nothing is mutated.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.weights.spec import CheckpointError, act_of, packed_format

__all__ = [
    "BLOCKS",
    "PANEL_COLS",
    "UNIT_BYTES",
    "act_of",
    "bf16_to_f32",
    "dequantise",
    "f32_to_bf16",
    "pack",
    "packed_bytes",
    "packed_format",
    "row_bytes",
    "to_native",
]

U8 = NDArray[np.uint8]
F32 = NDArray[np.float32]

BLOCKS = {  # source format: (columns, bytes) of a block
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q8_0": (32, 2 + 32),  # scale, int8 values
    "Q4_0": (32, 2 + 16),  # scale, nibbles: byte i holds columns i (low) and i + 16 (high)
    "Q4_1": (32, 4 + 16),  # scale, minimum, nibbles
    "Q6_K": (256, 128 + 64 + 16 + 2),  # low nibbles, high bit pairs, int8 sub-scales of 16 columns, scale
}

PANEL_COLS = {"f32": 32, "f16": 32, "bf16": 32, "w8": 16, "w4": 16, "w4f": 16}
UNIT_BYTES = {"f32": 8192, "f16": 4096, "bf16": 4096, "w8": 17 * 64, "w4": 9 * 64, "w4f": 10 * 64}
"""Bytes of one panel for 64 columns of input."""


def row_bytes(source: str, cols: int) -> int:
    """Bytes of a row of `cols` values. CheckpointError where blocks do not divide the row."""
    if source not in BLOCKS:
        raise CheckpointError(f"weight type {source} is not supported; supported are {', '.join(BLOCKS)}")
    block_cols, block_bytes = BLOCKS[source]
    if cols % block_cols:
        raise CheckpointError(f"a row of {cols} values is no multiple of the {block_cols} values of a {source} block")
    return cols // block_cols * block_bytes


def packed_bytes(packed: str, rows: int, cols: int) -> int:
    """Bytes of a packed weight: rows padded to 32, columns to 64."""
    return _up(rows, 32) // PANEL_COLS[packed] * (_up(cols, 64) // 64) * UNIT_BYTES[packed]


def bf16_to_f32(bits: NDArray[np.uint16]) -> F32:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def f32_to_bf16(values: F32) -> NDArray[np.uint16]:
    """Bits of the nearest bf16, ties to even; a NaN stays a (quiet) NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(values), (bits >> 16) | 0x40, rounded).astype(np.uint16)


def dequantise(source: str, data: U8, cols: int) -> F32:
    """`data` [rows, bytes per row] of a source format as float32 [rows, cols]."""
    rows = data.shape[0]
    if data.shape != (rows, row_bytes(source, cols)):
        raise CheckpointError(f"{data.shape[1]} bytes are not a row of {cols} values of type {source}")
    if source == "F32":
        return _fields(data, np.float32).copy()
    if source == "F16":
        return _fields(data, np.float16).astype(np.float32)
    if source == "BF16":
        return bf16_to_f32(_fields(data, np.uint16))
    blocks = data.reshape(rows, -1, BLOCKS[source][1])
    if source == "Q6_K":
        return _dequantise_q6k(blocks).reshape(rows, cols)
    scale = _half(blocks[..., 0:2])
    if source == "Q8_0":
        values = scale * blocks[..., 2:].view(np.int8).astype(np.float32)
    elif source == "Q4_0":
        values = scale * (_nibbles(blocks[..., 2:]).astype(np.float32) - 8)
    else:
        values = scale * _nibbles(blocks[..., 4:]).astype(np.float32) + _half(blocks[..., 2:4])
    return values.reshape(rows, cols)


def to_native(packed: str, source: str, data: U8, cols: int) -> U8:
    """Rows as the native packer takes them: Q6_K decoded to bf16 or f32 rows, others unchanged."""
    if source != "Q6_K":
        return data
    values = dequantise(source, data, cols)
    return _bytes(values if packed == "f32" else f32_to_bf16(values))


def pack(packed: str, source: str, data: U8, rows: int, cols: int) -> U8:
    """The packed weight as flat bytes [packed_bytes(packed, rows, cols)]; padding is zero bytes.

    `data` [rows, bytes per row] is in the source format.
    """
    native = to_native(packed, source, data, cols)
    n, k = _up(rows, 32), _up(cols, 64)
    if packed in ("f32", "f16", "bf16"):
        matrix = _pad(_fields(native, np.uint32 if packed == "f32" else np.uint16), n, k)
        if packed == "bf16":  # [K/2][32][2]
            return _bytes(matrix.reshape(n // 32, 32, k // 2, 2).transpose(0, 2, 1, 3)).ravel()
        return _bytes(matrix.reshape(n // 32, 32, k).transpose(0, 2, 1)).ravel()  # [K][32]
    block_bytes = BLOCKS[source][1]
    blocks = _pad(native, n, k // 32 * block_bytes).reshape(n // 16, 16, k // 64, 2, block_bytes)
    blocks = blocks.transpose(0, 2, 3, 1, 4)  # [panel, unit, group of 32 K, column, byte]
    panels, units = blocks.shape[:2]
    scales = blocks[..., 0:2].reshape(panels, units, 64)
    if packed == "w8":
        values = (blocks[..., 2:] ^ np.uint8(0x80)) * _inside(rows, cols, panels, units)[..., None]
        quads: U8 = values.reshape(panels, units, 2, 16, 8, 4)
        lines = quads.transpose(0, 1, 2, 4, 3, 5).reshape(panels, units, 16 * 64)
        return np.concatenate([lines, scales], axis=2).ravel()
    header = 2 if packed == "w4" else 4
    quads = _nibbles(blocks[..., header:]).reshape(panels, units, 2, 16, 8, 4)
    both = quads[..., :4, :] | quads[..., 4:, :] << np.uint8(4)  # quad j low, quad j + 4 high
    lines = both.transpose(0, 1, 2, 4, 3, 5).reshape(panels, units, 8 * 64)
    minima = [blocks[..., 2:4].reshape(panels, units, 64)] if packed == "w4f" else []
    return np.concatenate([lines, scales, *minima], axis=2).ravel()


def _dequantise_q6k(blocks: U8) -> F32:
    low, high, sub, scale = np.split(blocks, [128, 192, 208], axis=-1)
    shape = blocks.shape[:-1]
    # a block is two halves of 128 columns: 4 runs of 32, run r taking low nibble byte (r % 2) * 32 + i and bit pair r
    nibbles = low.reshape(*shape, 2, 1, 64) >> np.array([[0], [4]], np.uint8) & 0x0F
    pairs = high.reshape(*shape, 2, 1, 32) >> np.array([[0], [2], [4], [6]], np.uint8) & 0x03
    q = (nibbles.reshape(*shape, 2, 4, 32) | pairs << 4).astype(np.float32) - 32
    factor = _half(scale) * sub.view(np.int8).astype(np.float32)
    values: F32 = factor[..., None] * q.reshape(*shape, 16, 16)
    return values


def _inside(rows: int, cols: int, panels: int, units: int) -> U8:
    """1 where (panel, unit, group, column) holds data, 0 in the padding."""
    row = np.arange(panels * 16).reshape(panels, 1, 1, 16) < rows
    group = np.arange(units * 2).reshape(1, units, 2, 1) * 32 < cols
    return (row & group).astype(np.uint8)


def _nibbles(data: U8) -> U8:
    """[..., 16] bytes to [..., 32] values: low nibbles first."""
    return np.concatenate([data & 0x0F, data >> 4], axis=-1)


def _half(data: U8) -> F32:
    """[..., 2] bytes of a fp16 to float32 [..., 1]."""
    return np.ascontiguousarray(data).view(np.float16).astype(np.float32)


def _fields(data: U8, dtype: Any) -> NDArray[Any]:
    return np.ascontiguousarray(data).view(dtype)


def _bytes(array: NDArray[Any]) -> U8:
    return np.ascontiguousarray(array).view(np.uint8)


def _pad(matrix: NDArray[Any], rows: int, cols: int) -> NDArray[Any]:
    return np.pad(matrix, ((0, rows - matrix.shape[0]), (0, cols - matrix.shape[1])))


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
