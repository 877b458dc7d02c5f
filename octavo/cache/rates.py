"""Rates: what a loaded byte and a computed token cost here, measured while both happen."""

from __future__ import annotations

SMOOTHING = 0.2
"""Weight of the newest measurement."""

MIN_TOKENS = 65
"""A step of fewer tokens says little about prefill: `backends.base.SMALL_T` and less run on the plan for decoding."""


class Rates:
    """Whether to load or to compute. Several threads may measure; a lost measurement does no harm."""

    def __init__(self) -> None:
        self.seconds_per_byte: float | None = None  # of reading from disk, checks included
        self.seconds_per_byte_copied = 0.0  # from there into the cache
        self.seconds_per_token: float | None = None  # of prefill

    def read(self, num_bytes: int, seconds: float) -> None:
        self.seconds_per_byte = _mixed(self.seconds_per_byte, seconds / num_bytes)

    def copied(self, num_bytes: int, seconds: float) -> None:
        self.seconds_per_byte_copied = _mixed(self.seconds_per_byte_copied or None, seconds / num_bytes)

    def computed(self, num_tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long."""
        if num_tokens >= MIN_TOKENS:
            self.seconds_per_token = _mixed(self.seconds_per_token, seconds / num_tokens)

    def worth_loading(self, num_bytes: int, num_tokens: int) -> bool:
        """Whether loading is faster than computing. True while one of the two was never measured: the load measures it."""
        if self.seconds_per_byte is None or self.seconds_per_token is None:
            return True
        each = self.seconds_per_byte + self.seconds_per_byte_copied
        return each * num_bytes < self.seconds_per_token * num_tokens


def _mixed(before: float | None, now: float) -> float:
    return now if before is None else before + SMOOTHING * (now - before)
