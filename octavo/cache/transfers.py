"""Transfers: the two threads between a BlockStore and staging buffers. The engine's thread never waits for a disk.

A buffer belongs to whoever took it from its pool: the engine fills one and hands it to the writer, which gives it
back; the reader fills one and hands it to the engine, which gives it back.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.cache.rates import Rates
from octavo.cache.store import BlockId, BlockStore, Counters
from octavo.request import Request

STAGING_BYTES = 2**25
"""Of buffers in each direction: 32 MiB, some 90 blocks of a small model. Touched only when used."""

MIN_BUFFERS = 4

NICENESS = 10
"""Of the writer: until the engine ends nobody waits for it, and it shares the cores with the kernels."""

STOP_SECONDS = 1.0
"""For a thread to end what it is about."""

REFRESH_SECONDS = 30.0
"""Between two looks at what other processes did to the directory."""


class Piece(NamedTuple):
    """A block to load: the `depth`-th of its prefix, from 0, under its keys on disk and in memory."""

    depth: int
    stored: BlockId
    key: bytes
    parent: bytes
    num_bytes: int


class Staged(NamedTuple):
    piece: Piece
    buffer: NDArray[np.uint8]


class DiskLoad:
    """Blocks that come from disk for a request, which waits behind this gate. Opens when they are all in the cache,
    or as many as could be had; what is missing then is computed."""

    reason = "disk"

    def __init__(self, request: Request, pieces: list[Piece], expires: float) -> None:
        """expires: on the monotonic clock, when computing is the better choice after all."""
        self.starter = request
        self.requests = [request]  # all that wait
        self.expires = expires
        self.pieces = pieces
        self.stop = 0  # blocks of the prefix that are in the cache when it ends, where any came
        self.ready: deque[Staged] = deque()  # verified, not yet in the cache
        self.was_read = False  # nothing more will be ready; set after the last one was
        self.cancelled = threading.Event()
        self.closed = False  # the gate is open

    def is_open(self) -> bool:
        return self.closed

    @property
    def is_wanted(self) -> bool:
        """Whether anyone still waits for it."""
        return any(request.finish_reason is None for request in self.requests)


class _Save(NamedTuple):
    stored: BlockId
    buffer: NDArray[np.uint8]
    num_bytes: int
    seconds: float
    used_ns: int


class _Touch(NamedTuple):
    blocks: list[BlockId]
    used_ns: int


class _Flush(NamedTuple):
    pass


_Job = _Save | _Touch | _Flush


class Transfers:
    """`save`, `touch`, `load` and the buffers are for the engine's thread."""

    def __init__(self, open_store: Callable[[], BlockStore], block_bytes: list[int], rates: Rates, wakeup: int,
                 notify: Callable[[str], None]) -> None:  # fmt: skip
        """open_store may take long and raise OSError. wakeup: an event descriptor, written to when the engine has
        something to fetch; closed by this object. notify: is told once, in a line, why the store is of no use."""
        self.store: BlockStore | None = None  # until it is open, and after it failed
        self.failed: str | None = None
        self._last_store: BlockStore | None = None
        self.rates = rates
        self._open_store = open_store
        self._block_bytes = block_bytes
        self._wakeup = wakeup
        self._notify = notify
        size = max(block_bytes)
        count = max(MIN_BUFFERS, STAGING_BYTES // size)
        self.save_buffers = _Buffers(count, size)
        self.load_buffers = _Buffers(count, size)
        self.wants_buffer = False  # the engine has more to save than there were buffers
        self._saves: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._loads: queue.SimpleQueue[DiskLoad | None] = queue.SimpleQueue()
        self.stopped = False
        self._failure = threading.Lock()
        self._writer = threading.Thread(target=self._write_all, name="octavo-disk-writer", daemon=True)
        self._reader = threading.Thread(target=self._read_all, name="octavo-disk-reader", daemon=True)
        self._writer.start()
        self._reader.start()

    @property
    def counters(self) -> Counters:
        """Of the store, also when it is no longer of use."""
        return Counters() if self._last_store is None else self._last_store.counters

    def save(self, stored: BlockId, buffer: NDArray[np.uint8], num_bytes: int, seconds: float, used_ns: int) -> None:
        """Write the first `num_bytes` of a buffer of `save_buffers`, which goes back to them."""
        self._saves.put(_Save(stored, buffer, num_bytes, seconds, used_ns))

    def touch(self, blocks: list[BlockId], used_ns: int) -> None:
        self._saves.put(_Touch(blocks, used_ns))

    def load(self, load: DiskLoad) -> None:
        self._loads.put(load)

    def flush(self) -> None:
        """Remove what is stored."""
        if self.store is not None:
            self.store.forget()
            self._saves.put(_Flush())

    def drain(self, load: DiskLoad) -> None:
        """Take the buffers of a cancelled load back. From both threads."""
        while True:
            try:
                self.load_buffers.give(load.ready.popleft().buffer)
            except IndexError:
                return

    def wake(self) -> None:
        """Let the engine call `DiskTier.work` soon. From any thread."""
        os.eventfd_write(self._wakeup, 1)

    def hurry(self) -> None:
        """From now on somebody waits for what is saved: it is written at the priority of this thread."""
        hurried = threading.Thread(target=self._take_over, args=(self._writer,), name=self._writer.name, daemon=True)
        with suppress(RuntimeError):  # the interpreter is ending, and starts no thread any more
            hurried.start()
            self._writer = hurried
            self._saves.put(_Touch([], 0))  # lets the one before see it

    def stop(self, seconds: float) -> None:
        """End both threads; what was given to `save` is written within `seconds`, or not at all."""
        self._loads.put(None)
        self._saves.put(None)
        self._writer.join(seconds)
        self.stopped = True
        self.store = None
        self.load_buffers.give(np.empty(0, np.uint8))  # the reader may wait for one
        for thread in (self._writer, self._reader):
            thread.join(STOP_SECONDS)
        if not (self._writer.is_alive() or self._reader.is_alive()):  # a disk that hangs keeps its thread
            os.close(self._wakeup)

    # The writer

    def _write_all(self) -> None:
        os.nice(NICENESS)  # of this thread alone
        self._guard(self._open)
        self._write_jobs()

    def _take_over(self, before: threading.Thread) -> None:
        before.join()
        self._write_jobs()

    def _write_jobs(self) -> None:
        """Until the end, or until another thread takes over."""
        looked = time.monotonic()
        while True:
            try:
                job = self._saves.get(timeout=REFRESH_SECONDS)
            except queue.Empty:
                job = _Touch([], 0)
            if job is None or self.stopped:
                return
            self._guard(lambda job=job: self._write(job))  # type: ignore[misc]
            if isinstance(job, _Save):
                self.save_buffers.give(job.buffer)
                if self.wants_buffer:
                    self.wants_buffer = False
                    self.wake()
            if time.monotonic() > looked + REFRESH_SECONDS:
                self._guard(self._refresh)
                looked = time.monotonic()
            if threading.current_thread() is not self._writer:
                return

    def _open(self) -> None:
        store = self._open_store()
        buffer = np.empty(max(self._block_bytes), np.uint8)
        for num_bytes in self._block_bytes:
            started = time.perf_counter()
            found = store.probe(buffer.data[:num_bytes])
            if found is not None:
                num_tokens, seconds = found
                self.rates.read(num_bytes, time.perf_counter() - started)
                self.rates.seconds_per_token = self.rates.seconds_per_token or seconds / num_tokens
        self.store = self._last_store = store

    def _write(self, job: _Job) -> None:
        store = self.store
        if store is None:
            return
        if isinstance(job, _Touch):
            store.touch(job.blocks, job.used_ns)
        elif isinstance(job, _Flush):
            store.clear()
        else:
            store.write(job.stored, job.buffer.data[: job.num_bytes], job.seconds, job.used_ns)

    def _refresh(self) -> None:
        if self.store is not None:
            self.store.refresh_if_changed()

    # The reader

    def _read_all(self) -> None:
        while (load := self._loads.get()) is not None and not self.stopped:
            self._guard(lambda load=load: self._read(load))  # type: ignore[misc]
            load.was_read = True
            self.wake()

    def _read(self, load: DiskLoad) -> None:
        for piece in load.pieces:
            buffer = self.load_buffers.take(wait=True)
            assert buffer is not None
            store = self.store
            if load.cancelled.is_set() or self.stopped or store is None:
                self.load_buffers.give(buffer)
                return
            started = time.perf_counter()
            found = store.read(piece.stored, buffer.data[: piece.num_bytes])
            if found is None:
                self.load_buffers.give(buffer)
                return
            self.rates.read(piece.num_bytes, time.perf_counter() - started)
            load.ready.append(Staged(piece, buffer))
            if load.cancelled.is_set():  # perhaps since the engine looked
                self.drain(load)
            self.wake()

    # Both

    def _guard(self, work: Callable[[], None]) -> None:
        """A directory that fails ends the use of it, and nothing else."""
        try:
            work()
        except (OSError, MemoryError) as error:
            with self._failure:
                told = self.failed is not None
                self.failed, self.store = self.failed or str(error), None
            if not told:
                self._notify(f"the disk cache is closed, everything else goes on: {error}")


class _Buffers:
    """Uninitialised byte arrays of one size, made when they are first needed."""

    def __init__(self, count: int, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._left = threading.Semaphore(count)
        self._used_before: deque[NDArray[np.uint8]] = deque()

    def take(self, wait: bool = False) -> NDArray[np.uint8] | None:
        """None, where it does not `wait`: all are in use."""
        if not self._left.acquire(blocking=wait):
            return None
        try:
            return self._used_before.pop()
        except IndexError:
            return np.empty(self._num_bytes, np.uint8)

    def give(self, buffer: NDArray[np.uint8]) -> None:
        self._used_before.append(buffer)
        self._left.release()
