"""A file mapped into memory: which file it is, whether its pages can be read, and how parts of it are dropped again."""

from __future__ import annotations

import ctypes
import mmap
import os
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # whoever reads tables alone does without
    import numpy as np
    from numpy.typing import NDArray

_MADV_POPULATE_READ = 22
"""madvise(2), since Linux 5.14; later than the names that Python has."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class FileIdentity(NamedTuple):
    """Stays while a file's content does: whatever writes to a file sets the time of its change, which nobody can set back."""

    path: str
    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, path: Path, descriptor: int | None = None) -> FileIdentity:
        """descriptor: of the file, where it is open: another one may have come to its path. Raises OSError."""
        info = os.stat(path if descriptor is None else descriptor)
        return cls(str(path.resolve()), info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns)


class MappedFile:
    """Read-only bytes of a file. Views stay valid after `release`: touched again, they are read from disk again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            self.identity = FileIdentity.of(path, file.fileno())
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.buffer = memoryview(self._map)

    @cached_property
    def data(self) -> NDArray[np.uint8]:
        """The same bytes."""
        import numpy as np

        return np.frombuffer(self._map, np.uint8)

    def release(self, start: int, stop: int) -> None:
        """Drop the pages that touch bytes [start, stop) from this process's memory."""
        start -= start % mmap.PAGESIZE
        if stop > start:
            self._map.madvise(mmap.MADV_DONTNEED, start, stop - start)


def populate(mapped: NDArray[np.uint8]) -> None:
    """Have the pages of mapped memory read. Raises OSError where one cannot be: to touch it would be a SIGBUS."""
    address = mapped.ctypes.data
    before = address % mmap.PAGESIZE
    if _libc.madvise(address - before, mapped.nbytes + before, _MADV_POPULATE_READ):
        error = ctypes.get_errno()
        raise OSError(error, f"a page of a mapped file cannot be read: {os.strerror(error)}")
