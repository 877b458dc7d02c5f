"""Beam search written down plainly: whole distributions, no cache, every sequence computed from its beginning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Distribution = Callable[[list[int]], Sequence[float] | NDArray[np.float64]]
"""Log probabilities of every token of the vocabulary behind a sequence."""


class Found(NamedTuple):
    token_ids: list[int]
    logprob: float
    score: float
    stopped: bool  # by an end token


class Search(NamedTuple):
    best: list[Found]
    margin: float  # least difference in logprob or score that a decision hung on


def plain_beam_search(
    distribution: Distribution,
    prompt: list[int],
    *,
    width: int,
    ends: set[int],
    limit: int,
    min_tokens: int = 0,
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
) -> Search:
    """The `width` best outputs of at most `limit` tokens."""
    running: list[tuple[float, list[int]]] = [(0.0, [])]
    finished: list[Found] = []
    margin = float("inf")

    def finish(total: float, output: list[int], stopped: bool) -> None:
        nonlocal margin
        finished.append(Found(output, total, total / len(output) ** length_penalty, stopped))
        finished.sort(key=lambda found: -found.score)  # stable: the earlier of equal ones first
        margin = min([margin] + [a.score - b.score for a, b in pairwise(finished)])
        del finished[width:]

    for length in range(1, limit + 1):
        table = []
        for b, (total, output) in enumerate(running):
            for token, logprob in enumerate(distribution(prompt + output)):
                if length > min_tokens or token not in ends:
                    table.append((-(total + float(logprob)), b, token))
        table.sort()
        examined = table[: 2 * width + len(ends) * width + 1]
        margin = min([margin] + [b[0] - a[0] for a, b in pairwise(examined)])
        going_on = [row for row in table if row[2] not in ends][:width]
        for row in table[:width]:
            if row[2] in ends:
                finish(-row[0], [*running[row[1]][1], row[2]], True)
        running = [(-total, [*running[b][1], token]) for total, b, token in going_on]
        if length == limit:
            for total, output in running:
                finish(total, output, False)
            break
        if len(finished) == width:
            if early_stopping is True:
                break
            reached = limit if early_stopping == "never" and length_penalty > 0 else length
            hope = running[0][0] / reached**length_penalty
            margin = min(margin, abs(finished[-1].score - hope))
            if finished[-1].score >= hope:
                break
    return Search(finished, margin)
