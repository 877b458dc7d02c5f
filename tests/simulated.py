"""A machine in simulated time: the scheduler with a clock of its own, and steps that take what a formula says."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from octavo.backends.base import Limits, StepResult
from octavo.cache.blocks import GroupSpec
from octavo.cache.kv import KvCache
from octavo.request import FinishReason, Request, SamplingParams, Terms
from octavo.sched.cost import Load, load_of
from octavo.sched.live import Update
from octavo.sched.scheduler import Scheduler
from octavo.sched.step import Step


def seconds_of(load: Load) -> float:
    """About what a small model on two cores takes: 2 ms, 0.8 ms a token, attention, 0.2 ms a row."""
    return 2e-3 + 8e-4 * load.num_tokens + 1e-7 * load.num_pairs + 1e-7 * load.num_context + 2e-4 * load.num_rows


class Machine:
    """Draws token 1 for every row. `token_times`: when each choice drew, by key."""

    def __init__(
        self, num_blocks: int = 4096, max_seqs: int = 16, max_tokens: int = 512, max_model_len: int = 16384,
        seconds_of: Callable[[Load], float] = seconds_of, **options: Any,
    ) -> None:  # fmt: skip
        self.now = 0.0
        self.limits = Limits(max_tokens, max(64, max_seqs), max_seqs, max_model_len)
        self.scheduler = Scheduler(KvCache([GroupSpec(num_blocks)]), self.limits, clock=lambda: self.now, **options)
        self.token_times: dict[tuple[str, int], list[float]] = {}
        self.served: Counter[str] = Counter()  # tokens computed by tenant
        self.steps: list[Step] = []
        self._seconds_of = seconds_of
        self._fresh = iter(range(10, 2**30))

    def add(self, id: str, prompt: int | list[int], max_tokens: int, **terms: Any) -> Request:
        """prompt: a number of tokens that no other request has, or the tokens."""
        if isinstance(prompt, int):
            prompt = [next(self._fresh) for _ in range(prompt)]
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        request = Request(id, 0, prompt, params, seed=0, terms=Terms(**terms), arrival=self.now)
        self.scheduler.add(request)
        return request

    def step(self) -> list[Update]:
        """What was told, in the step or outside of it; the clock goes on by the step, or by a millisecond."""
        step = self.scheduler.schedule()
        updates = self.scheduler.dropped()
        if step is None:
            self.now += 1e-3
            return updates
        self.steps.append(step)
        seconds = self._seconds_of(load_of(step.work))
        self.now += seconds
        for work in step.work:
            self.served[work.request.terms.tenant] += work.num_tokens
        num_rows = sum(work.num_rows for work in step.work)
        zeros = np.zeros(num_rows, np.float32)
        result = StepResult(
            np.ones(num_rows, np.int32), zeros, np.ones(num_rows, np.int32), np.zeros((num_rows, 0), np.int32),
            np.zeros((num_rows, 0), np.float32), np.zeros(num_rows, np.bool_),
        )  # fmt: skip
        new = self.scheduler.commit(step, result)
        self.scheduler.took(step, seconds)
        for update in new:
            self.token_times.setdefault(update.request.key, []).extend([self.now] * len(update.token_ids))
        return updates + new

    def finish(self, most_steps: int = 100_000) -> None:
        for _ in range(most_steps):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError("requests wait for ever")

    def gaps(self, request: Request) -> list[float]:
        times = self.token_times[request.key]
        return [b - a for a, b in itertools.pairwise(times)]


def whole(request: Request) -> bool:
    return request.finish_reason is FinishReason.LENGTH and len(request.output_ids) == request.params.max_tokens
