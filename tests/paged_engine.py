"""Scheduler, batches and a model that is a pure function of the prefix, checked after every operation."""

from __future__ import annotations

import random
from collections import Counter
from typing import Self

from octavo.backends.base import Limits
from octavo.cache.blocks import GroupSpec
from octavo.cache.kv import KvCache
from octavo.request import FinishReason, ParameterError, Request, SamplingParams, Terms
from octavo.sched.batch import BatchBuilder
from octavo.sched.scheduler import Scheduler
from octavo.sched.step import Step
from tests.paged_model import VOCAB, PagedModel, Windows, expected


class Door:
    """A gate that the test opens, or shuts for ever."""

    def __init__(self, reason: str = "grammar") -> None:
        self.reason = reason
        self.opened = False
        self.error: ParameterError | None = None

    def is_open(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.opened


class Engine:
    """Scheduler, batches and the pure-function model, checked after every operation."""

    def __init__(
        self, num_blocks: int, max_tokens: int = 64, max_rows: int = 64, max_seqs: int = 8,
        max_model_len: int = 512, enabled: bool = True, windows: Windows = (None,),
        target_itl: float | None = None,
    ) -> None:  # fmt: skip
        self.now = 0.0
        self.doors: list[Door] = []
        self.limits = Limits(max_tokens, max_rows, max_seqs, max_model_len)
        self.cache = KvCache([GroupSpec(num_blocks + g, w) for g, w in enumerate(windows)], enabled)
        self.scheduler = Scheduler(self.cache, self.limits, clock=lambda: self.now, target_itl=target_itl)
        self.batches = BatchBuilder(self.limits, len(windows))
        self.model = PagedModel(windows)
        self.seen: Counter[str] = Counter()
        self.scored: dict[tuple[str, int], list[float]] = {}
        self.updated: dict[tuple[str, int], list[int]] = {}

    def add(self, request: Request) -> Request:
        self.scheduler.add(request)
        self.scheduler.check()
        return request

    def after_a_short_answer(self) -> Self:
        """From now on answers are expected to be short: more are let in than can be held."""
        self.add(make("short", [0], max_tokens=1))
        self.finish()
        return self

    def schedule(self) -> Step | None:
        step = self.scheduler.schedule()
        self.scheduler.check()
        for update in self.scheduler.dropped():
            assert update.error and update.request.finish_reason in (FinishReason.TIMEOUT, FinishReason.ERROR)
            self.seen[str(update.request.finish_reason)] += 1
        if step is None:
            return None
        assert 1 <= step.num_tokens <= self.limits.max_tokens
        assert sum(work.num_rows for work in step.work) <= self.limits.max_rows
        assert len(step.work) <= self.limits.max_seqs
        assert len({work.slot for work in step.work}) == len(step.work)
        for work in step.work:
            for table in work.request.tables:
                assert len(table) == -(-work.stop // 16), "blocks are for the tokens of this step only"
            self.seen["resumed"] += work.request.num_preemptions > 0
            self.seen["chunk"] += work.stop < work.request.num_tokens
            self.seen["left the window"] += any(-1 in table for table in work.request.tables)
            self.seen["kept scores"] += (
                work.request.params.prompt_logprobs is not None and 0 < work.start == work.request.num_cached
            )
            self.seen["shared"] += work.start >= 16 and work.start == work.request.num_cached
        self.seen["copy"] += len(step.copies[0])
        return step

    def commit(self, step: Step, seconds: float = 0.01) -> None:
        updates = self.scheduler.commit(step, self.model.run(self.batches.build(step)))
        self.scheduler.check()
        self.now += seconds
        self.scheduler.took(step, seconds)
        for update in updates:
            request = update.request
            output = self.updated.setdefault(request.key, [])
            output += update.token_ids
            assert output == request.output_ids
            assert len(update.logprobs) == (len(update.token_ids) if request.params.logprobs is not None else 0)

    def step(self) -> bool:
        step = self.schedule()
        if step is not None:
            self.commit(step)
        return step is not None

    def finish(self, most_steps: int = 10_000) -> None:
        for door in self.doors:
            door.opened = True
        for _ in range(most_steps):
            if not self.step():
                break
        assert not self.scheduler.has_work, "requests wait for ever"
        usage = self.cache.usage()
        assert usage.num_held == usage.num_filled == 0

    def verify(self, request: Request) -> None:
        output, scores = expected(request, self.limits.max_model_len, self.model.windows)
        if cut := request.finish_reason in (FinishReason.ABORT, FinishReason.TIMEOUT, FinishReason.ERROR):
            output = output[: len(request.output_ids)]
        else:
            assert self.updated.get(request.key, []) == output
            stopped = bool(output) and output[-1] in request.stop_ids
            assert request.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
        assert request.output_ids == output
        if request.params.prompt_logprobs is not None:
            assert [s.logprob for s in request.prompt_logprobs] == scores[: len(request.prompt_logprobs)]
            assert cut or len(request.prompt_logprobs) == len(scores)


def make(
    id: str, prompt: list[int], choice: int = 0, seed: int = 1, priority: int = 0, terms: Terms | None = None, **params: object
) -> Request:  # fmt: skip
    eos = frozenset({VOCAB - 1})
    terms = terms or Terms(priority=priority)
    return Request(id, choice, prompt, SamplingParams(**params), seed, eos, terms)  # type: ignore[arg-type]


def random_prompt(rng: random.Random, known: list[list[int]], longest: int) -> list[int]:
    """A prompt that often continues, repeats or leaves an earlier sequence."""
    length = rng.randint(1, longest)
    fresh = [rng.randrange(VOCAB) for _ in range(length)]
    if not known or rng.random() < 0.25:
        return fresh
    old = rng.choice(known)
    cut = rng.choice([len(old), len(old) // 16 * 16, rng.randint(0, len(old))])
    return (old[:cut] + (fresh if rng.random() < 0.7 else []))[:longest] or fresh
