"""A matrix that several tensors of a checkpoint make up, as rows of blocks in a source format of weights.formats."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.weights.quant import blocks
from octavo.weights.quant.blocks import F32, I32, U8
from octavo.weights.spec import CheckpointError, SourceTensor, TensorInfo

DEQUANTISED = "F32D"
"""Source of rows that fit no block format: float32 values, which the packed weight may hold as bf16."""


class Matrix(Protocol):
    """Rows and columns are those of the plain weight (out, in)."""

    @property
    def parts(self) -> tuple[str, ...]:
        """The tensors of the checkpoint that it is made of."""
        ...

    @property
    def info(self) -> TensorInfo: ...

    def read(self, start: int, stop: int) -> SourceTensor:
        """Rows [start, stop). Raise CheckpointError where scales are no numbers."""
        ...


class Place(NamedTuple):
    """What a matrix is called, and where it lies."""

    name: str
    shape: tuple[int, ...]
    file: str
    parts: tuple[str, ...]


@dataclass(frozen=True)
class Integers:
    """w[row, col] = scale[row, g] * (code[row, col] - zero[row, g]), g = groups[col], with codes of `bits`.

    Columns whose groups are not in runs are sorted by group (act-order): `info.order` says how.
    """

    place: Place
    bits: int
    num_groups: int
    read_groups: Callable[[], I32]  # [K]
    read_codes: Callable[[int, int], U8]  # rows [start, stop): [n, K]
    read_scales: Callable[[int, int], F32]  # [n, G]
    read_zeros: Callable[[int, int], U8] | None  # [n, G]; None: half of the range, 2^(bits - 1)
    scale_type: str  # of the checkpoint: F16, BF16 or F32
    read_pairs: Callable[[int, int], U8] | None = None  # codes of 4 bits two to a byte, the first low: [n, K / 2]

    @property
    def parts(self) -> tuple[str, ...]:
        return self.place.parts

    @property
    def info(self) -> TensorInfo:
        return TensorInfo(self.place.shape, self._layout.source, self.place.file, self._layout.order)

    @cached_property
    def _layout(self) -> _Layout:
        groups = self.read_groups()
        if groups.min() < 0 or groups.max() >= self.num_groups:
            raise CheckpointError(
                f"{self.place.file}: {self.place.name} has columns in groups {groups.min()} to {groups.max()}, of {self.num_groups} groups"
            )
        order = np.argsort(groups, kind="stable").astype(np.int32) if (np.diff(groups) < 0).any() else None
        sorted_groups = groups if order is None else groups[order]
        exact = self.scale_type == "F16"
        halves = exact or self.num_groups == 1 or self.scale_type == "BF16" or blocks.are_halves(self._scales(0, None))
        for source, width in self._choices(exact) if halves else ():
            of_block = blocks.run_groups(sorted_groups, width)
            if of_block is not None:
                return _Layout(source, width, order, of_block)
        return _Layout(DEQUANTISED, 1, None, groups)

    def _choices(self, fp16: bool) -> list[tuple[str, int]]:
        """Source formats that hold these integers, with the columns of a block, the smallest first.

        GGUF's have no zero points, nor factors for scales that are not fp16, and their blocks fill a row.
        """
        cols = self.place.shape[-1]
        symmetric = self.read_zeros is None and fp16 and cols % 32 == 0
        if self.bits <= 4 and self.num_groups == 1 and cols % 256 == 0:
            return [("I4C", 256)]
        if self.bits <= 4:
            return [*([("Q4_0", 32)] if symmetric else []), ("I4Z64", 64), ("I4Z32", 32)]
        return [*([("Q8_0", 32)] if symmetric else []), ("I8Z64", 64)]

    def read(self, start: int, stop: int) -> SourceTensor:
        source, _, _, of_block = self._layout
        scales = self._scales(start, stop)
        middle = 2 ** (self.bits - 1)
        zeros = self.read_zeros(start, stop) if self.read_zeros else np.full(scales.shape, middle, np.uint8)
        if source == DEQUANTISED:
            values = self.read_codes(start, stop).astype(np.float32) - zeros[:, of_block].astype(np.float32)
            values *= scales[:, of_block]
            return SourceTensor(self.info, values.view(np.uint8))
        if source == "I4C":
            data = blocks.i4c(self._nibbles(start, stop), zeros[:, of_block])
            return SourceTensor(self.info, data, scales[:, 0])
        fp16, factor = (scales.astype(np.float16), None) if self.scale_type == "F16" else blocks.halves(scales)
        fp16, zeros = fp16[:, of_block], zeros[:, of_block]
        if source == "Q4_0":
            data = blocks.q4_0(self._nibbles(start, stop, 8 - middle), fp16)
        elif source == "Q8_0":
            data = blocks.q8_0(self._codes(start, stop) + np.uint8(128 - middle), fp16)
        elif source == "I8Z64":
            data = blocks.i8z64(self._codes(start, stop), fp16, zeros)
        else:
            data = blocks.i4z(self._nibbles(start, stop), fp16, zeros)
        return SourceTensor(self.info, data, factor)

    def _nibbles(self, start: int, stop: int, plus: int = 0) -> U8:
        """In the order of Q4_0's, `plus` added to each code."""
        if (
            self.read_pairs
            and not plus
            and self._layout.order is None
            and self.place.shape[-1] % self._layout.width == 0
        ):
            return blocks.halved_pairs(self.read_pairs(start, stop))
        return blocks.halved(self._codes(start, stop) + np.uint8(plus))

    def _codes(self, start: int, stop: int) -> U8:
        """Sorted, and zeros up to whole blocks."""
        codes, order = self.read_codes(start, stop), self._layout.order
        return blocks.whole_blocks(codes if order is None else np.take(codes, order, axis=1), self._layout.width)

    def _scales(self, start: int, stop: int | None) -> F32:
        scales = self.read_scales(start, self.place.shape[0] if stop is None else stop)
        return finite(self.place, scales)


class _Layout(NamedTuple):
    source: str
    width: int  # columns of a block
    order: I32 | None  # [K]
    of_block: I32  # group of each block [K / width]


@dataclass(frozen=True)
class Blocks:
    """Any other matrix: `rows(start, stop)` gives the data [n, bytes per row] and perhaps a factor [n]."""

    place: Place
    source: str
    rows: Callable[[int, int], tuple[U8, F32 | None]]

    @property
    def parts(self) -> tuple[str, ...]:
        return self.place.parts

    @property
    def info(self) -> TensorInfo:
        return TensorInfo(self.place.shape, self.source, self.place.file)

    def read(self, start: int, stop: int) -> SourceTensor:
        data, factor = self.rows(start, stop)
        return SourceTensor(self.info, data, factor)


def finite(place: Place, scales: F32) -> F32:
    """`scales`, which CheckpointError names where one is infinite or no number."""
    if not np.isfinite(scales).all():
        raise CheckpointError(f"{place.file}: a scale of {place.name} is infinite or no number")
    return scales


def plain_groups(cols: int, size: int) -> Callable[[], I32]:
    """Of columns in runs of `size`, the last perhaps shorter."""
    return lambda: np.arange(cols, dtype=np.int32) // np.int32(size)


def to_f32(values: NDArray[np.generic], dtype: str) -> F32:
    """Values as `Tensors.values` gives them, of a float type, as float32."""
    from octavo.weights.formats import bf16_to_f32

    if dtype == "BF16":
        return bf16_to_f32(values.astype(np.uint16, copy=False))
    return values.astype(np.float32)
