"""A file of packed weights: bytes in memory as they are, and a checksum of every part of them.

    header (see `_HEADER`), name of the model, XXH3-128 of each CHUNK, zeros, XXH3-128 of all before   a multiple of ALIGN
    the image

The hashes find damage, at 14 GB/s a core; they are no defence against an owner of the file, who could as well replace
the weights.
"""

from __future__ import annotations

import os
import struct
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
import xxhash
from numpy.typing import NDArray

from octavo.weights.mapped import populate

MAGIC = b"OctavoWt"
VERSION = 1

CHUNK = 2**22
"""Bytes that are written, or read and checked, at once: the processor still has them in its cache when they are checked."""

SYNC = 64
"""Chunks, 256 MiB, after which a writer waits for the disk: what is still to be written takes memory from others."""

ALIGN = 2**21
"""Of the image in the file: so that huge pages of the page cache are those of the memory it is mapped to."""

_HEADER = struct.Struct("<8s I I I 16s 16s Q H")
"""magic, version, CHUNK, ALIGN, weights, packing (of ImageId), bytes of the image, bytes of the model's name."""

_CHECKSUM_BYTES = 16

Progress = Callable[[int, int], None]
"""(done, total), in bytes."""


class ImageId(NamedTuple):
    """Equal ids, equal bytes."""

    weights: bytes  # 16 bytes: digest of the files that they are made of
    packing: bytes  # 16 bytes: digest of how

    @property
    def name(self) -> str:
        return f"{self.weights.hex()}.{self.packing.hex()}.weights"


class Damaged(ValueError):
    """A byte of a file is not what was written, or the file is of another image."""


class Stopped(Exception):
    """The image was not written to its end."""


def write_image(file: int, image: ImageId, model: str, data: NDArray[np.uint8], stopped: Callable[[], bool]) -> None:
    """To an empty file, by its descriptor. Raises OSError, and Stopped as soon as `stopped` says so."""
    name, checksums = _name_bytes(model), []
    start = _header_bytes(len(name), len(data))
    for index in range(_num_chunks(len(data))):
        if stopped():
            raise Stopped
        chunk = _chunk(data, index)
        checksums.append(xxhash.xxh3_128_digest(chunk))
        _write(file, chunk, start + CHUNK * index)
        if index % SYNC == SYNC - 1:
            os.fdatasync(file)
    fixed = _HEADER.pack(MAGIC, VERSION, CHUNK, ALIGN, *image, len(data), len(name))
    header = b"".join((fixed, name, *checksums)).ljust(start - _CHECKSUM_BYTES, b"\0")
    _write(file, memoryview(header + xxhash.xxh3_128_digest(header)), 0)


class ImageFile:
    """A file that is open, and whose header was checked. The context closes it."""

    def __init__(self, path: Path, image: ImageId, num_bytes: int) -> None:
        """Raises Damaged, OSError."""
        self._num_bytes = num_bytes
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            # No reading ahead of the header: it would bring in the image in pages too small to be mapped as huge ones.
            os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_RANDOM)
            self.start, self._checksums = self._read_header(image)
            os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_NORMAL)
        except BaseException:
            os.close(self.descriptor)
            raise

    def read(self, out: NDArray[np.uint8], num_threads: int, progress: Progress | None = None) -> None:
        """Fill `out`, which has the image's size. Raises Damaged, and OSError; `out` then holds anything."""
        self._check(out, num_threads, progress, self._read_chunk)

    def check(self, mapped: NDArray[np.uint8], num_threads: int, progress: Progress | None = None) -> None:
        """Whether memory to which the image is mapped, from `start` on, holds what was written. Raises Damaged,
        and OSError where it cannot be read."""
        self._check(mapped, num_threads, progress, lambda index, chunk: populate(np.frombuffer(chunk, np.uint8)))

    def _check(
        self,
        data: NDArray[np.uint8],
        num_threads: int,
        progress: Progress | None,
        before: Callable[[int, memoryview], None],
    ) -> None:
        indices = iter(range(_num_chunks(len(data))))  # from which the threads take in turn

        def work(progress: Progress | None = None) -> None:
            try:
                for index in indices:
                    chunk = _chunk(data, index)
                    before(index, chunk)
                    expected = self._checksums[_CHECKSUM_BYTES * index : _CHECKSUM_BYTES * (index + 1)]
                    if xxhash.xxh3_128_digest(chunk) != expected:
                        raise Damaged
                    if progress:
                        progress(CHUNK * index + len(chunk), len(data))
            finally:  # also where this one failed: nothing is left for the others
                deque(indices, 0)

        with ThreadPoolExecutor(num_threads, "octavo-weights") as pool:  # which waits for all of them
            others = [pool.submit(work) for _ in range(num_threads - 1)]
            work(progress)
        for other in others:
            other.result()

    def _read_chunk(self, index: int, chunk: memoryview) -> None:
        if os.preadv(self.descriptor, [chunk], self.start + CHUNK * index) != len(chunk):
            raise Damaged

    def _read_header(self, image: ImageId) -> tuple[int, bytes]:
        """Where the image begins, and its checksums."""
        fixed = os.pread(self.descriptor, _HEADER.size, 0)
        name_bytes = int(_HEADER.unpack(fixed)[-1]) if len(fixed) == _HEADER.size else 0
        start = _header_bytes(name_bytes, self._num_bytes)
        header = os.pread(self.descriptor, start, 0)
        if (
            fixed != _HEADER.pack(MAGIC, VERSION, CHUNK, ALIGN, *image, self._num_bytes, name_bytes)
            or os.fstat(self.descriptor).st_size != start + self._num_bytes
            or xxhash.xxh3_128_digest(header[:-_CHECKSUM_BYTES]) != header[-_CHECKSUM_BYTES:]
        ):
            raise Damaged
        return start, header[_HEADER.size + name_bytes :]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self.descriptor)


def model_of(path: Path) -> str:
    """The model's name in a file, "" where it has none. Raises OSError."""
    with path.open("rb") as file:
        fixed = file.read(_HEADER.size)
        return str(file.read(_HEADER.unpack(fixed)[-1]), errors="replace") if len(fixed) == _HEADER.size else ""


def file_bytes(model: str, num_bytes: int) -> int:
    """Of an image of so many bytes."""
    return _header_bytes(len(_name_bytes(model)), num_bytes) + num_bytes


def _header_bytes(name_bytes: int, num_bytes: int) -> int:
    size = _HEADER.size + name_bytes + _CHECKSUM_BYTES * (_num_chunks(num_bytes) + 1)
    return -(-size // ALIGN) * ALIGN


def _name_bytes(model: str) -> bytes:
    return model.encode(errors="replace")[:1024]


def _num_chunks(num_bytes: int) -> int:
    return -(-num_bytes // CHUNK)


def _chunk(data: NDArray[np.uint8], index: int) -> memoryview:
    return data.data[CHUNK * index : CHUNK * (index + 1)]


def _write(file: int, data: memoryview, offset: int) -> None:
    while data:
        done = os.pwrite(file, data, offset)
        data, offset = data[done:], offset + done
