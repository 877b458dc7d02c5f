"""Matcher: the place of one output in its grammar."""

from __future__ import annotations

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray


class Matcher:
    """Follows the tokens of an output one by one.

    The same tokens always give the same masks: each matcher starts from the same compiled state and computes each mask
    once, in order, for what llguidance caches within counts towards its limits.
    """

    def __init__(self, compiled: LLMatcher, vocabulary: LLTokenizer, vocab_size: int) -> None:
        """vocab_size: tokens that the model can draw."""
        self._matcher = compiled.deep_copy()  # microseconds
        self._buffer: NDArray[np.uint32] = np.zeros((vocabulary.vocab_size + 31) // 32, np.uint32)
        self._target = self._buffer.ctypes.data, self._buffer.nbytes
        self._known = self._buffer[: (vocab_size + 31) // 32]
        self._last_word = np.uint32((1 << (vocab_size % 32 or 32)) - 1)
        self._fresh = False
        self.error: str | None = None

    def accept(self, token: int) -> None:
        """The next token of the output."""
        self.words()
        if self.error is None and not self._matcher.consume_token(token):
            self._fail()
        self._fresh = False

    def words(self) -> NDArray[np.uint32]:
        """Bits of the tokens that may come next, end tokens where the grammar is satisfied; none after an error.

        Changed by the next token.
        """
        if not self._fresh:
            self._fresh = True
            if self.error is None:
                self._matcher.unsafe_compute_mask_ptr(*self._target)
                if self._matcher.is_error():
                    self._fail()
                self._known[-1] &= self._last_word
        return self._known

    @property
    def complete(self) -> bool:
        """Nothing can follow but an end token, and the model may have none."""
        if self.error is not None:
            return False
        return self._matcher.is_stopped() or not self.words().any()

    def _fail(self) -> None:
        """At a limit of llguidance, or a token that was not allowed."""
        self.error = "the grammar: " + " ".join(self._matcher.get_error().split())[:400]
        self._buffer[:] = 0
