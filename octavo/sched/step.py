"""Step and Work: what one step computes, as the scheduler hands it to `batch` and takes it back in `commit`."""

from __future__ import annotations

import sys
from typing import NamedTuple

from octavo.cache.groups import Copy
from octavo.request import Request


class Work(NamedTuple):
    """Tokens [start, start + num_tokens) of one request.

    Its logit rows, in order: one for each position of [first_scored, first_scored + num_scored), which scores the
    prompt token after it, then, where `draws`, one for the last token, which draws the next. Where the request has a
    pool, the states of these positions are pooled instead of scoring anything.
    """

    request: Request
    slot: int  # below max_num_seqs, the request's own while it runs
    start: int
    num_tokens: int
    first_scored: int
    num_scored: int
    draws: bool

    @property
    def stop(self) -> int:
        return self.start + self.num_tokens

    @property
    def num_rows(self) -> int:
        return self.num_scored + self.draws

    @property
    def is_decode(self) -> bool:
        """The last token known, which draws the next, and nothing else."""
        return self.num_tokens == 1 and self.draws and not self.num_scored


class Step(NamedTuple):
    """Valid until it is committed."""

    work: list[Work]
    copies: list[list[Copy]]  # per KV group

    @property
    def num_tokens(self) -> int:
        return sum(work.num_tokens for work in self.work)

    @property
    def outputs(self) -> set[str]:
        """Outputs of the graph that are pooled of it."""
        return {work.request.pool.output for work in self.work if work.num_scored and work.request.pool is not None}

    def prompts_done(self) -> list[Request]:
        """The requests whose prompts this step ends."""
        return [work.request for work in self.work if work.start < len(work.request.prompt_ids) <= work.stop]


class Draft:
    """A step in the making: what is left of its bounds, and the work so far."""

    def __init__(self, num_tokens: int, num_rows: int) -> None:
        self.num_tokens = num_tokens  # left
        self.num_rows = num_rows  # left
        self.work: dict[int, Work] = {}  # by slot
        self.preempted = False  # a request gave up its blocks for this step

    def add(self, work: Work) -> None:
        self.work[work.slot] = work
        self.num_tokens -= work.num_tokens
        self.num_rows -= work.num_rows

    def drop(self, slot: int) -> None:
        """Take back the work of a slot, if there is."""
        work = self.work.pop(slot, None)
        if work is not None:
            self.num_tokens += work.num_tokens
            self.num_rows += work.num_rows

    def portion(self, request: Request, slot: int, max_tokens: int = sys.maxsize) -> Work | None:
        """The most of what `request` wants and the bounds still allow; None when that is nothing."""
        start, known = request.num_computed, request.num_tokens
        stop = min(known, start + min(max_tokens, self.num_tokens))
        first_scored, end_scored = stop, 0
        if request.pool is not None:
            wanted = request.pool.wanted
            first_scored, end_scored = max(start, wanted.start), wanted.stop
        elif request.params.prompt_logprobs is not None:
            first_scored = max(start, len(request.prompt_logprobs))
            end_scored = len(request.prompt_ids) - 1  # no prompt token follows the last one
        while stop > start:
            draws = stop == known and request.params.max_tokens != 0
            num_scored = max(0, min(stop, end_scored) - first_scored)
            excess = num_scored + draws - self.num_rows
            if excess <= 0:
                return Work(request, slot, start, stop - start, first_scored, num_scored, draws)
            stop -= excess
        return None
