"""FairShares: who of several tenants is served next (VTC: Sheng et al., "Fairness in Serving Large Language Models",
OSDI 2024)."""

from __future__ import annotations

from collections import Counter

OUTPUT_WEIGHT = 2.0
"""A token drawn counts as two prompt tokens: it takes a row of the vocabulary besides its pass through the layers."""

MAX_TENANTS = 4096
"""Counters remembered of tenants that have nothing waiting."""


class FairShares:
    """A virtual counter per tenant: the service it had. The tenant with the lowest goes first.

    A tenant that returns from idle is lifted to the lowest counter of those who wait: what it did not use it cannot
    claim later.
    """

    def __init__(self) -> None:
        self._counters: dict[str, float] = {}
        self._waiting: Counter[str] = Counter()
        self._last = ""  # tenant that left the queue last

    def arrive(self, tenant: str, again: bool = False) -> None:
        """A request of `tenant` begins to wait; `again`: after a preemption, which is no return from idle."""
        if not self._waiting[tenant] and not again:
            floor = self._floor()
            self._counters[tenant] = max(self._counters.get(tenant, floor), floor)
        self._waiting[tenant] += 1
        if len(self._counters) > MAX_TENANTS + len(self._waiting):
            self._forget()

    def leave(self, tenant: str) -> None:
        """A request of `tenant` waits no more."""
        self._waiting[tenant] -= 1
        if not self._waiting[tenant]:
            del self._waiting[tenant]
        self._last = tenant

    def charge(self, tenant: str, num_prompt: int, num_output: int) -> None:
        """Service given, in tokens; negative: taken back."""
        cost = num_prompt + OUTPUT_WEIGHT * num_output
        self._counters[tenant] = self._counters.get(tenant, 0.0) + cost

    def served(self, tenant: str) -> float:
        return self._counters.get(tenant, 0.0)

    def _floor(self) -> float:
        if self._waiting:
            return min(self.served(tenant) for tenant in self._waiting)
        return self.served(self._last)

    def _forget(self) -> None:
        """Those who are idle and had least: most of them would be lifted above it anyway."""
        idle = sorted((served, tenant) for tenant, served in self._counters.items() if tenant not in self._waiting)
        for _, tenant in idle[: len(idle) - MAX_TENANTS // 2]:
            del self._counters[tenant]
