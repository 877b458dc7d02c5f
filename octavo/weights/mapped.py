"""A file mapped into memory, of which parts can be dropped again."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


class MappedFile:
    """Read-only bytes of a file. Views stay valid after `release`: touched again, they are read from disk again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.buffer = memoryview(self._map)
        self.data: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)

    def release(self, start: int, stop: int) -> None:
        """Drop the pages that touch bytes [start, stop) from this process's memory."""
        start -= start % mmap.PAGESIZE
        if stop > start:
            self._map.madvise(mmap.MADV_DONTNEED, start, stop - start)
