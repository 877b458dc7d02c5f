"""Adapters: which LoRA adapters an engine holds, in which slots. They are known by the digest of their content."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from octavo.backends.base import Backend, Program
from octavo.engine.memory import format_bytes
from octavo.engine.messages import LoadAdapter, Reply
from octavo.weights.adapter import TENSORS, read_adapter
from octavo.weights.adapter_config import AdapterError
from octavo.weights.spec import reading


class Packed(NamedTuple):
    """An adapter as the backend has it, in no slot yet."""

    digest: str
    rank: int
    weights: Any


class AdapterReader:
    """Reads and packs adapters that fit a model, from any thread. free: bytes that an adapter may take."""

    def __init__(
        self, backend: Backend, targets: Mapping[str, tuple[int, int]], max_rank: int, free: Callable[[], int]
    ) -> None:
        self._backend = backend
        self._targets = targets
        self._max_rank = max_rank
        self.free = free

    def read(self, path: str) -> Packed:
        """Raises AdapterError with one line for the user."""
        file = Path(path).expanduser() / TENSORS
        if file.is_file():
            self._need(path, 3 * file.stat().st_size)  # the file, its tensors, and what is packed of them
        adapter = read_adapter(Path(path), self._targets, self._max_rank)
        self._need(path, self._backend.adapter_bytes(adapter))
        return Packed(adapter.digest, adapter.rank, self._backend.pack_adapter(adapter))

    def _need(self, path: str, num_bytes: int) -> None:
        if num_bytes > (free := self.free()):
            raise AdapterError(
                f"{path}: the adapter takes {format_bytes(num_bytes)}, but {format_bytes(free)} of memory are free beside "
                "the KV cache"
            )


class Adapters:
    """`slots` names the slot of each adapter by its digest; batches are made from it.

    Not thread-safe: the files of `begin` are read beside the engine, and what was read is put into its slot by `replies`.
    """

    def __init__(
        self, program: Program, reader: AdapterReader | None, max_adapters: int, used: Callable[[], Collection[str]]
    ) -> None:
        """reader: None where no adapters are served. used: digests of the adapters of live requests."""
        self.slots: dict[str, int] = {}
        self._program = program
        self._reader = reader
        self._max_adapters = max_adapters
        self._used = used
        self._leaving: set[str] = set()  # unloaded, and still used
        self._read: queue.SimpleQueue[tuple[int, Packed | AdapterError]] = queue.SimpleQueue()

    def load(self, path: str) -> str:
        """The digest of the adapter, which has a slot from now on. Raises AdapterError."""
        return self.install(self._its_reader(path).read(path))

    def begin(self, command: LoadAdapter, wake: Callable[[], None]) -> None:
        """The same, answered by `replies` after `wake` was called."""

        def read() -> None:
            found: Packed | AdapterError
            try:
                with reading(command.path):
                    found = self._its_reader(command.path).read(command.path)
            except AdapterError as error:
                found = error
            except Exception as error:
                found = AdapterError(str(error))
            self._read.put((command.ticket, found))
            wake()

        threading.Thread(target=read, name="octavo-adapter", daemon=True).start()

    def replies(self) -> list[Reply]:
        """To those `begin` whose files have been read."""
        replies = []
        while not self._read.empty():
            ticket, found = self._read.get()
            try:
                if isinstance(found, AdapterError):
                    raise found
                replies.append(Reply(ticket, adapter=self.install(found)))
            except AdapterError as error:
                replies.append(Reply(ticket, error=str(error)))
        self._sweep()
        return replies

    def unload(self, digest: str) -> None:
        """Its slot is free as soon as no live request uses it. Nothing where there is no such adapter."""
        if digest in self.slots:
            self._leaving.add(digest)
            self._sweep()

    def install(self, packed: Packed) -> str:
        """The digest of what was read, which has a slot from now on. Raises AdapterError where there is none."""
        self._leaving.discard(packed.digest)
        if packed.digest in self.slots:
            return packed.digest
        self._sweep()
        slot = next((i for i in range(self._max_adapters) if i not in self.slots.values()), None)
        if slot is None:
            raise AdapterError(
                f"{len(self.slots)} adapters are loaded or still in use, the most that max_loras allows; one that is "
                "replaced keeps its slot until its last request has ended"
            )
        self._program.set_adapter(slot, packed.weights)
        self.slots[packed.digest] = slot
        return packed.digest

    def _its_reader(self, path: str) -> AdapterReader:
        if self._reader is None:
            raise AdapterError(f"{path}: adapters are not served here: max_loras is 0")
        return self._reader

    def _sweep(self) -> None:
        for digest in self._leaving.difference(self._used()) if self._leaving else ():
            self._program.set_adapter(self.slots.pop(digest), None)
            self._leaving.remove(digest)
