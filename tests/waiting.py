"""Waiting for what another thread or process does: no test guesses how long that takes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

SECONDS = 60.0
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
