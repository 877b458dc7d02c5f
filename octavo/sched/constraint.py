"""Constraint: which tokens one output may have next. It joins the grammar, the thinking before it, `allowed_token_ids`
and what holds the end back (`min_tokens`, `ignore_eos`).

It follows the output as it grows and depends on nothing else: after a preemption or a restart it is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.request import Request
from octavo.sampling.params import mask_of
from octavo.sched.thinking import Thinking

U32 = NDArray[np.uint32]


class Grammar(Protocol):
    """The place of an output in a grammar: see `grammar.matcher`."""

    error: str | None

    def accept(self, token: int) -> None: ...

    def words(self) -> U32: ...

    @property
    def complete(self) -> bool: ...


class Constraint:
    """Of a request with a grammar or a budget for thinking; see `request.Constraint`."""

    def __init__(self, request: Request, start: Callable[[], Grammar] | None) -> None:
        """start: gives the grammar at its beginning; called once, when it is first needed."""
        params = request.params
        self._request = request
        self._start = start
        self._grammar: Grammar | None = None
        self._thinking = Thinking(params.reasoning, anywhere=start is None) if params.reasoning is not None else None
        self._allowed = mask_of(params.allowed_token_ids) if params.allowed_token_ids is not None else None
        self._early = mask_of(sorted(request.stop_ids | request.eos_ids)) if params.min_tokens else None
        self._later = mask_of(sorted(request.eos_ids)) if params.ignore_eos else None
        self._thoughts: U32 | None = None  # what may be thought before a grammar
        self._num_seen = -1  # output tokens that `_words` is behind
        self._words: U32 | None = None
        self._applies = False
        self.error: str | None = None

    def words(self) -> U32 | None:
        output_ids = self._request.output_ids
        if self._num_seen != len(output_ids):
            for token in output_ids[max(0, self._num_seen) :]:
                self._accept(token)
            self._num_seen = len(output_ids)
            self._words = self._next()
        return self._words

    def forced(self) -> int | None:
        words = self.words()
        if words is None or np.count_nonzero(words) != 1:
            return None
        word = int(np.argmax(words))
        bits = int(words[word])
        return 32 * word + bits.bit_length() - 1 if bits & (bits - 1) == 0 else None

    @property
    def holds_ends(self) -> bool:
        self.words()
        return self._applies

    @property
    def ended(self) -> bool:
        self.words()
        return self._applies and self._grammar is not None and self._grammar.complete

    def _accept(self, token: int) -> None:
        thinking = self._thinking
        if thinking is not None and thinking.length is None:
            thinking.push(token)
            if thinking.length != 0:  # within the thinking, or its end
                return
        if self._start is not None:
            self._at().accept(token)

    def _at(self) -> Grammar:
        if self._grammar is None:
            assert self._start is not None
            self._grammar = self._start()
        return self._grammar

    def _next(self) -> U32 | None:
        thinking = self._thinking
        thinks = thinking is not None and thinking.length is None
        opening = thinking.open_start if thinking is not None and thinks else None
        self._applies = self._start is not None and (not thinks or opening is not None)
        words: U32 | None = None
        if thinking is not None and thinking.forced is not None:
            words = mask_of([thinking.forced])
        elif self._applies:
            words = self._at().words()
            if opening is not None:
                words = _either(words, mask_of([opening]))
        elif thinks and self._start is not None:  # an output that ends here would miss what the grammar asks for
            words = self._endless()
        if self._allowed is not None:
            words = self._allowed if words is None else _both(words, self._allowed)
        if words is None:
            return None
        if self._applies:
            words = self._without_ends(words)
        if not np.count_nonzero(words):
            self.error = (self._grammar and self._grammar.error) or (
                "no token is left: the grammar and allowed_token_ids exclude each other"
            )
        return words

    def _endless(self) -> U32:
        """All tokens but those that end the output."""
        if self._thoughts is None:
            words = ~np.zeros_like(self._at().words())
            self._thoughts = words & ~_wide(mask_of(sorted(self._request.eos_ids)), len(words))
        return self._thoughts

    def _without_ends(self, words: U32) -> U32:
        """`words` with the ends held back, unless nothing else is left: a complete output ends whatever was asked."""
        early = len(self._request.output_ids) < self._request.params.min_tokens
        ends = self._early if early else self._later
        if ends is None or not (words[: len(ends)] & ends).any():
            return words
        held = words & ~_wide(ends, len(words))
        return held if held.any() else words


def _wide(words: U32, num_words: int) -> U32:
    return np.pad(words[:num_words], (0, max(0, num_words - len(words))))


def _both(a: U32, b: U32) -> U32:
    num_words = min(len(a), len(b))
    return a[:num_words] & b[:num_words]


def _either(a: U32, b: U32) -> U32:
    num_words = max(len(a), len(b))
    return _wide(a, num_words) | _wide(b, num_words)
