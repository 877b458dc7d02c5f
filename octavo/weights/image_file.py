"""A file of packed weights: bytes in memory as they are, and a checksum of every part of them.

    header (see `_HEADER`), name of the model, XXH3-128 of each CHUNK, zeros, XXH3-128 of all before   a multiple of _ALIGN
    the image

The hashes find damage, at 14 GB/s a core; they are no defence against an owner of the file, who could as well replace
the weights.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

MAGIC = b"OctavoWt"
VERSION = 1

CHUNK = 2**22
"""Bytes that are read and checked, or written, at once: the processor still has them in its cache when they are checked."""

SYNC = 64
"""Chunks, 256 MiB, after which a writer waits for the disk: what is still to be written takes memory from others."""

_HEADER = struct.Struct("<8s I I 16s 16s Q H")
"""magic, version, CHUNK, weights, packing (of ImageId), bytes of the image, bytes of the model's name."""

_ALIGN = 4096
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


class Stopped(Exception):
    """The image was not written to its end."""


def write_image(file: int, image: ImageId, model: str, data: NDArray[np.uint8], stopped: Callable[[], bool]) -> None:
    """To an empty file, by its descriptor. Raises OSError, and Stopped as soon as `stopped` says so."""
    name, checksums = _name_bytes(model), []
    start = _header_bytes(len(name), len(data))
    for index, chunk in _chunks(data):
        if stopped():
            raise Stopped
        checksums.append(xxhash.xxh3_128_digest(chunk))
        _write(file, chunk, start + CHUNK * index)
        if index % SYNC == SYNC - 1:
            os.fdatasync(file)
    fixed = _HEADER.pack(MAGIC, VERSION, CHUNK, *image, len(data), len(name))
    header = b"".join((fixed, name, *checksums)).ljust(start - _CHECKSUM_BYTES, b"\0")
    _write(file, memoryview(header + xxhash.xxh3_128_digest(header)), 0)


def read_image(
    file: int, image: ImageId, out: NDArray[np.uint8], num_threads: int, progress: Progress | None = None
) -> bool:
    """Fill `out`, which has the image's size. False where one byte of the file is not what was written, or the file is of
    another image. Raises OSError."""
    header = os.pread(file, _HEADER.size, 0)
    if len(header) < _HEADER.size:
        return False
    name_bytes = int(_HEADER.unpack(header)[-1])
    if header != _HEADER.pack(MAGIC, VERSION, CHUNK, *image, len(out), name_bytes):
        return False
    start = _header_bytes(name_bytes, len(out))
    if os.fstat(file).st_size != start + len(out):
        return False
    header = os.pread(file, start, 0)
    if xxhash.xxh3_128_digest(header[:-_CHECKSUM_BYTES]) != header[-_CHECKSUM_BYTES:]:
        return False
    checksums = header[_HEADER.size + name_bytes :]
    chunks = _chunks(out)
    failed: list[OSError | None] = []  # None: by its content

    def work(progress: Progress | None = None) -> None:
        try:
            for index, chunk in chunks:
                expected = checksums[_CHECKSUM_BYTES * index : _CHECKSUM_BYTES * (index + 1)]
                done = os.preadv(file, [chunk], start + CHUNK * index)
                if done != len(chunk) or xxhash.xxh3_128_digest(chunk) != expected:
                    failed.append(None)
                if failed:
                    return
                if progress:
                    progress(CHUNK * index + done, len(out))
        except OSError as error:
            failed.append(error)

    threads = [threading.Thread(target=work, name="octavo-weights") for _ in range(num_threads - 1)]
    for thread in threads:
        thread.start()
    work(progress)
    for thread in threads:
        thread.join()
    for error in failed:
        if error is not None:
            raise error
    return not failed


def model_of(path: Path) -> str:
    """The model's name in a file, "" where it has none. Raises OSError."""
    with path.open("rb") as file:
        fixed = file.read(_HEADER.size)
        return str(file.read(_HEADER.unpack(fixed)[-1]), errors="replace") if len(fixed) == _HEADER.size else ""


def file_bytes(model: str, num_bytes: int) -> int:
    """Of an image of so many bytes."""
    return _header_bytes(len(_name_bytes(model)), num_bytes) + num_bytes


def _header_bytes(name_bytes: int, num_bytes: int) -> int:
    size = _HEADER.size + name_bytes + _CHECKSUM_BYTES * (-(-num_bytes // CHUNK) + 1)
    return -(-size // _ALIGN) * _ALIGN


def _name_bytes(model: str) -> bytes:
    return model.encode(errors="replace")[:1024]


def _chunks(data: NDArray[np.uint8]) -> Iterator[tuple[int, memoryview]]:
    """With their indices."""
    view = data.data
    return ((i, view[CHUNK * i : CHUNK * (i + 1)]) for i in range(-(-len(data) // CHUNK)))


def _write(file: int, data: memoryview, offset: int) -> None:
    while data:
        done = os.pwrite(file, data, offset)
        data, offset = data[done:], offset + done
