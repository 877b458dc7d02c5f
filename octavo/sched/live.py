"""Live: what the scheduler knows of a request beyond the request itself. Update: what a request gained in a step."""

from __future__ import annotations

from typing import NamedTuple

from octavo.cache.kv import KvCache
from octavo.cache.match import Match
from octavo.cache.prefix import Key
from octavo.request import Request, TokenLogprobs


class Update(NamedTuple):
    """Already applied to the request."""

    request: Request
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    num_cached: int = 0  # prompt tokens that came from the cache when the request was first admitted
    error: str | None = None
    param: str | None = None  # the field at fault, where the error is the client's


class Live:
    """A request from `add` to its end. It waits (slot -1) or runs."""

    __slots__ = (
        "high_water", "inherited", "match", "max_computed", "num_cached", "num_recomputed", "number", "overtaken",
        "prefix", "request", "slot", "waiting_since", "waits",
    )  # fmt: skip

    def __init__(self, request: Request, number: int, max_computed: int) -> None:
        self.request = request
        self.number = number  # order of arrival
        self.max_computed = max_computed  # tokens in the cache at the very end; the last one drawn is never computed
        self.slot = -1
        self.inherited = request.terms.priority  # the highest of those who wait for its blocks
        self.num_cached = 0
        self.high_water = 0  # tokens computed at any time: those below are recomputed
        self.num_recomputed = 0
        self.match: Match | None = None  # of the first admission
        self.prefix = (0, 0)  # tokens found in the cache, and when that was looked up last
        self.overtaken = 0  # how often a later request of the same tenant was taken first
        self.waiting_since = 0.0
        self.waits: dict[str, float] = {}  # seconds waited, by reason

    @property
    def priority(self) -> int:
        """A leader is as urgent as the most urgent of its followers."""
        return max(self.request.terms.priority, self.inherited)


class LeaderGate(NamedTuple):
    """Closed while another request is about to compute the next block: equal prefixes are computed once."""

    cache: KvCache
    key: Key

    @property
    def reason(self) -> str:
        return "leader"

    def is_open(self) -> bool:
        return self.cache.leader(self.key) is None
