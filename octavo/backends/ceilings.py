"""What the machine does at this moment, as it changes from minute to minute: reading memory, and meeting at a barrier."""

from __future__ import annotations

from typing import NamedTuple

from octavo import _native
from octavo.backends import threads

READ_BYTES = 2**28
"""Of memory that is read: eight times a third-level cache of 32 MB."""


class Ceilings(NamedTuple):
    bandwidth: float  # bytes a second of a streaming read, all threads together
    barrier: float  # seconds


class Machine:
    """num_threads: as in EngineConfig. A measurement takes a tenth of a second or so."""

    def __init__(self, num_threads: int = 0) -> None:
        count = num_threads or threads.default_threads()
        self._pool = _native.Pool(count, threads.pinning(count))
        self._memory = _native.Memory(READ_BYTES, huge_pages=True)
        self._memory.view(0, READ_BYTES)[:] = 1

    def measure(self) -> Ceilings:
        return Ceilings(_native.read_rate(self._pool, self._memory), _native.barrier_seconds(self._pool))
