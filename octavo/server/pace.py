"""Pace: where one answer takes long to write, others have their turn in between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from octavo.request import TokenLogprobs

PIECE = 1024
"""Scores or deltas that are written at once: one takes 1 to 3 us, so that the event loop is free after 3 ms."""


class Pace:
    """Of one answer."""

    def __init__(self) -> None:
        self._done = 0

    async def did(self, count: int) -> None:
        """So much is written. Gives way to others where it was much since the last time."""
        self._done += count
        if self._done >= PIECE:
            self._done = 0
            await asyncio.sleep(0)

    async def pieces(self, scores: list[TokenLogprobs]) -> AsyncGenerator[list[TokenLogprobs], None]:
        """The scores of consecutive tokens in slices; others have their turn between them."""
        width = 1 + max((len(score.top_ids) for score in scores[:1]), default=0)
        step = -(-PIECE // width)
        for start in range(0, len(scores), step):
            yield scores[start : start + step]
            await self.did(step * width)
