"""Rates: what it costs here to load a byte and to compute a token, measured while both happen."""

from __future__ import annotations

from collections.abc import Callable

SMOOTHING = 0.2
"""Weight of the newest measurement."""


class Rates:
    """Whether to load or to compute. Two threads may measure; a lost measurement does no harm."""

    def __init__(self) -> None:
        self.seconds_per_byte = 0.0  # of reading from disk, checks included; 0: not known
        self.seconds_per_byte_copied = 0.0  # from there into the cache
        self.seconds_per_token = 0.0  # to compute it, as blocks on disk say; 0: not known
        self.prefill_seconds: Callable[[int, int], float] = lambda start, stop: 0.0
        """To compute the tokens [start, stop) of a prompt, as this process measured; 0: not known."""

    def read(self, num_bytes: int, seconds: float) -> None:
        self.seconds_per_byte = _mixed(self.seconds_per_byte, seconds / num_bytes)

    def copied(self, num_bytes: int, seconds: float) -> None:
        self.seconds_per_byte_copied = _mixed(self.seconds_per_byte_copied, seconds / num_bytes)

    def compute_seconds(self, start: int, stop: int) -> float:
        """Of the tokens [start, stop) of a prompt; 0: nobody knows."""
        return self.prefill_seconds(start, stop) or self.seconds_per_token * (stop - start)

    def worth_loading(self, num_bytes: int, compute_seconds: float) -> bool:
        """Whether loading is faster. True while one of the two is not known: the load measures it."""
        if not self.seconds_per_byte or not compute_seconds:
            return True
        return (self.seconds_per_byte + self.seconds_per_byte_copied) * num_bytes < compute_seconds


def _mixed(before: float, now: float) -> float:
    return before + SMOOTHING * (now - before) if before else now
