"""Backlog: how many requests wait in the engine and on the way to it, and when that is too many."""

from __future__ import annotations

import math
from typing import NamedTuple

from octavo.engine.messages import Add, Stats

MAX_RETRY_SECONDS = 600
"""What a client is told at most: no prediction is good for longer."""


class Overloaded(RuntimeError):
    """Refused for now. `bound` names the option, `retry_after` is in seconds."""

    def __init__(self, bound: str, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.bound = bound
        self.retry_after = retry_after


class QueueBounds(NamedTuple):
    """A request that would have to wait is refused where so many choices wait already; any, where so many tokens of others
    are still to be computed, prompts that run included: they come before its own first token.

    None: no bound. The request itself is not counted, so that none is too large to be accepted ever.
    """

    max_queued_requests: int | None = None
    max_queued_tokens: int | None = None


UNBOUNDED = QueueBounds()


class Backlog:
    """Decides in the API process, at once: the engine may be in the middle of a step."""

    def __init__(self, max_num_seqs: int, bounds: QueueBounds) -> None:
        self._max_num_seqs = max_num_seqs
        self._bounds = bounds
        self._num_sent = 0  # choices
        self._num_tokens_sent = 0

    def sent(self, add: Add) -> None:
        self._num_sent += add.params.n
        self._num_tokens_sent += add.params.n * len(add.prompt_ids)

    def check(self, stats: Stats) -> None:
        """Raises Overloaded. `stats` are the engine's latest: what it had not received by then is on the way."""
        num_coming = self._num_sent - stats.received
        num_free = 0 if stats.num_waiting else max(0, self._max_num_seqs - stats.num_running)
        num_queued = stats.num_waiting + num_coming - num_free
        num_tokens = stats.waiting_tokens + self._num_tokens_sent - stats.received_tokens
        for name, is_over, queued, what in (
            ("max_queued_requests", num_coming >= num_free, num_queued, "requests"),
            ("max_queued_tokens", num_tokens > 0, num_tokens, "prompt tokens"),
        ):
            bound = getattr(self._bounds, name)
            if bound is not None and is_over and queued >= bound:
                seconds = min(max(1, math.ceil(stats.waiting_seconds)), MAX_RETRY_SECONDS)
                raise Overloaded(
                    name,
                    f"the server is overloaded: {queued} {what} wait, {name.replace('_', '-')} is {bound}; "
                    f"try again in {seconds} s",
                    seconds,
                )
