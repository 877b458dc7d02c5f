"""StepCost: how long a step will take, learned from the steps that ran.

The time of a step is taken as a sum over what it does: a fixed part, tokens, pairs of token and context (attention of
prefills), context read (attention of decodes) and logit rows. The factors are fitted to the relative error, with the
influence of outliers bounded: other programs use the machine too. Steps are remembered by size, the latest of each,
so that hours of decoding do not forget what a prefill costs.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.sched.step import Work

REMEMBERED = 16
"""Steps of each power of two of tokens. Few, so that a machine that became slower is noticed within as many steps."""

FIT_STEPS = 8
MOST_UNFIT = 64
"""Steps between two fits: of those that are asked for, and where nobody asks. One takes 0.3 ms, and the caches it finds
full of weights; where streams decode and nothing waits, nobody asks."""

OUTLIER = 0.2
"""Relative error from which on a step counts no more than one with this error (Huber's loss)."""

TAIL_STEPS = 512
LEAST_TAIL = 1.25
"""Steps that the tail is taken of, and what it is while few are known: predictions of mixed steps miss by a fifth."""

USUAL_FITS = 64
"""Fits that a usual step is the median of: a machine that is slow for some seconds is not the usual one."""

FAR = 32
"""Steps of so many times the tokens, or pairs of tokens, of any that ran are not known: a step of one token, the first of
all, would have a prompt of a thousand take an hour."""

MANY = 2**31 - 1
"""Tokens: more than any step has."""


class Load(NamedTuple):
    """What a step does, in the units of its cost."""

    num_steps: int = 0
    num_tokens: int = 0
    num_pairs: float = 0.0  # of a token and a token that it attends to
    num_context: int = 0  # tokens read from the cache, once per sequence
    num_rows: int = 0


def load_of(works: Iterable[Work]) -> Load:
    """Of a step with these pieces of work."""
    num_tokens = num_context = num_rows = 0
    num_pairs = 0.0
    for work in works:
        n, start = work.num_tokens, work.start
        num_tokens += n
        num_pairs += n * start + n * (n + 1) / 2
        num_context += start + n
        num_rows += work.num_rows
    return Load(1, num_tokens, num_pairs, num_context, num_rows)


class StepCost:
    """Deterministic: the same steps give the same predictions. Before the first step everything is free."""

    def __init__(self) -> None:
        self._seen: dict[int, deque[tuple[Load, float]]] = {}
        self._factors = (0.0,) * len(Load._fields)
        self._fits = np.zeros((0, len(Load._fields)))  # the latest factors
        self._num_known = 0  # steps remembered at the last fit
        self._num_new = 0  # observed since
        self._most_tokens = 0
        self._most_pairs = 0.0
        self._ratios: deque[float] = deque(maxlen=TAIL_STEPS)  # of the time of a step to what was thought of it
        self._tail = LEAST_TAIL

    def predict(self, load: Load) -> float:
        """Seconds of a step."""
        return _sum_of(self._fitted(), load)

    def usual(self, load: Load) -> float:
        """Seconds of a step as it was for a while, where `predict` says what it takes at this moment: that at most, since
        fits of prompts alone, the first after a start, say little of decodes."""
        now = self.predict(load)
        return min(now, float(np.median(self._fits @ load))) if len(self._fits) else now

    def observe(self, load: Load, seconds: float) -> float:
        """A step took so long. Returns what had been thought of it."""
        thought = _sum_of(self._factors, load)
        self._most_tokens = max(self._most_tokens, load.num_tokens)
        self._most_pairs = max(self._most_pairs, load.num_pairs)
        if thought and self._num_known >= REMEMBERED:  # the first thoughts are far off
            self._ratios.append(seconds / thought)
        size = load.num_tokens.bit_length()
        if size not in self._seen:
            self._seen[size] = deque(maxlen=REMEMBERED)
        self._seen[size].append((load, seconds))
        self._num_new += 1
        if self._num_new >= min(MOST_UNFIT, self._num_known):
            self._fit()
        return thought

    @property
    def error(self) -> float:
        """Median relative error of the latest predictions."""
        return statistics.median(abs(1 / ratio - 1) for ratio in self._ratios) if self._ratios else 0.0

    @property
    def tail(self) -> float:
        """How many times what was thought of them 99 of 100 of the latest steps took at most; not below LEAST_TAIL."""
        return self._tail

    def most_tokens(self, start: int, seconds: float) -> int:
        """Tokens from position `start` on that a step computes in so much more time, with one row."""
        _, token, pair, context, row = self._fitted()
        linear = token + pair * (start + 0.5) + context
        left = seconds - context * start - row
        if left <= 0:
            return 0
        if linear <= 0:
            return MANY
        return int(min(2 * left / (linear + math.sqrt(linear * linear + 2 * pair * left)), MANY))

    def seconds(self, start: int, num_tokens: int) -> float:
        """What so many tokens from position `start` on, with one row, add to a step."""
        n = num_tokens
        return self.predict(Load(0, n, n * start + n * (n + 1) / 2, start + n, 1))

    def prefill_seconds(self, start: int, stop: int, chunk: int) -> float:
        """Of the tokens [start, stop) in steps of `chunk` with nothing beside them; 0: no step that ran comes near."""
        fixed, token, pair, context, row = self._fitted()
        n = stop - start
        largest = min(n, chunk)
        if largest > FAR * self._most_tokens or largest * (stop - largest / 2) > FAR * self._most_pairs:
            return 0.0
        num_steps = -(-n // chunk)
        middle = (start + stop) / 2
        return float(num_steps * (fixed + context * middle) + n * (token + pair * middle) + row)

    def _fitted(self) -> tuple[float, ...]:
        """The factors, of all but the latest steps."""
        if self._num_new >= min(FIT_STEPS, max(1, self._num_known)):  # the first steps are waited for
            self._fit()
        return self._factors

    def _fit(self) -> None:
        """Least squares of the relative error, all factors at least zero."""
        seen = [pair for steps in self._seen.values() for pair in steps]
        seconds = np.array([pair[1] for pair in seen])
        loads = np.array([pair[0] for pair in seen], float) / seconds[:, None]
        scale = np.maximum(loads.max(axis=0), 1e-30)
        loads /= scale
        weights = np.ones(len(seen))
        factors = np.zeros(loads.shape[1])
        for _ in range(4):
            factors = _nonnegative(loads * weights[:, None], weights)
            weights = np.sqrt(OUTLIER / np.maximum(np.abs(loads @ factors - 1), OUTLIER))
        self._factors = tuple((factors / scale).tolist())
        self._fits = np.vstack([self._fits[1 - USUAL_FITS :], factors / scale])
        self._num_known, self._num_new = len(seen), 0
        if 2 * len(self._ratios) >= TAIL_STEPS:
            self._tail = max(LEAST_TAIL, float(np.quantile(self._ratios, 0.99)))


def _sum_of(factors: tuple[float, ...], load: Load) -> float:
    fixed, token, pair, context, row = factors
    return (
        fixed * load.num_steps
        + token * load.num_tokens
        + pair * load.num_pairs
        + context * load.num_context
        + row * load.num_rows
    )


def _nonnegative(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """Least squares of a x = b, where the most negative factor is left out until none is."""
    columns = list(range(a.shape[1]))
    x = np.zeros(a.shape[1])
    while columns:
        # A little weight on zero decides where columns say the same, as in steps of decodes alone.
        rows = np.vstack([a[:, columns], 1e-3 * np.eye(len(columns))])
        found, *_ = np.linalg.lstsq(rows, np.concatenate([b, np.zeros(len(columns))]), rcond=None)
        worst = int(np.argmin(found))
        if found[worst] >= 0:
            x[columns] = found
            break
        del columns[worst]
    return x
