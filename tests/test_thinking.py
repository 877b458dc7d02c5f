"""Where thinking begins, ends and must end, by the tokens alone."""

from __future__ import annotations

import pytest

from octavo.request import Reasoning
from octavo.sched.thinking import Thinking

START, END = 8, 9


@pytest.mark.parametrize(
    ("start", "budget", "tokens", "anywhere", "length", "forced"),
    [
        (None, None, [1, 2, 3], False, None, None),  # the prompt has begun it
        (None, None, [1, END, 2], False, 2, None),
        (None, 2, [1], False, None, None),
        (None, 2, [1, 2], False, None, END),
        (None, 0, [], False, None, END),
        (None, 2, [1, 2, END, 3], False, 3, None),
        (START, None, [], False, None, None),
        (START, None, [1], False, 0, None),
        (START, 0, [1], False, 0, None),
        (START, 0, [START], False, None, END),
        (START, 2, [START, 1], False, None, None),
        (START, 2, [START, 1, 2], False, None, END),
        (START, 2, [START, START, 2], False, None, END),
        (START, 2, [1, 1, 1], True, None, None),  # not yet, and perhaps never
        (START, 2, [1, START, 1, 2], True, None, END),
        (START, 2, [1, START, 1, END], True, 4, None),
        (START, 2, [END, 1, 1], True, None, None),
    ],
)
def test_thinking(
    start: int | None, budget: int | None, tokens: list[int], anywhere: bool, length: int | None, forced: int | None
) -> None:
    reasoning = Reasoning(start=start, end=END, budget=budget)
    whole = Thinking(reasoning, tokens, anywhere)
    assert (whole.length, whole.forced) == (length, forced)
    assert whole.open_start == (start if not tokens else None)
    step = Thinking(reasoning, (), anywhere)
    for token in tokens:
        step.push(token)
    assert (step.length, step.forced) == (length, forced)
