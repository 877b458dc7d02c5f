"""Constraints: where thinking, a grammar, allowed tokens and ends that are held back meet."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from octavo.grammar.matcher import Matcher
from octavo.grammar.source import compiled, grammar_of
from octavo.grammar.vocabulary import load_vocabulary
from octavo.request import Reasoning, Request, SamplingParams, Structured
from octavo.sched.constraint import Constraint
from octavo.text.tokenizer import load_tokenizer

VOCAB_SIZE = 49152
END, OPEN, CLOSE = 2, 100, 101
EVERYTHING = set(range(VOCAB_SIZE))

Start = Callable[[], Matcher]


@pytest.fixture(scope="module")
def start(data: Path) -> Start:
    """Starts of the grammar 0[12]*, in which each digit is a token."""
    vocabulary = load_vocabulary(data / "tokenizers" / "smollm2" / "vocab-only.gguf", VOCAB_SIZE, [END])
    structured = Structured("regex", "0[12]*")
    start = compiled(structured, grammar_of(structured), vocabulary)
    return lambda: Matcher(start, vocabulary, VOCAB_SIZE)


@pytest.fixture(scope="module")
def digits(data: Path) -> tuple[int, int, int]:
    tokenizer = load_tokenizer(data / "tokenizers" / "smollm2" / "vocab-only.gguf")
    zero, one, two = tokenizer.encode("012", add_special_tokens=False)
    return zero, one, two


def made(begins: Start | None, reasoning: Reasoning | None = None, **fields: object) -> tuple[Request, Constraint]:
    params = SamplingParams(reasoning=reasoning, **fields)  # type: ignore[arg-type]
    request = Request("r", 0, [1], params, 0, frozenset([END]))
    request.constraint = constraint = Constraint(request, begins)
    return request, constraint


def _bits(words: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())


def allowed(constraint: Constraint) -> set[int]:
    words = constraint.words()
    return EVERYTHING if words is None else _bits(words) & EVERYTHING


def test_a_grammar_begins_behind_the_thinking(start: Start, digits: tuple[int, int, int]) -> None:
    zero, one, two = digits
    request, constraint = made(start, Reasoning(start=None, end=CLOSE), min_tokens=1)
    for token in (zero, 7, OPEN):  # anything but the end of the output
        assert allowed(constraint) == EVERYTHING - {END}
        assert not constraint.ended and not constraint.holds_ends
        request.output_ids.append(token)
    request.output_ids.append(CLOSE)
    assert allowed(constraint) == {zero} and constraint.forced() == zero
    request.output_ids.append(zero)
    assert allowed(constraint) == {one, two, END}
    assert constraint.holds_ends and not constraint.ended


def test_who_may_think_may_also_answer_at_once(start: Start, digits: tuple[int, int, int]) -> None:
    zero, one, two = digits
    request, constraint = made(start, Reasoning(start=OPEN, end=CLOSE))
    assert allowed(constraint) == {zero, OPEN} and constraint.forced() is None
    request.output_ids.append(zero)
    assert allowed(constraint) == {one, two, END}
    request, constraint = made(start, Reasoning(start=OPEN, end=CLOSE))
    request.output_ids += [OPEN, 7, CLOSE]
    assert allowed(constraint) == {zero}


def test_a_budget_forces_the_end_of_the_thinking(start: Start, digits: tuple[int, int, int]) -> None:
    for begins in (start, None):
        request, constraint = made(begins, Reasoning(start=None, end=CLOSE, budget=2))
        request.output_ids += [7, 8]
        assert constraint.forced() == CLOSE
        request.output_ids.append(CLOSE)
        assert allowed(constraint) == ({digits[0]} if begins else EVERYTHING)


def test_allowed_tokens_narrow_the_grammar(start: Start, digits: tuple[int, int, int]) -> None:
    zero, one, _ = digits
    request, constraint = made(start, allowed_token_ids=[zero, one, 9])
    assert constraint.forced() == zero
    request.output_ids.append(zero)
    assert allowed(constraint) == {one}  # END is not among them
    _, constraint = made(start, allowed_token_ids=[9])
    assert allowed(constraint) == set()
    assert constraint.error is not None and "allowed_token_ids" in constraint.error


def test_ends_are_held_back_where_anything_else_is_left(start: Start, digits: tuple[int, int, int]) -> None:
    zero, one, two = digits
    for fields in ({"min_tokens": 3}, {"ignore_eos": True}, {"min_tokens": 3, "stop_token_ids": [one]}):
        request, constraint = made(start, **fields)
        request.output_ids.append(zero)
        assert allowed(constraint) == {one, two} - set(request.params.stop_token_ids)
    request.output_ids += [two, two]
    assert allowed(constraint) == {one, two, END}
    request, constraint = made(start, allowed_token_ids=[zero, END], min_tokens=3)
    request.output_ids.append(zero)
    assert constraint.forced() == END  # complete


def test_it_is_a_function_of_the_output(start: Start, digits: tuple[int, int, int]) -> None:
    zero, one, two = digits
    live, constraint = made(start, Reasoning(start=OPEN, end=CLOSE), min_tokens=4)
    for token in (OPEN, 7, CLOSE, zero, one, two):
        again, other = made(start, Reasoning(start=OPEN, end=CLOSE), min_tokens=4)
        again.output_ids += live.output_ids
        assert allowed(other) == allowed(constraint)
        for name in ("ended", "holds_ends", "error"):
            assert getattr(other, name) == getattr(constraint, name)
        live.output_ids.append(token)
