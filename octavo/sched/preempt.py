"""Who gives up its blocks when there are none left, and how many are kept back so that this stays rare."""

from __future__ import annotations

from collections.abc import Iterable

from octavo.cache.blocks import BLOCK_SIZE
from octavo.cache.kv import KvCache
from octavo.sched.live import Live

MAX_PREEMPTIONS = 3
"""A request preempted this often is a victim only where all others are, too."""

RECENT = 10
"""Outputs that their expected length is a mean of, about."""

MAX_CAUTION = 8.0
"""Blocks kept back for each who runs, beside what it is expected to fill."""


def victim(running: Iterable[Live], cache: KvCache) -> Live:
    """The lowest priority, then the least lost work: computed tokens in blocks that nobody else refers to."""
    return min(
        running,
        key=lambda live: (
            live.request.num_preemptions >= MAX_PREEMPTIONS,
            live.priority,
            cache.num_private(live.request),
            -live.number,
        ),
    )


def makes_way(waiting: Live, running: Iterable[Live], cache: KvCache) -> Live | None:
    """Who gives up its place to `waiting`, where all are taken: one of a lower priority, whatever age has made of both.
    Its blocks stay in the cache as long as nobody needs them, so that most of its work is not lost."""
    lower = [
        live
        for live in running
        if live.priority < waiting.priority and live.search is None and live.num_preemptions < MAX_PREEMPTIONS
    ]
    return victim(lower, cache) if lower else None


class Headroom:
    """How much those who run will still grow: admission leaves it to them.

    Outputs are expected to be as long as those that ended lately; before any has, as long as they may be, where that was
    named. A preemption shows that this was too little: the blocks kept back beside it double, and come down again with
    every request that ends.
    """

    def __init__(self) -> None:
        self.mean_length = 0.0  # of outputs lately, in tokens
        self._num_ended = 0
        self._caution = 1.0

    def ended(self, live: Live) -> None:
        """A request came to its end, by itself or where its client had enough of it."""
        if live.request.params.max_tokens == 0:  # its prompt alone was wanted
            return
        self._num_ended += 1
        weight = 1 / min(self._num_ended, RECENT)
        self.mean_length += weight * (len(live.request.output_ids) - self.mean_length)
        self._caution = 1.0 + 0.9 * (self._caution - 1.0)

    def preempted(self) -> None:
        self._caution = min(MAX_CAUTION, 2.0 * self._caution)

    def num_tokens(self, live: Live) -> int:
        """Tokens that `live` is expected to have in the cache soon, at its end at most."""
        request = live.request
        if not self._num_ended and request.params.max_tokens is not None:
            return live.max_computed
        growth = max(0.0, self.mean_length - len(request.output_ids)) + self._caution * BLOCK_SIZE
        return min(request.num_tokens + int(growth), live.max_computed)
