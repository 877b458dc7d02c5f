"""What is still to be computed, and how long that will take."""

from __future__ import annotations

from collections.abc import Iterable

from octavo.backends.base import Limits
from octavo.sched.cost import Load, StepCost
from octavo.sched.live import Live
from octavo.sched.preempt import Headroom
from octavo.sched.queue import WaitingQueue


def unfinished_tokens(running: Iterable[Live]) -> int:
    """Tokens that are known and not computed, where that is more than the last one drawn: of prompts that run."""
    return sum(live.num_left for live in running if live.num_left > 1)


def waiting_seconds(
    num_unfinished: int, queue: WaitingQueue, headroom: Headroom, cost: StepCost, limits: Limits
) -> float:
    """Until `num_unfinished` tokens have been computed and those who wait served, as the outputs of late have it."""
    num_waiting, most = len(queue), limits.max_seqs
    seconds = cost.prefill_seconds(0, num_unfinished, limits.max_tokens) if num_unfinished else 0.0
    if num_waiting:
        mean = queue.num_tokens // num_waiting
        prefill = cost.prefill_seconds(0, mean, limits.max_tokens)
        decode = cost.predict(Load(1, most, most * mean, most * mean, most)) / most
        seconds += num_waiting * (prefill + headroom.mean_length * decode)
    return seconds
