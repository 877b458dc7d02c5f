"""What the host of a virtual machine took of its processors: time that they wanted to run and did not."""

from __future__ import annotations

import os
import time


def stolen_seconds() -> float | None:
    """Of all processors since the start of the machine, in hundredths; None where the kernel does not tell."""
    try:
        with open("/proc/stat") as f:
            return int(f.readline().split()[8]) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return None


class Stolen:
    """Since it was made."""

    def __init__(self) -> None:
        self._began, self._before = time.monotonic(), stolen_seconds()

    @property
    def percent(self) -> float | None:
        """Of the time of all processors."""
        now, passed = stolen_seconds(), time.monotonic() - self._began
        if now is None or self._before is None or not passed:
            return None
        return 100 * (now - self._before) / (passed * (os.cpu_count() or 1))
