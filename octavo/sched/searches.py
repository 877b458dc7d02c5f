"""Searches: what becomes of the requests of a beam search when its beams have drawn, and when it ends."""

from __future__ import annotations

from collections.abc import Callable

from octavo.cache.kv import KvCache
from octavo.request import FinishReason, Request
from octavo.sched.beam import BeamSearch
from octavo.sched.live import Live, Update
from octavo.sched.queue import WaitingQueue
from octavo.sched.recent import Recent


class Searches:
    """Shares the scheduler's lists: `lives` by id, then choice; `running`; free `slots`. `end` ends a request of them."""

    def __init__(
        self, lives: dict[str, dict[int, Live]], running: list[Live], slots: list[int], cache: KvCache,
        queue: WaitingQueue, recent: Recent, end: Callable[[Live], None],
    ) -> None:  # fmt: skip
        self._lives = lives
        self._running = running
        self._slots = slots
        self._cache = cache
        self._queue = queue
        self._recent = recent
        self._end = end

    def turn(self, id: str, error: str | None, now: float, number: int) -> list[Update]:
        """Beams have drawn, or one failed: the search goes on where all have drawn. Returns what its client should hear.

        New requests are numbered from `number` on: `BeamSearch.width` numbers at most.
        """
        lives = self._lives[id]
        search = next(iter(lives.values())).search
        assert search is not None
        if error is not None:
            return self.conclude(search, FinishReason.ERROR, error)
        if not search.is_ready:
            return []
        turn = search.turn()
        if search.done:
            return self.conclude(search)
        for request in turn.dropped:
            self._end(lives[request.choice])
        for i, (parent, child) in enumerate(turn.forks):
            self._fork(lives[parent.choice], child, now, number + i)
        for request in search.beams:
            live = lives[request.choice]
            if live.resting and live.slot < 0:  # was preempted meanwhile
                self._queue.add(live, now)
            live.resting = False
        return []

    def conclude(
        self, search: BeamSearch, reason: FinishReason | None = None, error: str | None = None, param: str | None = None
    ) -> list[Update]:
        """End a search: with its answers, or without any for a `reason`."""
        lives = list(self._lives[search.request.id].values())
        updates = []
        for request, scores, logprob in search.answers(reason):
            self._recent.ended(lives[0], request)
            updates.append(Update(request, request.output_ids, scores, lives[0], error, param, logprob))
        for live in lives:
            live.request.finish_reason = updates[0].request.finish_reason
            self._end(live)
        return updates

    def _fork(self, parent: Live, child: Request, now: float, number: int) -> None:
        """A new beam runs on the blocks of its parent; where that has none, or no slot is left, it is computed again."""
        live = Live(child, number, parent.max_computed)
        live.search, live.match, live.waits = parent.search, parent.match, parent.waits
        live.high_water, live.num_cached, live.num_disk = parent.high_water, parent.num_cached, parent.num_disk
        self._lives[child.id][child.choice] = live
        if parent.slot >= 0 and self._slots:
            self._cache.fork(parent.request, child)
            live.slot = self._slots.pop()
            live.served = now
            self._running.append(live)
        else:
            child.num_preemptions = max(1, parent.request.num_preemptions)
            self._queue.add(live, now)
