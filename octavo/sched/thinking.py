"""Where a choice thinks and where it answers, by its output tokens alone.

Output tokens::

    [0, length)     thinking, from the start token (or from the prompt's) through the end token
    [length, end)   the answer; a grammar begins here

`length` is 0 for an answer that does not think. Like all that masks depend on it is a function of the output, so that
it is the same after preemption and restart.
"""

from __future__ import annotations

from collections.abc import Iterable

from octavo.request import Reasoning


class Thinking:
    def __init__(self, reasoning: Reasoning, output_ids: Iterable[int] = (), anywhere: bool = False) -> None:
        """anywhere: thinking may begin behind other tokens, as blanks: where no grammar must know at once."""
        self._reasoning = reasoning
        self._anywhere = anywhere
        self._count = 0  # tokens pushed while not over
        self._inside = reasoning.start is None
        self._began = 0  # tokens through the start
        self.length: int | None = None  # None: not over, or nothing is known yet
        for token in output_ids:
            self.push(token)

    def push(self, token: int) -> None:
        """The next output token."""
        if self.length is not None:
            return
        self._count += 1
        if not self._inside:
            self._inside = token == self._reasoning.start
            if self._inside:
                self._began = self._count
            elif not self._anywhere:
                self.length = 0
        elif token == self._reasoning.end:
            self.length = self._count

    @property
    def open_start(self) -> int | None:
        """The token that may begin the thinking here, beside what the answer may begin with."""
        return self._reasoning.start if self._count == 0 and self.length is None else None

    @property
    def forced(self) -> int | None:
        """The only token that may come next: the end token, where the budget is spent."""
        if not self._inside or self.length is not None or self._reasoning.budget is None:
            return None
        return self._reasoning.end if self._count - self._began >= self._reasoning.budget else None
