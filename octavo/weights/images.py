"""ImageStore: packed weights in files, one for each model, which later starts read instead of packing again.

A file is named by what its bytes are made of, so whoever wrote it::

    DIR/<weights>.<packing>.weights     as in `image_file.ImageId`

It is written beside its place and renamed, and every byte is checked when it is read: what does not fit is refused and
removed. The last of it is not forced to the disk: what a power failure leaves half-written is found by its checksums.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.disk import StoredFile, is_stale, oldest, private, remove
from octavo.weights.image_file import Damaged, ImageFile, ImageId, Stopped, file_bytes, model_of, write_image

KEPT_FREE = 0.05
"""Of the disk, what is left to others."""

OUTDATED_SECONDS = 86400
"""An image is removed when another of the same weights is written and it was not used for so long: it was packed by an
older version, or otherwise."""

_NAME = re.compile(r"[0-9a-f]{32}\.[0-9a-f]{32}\.weights")


class Image(NamedTuple):
    """A file of the store."""

    model: str  # as it was called when it was packed
    file: StoredFile


class NoRoom(OSError):
    """An image does not fit into the bound of its store, or on the disk."""


class ImageStore:
    """Any number of processes may share a directory. It is made by the first `write`, readable by its owner only."""

    def __init__(self, directory: Path, max_bytes: int) -> None:
        self.directory = directory
        self._max_bytes = max_bytes

    def __contains__(self, image: ImageId) -> bool:
        return (self.directory / image.name).is_file()

    def open(self, image: ImageId, num_bytes: int) -> ImageFile | None:
        """For the context of a `with`. None where there is none, or none that can be used."""
        try:
            return ImageFile(self.directory / image.name, image, num_bytes)
        except Damaged:
            self.remove(image)
        except OSError:
            pass
        return None

    def used(self, image: ImageId) -> None:
        """It is the most recently used now."""
        with suppress(OSError):  # of a directory that cannot be written to
            os.utime(self.directory / image.name)

    def remove(self, image: ImageId) -> None:
        with suppress(OSError):
            (self.directory / image.name).unlink(missing_ok=True)

    def write(self, image: ImageId, model: str, data: NDArray[np.uint8], stopped: Callable[[], bool]) -> None:
        """Store an image, unless it is there. The least recently used ones make room. When `stopped`, nothing is stored.

        Raises OSError where the directory cannot be used, NoRoom where there is no room on the disk: then none is removed.
        """
        num_bytes = file_bytes(model, len(data))
        if image in self or not self.has_room(model, len(data)):
            return
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        outdated = time.time_ns() - OUTDATED_SECONDS * 10**9
        others = [each.file for each in stored_images(self.directory)]
        leaving = [file for file in others if _is_of(file, image.weights) and file.used_ns < outdated]
        leaving += oldest([file for file in others if file not in leaving], self._max_bytes - num_bytes)
        disk = shutil.disk_usage(self.directory)
        free = disk.free + sum(file.num_bytes for file in leaving)
        if free - num_bytes < KEPT_FREE * disk.total:
            raise NoRoom(f"{self.directory}: {num_bytes} bytes would leave too little of {free} that are free")
        remove(leaving)
        scratch = self.directory / f".{image.name}.{os.getpid()}.{threading.get_ident()}"
        try:
            with open(scratch, "xb", buffering=0, opener=private) as file:
                write_image(file.fileno(), image, model, data, stopped)
            os.replace(scratch, self.directory / image.name)
        except Stopped:
            scratch.unlink(missing_ok=True)
        except OSError:
            scratch.unlink(missing_ok=True)
            raise

    def has_room(self, model: str, num_bytes: int) -> bool:
        """Whether the bound of the store allows an image of this size."""
        return file_bytes(model, num_bytes) <= self._max_bytes


def stored_images(directory: Path) -> list[Image]:
    """What is there and can be read, the last used first; what else the user keeps there is not looked at. Removes what
    processes that are gone have left unfinished. Raises OSError where the directory cannot be read."""
    found = []
    for entry in os.scandir(directory) if directory.is_dir() else ():
        with suppress(OSError):  # another process removed it, or it belongs to another user
            info = entry.stat(follow_symlinks=False)
            if not stat.S_ISREG(info.st_mode):
                continue
            if _NAME.fullmatch(entry.name):
                file = StoredFile(info.st_mtime_ns, info.st_size, entry.path)
                found.append(Image(model_of(Path(entry.path)), file))
            elif _NAME.match(entry.name, 1) and is_stale(info):
                os.unlink(entry.path)
    return sorted(found, key=lambda image: image.file, reverse=True)


def _is_of(file: StoredFile, weights: bytes) -> bool:
    return os.path.basename(file.path).startswith(weights.hex())
