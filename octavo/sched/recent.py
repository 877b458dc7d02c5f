"""Recent: what can be told of requests, live ones and those that have ended not long ago."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from octavo.cache.kv import KvCache
from octavo.explain import Explanation, MatchEnd
from octavo.request import Request
from octavo.sched.live import Live
from octavo.sched.queue import WaitingQueue

MAX_RECENT = 4096
"""Choices that have ended and can still be explained: a kilobyte each."""


class Recent:
    def __init__(self, cache: KvCache, queue: WaitingQueue) -> None:
        self._cache = cache
        self._queue = queue
        self._ended: deque[Explanation] = deque(maxlen=MAX_RECENT)

    def ended(self, live: Live, request: Request) -> Explanation:
        """Of `request`, which ends: `live`'s own, or an answer of its search."""
        explanation = self._explanation(live, request, str(request.finish_reason), live.waits)
        self._ended.append(explanation)
        return explanation

    def explain(self, prefix: str, lives: Iterable[Live], now: float) -> list[Explanation]:
        """Of the choices whose id begins with `prefix`: those that have ended, then the live ones.

        One that was never admitted has the match that it would have now. The beams of a search have one explanation.
        """
        found = [explanation for explanation in self._ended if explanation.id.startswith(prefix)]
        searches = set()
        for live in lives:
            if live.request.id.startswith(prefix) and live.search not in searches:
                state, waits = "running" if live.slot >= 0 else "waiting", dict(live.waits)
                if live.slot < 0 and not live.resting:
                    reason = self._queue.reason(live)
                    waits[reason] = waits.get(reason, 0.0) + now - live.waiting_since
                found.append(self._explanation(live, live.request, state, waits))
                if live.search is not None:
                    searches.add(live.search)
        return found

    def _explanation(self, live: Live, request: Request, state: str, waits: dict[str, float]) -> Explanation:
        counts = live if live.search is None else live.search
        match = live.match or (self._cache.match(live.request) if state == "waiting" else None)
        return Explanation(
            id=request.id,
            choice=request.choice,
            state=state,
            prompt_tokens=len(request.prompt_ids),
            output_tokens=len(request.output_ids),
            cached_tokens=live.num_cached,
            cached_tokens_disk=live.num_disk,
            match_end=MatchEnd(match.end.reason, match.end.position) if match else None,
            wait_seconds={reason: round(seconds, 6) for reason, seconds in waits.items()},
            preemptions=counts.num_preemptions,
            recomputed_tokens=counts.num_recomputed,
        )
