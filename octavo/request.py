"""Request, SamplingParams, FinishReason: the nouns of serving and their invariants.

Lengths of a sequence, ordered at all times::

    0 <= num_cached <= num_computed <= len(prompt_ids) + len(output_ids)

A token is *computed* when its keys and values are in the KV cache; *cached* are those of them that were reused
from the prefix index when the request was (last) admitted.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

# What a request is asked for is a file of its own, and is imported from here like the other nouns.
from octavo.params import DRY_BREAKERS as DRY_BREAKERS
from octavo.params import LIMITS as LIMITS
from octavo.params import MAX_LOGPROBS as MAX_LOGPROBS
from octavo.params import MAX_N as MAX_N
from octavo.params import MAX_STOPS as MAX_STOPS
from octavo.params import MAX_STRUCTURED as MAX_STRUCTURED
from octavo.params import ParameterError as ParameterError
from octavo.params import Reasoning as Reasoning
from octavo.params import SamplingParams as SamplingParams
from octavo.params import Structured as Structured

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from octavo.pooled import Pool


class FinishReason(enum.StrEnum):
    """Why a choice ended. STOP: end token, stop id or stop string. LENGTH: max_tokens or the context limit."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    TIMEOUT = "timeout"  # a limit of `Terms` was passed, or was bound to be


class Retention(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A wish that the cache keeps a request's blocks longer, or less long, than others.

    Blocks are evicted by the time of their last use. A hint moves that time by `seconds`, and by a minute for each
    level of `priority`: it weighs less and less as time goes on, and no block is ever pinned.
    """

    seconds: float = 0.0  # time to live: for so long it counts as if just used
    priority: int = 0  # below 0: evicted before others
    num_tokens: int | None = None  # the hint is for so many leading tokens; None: all, output included

    def __post_init__(self) -> None:
        for name, low, high in _RETENTION_BOUNDS:
            value: Any = getattr(self, name)
            if value is not None and not low <= value <= high:  # also true for NaN
                raise ParameterError("retention", f"retention.{name} must be between {low} and {high}, got {value}")
        if self.num_tokens is not None and self.bonus < 0:
            raise ParameterError("retention", "retention.num_tokens needs seconds and priority that keep blocks longer")

    @property
    def bonus(self) -> float:
        """Seconds by which the last use is moved."""
        return self.seconds + 60.0 * self.priority

    def covers(self, position: int) -> bool:
        """Whether the hint is for the token at this position."""
        return self.num_tokens is None or position < self.num_tokens


_RETENTION_BOUNDS = (("seconds", 0, 86_400), ("priority", -100, 100), ("num_tokens", 1, 2**31 - 1))


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """What a request asks of scheduler and cache, beside its tokens. It changes when they come, never which."""

    priority: int = 0  # higher is served first
    tenant: str = ""  # who shares the machine fairly with whom: an API key or a user
    total_seconds: float | None = None  # from its arrival to its last token; None: no limit
    ttft_seconds: float | None = None  # to its first token
    cache_salt: str = ""  # only requests of the same salt share KV blocks
    retention: Retention | None = None  # how long its KV blocks are worth keeping
    reports_prefill: bool = False  # tell after each step how much of the prompt is computed


PLAIN = Terms()


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Score of one token and the best alternatives, all natural logarithms of the model's own distribution."""

    token_id: int
    logprob: float
    rank: int  # 1: the most likely token
    top_ids: list[int]
    top_logprobs: list[float]


class GateError(RuntimeError):
    """A gate will never open, and the request that waits for it is not at fault (HTTP 500)."""


class Gate(Protocol):
    """What a waiting request waits for beside its turn. Looked at between steps, by the thread of the engine."""

    @property
    def reason(self) -> str:
        """What is waited for, in a word that metrics can carry: "leader", "grammar", "disk"."""

    def is_open(self) -> bool:
        """Cheap, for it is called before each step. Raises ParameterError or GateError where the gate will never open."""


class Constraint(Protocol):
    """Which tokens may come next, as a function of the output so far: see `sched.constraint`."""

    def words(self) -> NDArray[np.uint32] | None:
        """Bits of the tokens that may be drawn next, id i in bit i % 32 of word i // 32; None: any. Valid until the
        output grows."""

    def forced(self) -> int | None:
        """The token that any draw would give, where only one is left."""

    @property
    def holds_ends(self) -> bool:
        """Whether `words` has cleared, as far as it can, the tokens that end the output too early."""

    @property
    def ended(self) -> bool:
        """Nothing may follow: the output is complete."""

    @property
    def error(self) -> str | None:
        """Why nothing can be drawn."""


class Request:
    """One choice of one client request: the unit the scheduler works on.

    `n` choices are n Requests with one `id` and `choice` 0..n-1. Everything that must survive a crash or a
    preemption is `prompt_ids`, `output_ids`, `params`, `seed`, `choice`; the rest is recomputed.
    """

    __slots__ = (
        "adapter", "arrival", "choice", "constraint", "eos_ids", "finish_reason", "from_disk", "gates", "id", "num_cached",
        "num_computed", "num_first", "num_preemptions", "output_ids", "params", "pool", "prompt_ids", "prompt_logprobs", "seed", "stop_ids",
        "tables", "terms",
    )  # fmt: skip

    def __init__(
        self, id: str, choice: int, prompt_ids: list[int], params: SamplingParams, seed: int,
        eos_ids: frozenset[int] = frozenset(), terms: Terms = PLAIN, arrival: float = 0.0, adapter: str = "",
    ) -> None:  # fmt: skip
        assert prompt_ids, "a prompt has at least one token"
        self.id = id
        self.choice = choice
        self.prompt_ids = prompt_ids
        self.output_ids: list[int] = []
        self.params = params
        self.seed = seed
        self.eos_ids = eos_ids
        self.stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_ids)
        self.terms = terms
        self.adapter = adapter  # digest of the LoRA adapter that computes it; "": none
        self.arrival = arrival  # seconds, monotonic clock of the engine
        self.gates: list[Gate] = []  # it does not run before all are open
        self.constraint: Constraint | None = None
        self.pool: Pool | None = None  # its states are wanted, not tokens: max_tokens is 0
        self.num_first: int | None = None  # tokens of the first of two texts; those behind have type 1
        self.num_cached = 0
        self.from_disk: tuple[int, int] | None = None  # tokens [start, stop) that a load brought; None: none was tried
        self.num_computed = 0
        self.num_preemptions = 0
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.tables: list[list[int]] = []  # per KV group: logical block -> physical block id
        self.finish_reason: FinishReason | None = None

    @property
    def key(self) -> tuple[str, int]:
        """Identity among live requests."""
        return (self.id, self.choice)

    @property
    def num_tokens(self) -> int:
        """Tokens known so far, prompt and output."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def last_token(self) -> int:
        return self.output_ids[-1] if self.output_ids else self.prompt_ids[-1]

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Tokens [start, stop) of prompt followed by output."""
        n = len(self.prompt_ids)
        if stop <= n:
            return self.prompt_ids[start:stop]
        return self.prompt_ids[start:n] + self.output_ids[max(0, start - n) : stop - n]
