"""Waiting for what another thread or process does: no test guesses how long that takes."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path

SECONDS = 300.0
"""Far more than anything here takes on a busy machine: only what never happens fails."""


def until(reached: Callable[[], object], every: float = 0.005) -> None:
    """Ask each `every` seconds."""
    end = time.monotonic() + SECONDS
    while not reached():
        assert time.monotonic() < end, f"did not happen within {SECONDS:.0f} s"
        time.sleep(every)


async def until_async(reached: Callable[[], object], every: float = 0.005) -> None:
    """The same beside an event loop."""
    end = time.monotonic() + SECONDS
    while not reached():
        assert time.monotonic() < end, f"did not happen within {SECONDS:.0f} s"
        await asyncio.sleep(every)


def busy_share(*pids: int) -> float:
    """Of one processor, what these processes take of the next two seconds. Idle ones, which what went before may disturb for a
    while, have two of under 1 % sooner or later; those that poll or spin have none."""

    def seconds() -> float:
        stats = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
        return sum(int(stat[11]) + int(stat[12]) for stat in stats) / os.sysconf("SC_CLK_TCK")

    before, began = seconds(), time.monotonic()
    time.sleep(2.0)
    return (seconds() - before) / (time.monotonic() - began)
