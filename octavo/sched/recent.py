"""Recent: what can be told of requests, live ones and those that have ended not long ago."""

from __future__ import annotations

from collections.abc import Mapping

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
        self._ended: dict[str, list[Explanation]] = {}  # by id, the latest last
        self._num_ended = 0

    def ended(self, live: Live, request: Request) -> None:
        """`request`, which is `live`'s own or an answer of its search, ends."""
        explanations = self._ended.setdefault(request.id, [])
        explanations.append(self._explanation(live, request, str(request.finish_reason), live.waits))
        self._num_ended += 1
        while self._num_ended > MAX_RECENT and len(self._ended) > 1:
            self._num_ended -= len(self._ended.pop(next(iter(self._ended))))

    def forget(self, id: str) -> None:
        """The id is used again: what is told of it is told of its new life."""
        self._num_ended -= len(self._ended.pop(id, ()))

    def explain(self, id: str, lives: Mapping[str, Mapping[int, Live]], now: float) -> list[Explanation]:
        """Of all choices of the request `id`, or of those named `id`-0, `id`-1 and so on. `lives` by id, then choice.

        One that was never admitted has the match that it would have now. The beams of a search have one explanation.
        """
        found = []
        names = {id}
        if id not in self._ended and id not in lives:
            start = f"{id}-"
            names = {
                n
                for known in (self._ended, lives)
                for n in known
                if n.startswith(start) and n[len(start) :].isdecimal()
            }
        for name in names:
            found += self._ended.get(name, [])
            for live in lives.get(name, {}).values():
                state, waits = "running" if live.slot >= 0 else "waiting", dict(live.waits)
                if live.slot < 0 and not live.resting:
                    reason = self._queue.reason(live)
                    waits[reason] = waits.get(reason, 0.0) + now - live.waiting_since
                found.append(self._explanation(live, live.request, state, waits))
                if live.search is not None:
                    break
        return sorted(found, key=lambda explanation: (explanation.id, explanation.choice))

    def _explanation(self, live: Live, request: Request, state: str, waits: dict[str, float]) -> Explanation:
        counts = live if live.search is None else live.search
        match = live.match or (self._cache.match(live.request) if state == "waiting" else None)
        return Explanation(
            id=request.id,
            choice=request.choice,
            state=state,
            prompt_tokens=len(request.prompt_ids),
            output_tokens=len(request.output_ids),
            adapter=request.adapter,
            cached_tokens=live.num_cached,
            cached_tokens_disk=live.num_disk,
            match_end=MatchEnd(match.end.reason, match.end.position) if match else None,
            wait_seconds={reason: round(seconds, 6) for reason, seconds in waits.items()},
            preemptions=counts.num_preemptions,
            recomputed_tokens=counts.num_recomputed,
        )
