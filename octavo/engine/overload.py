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
    """A request is refused where what is before it has reached a bound. The request itself is not counted, so that none is
    too large to be accepted ever. None: no bound.

    max_queued_requests: choices that wait to run. Only for requests that would have to wait as well.
    max_queued_tokens: of prompts that are computed before its own first token, those that run included.
    """

    max_queued_requests: int | None = None
    max_queued_tokens: int | None = None


UNBOUNDED = QueueBounds()


class Asking(NamedTuple):
    """What decides about a request, until its first token."""

    tenant: str
    priority: int
    num_tokens: int  # of its prompt
    num_choices: int

    @classmethod
    def of(cls, add: Add) -> Asking:
        return cls(add.terms.tenant, add.terms.priority, len(add.prompt_ids), add.params.n)

    def tokens_before(self, other: Asking) -> int:
        """Of its prompt, those that are computed before the first token of a later request: the scheduler gives prompts
        beside each other the same time at least, and those of a lower priority none."""
        return min(self.num_tokens, other.num_tokens) if self.priority >= other.priority else 0


class Backlog:
    """Decides in the API process, at once: the engine may be in the middle of a step.

    Where a bound is reached, a tenant with less than its equal share waiting is accepted still, up to twice the bound for all:
    what one of them sends leaves room for the others.
    """

    def __init__(self, max_num_seqs: int, bounds: QueueBounds) -> None:
        self._max_num_seqs = max_num_seqs
        self._bounds = bounds
        self._num_sent = 0  # choices
        self._waiting: dict[str, Asking] = {}  # by id, until the first token

    def sent(self, add: Add) -> None:
        self._num_sent += add.params.n
        self._waiting[add.id] = Asking.of(add)

    def begun(self, id: str) -> None:
        """A choice of the request has a token, or has ended."""
        self._waiting.pop(id, None)

    def check(self, stats: Stats, asking: Asking) -> None:
        """Raises Overloaded. `stats` are the engine's latest: what it had not received by then is on the way."""
        for name, what, look in (
            ("max_queued_requests", "requests", self._queued),
            ("max_queued_tokens", "prompt tokens", self._tokens),
        ):
            bound = getattr(self._bounds, name)
            if bound is None:
                continue
            total, own = look(stats, asking)
            if total < bound:
                continue
            num_tenants = len({asking.tenant, *(other.tenant for other in self._waiting.values())})
            if own >= bound / num_tenants or total >= 2 * bound:
                seconds = min(max(1, math.ceil(stats.waiting_seconds)), MAX_RETRY_SECONDS)
                raise Overloaded(
                    name,
                    f"the server is overloaded: {total} {what} wait, {own} of them yours, {name.replace('_', '-')} is {bound}; "
                    f"try again in {seconds} s",
                    seconds,
                )

    def _queued(self, stats: Stats, asking: Asking) -> tuple[float, int]:
        """Choices that wait to run: all, and the tenant's. Less than none where one more would run at once."""
        num_coming = self._num_sent - stats.received
        num_free = 0 if stats.num_waiting else max(0, self._max_num_seqs - stats.num_running)
        if num_coming < num_free:
            return -math.inf, 0
        total = stats.num_waiting + num_coming - num_free
        own = sum(other.num_choices for other in self._waiting.values() if other.tenant == asking.tenant)
        return total, min(own, total)

    def _tokens(self, stats: Stats, asking: Asking) -> tuple[float, int]:
        """Of prompts that come first: of all, and of the tenant. Less than none where there are none."""
        total = own = 0
        for other in self._waiting.values():
            num_tokens = other.tokens_before(asking)
            total += num_tokens
            own += num_tokens if other.tenant == asking.tenant else 0
        return (total, own) if total else (-math.inf, 0)
