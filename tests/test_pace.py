"""Answers that take long to write: others have their turn meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from octavo.engine.messages import Progress
from octavo.request import FinishReason, TokenLogprobs
from octavo.server.generation import _behind_scores
from octavo.server.pace import PIECE, Pace


def test_others_have_their_turn_between_pieces() -> None:
    width = 1 + 32
    scores = [TokenLogprobs(i, -1.0, 1, list(range(width - 1)), [-1.0] * (width - 1)) for i in range(1000)]
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def scenario() -> None:
        running = asyncio.create_task(other())
        pace = Pace()
        pieces = [piece async for piece in pace.pieces(scores)]
        assert [score for piece in pieces for score in piece] == scores
        assert max(map(len, pieces)) * width < PIECE + width
        assert turns >= len(scores) * width // PIECE - 1
        before = turns
        for _ in range(PIECE):
            await pace.did(1)
        assert turns > before
        assert [piece async for piece in pace.pieces([])] == []
        running.cancel()

    asyncio.run(scenario())


def test_choices_wait_for_the_scores_of_their_prompt() -> None:
    """Another choice may find the prompt in the cache while choice 0 computes it for its scores."""

    def token(prompt: int, choice: int, index: int) -> tuple[int, Progress]:
        return prompt, Progress(str(prompt), choice, index, [5], [], 0)

    waits = 0, Progress("0", 0, 0, [], [], 0)  # of the prompt
    ended = 1, Progress("1", 0, 0, [], [], 0, FinishReason.ABORT)
    came = [token(0, 1, 0), waits, token(1, 2, 0), token(0, 2, 0), ended, token(0, 0, 0), token(0, 1, 1)]

    async def arriving() -> AsyncGenerator[tuple[int, Progress], None]:
        for item in came:
            yield item

    async def scenario() -> list[tuple[int, Progress]]:
        return [item async for item in _behind_scores(arriving())]

    told = asyncio.run(scenario())
    assert told == [waits, ended, token(1, 2, 0), token(0, 0, 0), token(0, 1, 0), token(0, 2, 0), token(0, 1, 1)]
