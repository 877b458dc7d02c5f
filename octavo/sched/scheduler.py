"""Scheduler: which tokens of which requests the next step computes.

One rule: a request has tokens known and tokens computed, and a step hands out a budget so that the second catches
up with the first. Chunked prefill, cache hits and resumption after preemption are the same arithmetic.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from octavo.backends.base import F32, Limits, StepResult
from octavo.cache.blocks import BLOCK_SIZE
from octavo.cache.integrity import exhaust
from octavo.cache.kv import KvCache
from octavo.cache.match import Match
from octavo.explain import Explanation
from octavo.request import Constraint, FinishReason, ParameterError, Request
from octavo.sched.admission import Admission, Fetch
from octavo.sched.beam import BeamSearch
from octavo.sched.budget import StepBudget, Want
from octavo.sched.cost import StepCost, load_of
from octavo.sched.deadlines import Deadlines
from octavo.sched.fairness import FairShares
from octavo.sched.live import Live, Update
from octavo.sched.outlook import unfinished_tokens, waiting_seconds
from octavo.sched.preempt import Headroom, makes_way, victim
from octavo.sched.queue import WaitingQueue, aged
from octavo.sched.recent import Recent
from octavo.sched.rows import Rows
from octavo.sched.searches import Searches
from octavo.sched.step import Draft, Step, Work


class Scheduler:
    """Requests waiting and running. The order of calls is schedule, run the step, commit; `add` between any two."""

    def __init__(
        self,
        cache: KvCache,
        limits: Limits,
        fetch: Fetch | None = None,
        clock: Callable[[], float] = time.monotonic,
        target_itl: float | None = None,
        whole: bool = False,
    ) -> None:
        """clock: seconds, the same that `Request.arrival` is read from. target_itl, whole: see `StepBudget`."""
        assert 1 <= limits.max_seqs <= min(limits.max_tokens, limits.max_rows), "each sequence can draw in each step"
        self._cache = cache
        self._limits = limits
        self._clock = clock
        self._live: dict[str, dict[int, Live]] = {}  # by id, then choice
        self._shares = FairShares()
        self._headroom = Headroom()
        self._queue = WaitingQueue(self._shares, lambda live: self._admission.prefix_len(live, self._num_steps))
        self._admission = Admission(cache, self._queue, self._headroom, self._find, fetch)
        self._cost = StepCost()
        self._budget = StepBudget(self._cost, target_itl, whole)
        self._deadlines = Deadlines(self._prefill_seconds, self._is_over)
        self._running: list[Live] = []  # by admission
        self._slots = list(range(limits.max_seqs - 1, -1, -1))
        self._in_step = False
        self._aborted: list[Live] = []  # while a step that may write their blocks is in flight
        self._dropped: list[Update] = []  # ended outside of a step
        self._recent = Recent(cache, self._queue)
        self._searches = Searches(
            self._live, self._running, self._slots, cache, self._queue, self._recent, self._end
        )  # fmt: skip
        self._num_added = 0
        self._num_steps = 0
        self._counters = {
            "prompt_tokens": 0, "cached_tokens": 0, "output_tokens": 0, "forced_tokens": 0, "preemptions": 0,
            "recomputed_tokens": 0,
        }  # fmt: skip
        self._predicted_seconds = 0.0

    # Requests come and go

    def add(self, request: Request, search: BeamSearch | None = None) -> None:
        """Queue a request. ValueError where it could never run; its id and choice must not be live.

        search: the request is its first beam; the id must not be live.
        """
        assert request.choice not in self._live.get(request.id, ())
        num_tokens = self._max_computed(request)
        if not self._cache.fits(num_tokens):
            raise ValueError(
                f"the KV cache cannot hold the {num_tokens} tokens of prompt and output that were asked for: "
                f"it has room for {self._cache.most_tokens()}"
            )
        if request.id not in self._live:
            self._recent.forget(request.id)
        self._num_added += 1
        live = Live(request, self._num_added, num_tokens)
        live.search = search
        self._live.setdefault(request.id, {})[request.choice] = live
        self._queue.add(live, self._clock())
        self._deadlines.add(live)

    def abort(self, id: str, choice: int = -1) -> list[Request]:
        """End a request, or one choice of it, in any state. Blocks that a step in flight writes are freed with its end.

        A beam search ends as a whole. Returns what its clients wait for, each choice once.
        """
        ended = []
        search: BeamSearch | None = None
        for live in list(self._live.get(id, {}).values()):
            search = live.search
            if (choice in (-1, live.request.choice) or search) and live.request.finish_reason is None:
                live.request.finish_reason = FinishReason.ABORT
                ended.append(live.request)
                if search is None or len(ended) == 1:
                    self._recent.ended(live, live.request)
                if self._in_step and live.slot >= 0:
                    self._aborted.append(live)
                else:
                    self._end(live)
        if search is not None and ended:
            return [answer.request for answer in search.answers(FinishReason.ABORT)]
        return ended

    def dropped(self) -> list[Update]:
        """Those that ended outside of a step since the last call, other than by `abort`."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def is_live(self, id: str) -> bool:
        """Whether a choice of this request waits or runs."""
        return id in self._live

    @property
    def cost(self) -> StepCost:
        """What steps cost here, as measured so far."""
        return self._cost

    @property
    def has_work(self) -> bool:
        """A request is live. It may wait for a gate: then `schedule` gives None."""
        return bool(self._live)

    @property
    def runs_all(self) -> bool:
        """Requests run and none waits."""
        return bool(self._running) and not self._queue

    # A step

    def schedule(self) -> Step | None:
        """The next step: running decodes, running prefills, then the waiting, as far as tokens, rows and blocks go."""
        assert not self._in_step, "the last step is not committed"
        now = self._clock()
        self._num_steps += 1
        for live, error in self._queue.look_at_gates(now):
            param = error.param if isinstance(error, ParameterError) else None
            self._drop(live, FinishReason.ERROR, str(error), param)
        for missed in self._deadlines.missed(now):
            self._drop(missed.live, FinishReason.TIMEOUT, missed.message, missed.field)
        waiting = None if self._slots else self._queue.first(now)
        if waiting is not None and (loser := makes_way(waiting, self._running, self._cache)):
            self._preempt(loser, now)
        draft = Draft(self._limits.max_tokens, self._limits.max_rows)
        decodes, prefills = self._turns()
        for live in decodes:
            self._give(live, draft, now)
        self._prefill(prefills, draft, now)
        while not draft.work and (resting := [live for live in self._running if live.resting]):
            if self._queue.first(now) is None:
                break
            self._preempt(victim(resting, self._cache), now)  # they hold what the last of their search waits for
            self._prefill([], draft, now)
        if not draft.work:
            return None
        self._in_step = True
        return Step(list(draft.work.values()), self._cache.copies())

    def commit(self, step: Step, result: StepResult, states: Mapping[str, F32] = MappingProxyType({})) -> list[Update]:
        """Apply what a step computed: tokens, scores, published blocks, stop rules. Returns what clients should hear.

        states: `Program.output` of those that `step.outputs` names."""
        self._in_step = False
        self._cache.end_step()
        now = self._clock()
        rows = Rows(result, states)
        updates = []
        searches: dict[str, str | None] = {}  # ids of those to look at -> why it failed
        for work in step.work:
            request = work.request
            live = self._live[request.id][request.choice]
            if request.finish_reason is not None:  # aborted meanwhile
                rows.skip(work)
                continue
            error = rows.error(work)
            if error is None:
                self._count(live, work)
                live.served = now
                tokens, logprobs = rows.take(work)
                self._cache.advance(request, work.stop)
                if live.search is None:
                    request.output_ids += tokens
                    request.finish_reason = self._finish_reason(live)
                    if tokens and request.constraint is not None:
                        tokens += self._jump(live, request.constraint)
                elif tokens:
                    live.search.take(request, logprobs[0])
                    live.resting = True
                    searches.setdefault(request.id, None)
                    tokens = []
            else:
                tokens, logprobs = [], []
                rows.skip(work)
                if live.search is None:
                    request.finish_reason = FinishReason.ERROR
                else:
                    searches[request.id] = error
            if request.finish_reason is not None:
                self._recent.ended(live, request)
                updates.append(Update(request, tokens, logprobs, live, error))
                self._end(live)
            elif tokens or (request.terms.reports_prefill and not request.output_ids and not live.resting):
                updates.append(Update(request, tokens, logprobs, live))
        for id, error in searches.items():
            updates += self._searches.turn(id, error, now, self._num_added + 1)
            self._num_added += len(self._live.get(id, ()))
        while self._aborted:
            self._end(self._aborted.pop())
        return updates

    def took(self, step: Step, seconds: float) -> None:
        """`step` was scheduled, run and committed in so much time."""
        self._predicted_seconds += self._cost.observe(load_of(step.work), seconds)

    def next_deadline(self) -> float | None:
        """When `schedule` has something to do although nothing else happens, by the clock."""
        return self._deadlines.next()

    # Numbers

    def stats(self) -> dict[str, Any]:
        """Fields of `engine.messages.Stats`, by name."""
        usage, unfinished = self._cache.usage(), unfinished_tokens(self._running)
        return {
            "num_running": len(self._running),
            "num_waiting": len(self._queue),
            "waiting_by_reason": self._queue.reasons(),
            "waiting_tokens": self._queue.num_tokens + unfinished,
            "waiting_seconds": waiting_seconds(unfinished, self._queue, self._headroom, self._cost, self._limits),
            "predicted_seconds": self._predicted_seconds,
            "prediction_error": self._cost.error,
            "kv_blocks_total": usage.num_blocks,
            "kv_blocks_held": usage.num_held,
            "kv_blocks_cached": usage.num_cached,
            "kv_score_bytes": usage.score_bytes,
            "kv_slots_filled": usage.num_filled,
            **self._counters,
        }

    def adapters(self) -> Counter[str]:
        """Digests of the adapters of live choices, and how many each has."""
        return Counter(live.request.adapter for lives in self._live.values() for live in lives.values())

    def explain(self, id: str) -> list[Explanation]:
        """Of the choices of the request `id`, or of `id`-0, `id`-1 and so on: live ones, and the last that have ended."""
        return self._recent.explain(id, self._live, self._clock())

    def check(self) -> None:
        """Raise AssertionError unless requests, slots, queues and cache agree."""
        exhaust(self.check_in_parts())

    def check_in_parts(self) -> Iterator[None]:
        """The same, with a breath every few milliseconds. Nothing may change until it ends; it need not be ended."""
        self._queue.check()
        lives = [live for choices in self._live.values() for live in choices.values()]
        away = [live for live in lives if live.resting and live.slot < 0]
        assert {*self._queue, *self._running, *away} == set(lives)
        assert len(self._queue) + len(self._running) + len(away) == len(lives)
        slots = [live.slot for live in self._running]
        assert sorted(slots + self._slots) == list(range(self._limits.max_seqs))
        for live in self._queue:
            assert live.slot < 0 and not live.request.tables
        for live in self._running:
            request = live.request
            assert 0 <= request.num_cached <= request.num_computed <= request.num_tokens
        yield from self._cache.check_in_parts(live.request for live in lives)

    # Inside

    def _max_computed(self, request: Request) -> int:
        """Tokens in the cache at the very end: the last one drawn is never computed."""
        num_prompt, max_tokens = len(request.prompt_ids), request.params.max_tokens
        limit = self._limits.max_model_len
        if max_tokens is not None:
            limit = min(limit, num_prompt + max_tokens)
        return max(num_prompt, limit - 1)

    def _find(self, request: Request) -> Live:
        return self._live[request.id][request.choice]

    def _is_over(self, live: Live) -> bool:
        others = self._live.get(live.request.id, {}).values()
        return not any(other is live or (live.search is not None and other.search is live.search) for other in others)

    def _give(self, live: Live, draft: Draft, now: float, num_tokens: int = sys.maxsize) -> None:
        """Work for a running request, of so many tokens at most."""
        if live.slot < 0:  # preempted by one before it
            return
        work = draft.portion(live.request, live.slot, num_tokens)
        if work is not None and not self._cache.grow(live.request, work.stop):
            work = self._make_room(live, draft, now, num_tokens)
        if work is not None:
            draft.add(work)

    def _turns(self) -> tuple[list[Live], list[Live]]:
        """The running that have something to compute: decodes, which streams wait for, and prefills."""
        decodes, prefills = [], []
        for live in self._running:
            num_left = live.num_left
            if num_left == 1 or (1 < num_left <= BLOCK_SIZE and live.request.output_ids):
                decodes.append(live)
            elif num_left:
                prefills.append(live)
        return decodes, prefills

    def _prefill(self, prefills: list[Live], draft: Draft, now: float) -> None:
        """Share what is left of the step among running prefills and those who are admitted for it."""
        wants = [self._want(live, live.request.num_computed, now) for live in prefills if live.slot >= 0]
        if not wants and not self._queue:
            return
        num_prompts = len(wants) + min(len(self._queue), len(self._slots))
        seconds = self._budget.seconds(load_of(draft.work.values()), num_prompts)
        counts = self._budget.share(wants, seconds, draft.num_tokens)
        if self._queue and not draft.preempted:
            counts = self._admit(wants, counts, seconds, draft.num_tokens, now)
        for live, num_tokens in counts.items():
            self._give(live, draft, now, num_tokens)

    def _admit(
        self, wants: list[Want], counts: dict[Live, int], seconds: float, num_tokens: int, now: float
    ) -> dict[Live, int]:
        """Admit those who get tokens in this step beside `wants`, who get `counts`. The shares of all."""
        beside = False  # what is next in order would get nothing yet: a short one may
        while self._slots:
            candidate = self._admission.candidate(now, shortest=beside)
            if candidate is None:
                return counts
            live, match = candidate
            live.served = now
            want = self._want(live, match.num_tokens, now)
            shares = self._budget.share([*wants, want], seconds, num_tokens)
            if not shares[live]:
                if beside:
                    self._queue.block("budget", now)
                    return counts
                beside = True
                continue
            used = self._admission.admit(live, match, self._running)
            if used is None:
                self._queue.block("blocks", now)
                return counts
            self._queue.take(live, now)
            self._join(live, used)
            wants.append(want)
            counts = shares
        self._queue.block("slots", now)
        return counts

    def _want(self, live: Live, start: int, now: float) -> Want:
        return Want(live, aged(live.priority, now - live.served), start, live.request.num_tokens)

    def _make_room(self, live: Live, draft: Draft, now: float, num_tokens: int) -> Work | None:
        """Work for a request whose blocks are not all there: less of it, or others must go; None if it goes itself."""
        while (room := self._cache.room(live.request)) < 1:
            assert len(self._running) > 1, "add() refuses what does not fit alone"
            loser = victim(self._running, self._cache)
            draft.drop(loser.slot)
            draft.preempted = True
            self._preempt(loser, now)
            if loser is live:
                return None
        work = draft.portion(live.request, live.slot, min(num_tokens, room))
        if work is not None and not self._cache.grow(live.request, work.stop):
            raise AssertionError("room() and grow() disagree")
        return work

    def _preempt(self, live: Live, now: float) -> None:
        self._leave(live, keep_tail=True)
        live.request.num_preemptions += 1
        self._counters["preemptions"] += 1
        self._headroom.preempted()
        if live.search is not None:
            live.search.num_preemptions += 1
        if not live.resting:
            self._queue.add(live, now)

    def _prefill_seconds(self, live: Live) -> float:
        """The least time until a request has drawn its next token."""
        request = live.request
        start = request.num_computed if live.slot >= 0 else self._admission.prefix_len(live, self._num_steps)
        return self._cost.prefill_seconds(start, request.num_tokens, self._limits.max_tokens)

    def _join(self, live: Live, match: Match) -> None:
        """An admitted request begins to run in the step that is being made, where its copies are due."""
        request = live.request
        live.slot = self._slots.pop()
        self._running.append(live)
        if request.num_preemptions == 0:
            live.match = match
            live.num_cached = live.high_water = request.num_cached
            start, stop = request.from_disk or (0, 0)
            live.num_disk = max(0, min(stop, request.num_cached) - start)
            self._counters["cached_tokens"] += request.num_cached
            self._shares.charge(request.terms.tenant, len(request.prompt_ids) - request.num_cached, 0)

    def _leave(self, live: Live, keep_tail: bool) -> None:
        self._running.remove(live)
        self._slots.append(live.slot)
        live.slot = -1
        self._cache.free(live.request, keep_tail)

    def _drop(self, live: Live, reason: FinishReason, error: str, param: str | None = None) -> None:
        """End a request between two steps, or the search that it is a beam of."""
        if live.search is not None:
            self._dropped += self._searches.conclude(live.search, reason, error, param)
            return
        live.request.finish_reason = reason
        self._recent.ended(live, live.request)
        self._dropped.append(Update(live.request, [], [], live, error, param))
        self._end(live)

    def _end(self, live: Live) -> None:
        request = live.request
        if live.slot >= 0:  # nobody will continue an invalid request, or a beam that its search has dropped
            self._leave(live, keep_tail=request.finish_reason not in (None, FinishReason.ERROR))
        elif not live.resting:
            self._queue.remove(live, self._clock())
        if live.match is not None:  # what of the prompt was never computed was no service
            self._shares.charge(request.terms.tenant, min(0, live.high_water - len(request.prompt_ids)), 0)
        stopped = request.finish_reason is FinishReason.ABORT and request.output_ids  # as at a stop string
        if request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH) or stopped:
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
            if live.search is not None:
                live.search.num_recomputed += num_recomputed
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
        if request.output_ids:
            if request.output_ids[-1] in request.stop_ids:
                return FinishReason.STOP
            if request.constraint is not None and request.constraint.ended:
                return FinishReason.STOP
        is_full = request.num_computed >= live.max_computed or request.num_tokens > live.max_computed
        return FinishReason.LENGTH if is_full else None

    def _jump(self, live: Live, constraint: Constraint) -> list[int]:
        """Tokens that the constraint leaves no choice about, appended to the output: draws would give the same, but take
        a step each. Not where each needs a row of its own, for its score or for banned words."""
        request, tokens = live.request, list[int]()
        if request.params.logprobs is not None or request.params.bad_word_ids:
            return tokens
        while request.finish_reason is None and (token := constraint.forced()) is not None:
            request.output_ids.append(token)
            tokens.append(token)
            request.finish_reason = self._finish_reason(live)
        self._counters["forced_tokens"] += len(tokens)
        return tokens
