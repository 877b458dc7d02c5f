"""EvictionOrder: which cached block goes next."""

from __future__ import annotations

import heapq


class EvictionOrder:
    """Cached blocks by the time of their last use; of equal times the one added first goes first.

    A hint (`request.Retention`) moves the time it is given. So hints order, and never pin: every block here can go.
    """

    def __init__(self) -> None:
        self._places: dict[int, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, int]] = []  # (time, count, block); an entry whose place has changed is stale
        self._count = 0

    def __len__(self) -> int:
        return len(self._places)

    def add(self, block: int, time: float) -> None:
        self._count += 1
        self._places[block] = (time, self._count)
        heapq.heappush(self._heap, (time, self._count, block))
        if len(self._heap) > 2 * len(self._places) + 64:
            self._heap = [(*place, block) for block, place in self._places.items()]
            heapq.heapify(self._heap)

    def remove(self, block: int) -> None:
        del self._places[block]

    def first(self) -> int:
        """The block to evict next. IndexError when there is none."""
        while True:
            time, count, block = self._heap[0]
            if self._places.get(block) == (time, count):
                return block
            heapq.heappop(self._heap)

    def blocks(self) -> list[int]:
        """All of them, next to be evicted first."""
        return sorted(self._places, key=self._places.__getitem__)
