"""Scheduler: which tokens of which requests the next step computes.

One rule: a request has tokens known and tokens computed, and a step hands out a budget so that the second catches
up with the first. Chunked prefill, cache hits and resumption after preemption are the same arithmetic.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from octavo.backends.base import Limits, StepResult
from octavo.cache.kv import KvCache
from octavo.cache.match import Match
from octavo.request import FinishReason, Gate, Request
from octavo.sched.fairness import FairShares
from octavo.sched.live import LeaderGate, Live, Update
from octavo.sched.preempt import Headroom, victim
from octavo.sched.queue import WaitingQueue
from octavo.sched.rows import Rows
from octavo.sched.step import Draft, Step, Work

PREFIX_STEPS = 16
"""A look into the cache for a waiting request's prefix is good for so many steps."""

Fetch = Callable[[Request, Match, int], Gate | None]
"""fetch(request, match, limit): a gate where more of the first `limit` tokens than `match` are about to be had."""


class Scheduler:
    """Requests waiting and running. The order of calls is schedule, run the step, commit; `add` between any two."""

    def __init__(
        self,
        cache: KvCache,
        limits: Limits,
        fetch: Fetch | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """clock: seconds, the same that `Request.arrival` is read from."""
        assert 1 <= limits.max_seqs <= min(limits.max_tokens, limits.max_rows), "each sequence can draw in each step"
        self._cache = cache
        self._limits = limits
        self._fetch = fetch
        self._clock = clock
        self._live: dict[str, dict[int, Live]] = {}  # by id, then choice
        self._shares = FairShares()
        self._queue = WaitingQueue(self._shares, self._prefix_len)
        self._running: list[Live] = []  # by admission
        self._slots = list(range(limits.max_seqs - 1, -1, -1))
        self._headroom = Headroom()
        self._in_step = False
        self._aborted: list[Live] = []  # while a step that may write their blocks is in flight
        self._dropped: list[Update] = []  # ended outside of a step
        self._num_added = 0
        self._num_steps = 0
        self._counters = {
            "prompt_tokens": 0, "cached_tokens": 0, "output_tokens": 0, "preemptions": 0, "recomputed_tokens": 0,
        }  # fmt: skip

    # Requests come and go

    def add(self, request: Request) -> None:
        """Queue a request. ValueError where it could never run; its id and choice must not be live."""
        assert request.choice not in self._live.get(request.id, ())
        num_tokens = self._max_computed(request)
        if not self._cache.fits(num_tokens):
            raise ValueError(
                f"the KV cache cannot hold the {num_tokens} tokens of prompt and output that were asked for"
            )
        self._num_added += 1
        live = Live(request, self._num_added, num_tokens)
        self._live.setdefault(request.id, {})[request.choice] = live
        self._queue.add(live, self._clock())

    def abort(self, id: str, choice: int = -1) -> list[Request]:
        """End a request, or one choice of it, in any state. Blocks that a step in flight writes are freed with its end."""
        ended = []
        for live in list(self._live.get(id, {}).values()):
            if choice in (-1, live.request.choice) and live.request.finish_reason is None:
                live.request.finish_reason = FinishReason.ABORT
                ended.append(live.request)
                if self._in_step and live.slot >= 0:
                    self._aborted.append(live)
                else:
                    self._end(live)
        return ended

    def dropped(self) -> list[Update]:
        """Those that ended outside of a step since the last call, other than by `abort`."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def is_live(self, id: str) -> bool:
        """Whether a choice of this request waits or runs."""
        return id in self._live

    @property
    def has_work(self) -> bool:
        """A request is live. It may wait for a gate: then `schedule` gives None."""
        return bool(self._live)

    # A step

    def schedule(self) -> Step | None:
        """The next step: running decodes, running prefills, then the waiting, as far as tokens, rows and blocks go."""
        assert not self._in_step, "the last step is not committed"
        now = self._clock()
        self._num_steps += 1
        for live, error in self._queue.look_at_gates(now):
            self._drop(live, FinishReason.ERROR, str(error), error.param)
        draft = Draft(self._limits.max_tokens, self._limits.max_rows)
        num_preemptions = self._counters["preemptions"]
        for live in self._turns():
            if live.slot < 0:  # preempted by one before it
                continue
            work = draft.portion(live.request, live.slot)
            if work is not None and not self._cache.grow(live.request, work.stop):
                work = self._make_room(live, draft, now)
            if work is not None:
                draft.add(work)
        if num_preemptions == self._counters["preemptions"]:
            self._admit(draft, now)
        if not draft.work:
            return None
        self._in_step = True
        return Step(list(draft.work.values()), self._cache.copies())

    def commit(self, step: Step, result: StepResult) -> list[Update]:
        """Apply what a step computed: tokens, scores, published blocks, stop rules. Returns what clients should hear."""
        self._in_step = False
        self._cache.end_step()
        rows = Rows(result)
        updates = []
        for work in step.work:
            request = work.request
            live = self._live[request.id][request.choice]
            if request.finish_reason is not None:  # aborted meanwhile
                rows.skip(work)
                continue
            error = rows.error(work)
            if error is None:
                self._count(live, work)
                tokens, logprobs = rows.take(work)
                self._cache.advance(request, work.stop)
                request.output_ids += tokens
                request.finish_reason = self._finish_reason(live)
            else:
                tokens, logprobs = [], []
                rows.skip(work)
                request.finish_reason = FinishReason.ERROR
            if tokens or request.finish_reason is not None:
                updates.append(Update(request, tokens, logprobs, live.num_cached, error))
            if request.finish_reason is not None:
                self._end(live)
        while self._aborted:
            self._end(self._aborted.pop())
        return updates

    # Numbers

    def stats(self) -> dict[str, Any]:
        """Fields of `engine.messages.Stats`, by name."""
        usage = self._cache.usage()
        return {
            "num_running": len(self._running),
            "num_waiting": len(self._queue),
            "waiting_by_reason": self._queue.reasons(),
            "kv_blocks_total": usage.num_blocks,
            "kv_blocks_held": usage.num_held,
            "kv_blocks_cached": usage.num_cached,
            "kv_slots_filled": usage.num_filled,
            **self._counters,
        }

    def check(self) -> None:
        """Raise AssertionError unless requests, slots, queues and cache agree."""
        self._queue.check()
        lives = [live for choices in self._live.values() for live in choices.values()]
        assert {*self._queue, *self._running} == set(lives)
        assert len(self._queue) + len(self._running) == len(lives)
        slots = [live.slot for live in self._running]
        assert sorted(slots + self._slots) == list(range(self._limits.max_seqs))
        for live in self._queue:
            assert live.slot < 0 and not live.request.tables
        for live in self._running:
            request = live.request
            assert 0 <= request.num_cached <= request.num_computed <= request.num_tokens
        self._cache.check(live.request for live in lives)

    # Inside

    def _max_computed(self, request: Request) -> int:
        """Tokens in the cache at the very end: the last one drawn is never computed."""
        num_prompt, max_tokens = len(request.prompt_ids), request.params.max_tokens
        limit = self._limits.max_model_len
        if max_tokens is not None:
            limit = min(limit, num_prompt + max_tokens)
        return max(num_prompt, limit - 1)

    def _turns(self) -> list[Live]:
        """The running: decodes, then prefills by priority."""
        decodes = [live for live in self._running if live.request.num_tokens - live.request.num_computed == 1]
        if len(decodes) == len(self._running):
            return decodes
        prefills = [live for live in self._running if live.request.num_tokens - live.request.num_computed > 1]
        prefills.sort(key=lambda live: -live.priority)
        return decodes + prefills

    def _make_room(self, live: Live, draft: Draft, now: float) -> Work | None:
        """Work for a request whose blocks are not all there: less of it, or others must go; None if it goes itself."""
        while (room := self._cache.room(live.request)) < 1:
            assert len(self._running) > 1, "add() refuses what does not fit alone"
            loser = victim(self._running, self._cache)
            draft.drop(loser.slot)
            self._preempt(loser, now)
            if loser is live:
                return None
        work = draft.portion(live.request, live.slot, room)
        if work is not None and not self._cache.grow(live.request, work.stop):
            raise AssertionError("room() and grow() disagree")
        return work

    def _preempt(self, live: Live, now: float) -> None:
        self._leave(live)
        live.request.num_preemptions += 1
        self._counters["preemptions"] += 1
        self._headroom.preempted()
        self._queue.add(live, now)

    def _admit(self, draft: Draft, now: float) -> None:
        """Admit the waiting in order, each only where all it has to compute, and what it and those who run are
        expected to add, could be held."""
        if not self._slots:
            self._queue.blocked = "slots"
            return
        reserved = self._cache.demands((live.request, self._headroom.num_tokens(live)) for live in self._running)
        while draft.num_tokens > 0 and draft.num_rows > 0 and self._slots:
            live = self._queue.first(now)
            if live is None:
                return
            request = live.request
            match = self._cache.match(request)
            gate = self._gate(request, match)
            if gate is not None:
                request.gates.append(gate)
                self._queue.lay_aside(live, now)
                continue
            least = min(request.num_tokens + 1, live.max_computed)
            num_tokens = self._headroom.num_tokens(live) if self._running else least
            if not self._cache.admit(request, match, max(least, num_tokens), reserved):
                self._queue.blocked = "blocks"
                return
            self._queue.take(live, now)
            self._join(live, match, draft)
            demand = self._cache.demands([(request, self._headroom.num_tokens(live))])
            reserved = [a + b for a, b in zip(reserved, demand, strict=True)]
        self._queue.blocked = "budget"

    def _gate(self, request: Request, match: Match) -> Gate | None:
        """What is worth waiting for instead of computing it: another request's block, or one of a slower tier."""
        if match.awaits is not None:
            leader = self._cache.leader(match.awaits)
            assert leader is not None
            leading, following = self._live[leader.id][leader.choice], self._live[request.id][request.choice]
            leading.inherited = max(leading.inherited, following.priority)
            return LeaderGate(self._cache, match.awaits)
        return self._fetch(request, match, match.limit) if self._fetch else None

    def _prefix_len(self, live: Live) -> int:
        num_tokens, step = live.prefix
        if not step or step + PREFIX_STEPS <= self._num_steps:
            num_tokens = self._cache.match(live.request).num_tokens
            live.prefix = (num_tokens, self._num_steps)
        return num_tokens

    def _join(self, live: Live, match: Match, draft: Draft) -> None:
        """An admitted request begins to run in the step that is being made, where its copies are due."""
        request = live.request
        live.slot = self._slots.pop()
        self._running.append(live)
        work = draft.portion(request, live.slot)
        if work is None or not self._cache.grow(request, work.stop):
            raise AssertionError("admission counts tokens and blocks")
        draft.add(work)
        if request.num_preemptions == 0:
            live.match = match
            live.num_cached = live.high_water = request.num_cached
            self._counters["cached_tokens"] += request.num_cached
            self._shares.charge(request.terms.tenant, len(request.prompt_ids) - request.num_cached, 0)

    def _leave(self, live: Live) -> None:
        self._running.remove(live)
        self._slots.append(live.slot)
        live.slot = -1
        self._cache.free(live.request, keep_tail=live.request.finish_reason is not FinishReason.ERROR)

    def _drop(self, live: Live, reason: FinishReason, error: str, param: str | None = None) -> None:
        """End a request between two steps."""
        live.request.finish_reason = reason
        self._dropped.append(Update(live.request, [], [], live.num_cached, error, param))
        self._end(live)

    def _end(self, live: Live) -> None:
        request = live.request
        if live.slot < 0:
            self._queue.remove(live, self._clock())
        else:
            self._leave(live)
        if live.match is not None:  # what of the prompt was never computed was no service
            self._shares.charge(request.terms.tenant, min(0, live.high_water - len(request.prompt_ids)), 0)
        if request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._headroom.ended(live)
        self._cache.forget(request)
        choices = self._live[request.id]
        del choices[request.choice]
        if not choices:
            del self._live[request.id]

    def _count(self, live: Live, work: Work) -> None:
        start, stop, high_water = work.start, work.stop, live.high_water
        if start < high_water:
            num_recomputed = min(stop, high_water) - start
            live.num_recomputed += num_recomputed
            self._counters["recomputed_tokens"] += num_recomputed
            start = high_water
        if start < stop:
            live.high_water = stop
            if start < (num_prompt := len(work.request.prompt_ids)):
                self._counters["prompt_tokens"] += min(stop, num_prompt) - start
        self._counters["output_tokens"] += work.draws
        self._shares.charge(work.request.terms.tenant, 0, work.draws)

    @staticmethod
    def _finish_reason(live: Live) -> FinishReason | None:
        request = live.request
        if request.output_ids and request.output_ids[-1] in request.stop_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if request.num_computed >= live.max_computed else None
