"""Admission: who of the waiting may run now."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from octavo.cache.kv import KvCache, Match
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

    def candidate(self, now: float) -> tuple[Live, Match] | None:
        """The next in order, and what it can reuse. Those before it that turn out to wait for something are laid aside."""
        while (live := self._queue.first(now)) is not None:
            request = live.request
            limit = reusable(request)
            match = self._cache.match(request, limit)
            gate = self._gate(live, match, limit)
            if gate is None:
                return live, match
            request.gates.append(gate)
            self._queue.lay_aside(live, now)
        return None

    def admit(self, live: Live, match: Match, running: Sequence[Live]) -> bool:
        """Give it its blocks, if what it has to compute, and what it and those who run are expected to add, can be held."""
        request = live.request
        num_tokens = min(request.num_tokens + 1, live.max_computed)
        if running:
            num_tokens = max(num_tokens, self._headroom.num_tokens(live))
        return self._cache.admit(request, match, num_tokens, sum(map(self._headroom.num_blocks, running)))

    def prefix_len(self, live: Live, step: int) -> int:
        """Tokens of a waiting request that are in the cache, as it was a few steps ago."""
        num_tokens, looked = live.prefix
        if not looked or looked + PREFIX_STEPS <= step:
            num_tokens = self._cache.match(live.request, reusable(live.request)).num_tokens
            live.prefix = (num_tokens, step)
        return num_tokens

    def _gate(self, live: Live, match: Match, limit: int) -> Gate | None:
        """What is worth waiting for instead of computing it: another request's block, or one of a slower tier."""
        key = self._cache.awaited(live.request, match, limit)
        if key is None:
            return self._fetch(live.request, match, limit) if self._fetch else None
        leader = self._cache.leader(key)
        assert leader is not None
        leading = self._find(leader)
        leading.inherited = max(leading.inherited, live.priority)
        return LeaderGate(self._cache, key)


def reusable(request: Request) -> int:
    """Tokens that may come from the cache: not the last known one, whose logits are drawn from, and none whose
    logits are still to be scored for prompt_logprobs."""
    num_scored = len(request.prompt_logprobs)
    if request.params.prompt_logprobs is not None and num_scored < len(request.prompt_ids) - 1:
        return num_scored
    return request.num_tokens - 1
