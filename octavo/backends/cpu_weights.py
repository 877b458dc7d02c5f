"""The packed weights of a graph in memory: which bytes belong to whom, how they are made, and what they depend on."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from octavo import _native, weights
from octavo.graph.ir import Graph, WeightPart
from octavo.graph.plan import align
from octavo.weights.digest import code_digest
from octavo.weights.formats import column_factors, dequantise, panel_bytes, to_native
from octavo.weights.mapped import populate
from octavo.weights.spec import Checkpoint, CheckpointError

VALUES_AT_ONCE = 2**21
"""Of a matrix that is packed: decoding takes up to 30 bytes a value, 63 MB for so many."""


@dataclass(frozen=True)
class CpuWeights:
    """Every weight packed once. A tensor used twice (tied embeddings) has one place."""

    memory: _native.Memory
    parts: dict[WeightPart, int]  # byte offset of a packed matrix
    vectors: dict[str, int]  # byte offset of a float32 vector, by the name of its value

    @property
    def num_bytes(self) -> int:
        return self.memory.num_bytes

    @property
    def image(self) -> NDArray[np.uint8]:
        """All bytes. Nothing changes them once they are packed."""
        return self.memory.view(0, self.memory.num_bytes)


class WeightLayout:
    """Matrices in the order of their first use, then vectors, in aligned places; between them zeros."""

    def __init__(self, graph: Graph) -> None:
        matrices = [value for value in graph.weights() if not value.vector]
        self._vectors = [value for value in graph.weights() if value.vector]
        self.cols = {part: value.cols for value in matrices for part in value.parts}  # input features
        end = 0
        self.parts: dict[WeightPart, int] = {}  # byte offsets, as in CpuWeights
        for part, cols in self.cols.items():
            self.parts[part], end = end, align(end + _native.packed_bytes(part.format, part.rows, cols))
        self.vectors: dict[str, int] = {}
        for value in self._vectors:
            self.vectors[value.name], end = end, align(end + 4 * value.cols)
        self.num_bytes = end

    def pack(
        self, pool: _native.Pool, checkpoint: Checkpoint, progress: Callable[[int, int], None] | None
    ) -> CpuWeights:
        """As `Backend.pack`."""
        packed = self.empty()
        for part in self.cols:
            for done in self._pack_matrix(pool, checkpoint, packed.memory, part):
                if progress:
                    progress(done, self.num_bytes)
            checkpoint.release(part.name)  # its pages, before others are read
        for value in self._vectors:
            vector = packed.memory.view(self.vectors[value.name], 4 * value.cols).view(np.float32)
            np.concatenate([_vector(checkpoint, part) for part in value.parts], out=vector)
        if progress:
            progress(self.num_bytes, self.num_bytes)
        return packed

    def empty(self) -> CpuWeights:
        """Zeros."""
        return CpuWeights(_native.Memory(self.num_bytes, huge_pages=True), self.parts, self.vectors)

    def mapped(self, file: int, start: int) -> CpuWeights | None:
        """As `Packing.mapped`."""
        weights = CpuWeights(_native.Memory.of_file(file, start, self.num_bytes), self.parts, self.vectors)
        return weights if in_huge_pages(weights.image) else None

    def digest(self) -> bytes:
        """Of all that `pack` makes its bytes of beside the files of the checkpoint: equal digests, equal bytes."""
        digest = hashlib.blake2b(packer_digest(), digest_size=16, person=b"octavo-packing")
        for line in self._lines():
            digest.update(line.encode() + b"\n")
        return digest.digest()

    def _lines(self) -> Iterator[str]:
        for part, cols in self.cols.items():
            yield f"{part} {cols} {self.parts[part]}"
        for value in self._vectors:
            yield f"{value.parts} {value.cols} {self.vectors[value.name]}"
        yield str(self.num_bytes)

    def _pack_matrix(
        self, pool: _native.Pool, checkpoint: Checkpoint, memory: _native.Memory, part: WeightPart
    ) -> Iterator[int]:
        """Yields where in the memory it is."""
        cols, start = self.cols[part], self.parts[part]
        step = max(32, VALUES_AT_ONCE // cols // 32 * 32)  # whole panels
        for row in range(0, part.rows, step):
            info, data, factor = checkpoint.read(part.name, row, row + step)
            if info.shape[0] != part.rows:
                raise CheckpointError(f"{info.file}: {part.name} has {info.shape[0]} rows, expected {part.rows}")
            rows = to_native(part.format, info.source, data, cols, factor)
            place = start + panel_bytes(part.format, row, cols)
            _native.pack(pool, memory, place, part.format, np.ascontiguousarray(rows), cols)
            factors = column_factors(part.format, info.source, len(rows), factor)
            if factors.size:  # otherwise nothing lies there, perhaps no memory at all
                beside = start + panel_bytes(part.format, part.rows, cols) + 4 * row
                memory.view(beside, factors.nbytes).view(np.float32)[:] = factors
            del data, rows  # before the next are made
            yield place


def in_huge_pages(mapped: NDArray[np.uint8]) -> bool:
    """Whether the kernel has the first page of a mapped file in a huge one: that depends on it and on the file system.
    Also False where that page cannot be read: reading the file will say so.

    A stream from pages of 4 KiB is 2 to 6 % slower (docs/DECISIONS.md).
    """
    try:
        populate(mapped[:1])
    except OSError:
        return False
    first = f"{mapped.ctypes.data:x}-"
    with open("/proc/self/smaps") as lines:
        return any(line.startswith(first) for line in lines) and any(
            int(line.split()[1]) > 0 for line in itertools.islice(lines, 30) if line.startswith("FilePmdMapped:")
        )


@cache
def packer_digest() -> bytes:
    """Of the code between a checkpoint's files and packed bytes, the native module included."""
    return code_digest([Path(_native.__file__), Path(__file__), *sorted(Path(weights.__path__[0]).rglob("*.py"))])


def _vector(checkpoint: Checkpoint, part: WeightPart) -> NDArray[np.float32]:
    info, data, factor = checkpoint.read(part.name)
    data = data.reshape(1, -1) if len(info.shape) == 1 else data
    values = dequantise(info.source, data, info.shape[-1], factor)
    checkpoint.release(part.name)
    return values.ravel() + np.float32(part.plus)
