"""BlockPool: the ids of one KV group, who holds them, and how many of their slots are written.

Every id of [0, num_blocks) is in exactly one state::

    held     refcount > 0: live requests (or a copy of this step) refer to it
    cached   refcount 0, kept for the prefix index; evicted by time of last use
    free     everything else
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

from octavo.cache.eviction import EvictionOrder

BLOCK_SIZE = 16
"""Tokens per block; equals `backends.base.BLOCK_SIZE` (a test compares them), which this package may not import."""

NEVER = float("-inf")
"""As a time of use: none."""


def blocks_for(num_tokens: int) -> int:
    """Blocks that `num_tokens` tokens take."""
    return -(-num_tokens // BLOCK_SIZE)


class GroupSpec(NamedTuple):
    """A KV group: layers with the same needs. `window`: tokens that a query sees, itself included; None: all."""

    num_blocks: int
    window: int | None = None


class BlockPool:
    """Bookkeeping only: owns no memory. Free ids are handed out lowest first, so memory is touched late."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a KV group needs at least one block, got {num_blocks}")
        self.num_blocks = num_blocks
        self.num_held = 0
        self.num_filled = 0  # written slots of held blocks
        self.refcounts = [0] * num_blocks
        self.filled = [0] * num_blocks  # written slots, also of cached blocks; 0 when free
        self.used = [NEVER] * num_blocks  # time of last use, as hints move it
        self._cached = EvictionOrder()
        self._returned: list[int] = []  # heap of free ids below _fresh
        self._fresh = 0  # ids from here on were never used

    @property
    def num_free(self) -> int:
        return self.num_blocks - self._fresh + len(self._returned)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that could be had now: free, or cached and evicted for it."""
        return self.num_blocks - self.num_held

    def take(self) -> int:
        """A free block, now held once and empty. IndexError when none is free: evict first."""
        if self._returned:
            block = heapq.heappop(self._returned)
        elif self._fresh < self.num_blocks:
            block = self._fresh
            self._fresh += 1
        else:
            raise IndexError("no free block")
        self.refcounts[block] = 1
        self.num_held += 1
        return block

    def share(self, block: int) -> None:
        """One more holder of a held or cached block."""
        if self.refcounts[block] == 0:
            self._cached.remove(block)
            self.num_held += 1
            self.num_filled += self.filled[block]
        self.refcounts[block] += 1

    def release(self, block: int, used: float | None) -> None:
        """One holder less. With the last one the block is cached, as last used at `used` or later, or free (None)."""
        if used is not None:
            self.used[block] = max(self.used[block], used)
        self.refcounts[block] -= 1
        if self.refcounts[block] > 0:
            return
        self.num_held -= 1
        self.num_filled -= self.filled[block]
        if used is not None:
            self._cached.add(block, self.used[block])
        else:
            self._return(block)

    def oldest(self) -> int:
        """The cached block to evict next."""
        return self._cached.first()

    def drop(self, block: int) -> None:
        """A cached block becomes free."""
        self._cached.remove(block)
        self._return(block)

    def set_filled(self, block: int, num_slots: int) -> None:
        """Written slots of a held block."""
        self.num_filled += num_slots - self.filled[block]
        self.filled[block] = num_slots

    def cached_blocks(self) -> list[int]:
        """Cached ids, next to be evicted first."""
        return self._cached.blocks()

    def free_blocks(self) -> set[int]:
        return set(self._returned) | set(range(self._fresh, self.num_blocks))

    def _return(self, block: int) -> None:
        self.filled[block] = 0
        self.used[block] = NEVER
        heapq.heappush(self._returned, block)
