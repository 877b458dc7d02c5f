"""WaitingQueue: who of the waiting is admitted next.

Effective priority, then the tenant that had least service, then within a tenant the longest cached prefix, then
arrival. A preempted request goes before those of its priority that have not begun. Requests with a closed gate are
laid aside and block nobody.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable, Iterator
from operator import attrgetter

from octavo.request import GateError, ParameterError
from octavo.sched.fairness import FairShares
from octavo.sched.live import Live

AGE_SECONDS = 10.0
"""A priority that was not served for so long counts as one higher, after twice as long as three, then seven: any
distance of two priorities (32 bits) is made up in 32 times as long, so that none starves. It is the priority that
ages, not the request: where all wait long, age must not decide between tenants instead of their shares."""

PREFIX_WINDOW = 8
"""Requests of a tenant among which the longest cached prefix goes first: bounds the work of a long queue."""

SHORT_WINDOW = 64
"""Requests among which a short one is looked for to go beside a long one."""

MAX_OVERTAKEN = 8
"""A request that was passed over so often by others of its tenant goes first."""

_by_number = attrgetter("number")


def aged(priority: int, seconds: float) -> int:
    """Effective priority after `seconds` without service."""
    return priority - 1 + int(2 ** min(seconds / AGE_SECONDS, 64.0))


class _Level:
    """The waiting of one priority."""

    def __init__(self, now: float) -> None:
        self.served = now  # when one of them was taken last, or the first arrived
        self.resumed: list[Live] = []  # were preempted; by number
        self.tenants: dict[str, list[Live]] = {}  # by number


class WaitingQueue:
    """`prefix_len(live)`: tokens of its prompt in the cache."""

    def __init__(self, shares: FairShares, prefix_len: Callable[[Live], int]) -> None:
        self._shares = shares
        self._prefix_len = prefix_len
        self._levels: dict[int, _Level] = {}
        self._aside: dict[Live, str] = {}  # -> reason of its first closed gate
        self._num_ready = 0
        self.num_tokens = 0  # known of all who wait
        self._blocked = "step"  # what held up those without a gate when one was last looked for: the running step only,
        self._blocked_at = 0.0  # where that was before they came

    def __len__(self) -> int:
        return self._num_ready + len(self._aside)

    def __iter__(self) -> Iterator[Live]:
        for level in self._levels.values():
            yield from level.resumed
            for queue in level.tenants.values():
                yield from queue
        yield from self._aside

    def reasons(self) -> dict[str, int]:
        """How many wait for what."""
        reasons = Counter(self._aside.values())
        if self._num_ready:
            reasons[self._blocked] += self._num_ready
        return dict(reasons)

    def reason(self, live: Live) -> str:
        """What one of the waiting waits for."""
        return self._aside.get(live) or (self._blocked if self._blocked_at >= live.waiting_since else "step")

    def block(self, reason: str, now: float) -> None:
        """Nobody more is admitted to this step, for want of "slots", "blocks" or "budget"."""
        self._blocked, self._blocked_at = reason, now

    def add(self, live: Live, now: float) -> None:
        """`live` begins to wait."""
        live.waiting_since = now
        self.num_tokens += live.request.num_tokens
        self._shares.arrive(live.request.terms.tenant, again=live.request.num_preemptions > 0)
        if live.request.gates:
            self._aside[live] = live.request.gates[0].reason
        else:
            self._insert(live, now)

    def remove(self, live: Live, now: float) -> None:
        """`live` waits no more, for whatever reason."""
        self._note(live, now)
        self.num_tokens -= live.request.num_tokens
        self._shares.leave(live.request.terms.tenant)
        if live in self._aside:
            del self._aside[live]
        else:
            self._take_out(live)

    def take(self, live: Live, now: float) -> None:
        """`live`, which was `first`, is admitted."""
        level = self._levels[live.request.terms.priority]
        level.served = now
        for earlier in level.tenants.get(live.request.terms.tenant, ())[:SHORT_WINDOW]:
            earlier.overtaken += earlier.number < live.number
        self.remove(live, now)

    def lay_aside(self, live: Live, now: float) -> None:
        """A gate of `live` is closed."""
        self._note(live, now)
        self._take_out(live)
        self._aside[live] = live.request.gates[0].reason

    def look_at_gates(self, now: float) -> list[tuple[Live, ParameterError | GateError]]:
        """Put back those whose gates have opened. Returns those whose gates never will; they stay."""
        failed = []
        for live in list(self._aside):
            gates = live.request.gates
            try:
                gates[:] = [gate for gate in gates if not gate.is_open()]
            except (ParameterError, GateError) as error:
                failed.append((live, error))
                continue
            if gates and gates[0].reason == self._aside[live]:
                continue
            self._note(live, now)
            if gates:
                self._aside[live] = gates[0].reason
            else:
                del self._aside[live]
                self._insert(live, live.served or live.request.arrival)
        return failed

    def first(self, now: float) -> Live | None:
        """The next to be admitted."""
        queue = self._first_queue(now)[:PREFIX_WINDOW]
        if not queue:
            return None
        if len(queue) == 1 or queue[0].request.num_preemptions or queue[0].overtaken >= MAX_OVERTAKEN:
            return queue[0]
        return max(queue, key=lambda live: (self._prefix_len(live), -live.number))

    def shortest(self, now: float) -> Live | None:
        """The one with least tokens of those whose turn it nearly is: to go beside what is long."""
        queue = self._first_queue(now)[:SHORT_WINDOW]
        return min(queue, key=lambda live: (live.request.num_tokens, live.number), default=None)

    def _first_queue(self, now: float) -> list[Live]:
        """Where the next comes from: the highest priority, and of it the preempted or else the tenant that had least."""
        if not self._levels:
            return []
        _, level = max(self._levels.items(), key=lambda item: (aged(item[0], now - item[1].served), -item[1].served))
        if level.resumed:
            return level.resumed
        tenants = level.tenants
        return tenants[min(tenants, key=lambda tenant: (self._shares.served(tenant), tenants[tenant][0].number))]

    def check(self) -> None:
        """Raise AssertionError unless every list is in order and every count right."""
        lives = list(self)
        assert len(lives) == len(set(lives)) == len(self)
        assert self.num_tokens == sum(live.request.num_tokens for live in lives)
        for priority, level in self._levels.items():
            assert level.resumed or level.tenants, "an empty level"
            for tenant, queue in [*level.tenants.items(), *((None, q) for q in [level.resumed] if q)]:
                assert queue == sorted(queue, key=_by_number) != []
                for live in queue:
                    terms = live.request.terms
                    assert terms.priority == priority and tenant in (None, terms.tenant) and not live.request.gates
                    assert (tenant is None) == (live.request.num_preemptions > 0)
        for live, reason in self._aside.items():
            assert live.request.gates[0].reason == reason
        assert self._shares._waiting == Counter(live.request.terms.tenant for live in lives)

    def _insert(self, live: Live, served: float) -> None:
        """served: when one of its priority was served last, where none of them is here."""
        level = self._levels.setdefault(live.request.terms.priority, _Level(served))
        bisect.insort(self._queue_of(level, live), live, key=_by_number)
        self._num_ready += 1

    def _take_out(self, live: Live) -> None:
        priority, tenant = live.request.terms.priority, live.request.terms.tenant
        level = self._levels[priority]
        queue = self._queue_of(level, live)
        del queue[bisect.bisect_left(queue, live.number, key=_by_number)]
        if not queue and queue is not level.resumed:
            del level.tenants[tenant]
        if not level.resumed and not level.tenants:
            del self._levels[priority]
        self._num_ready -= 1

    @staticmethod
    def _queue_of(level: _Level, live: Live) -> list[Live]:
        if live.request.num_preemptions:
            return level.resumed
        return level.tenants.setdefault(live.request.terms.tenant, [])

    def _note(self, live: Live, now: float) -> None:
        """Count the seconds waited for what ends now."""
        reason = self.reason(live)
        live.waits[reason] = live.waits.get(reason, 0.0) + now - live.waiting_since
        live.waiting_since = now
