"""Rows: a cursor over a StepResult, in the order of the step's work."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from octavo.backends.base import F32, StepResult
from octavo.request import TokenLogprobs
from octavo.sched.step import Work


class Rows:
    """Every piece of work takes its rows once, by `take` or `skip`."""

    def __init__(self, result: StepResult, states: Mapping[str, F32] = MappingProxyType({})) -> None:
        """states: outputs of the graph that are pooled, [R, columns]."""
        self._result = result
        self._states = states
        self._token_ids: list[int] = result.token_ids.tolist()
        self._invalid: list[bool] = result.invalid.tolist()
        self._row = 0

    def error(self, work: Work) -> str | None:
        """Why the rows of `work` cannot be used; takes none."""
        if work.request.pool is not None and not np.isfinite(self._pooled(work)).all():
            return f"the model computed no finite state at tokens {work.start} to {work.stop - 1}"
        if True not in self._invalid[self._row : self._row + work.num_rows]:
            return None
        constraint = work.request.constraint
        if constraint is not None and constraint.error is not None:
            return constraint.error
        return f"the model computed no finite logit at tokens {work.start} to {work.stop - 1}"

    def skip(self, work: Work) -> None:
        self._row += work.num_rows

    def take(self, work: Work) -> tuple[list[int], list[TokenLogprobs]]:
        """The drawn token and its scores, where there are; scores of prompt tokens are added to the request, states to
        its pool."""
        request = work.request
        params = request.params
        last = self._row + work.num_scored
        if request.pool is None:
            for row in range(self._row, last):
                request.prompt_logprobs.append(self._scores(row, params.prompt_logprobs or 0))
        elif work.num_scored:
            request.pool.take(self._pooled(work))
        self.skip(work)
        if not work.draws:
            return [], []
        scores = [] if params.logprobs is None else [self._scores(last, params.logprobs)]
        return [self._token_ids[last]], scores

    def _pooled(self, work: Work) -> F32:
        """The states of the rows that are for the pool."""
        assert work.request.pool is not None
        if not work.num_scored:
            return np.zeros((0, 0), np.float32)
        return self._states[work.request.pool.output][self._row : self._row + work.num_scored]

    def _scores(self, row: int, num_top: int) -> TokenLogprobs:
        result = self._result
        return TokenLogprobs(
            self._token_ids[row],
            float(result.logprobs[row]),
            int(result.ranks[row]),
            result.top_ids[row, :num_top].tolist(),
            result.top_logprobs[row, :num_top].tolist(),
        )
