"""Explanation: where the prompt of a choice came from and what it waited for. Counts and positions, never text."""

from __future__ import annotations

import msgspec


class MatchEnd(msgspec.Struct, frozen=True):
    """Why no more of the prompt came from the cache."""

    reason: str  # a `cache.EndReason`
    position: int  # of the first token that had to be computed


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """Of one choice, or of all beams of a beam search together."""

    id: str
    choice: int
    state: str  # "waiting", "running", or why it finished
    prompt_tokens: int
    output_tokens: int
    adapter: str = ""  # digest of its LoRA adapter; "": none
    cached_tokens: int = 0  # prompt tokens that came from the cache when it was first admitted
    cached_tokens_disk: int = 0  # of them, those that were read from disk for it
    match_end: MatchEnd | None = None  # None: not admitted yet
    wait_seconds: dict[str, float] = {}  # by what was waited for
    preemptions: int = 0
    recomputed_tokens: int = 0  # computed before, and lost by preemption
