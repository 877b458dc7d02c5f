"""Deadlines: requests that must have their first or their last token by a time, and those that cannot."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import NamedTuple

from octavo.request import Terms
from octavo.sched.live import Live

LEAST_LOOKS = 256
"""Looks that are kept whether or not their requests are over: each keeps its prompt alive."""


class Missed(NamedTuple):
    """A limit that a request has passed or is bound to pass."""

    live: Live
    field: str  # of Terms
    message: str


class Deadlines:
    """prefill_seconds(live): the least time until its first token, with the machine to itself; 0: not known. is_over(live): it has
    ended, and where it is a beam so has its search.

    A request is looked at when its time is up, and before that when its prefill could no longer end in time.
    """

    def __init__(self, prefill_seconds: Callable[[Live], float], is_over: Callable[[Live], bool]) -> None:
        self._prefill_seconds = prefill_seconds
        self._is_over = is_over
        self._looks: list[tuple[float, int, str, Live]] = []  # heap: (when to look, number, field, request)
        self._most = LEAST_LOOKS  # of them, from which on those of requests that are over are taken out

    def add(self, live: Live) -> None:
        """From the arrival of a request on."""
        for field in ("ttft_seconds", "total_seconds"):
            limit = getattr(live.request.terms, field)
            if limit is not None:
                heapq.heappush(self._looks, (live.request.arrival, live.number, field, live))
        if len(self._looks) > self._most:  # most requests end long before their limits
            self._looks = [look for look in self._looks if not self._is_over(look[-1])]
            heapq.heapify(self._looks)
            self._most = max(LEAST_LOOKS, 2 * len(self._looks))

    def __len__(self) -> int:
        return len(self._looks)

    def next(self) -> float | None:
        """When to look again."""
        return self._looks[0][0] if self._looks else None

    def missed(self, now: float) -> Iterator[Missed]:
        """Those to be ended, each before the next is asked for: a request may have missed both of its limits."""
        while self._looks and self._looks[0][0] <= now:
            _, number, field, live = heapq.heappop(self._looks)
            request = live.request
            begun = bool(request.output_ids)
            if self._is_over(live) or (field == "ttft_seconds" and begun):
                continue
            limit = getattr(request.terms, field)
            left = request.arrival + limit - now
            needed = 0.0 if begun else self._prefill_seconds(live)
            if left > needed:
                wait = left / 2 if needed == 0.0 and not begun else left - needed  # its steps will tell what it needs
                heapq.heappush(self._looks, (now + max(wait, 1e-3), number, field, live))
            else:
                yield Missed(live, field, _message(request.terms, field, limit, left, needed))


def _message(terms: Terms, field: str, limit: float, left: float, needed: float) -> str:
    what = "the first token" if field == "ttft_seconds" else "the answer"
    if left <= 0:
        return f"{what} was not there within the limit of {limit:g} s"
    return f"{what} cannot be there within the limit of {limit:g} s: {left:.3g} s are left and the prompt takes {needed:.3g} s"
