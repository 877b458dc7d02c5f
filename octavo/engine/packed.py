"""PackedCache: the packed weights of one model, kept on disk for the next start.

Reading them is several times faster than packing. Their name holds a digest of the checkpoint's files, which is known at
a second start; at the first it is taken in the background, and then the weights are written. Nothing waits for that, and
where it fails everything else goes on.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.backends.base import Packing
from octavo.config import ConfigError, EngineConfig
from octavo.disk import cache_home
from octavo.engine.memory import format_bytes
from octavo.weights.digest import WeightsDigest
from octavo.weights.image_file import Damaged, ImageId, Progress
from octavo.weights.images import ImageStore

NICENESS = 19
"""Of the thread that takes the digest and writes: nobody waits for it, and it shares the cores with the kernels."""

STOP_SECONDS = 2.0
"""For a chunk to be written, and the unfinished file to be removed."""


MIN_BYTES = 32 * 2**20
"""Smaller weights are packed within some hundredths of a second: they are not kept."""


class PackedCache:
    """`read`, or else `keep` and `start`, once each."""

    def __init__(
        self, store: ImageStore, packing: Packing, digest: WeightsDigest, model: str, notify: Callable[[str], None]
    ) -> None:
        """notify is told in a line why nothing could be kept."""
        self._store = store
        self._packing = packing
        self._digest = digest
        self._model = model
        self._notify = notify
        self.mapped_bytes = 0  # of the weights, which are pages of a file: the kernel counts them as free
        self._data: NDArray[np.uint8] | None = None
        self._thread: threading.Thread | None = None
        self._writing = False
        self._stopped = threading.Event()

    def read(self, num_threads: int, progress: Progress | None) -> Any | None:
        """The packed weights, or None where they are to be packed. Every byte is checked."""
        digest = self._digest.known()
        if digest is None or (opened := self._store.open(self._image(digest), self._packing.num_bytes)) is None:
            return None
        try:
            with opened as file:
                weights = self._packing.mapped(file.descriptor, file.start)
                if weights is not None:
                    file.check(weights.image, num_threads, progress)
                    self.mapped_bytes = self._packing.num_bytes
                else:
                    weights = self._packing.empty()
                    file.read(weights.image, num_threads, progress)
        except Damaged:
            self._store.remove(self._image(digest))
            return None
        except (OSError, RuntimeError):  # of a disk that cannot be read
            return None
        self._store.used(self._image(digest))
        return weights

    def keep(self, data: NDArray[np.uint8]) -> None:
        """These are the packed weights; they do not change."""
        self._data = data

    def start(self) -> None:
        """Write what is to be kept, in a thread."""
        if self._data is not None:
            self._thread = threading.Thread(target=self._write, name="octavo-weights-writer", daemon=True)
            self._thread.start()
            atexit.register(self.stop)

    def stop(self) -> None:
        """Write no more; a file that is not finished is removed. May be called again."""
        self._stopped.set()
        self._data = None
        if self._thread is not None:
            atexit.unregister(self.stop)
            if self._writing:  # not while it reads the checkpoint, which may take minutes and harms nobody
                self._thread.join(STOP_SECONDS)

    def _write(self) -> None:
        os.nice(NICENESS)  # of this thread alone
        try:
            image = self._image(self._digest.take())
            self._writing = True
            data, self._data = self._data, None
            if data is not None:
                self._store.write(image, self._model, data, self._stopped.is_set)
        except (OSError, MemoryError) as error:
            self._notify(f"the packed weights are not kept, everything else goes on: {error}")

    def _image(self, weights: bytes) -> ImageId:
        return ImageId(weights[:16], self._packing.digest())


def weights_directory(weights_cache: str) -> Path:
    """Of the option."""
    return cache_home() / "weights" if weights_cache == "auto" else Path(weights_cache).expanduser()


def packed_cache(
    config: EngineConfig,
    packing: Packing | None,
    digest: WeightsDigest,
    notices: list[str],
    notify: Callable[[str], None],
) -> PackedCache | None:
    """As the config says, where it is worth while. Adds to `notices`. Raises ConfigError."""
    if config.weights_cache == "off" or packing is None or packing.num_bytes < MIN_BYTES:
        return None
    directory = weights_directory(config.weights_cache)
    if config.weights_cache != "auto" and directory.exists() and not directory.is_dir():
        raise ConfigError(f"weights_cache is {directory}, which is no directory")
    store, model = ImageStore(directory, config.weights_cache_size), Path(config.model).name
    if not store.has_room(model, packing.num_bytes):
        notices.append(
            f"the packed weights are not kept for the next start: they take {format_bytes(packing.num_bytes)}, and "
            f"weights_cache_size is {format_bytes(config.weights_cache_size)}"
        )
        return None
    return PackedCache(store, packing, digest, model, notify)
