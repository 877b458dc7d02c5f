"""FP8 weights of any method: e4m3 values and float scales for a tensor, an output, a tile or a run of inputs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from octavo.weights.formats.codes import E4M3
from octavo.weights.quant import blocks
from octavo.weights.quant.blocks import F32, U8
from octavo.weights.quant.matrix import DEQUANTISED, Blocks, Place, finite, to_f32
from octavo.weights.safetensors_file import Tensors
from octavo.weights.spec import CheckpointError

SCALES = ("F32", "BF16", "F16", "F8_E8M0", "U8")
"""Types of scales; U8 is e8m0, too."""


def fp8(
    tensors: Tensors, weight: str, scale: str, tile: tuple[int, int] | None, others: tuple[str, ...] = ()
) -> Blocks:
    """w = value * scale. tile: rows and columns that share a scale, counted from the top left, where there are several;
    None: one scale for all, or one for each row. others: tensors that belong to it and change nothing."""
    entry = tensors.check(weight, ("F8_E4M3",), (None, None))
    rows, cols = entry.shape
    if not rows or not cols:
        raise CheckpointError(f"{entry.file.path}: tensor {weight!r} of shape {entry.shape} is empty")
    given = tensors.check(scale, SCALES)
    place = Place(weight, (rows, cols), str(entry.file.path), (weight, scale, *others))
    if tile is None:
        tile = (1, cols) if given.shape in ((rows,), (rows, 1)) else (rows, cols)
    grid = (-(-rows // tile[0]), -(-cols // tile[1]))
    shapes = {(): (1, 1), (1,): (1, 1), (rows,): (rows, 1)}
    if shapes.get(given.shape, given.shape) != grid:
        raise CheckpointError(
            f"{place.file}: tensor {scale!r} has shape {given.shape}, expected {grid} for {weight} of shape {entry.shape}"
        )

    def scales(start: int, stop: int) -> F32:  # [n, tiles of a row]
        of_tile = decode_scales(tensors, scale).reshape(grid)[start // tile[0] : -(-stop // tile[0])]
        return finite(place, of_tile)[np.arange(start, stop) // tile[0] - start // tile[0]]

    def values(start: int, stop: int) -> U8:
        found: U8 = tensors.values(weight)[start:stop]
        return found

    return fp8_blocks(place, tile[1], values, scales)


def fp8_blocks(place: Place, run: int, values: Callable[[int, int], U8], scales: Callable[[int, int], F32]) -> Blocks:
    """`run` columns share a scale."""
    cols = place.shape[-1]
    fits = run % 64 == 0 or run >= cols

    def rows_of(start: int, stop: int) -> tuple[U8, F32 | None]:
        of_run = scales(start, stop)
        if fits:
            return blocks.f8(
                blocks.whole_blocks(values(start, stop), 64), of_run[:, np.arange(0, cols, 64) // run]
            ), None
        return (E4M3[values(start, stop)] * of_run[:, np.arange(cols) // run]).view(np.uint8), None

    return Blocks(place, "F8" if fits else DEQUANTISED, rows_of)


def decode_scales(tensors: Tensors, name: str) -> F32:
    """A tensor of scales as float32; e8m0 byte e is 2^(e - 127), and 255 no number."""
    dtype, values = tensors.entry(name).dtype, tensors.values(name)
    if dtype in ("F8_E8M0", "U8"):
        return np.where(values == 255, np.float32(np.nan), np.ldexp(np.float32(1), values.astype(np.int32) - 127))
    return to_f32(values, dtype)
