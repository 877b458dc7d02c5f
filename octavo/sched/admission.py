"""Admission: who of the waiting may run now."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from octavo.cache.blocks import BLOCK_SIZE
from octavo.cache.kv import KvCache
from octavo.cache.match import Match
from octavo.request import Gate, Request
from octavo.sched.live import LeaderGate, Live
from octavo.sched.preempt import Headroom
from octavo.sched.queue import WaitingQueue

PREFIX_STEPS = 16
"""A look into the cache for a waiting request's prefix is good for so many steps."""

Fetch = Callable[[Request, Match, int], Gate | None]
"""fetch(request, match, limit): a gate where more of the first `limit` tokens than `match` are about to be had."""


class Admission:
    """`find`: the Live of a request."""

    def __init__(
        self,
        cache: KvCache,
        queue: WaitingQueue,
        headroom: Headroom,
        find: Callable[[Request], Live],
        fetch: Fetch | None,
    ) -> None:
        self._cache = cache
        self._queue = queue
        self._headroom = headroom
        self._find = find
        self._fetch = fetch

    def candidate(self, now: float, shortest: bool = False) -> tuple[Live, Match] | None:
        """The next in order, or a short one that goes beside it, and what it can reuse.

        Those before it that turn out to wait for something are laid aside."""
        while (live := self._queue.shortest(now) if shortest else self._queue.first(now)) is not None:
            request = live.request
            match = self._cache.match(request)
            gate = self._gate(live, match)
            if gate is None:
                return live, match
            request.gates.append(gate)
            self._queue.lay_aside(live, now)
        return None

    def admit(self, live: Live, match: Match, running: Sequence[Live]) -> Match | None:
        """Give it its blocks, if what it has to compute, and what it and those who run are expected to add, can be held.

        The match that was used, None where there is no room."""
        request = live.request
        num_tokens = min(request.num_tokens + 1, live.max_computed)
        if running:
            num_tokens = max(num_tokens, self._headroom.num_tokens(live))
        reserved = self._cache.demands((other.request, self._headroom.num_tokens(other)) for other in running)
        return self._cache.admit(request, match, num_tokens, reserved)

    def prefix_len(self, live: Live, step: int) -> int:
        """Tokens of a waiting request that are in the cache, as it was a few steps ago."""
        num_tokens, looked = live.prefix
        if not looked or looked + PREFIX_STEPS <= step:
            num_tokens = self._cache.match(live.request).num_tokens
            live.prefix = (num_tokens, step)
        return num_tokens

    def _gate(self, live: Live, match: Match) -> Gate | None:
        """What is worth waiting for instead of computing it: another request's block, or one of a slower tier."""
        if match.awaits is None:
            return self._fetch(live.request, match, match.limit) if self._fetch else None
        leader = self._cache.leader(match.awaits)
        assert leader is not None
        leading = self._find(leader)
        leading.inherited = max(leading.inherited, live.priority)
        keys = self._cache.keys(live.request, live.request.num_tokens // BLOCK_SIZE)
        last = next((key for key in reversed(keys) if self._cache.leader(key) is leader), match.awaits)
        return LeaderGate(self._cache, last)
