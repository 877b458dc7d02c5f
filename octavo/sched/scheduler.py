"""Scheduler: which tokens of which requests the next step computes.

One rule: a request has tokens known and tokens computed, and a step hands out a budget so that the second catches
up with the first. Chunked prefill, cache hits and resumption after preemption are the same arithmetic.
"""

from __future__ import annotations

import bisect
from typing import NamedTuple

from octavo.backends.base import Limits, StepResult
from octavo.cache.blocks import BLOCK_SIZE, blocks_for
from octavo.cache.kv import KvCache
from octavo.cache.prefix import Key
from octavo.request import FinishReason, Request, TokenLogprobs
from octavo.sched.rows import Rows
from octavo.sched.step import Draft, Step, Work

MAX_PREEMPTIONS = 3
"""A request preempted this often is a victim only where all others are, too."""


class Update(NamedTuple):
    """What one request gained in a step, already applied to the request."""

    request: Request
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    num_cached: int = 0  # prompt tokens that came from the cache when the request was first admitted
    error: str | None = None


class Live:
    """What the scheduler knows of a request beyond the request itself."""

    __slots__ = ("awaits", "high_water", "max_computed", "num_cached", "order", "request", "slot")

    def __init__(self, request: Request, order: tuple[int, float, int, int], max_computed: int) -> None:
        self.request = request
        self.order = order  # of the waiting: ascending
        self.max_computed = max_computed  # tokens in the cache at the very end; the last one drawn is never computed
        self.slot = -1
        self.num_cached = 0
        self.high_water = 0  # tokens computed at any time: those below are recomputed
        self.awaits: Key | None = None  # a block that another request is computing


class Scheduler:
    """Requests waiting and running. The order of calls is schedule, run the step, commit; `add` between any two."""

    def __init__(self, cache: KvCache, limits: Limits) -> None:
        assert 1 <= limits.max_seqs <= min(limits.max_tokens, limits.max_rows), "each sequence can draw in each step"
        self._cache = cache
        self._limits = limits
        self._live: dict[str, dict[int, Live]] = {}  # by id, then choice
        self._waiting: list[Live] = []  # sorted by order
        self._running: list[Live] = []  # by admission
        self._slots = list(range(limits.max_seqs - 1, -1, -1))
        self._in_step = False
        self._aborted: list[Live] = []  # while a step that may write their blocks is in flight
        self._num_added = 0
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
        order = (-request.terms.priority, request.arrival, self._num_added, request.choice)
        live = Live(request, order, num_tokens)
        self._live.setdefault(request.id, {})[request.choice] = live
        bisect.insort(self._waiting, live, key=_order)

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

    def is_live(self, id: str) -> bool:
        """Whether a choice of this request waits or runs."""
        return id in self._live

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    # A step

    def schedule(self) -> Step | None:
        """The next step: running decodes, running prefills, then the waiting, as far as tokens, rows and blocks go."""
        assert not self._in_step, "the last step is not committed"
        draft = Draft(self._limits.max_tokens, self._limits.max_rows)
        num_preemptions = self._counters["preemptions"]
        for live in self._turns():
            if live.slot < 0:  # preempted by one before it
                continue
            work = draft.portion(live.request, live.slot)
            if work is not None and not self._cache.grow(live.request, work.stop):
                work = self._make_room(live, draft)
            if work is not None:
                draft.add(work)
        if num_preemptions == self._counters["preemptions"]:
            self._admit(draft)
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
                self._cache.advance(request, work.stop)
                tokens, logprobs = rows.take(work)
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

    def stats(self) -> dict[str, int]:
        """Fields of `engine.messages.Stats`, by name."""
        usage = self._cache.usage()
        return {
            "num_running": len(self._running),
            "num_waiting": len(self._waiting),
            "kv_blocks_total": usage.num_blocks,
            "kv_blocks_held": usage.num_held,
            "kv_blocks_cached": usage.num_cached,
            "kv_slots_filled": usage.num_filled,
            **self._counters,
        }

    def check(self) -> None:
        """Raise AssertionError unless requests, slots, queues and cache agree."""
        assert sorted(map(_order, self._waiting)) == list(map(_order, self._waiting))
        lives = [live for choices in self._live.values() for live in choices.values()]
        assert {*self._waiting, *self._running} == set(lives)
        assert len(self._waiting) + len(self._running) == len(lives)
        slots = [live.slot for live in self._running]
        assert sorted(slots + self._slots) == list(range(self._limits.max_seqs))
        for live in self._waiting:
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
        prefills.sort(key=lambda live: -live.request.terms.priority)
        return decodes + prefills

    def _make_room(self, live: Live, draft: Draft) -> Work | None:
        """Work for a request whose blocks are not all there: less of it, or others must go; None if it goes itself."""
        while (room := self._cache.room(live.request)) < 1:
            assert len(self._running) > 1, "add() refuses what does not fit alone"
            victim = min(self._running, key=self._loss)
            draft.drop(victim.slot)
            self._preempt(victim)
            if victim is live:
                return None
        work = draft.portion(live.request, live.slot, room)
        if work is not None and not self._cache.grow(live.request, work.stop):
            raise AssertionError("room() and grow() disagree")
        return work

    def _loss(self, live: Live) -> tuple[bool, int, int, int]:
        """Smallest: the one to preempt. The tokens lost are at most those that no other request shares."""
        return (
            live.request.num_preemptions >= MAX_PREEMPTIONS,
            live.request.terms.priority,
            self._cache.num_private(live.request),
            -live.order[2],
        )

    def _preempt(self, live: Live) -> None:
        self._leave(live)
        live.request.num_preemptions += 1
        self._counters["preemptions"] += 1
        bisect.insort(self._waiting, live, key=_order)

    def _admit(self, draft: Draft) -> None:
        """Admit the waiting in order, each only where all it has to compute, and one token more, could be held now."""
        if not self._waiting or not self._slots:
            return
        passed: list[Live] = []  # they wait for blocks that another is computing: equal prefixes are computed once
        num_seen = 0
        num_reserved = sum(map(self._reserved, self._running))
        for live in self._waiting:
            if draft.num_tokens < 1 or draft.num_rows < 1 or not self._slots:
                break
            request = live.request
            if live.awaits is None or not self._cache.is_coming(live.awaits):
                limit = self._reusable(request)
                match = self._cache.match(request, limit)
                live.awaits = self._cache.awaited(request, match, limit)
                if live.awaits is None:
                    num_tokens = min(request.num_tokens + 1, live.max_computed)
                    if not self._cache.admit(request, match, num_tokens, num_reserved):
                        break
                    self._join(live, draft)
                    num_reserved += self._reserved(live)
            if live.awaits is not None:
                passed.append(live)
            num_seen += 1
        self._waiting[:num_seen] = passed

    def _reserved(self, live: Live) -> int:
        """Blocks that a running request will still take soon: for the tokens it knows and a block of output."""
        request = live.request
        num_tokens = min(request.num_tokens + BLOCK_SIZE, live.max_computed)
        return max(0, blocks_for(num_tokens) - len(request.tables[0]))

    @staticmethod
    def _reusable(request: Request) -> int:
        """Tokens that may come from the cache: not the last known one, whose logits are drawn from, and none whose
        logits are still to be scored for prompt_logprobs."""
        num_scored = len(request.prompt_logprobs)
        if request.params.prompt_logprobs is not None and num_scored < len(request.prompt_ids) - 1:
            return num_scored
        return request.num_tokens - 1

    def _join(self, live: Live, draft: Draft) -> None:
        """An admitted request begins to run in the step that is being made, where its copies are due."""
        request = live.request
        live.slot = self._slots.pop()
        self._running.append(live)
        work = draft.portion(request, live.slot)
        if work is None or not self._cache.grow(request, work.stop):
            raise AssertionError("admission counts tokens and blocks")
        draft.add(work)
        if request.num_preemptions == 0:
            live.num_cached = live.high_water = request.num_cached
            self._counters["cached_tokens"] += request.num_cached

    def _leave(self, live: Live) -> None:
        self._running.remove(live)
        self._slots.append(live.slot)
        live.slot = -1
        self._cache.free(live.request, keep_tail=live.request.finish_reason is not FinishReason.ERROR)

    def _end(self, live: Live) -> None:
        if live.slot < 0:
            del self._waiting[bisect.bisect_left(self._waiting, live.order, key=_order)]
        else:
            self._leave(live)
        self._cache.forget(live.request)
        choices = self._live[live.request.id]
        del choices[live.request.choice]
        if not choices:
            del self._live[live.request.id]

    def _count(self, live: Live, work: Work) -> None:
        start, stop, high_water = work.start, work.stop, live.high_water
        if start < high_water:
            self._counters["recomputed_tokens"] += min(stop, high_water) - start
            start = high_water
        if start < stop:
            live.high_water = stop
            if start < (num_prompt := len(work.request.prompt_ids)):
                self._counters["prompt_tokens"] += min(stop, num_prompt) - start
        self._counters["output_tokens"] += work.draws

    @staticmethod
    def _finish_reason(live: Live) -> FinishReason | None:
        request = live.request
        if request.output_ids and request.output_ids[-1] in request.stop_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if request.num_computed >= live.max_computed else None


def _order(live: Live) -> tuple[int, float, int, int]:
    return live.order
