"""Random rows of the formats of GGUF, as random as a model may have them without overflowing."""

from __future__ import annotations

import numpy as np

from octavo.weights import formats
from octavo.weights.formats.numbers import as_bytes

HALVES = {
    "Q6_K": (208,), "Q4_1": (0, 2), "Q5_1": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2),
    "MXFP4": (), "NVFP4": (),
}  # fmt: skip
"""Places of fp16 numbers in a block; by default the first two bytes. All other bytes may be any."""

SOURCES = (
    "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS",
    "MXFP4", "NVFP4",
)  # fmt: skip

_SAMPLE = 64
"""Rows from which the size of the values is taken."""


def random_rows(source: str, rows: int, cols: int, size: float, rng: np.random.Generator) -> formats.U8:
    """[rows, bytes per row] of one of SOURCES, values with the root mean square `size`, about."""
    if source in ("F16", "BF16"):
        table = rng.standard_normal(2**16, np.float32) * np.float32(size)
        numbers = table.astype(np.float16).view(np.uint16) if source == "F16" else formats.f32_to_bf16(table)
        chosen = rng.integers(0, 2**16, (rows, cols), np.uint16)
        return as_bytes(numbers[chosen])
    block_cols, block_bytes = formats.BLOCKS[source]
    blocks = np.frombuffer(bytearray(rng.bytes(rows * cols // block_cols * block_bytes)), np.uint8)
    blocks = blocks.reshape(rows, cols // block_cols, block_bytes)
    if source == "MXFP4":
        blocks[..., 0] = 128 + round(np.log2(size / 6))  # of codes whose root mean square is about 6
    elif source == "NVFP4":
        blocks[..., :4] = max(1, 7 + round(np.log2(size / 3))) << 3  # e4m3 of bias 7; no smaller normal number
    for place in HALVES.get(source, (0,)):
        _set(blocks, place, rng.uniform(-0.1, 0.1, blocks.shape[:2]))
    places = HALVES.get(source, (0,))
    if places:
        values = formats.dequantise(source, blocks[:_SAMPLE].reshape(min(rows, _SAMPLE), -1), cols)
        factor = size / np.sqrt(np.square(values).mean())
        for place in places:
            _set(blocks, place, np.ascontiguousarray(blocks[..., place : place + 2]).view(np.float16)[..., 0] * factor)
    return blocks.reshape(rows, -1)


def _set(blocks: formats.U8, place: int, numbers: np.ndarray[tuple[int, ...], np.dtype[np.floating]]) -> None:
    blocks[..., place : place + 2] = numbers.astype(np.float16)[..., None].view(np.uint8)
