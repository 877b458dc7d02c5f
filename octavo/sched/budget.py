"""StepBudget: how much prefill a step may carry beside its decodes, and who gets it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from octavo.cache.blocks import BLOCK_SIZE
from octavo.sched.cost import Load, StepCost
from octavo.sched.live import Live

ITL_FACTOR = 2.5
"""Default inter-token target, in times of the same step without prefill as it usually is: it does not grow where the machine
is slow for some seconds. The bar is 3, and steps grow with the context while a long prompt goes on."""

LEAST_ITL = 0.055
"""Seconds. The default target is never below: 18 tokens a second are faster than anyone reads."""

ALL_FACTOR = 2
"""And in times of the step that it will be when all prompts that could run are streams: one with few streams is little
longer without them, so that a burst would be computed a few streams at a time, and its last first token come late."""

LEAST_FACTOR = 1.4
"""Prefill has two sevenths of the time of a step by default, however far steps are from their predictions: on a machine that
is taken away now and then the target would leave it nothing."""

FEW_TOKENS = 2
"""A prefill goes on with so many tokens however little time there is: at a context of 8,000 four took two decode steps."""

UNLIMITED = 1e9
"""Seconds of a step that no stream waits for."""


class Want(NamedTuple):
    """A prefill that could go on in this step: tokens [start, stop)."""

    live: Live
    urgency: float  # effective priority
    start: int
    stop: int

    @property
    def shortest(self) -> tuple[float, int, int]:
        return (-self.urgency, self.stop - self.start, self.live.number)

    @property
    def oldest(self) -> tuple[float, int]:
        return (-self.urgency, self.live.number)


class StepBudget:
    """`target_itl`: seconds that 99 of 100 steps with prefill beside streams should not exceed; None: the default. So the
    time that is planned for is less, by what steps took beyond their predictions (`StepCost.tail`).

    `whole`: a prompt is computed in one step, or not in this one (encoders: no token stands for those that follow).
    """

    def __init__(self, cost: StepCost, target_itl: float | None = None, whole: bool = False) -> None:
        self._cost = cost
        self._target = target_itl
        self._whole = whole

    def seconds(self, decodes: Load, num_prompts: int) -> float:
        """For all prefills of a step with these decodes. num_prompts: those under way, and those who wait and have a slot."""
        if not decodes.num_tokens:
            return UNLIMITED
        alone = self._cost.predict(decodes)
        if self._target is not None:
            return self._target / self._cost.tail - alone
        more = 1 + num_prompts / decodes.num_tokens
        all_streams = Load(1, *(more * amount for amount in decodes[1:]))  # type: ignore[arg-type]
        usual, later = self._cost.usual(decodes), self._cost.usual(all_streams)
        target = max(LEAST_ITL, ITL_FACTOR * usual, ALL_FACTOR * later)
        return max(target / self._cost.tail, LEAST_FACTOR * alone) - alone

    def share(self, wants: Sequence[Want], seconds: float, num_tokens: int) -> dict[Live, int]:
        """Tokens for each of `wants`, of a budget in seconds and tokens.

        Half is kept for the oldest, so that a long prompt always goes on; those that have least left get the rest
        first, so that a short one is not blocked by it. The oldest gets a few tokens however little time there is.
        """
        if not wants:
            return {}
        if self._whole:
            return self._share_whole(wants, num_tokens)
        oldest = min(wants, key=lambda want: want.oldest)
        kept_seconds, kept_tokens = seconds / 2, min((num_tokens + 1) // 2, oldest.stop - oldest.start)
        counts: dict[Live, int] = {}
        for want in sorted(wants, key=lambda want: want.shortest):
            if want is oldest:
                kept_seconds = kept_tokens = 0
            n = self._portion(want, seconds - kept_seconds, num_tokens - kept_tokens, least=want is oldest)
            counts[want.live] = n
            num_tokens -= n
            if n:
                seconds -= self._cost.seconds(want.start, n)
        return counts

    @staticmethod
    def _share_whole(wants: Sequence[Want], num_tokens: int) -> dict[Live, int]:
        """In their order, which is that of admission: each all that it needs, as long as that is left."""
        counts: dict[Live, int] = {}
        for want in wants:
            needed = want.stop - want.start
            counts[want.live] = needed if needed <= num_tokens else 0
            num_tokens -= counts[want.live]
        return counts

    def _portion(self, want: Want, seconds: float, num_tokens: int, least: bool) -> int:
        start, stop = want.start, want.stop
        n = min(stop - start, num_tokens)
        fits = self._cost.most_tokens(start, seconds) if seconds < UNLIMITED / 2 else n
        if fits < n:  # whole blocks, since kernels work on rows in sixteens; less where a block takes too long
            unit = BLOCK_SIZE if fits >= BLOCK_SIZE or not least else FEW_TOKENS
            n = max(fits - (start + fits) % unit, 0)
            if least:
                n = min(max(n, FEW_TOKENS), stop - start, num_tokens)
        return n
