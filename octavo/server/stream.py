"""Responses that end with their client: a disconnect aborts the generation, streamed or not."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.server.answer import Answer
from octavo.server.errors import ApiError, json_response


class EventStream(Response):
    """Server-sent events of an answer. A slow reader holds up only its own stream."""

    def __init__(self, answer: Answer, headers: dict[str, str]) -> None:
        super().__init__(None, 200, {**headers, "cache-control": "no-cache", "x-accel-buffering": "no"})
        self.headers["content-type"] = "text/event-stream; charset=utf-8"
        del self.headers["content-length"]
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await _while_connected(receive, self._events(send))

    async def _events(self, send: Send) -> None:
        try:
            for chunk in self._answer.opening():
                await _send_part(send, chunk)
            async with aclosing(self._answer.generation.deltas()) as deltas:
                async for choice, delta in deltas:
                    if chunk := self._answer.chunk(choice, delta):
                        await _send_part(send, chunk)
            last = self._answer.closing()
        except ApiError as e:
            last = e.event()
        await send({"type": "http.response.body", "body": last, "more_body": False})


class WholeAnswer(Response):
    """The answer as one JSON body."""

    def __init__(self, answer: Answer, headers: dict[str, str]) -> None:
        super().__init__(None, 200)
        self._answer = answer
        self._extra = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await _while_connected(receive, self._answer.body())
        except ApiError as e:
            response = e.response()
        else:
            if body is None:
                return
            response = json_response(body, 200, self._extra)
        await response(scope, receive, send)


async def _send_part(send: Send, chunk: bytes) -> None:
    await send({"type": "http.response.body", "body": chunk, "more_body": True})


async def _while_connected(receive: Receive, work: Coroutine[Any, Any, Any]) -> Any:
    """The result of `work`; None, and `work` cancelled, when the client leaves first."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(gone())
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)
