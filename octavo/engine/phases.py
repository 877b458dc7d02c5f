"""Phase, StepClock: where the time of a step goes."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable


class Phase(enum.StrEnum):
    """What the engine does in a step, in this order."""

    __hash__ = str.__hash__  # Enum's own is a function of Python

    SCHEDULE = "schedule"  # which tokens of which requests, and blocks for them
    BATCH = "batch"  # the step as flat arrays
    RUN = "run"  # the program
    COMMIT = "commit"  # tokens to requests, full blocks to the index, stop rules
    EMIT = "emit"  # what came out, as a message


class StepClock:
    """Seconds of each phase, of all steps together."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """clock: seconds; `time.thread_time` counts those alone in which the calling thread ran."""
        self.seconds = dict.fromkeys(Phase, 0.0)
        self._clock = clock
        self._since = clock()

    def begin(self) -> None:
        """What follows belongs to the phase that `end` will name."""
        self._since = self._clock()

    def end(self, phase: Phase) -> None:
        """What was done since `begin`, or the last phase, is `phase`."""
        now = self._clock()
        self.seconds[phase] += now - self._since
        self._since = now
