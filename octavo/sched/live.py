"""Live: what the scheduler knows of a request beyond the request itself. Update: what a request gained in a step."""

from __future__ import annotations

from typing import NamedTuple

from octavo.cache.kv import KvCache
from octavo.cache.match import Match
from octavo.cache.prefix import Key
from octavo.request import Request, TokenLogprobs
from octavo.sched.beam import BeamSearch


class Update(NamedTuple):
    """Already applied to the request."""

    request: Request
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    live: Live | None = None  # None: it ended before it was scheduled
    error: str | None = None
    param: str | None = None  # the field at fault, where the error is the client's
    logprob: float | None = None  # of all tokens together, with the whole answer of a beam search

    @property
    def num_cached(self) -> int:
        """Prompt tokens that came from the cache when the request was first admitted."""
        return 0 if self.live is None else self.live.num_cached


class Live:
    """A request from `add` to its end. It waits (slot -1) or runs. A beam that has drawn rests until its search turns:
    it has nothing to compute, and where it was preempted (slot -1) it does not even wait."""

    __slots__ = (
        "high_water", "inherited", "match", "max_computed", "num_cached", "num_disk", "num_recomputed", "number", "overtaken",
        "prefix", "request", "resting", "search", "served", "slot", "waiting_since", "waits",
    )  # fmt: skip

    def __init__(self, request: Request, number: int, max_computed: int) -> None:
        self.request = request
        self.number = number  # order of arrival
        self.max_computed = max_computed  # tokens in the cache at the very end; the last one drawn is never computed
        self.slot = -1
        self.search: BeamSearch | None = None  # whose beam it is
        self.resting = False
        self.inherited = request.terms.priority  # the highest of those who wait for its blocks
        self.num_cached = 0  # prompt tokens from the cache at the first admission
        self.num_disk = 0  # of them, those that came from disk for it
        self.high_water = 0  # tokens computed at any time: those below are recomputed
        self.num_recomputed = 0
        self.match: Match | None = None  # of the first admission
        self.prefix = (0, 0)  # tokens found in the cache, and when that was looked up last
        self.overtaken = 0  # how often a later request of the same tenant was taken first
        self.served = 0.0  # when it last had part in a step, or was admitted
        self.waiting_since = 0.0
        self.waits: dict[str, float] = {}  # seconds waited, by reason

    @property
    def num_left(self) -> int:
        """Tokens known and not computed: none where a beam rests."""
        return self.request.num_tokens - self.request.num_computed

    @property
    def num_preemptions(self) -> int:
        return self.request.num_preemptions

    @property
    def priority(self) -> int:
        """A leader is as urgent as the most urgent of its followers."""
        return max(self.request.terms.priority, self.inherited)


class LeaderGate(NamedTuple):
    """Closed while another request is about to compute the last block they share: equal prefixes are computed once."""

    cache: KvCache
    key: Key

    @property
    def reason(self) -> str:
        return "leader"

    def is_open(self) -> bool:
        return self.cache.leader(self.key) is None
