"""Responses that end with their client: a disconnect aborts the generation, streamed or not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, NamedTuple, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.server.calls import SEND_BODY
from octavo.server.errors import ApiError, json_response
from octavo.server.generation import Generation
from octavo.server.protocol import BODY_WRITER, BodyWriter
from octavo.text.output import Delta

PING = b": ping\n\n"
"""A comment: keeps proxies from closing a connection on which nothing comes."""


_LINE_ENDS = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))


def in_line(part: bytes) -> bytes:
    """JSON whose strings hold nothing that ends a line in Unicode: JSON allows it, but many clients read lines of text."""
    if not part.isascii():
        for raw, escaped in _LINE_ENDS:
            part = part.replace(raw, escaped)
    return part


class Relay(NamedTuple):
    """What makes most parts of a stream, which are written where the engine's message is read."""

    generation: Generation
    written: Callable[[int, Delta], bytes]  # of a delta of a choice; may be empty


class EventStream(Response):
    """Server-sent events. A slow reader holds up only its own stream."""

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        headers: dict[str, str],
        ping_seconds: float,
        status: int = 200,
        *,
        waits: bool = False,
        relay: Relay | None = None,
        media_type: str = "text/event-stream; charset=utf-8",
        ping: bytes = PING,
    ) -> None:
        """ping_seconds: `ping` is sent where nothing else was for so long; 0: never. waits: the status is sent with
        the first event, and is that of the ApiError which `events` raises instead. relay: writes beside `events` what its
        generation relays."""
        super().__init__(None, status, {**headers, "cache-control": "no-cache", "x-accel-buffering": "no"})
        self.headers["content-type"] = media_type
        del self.headers["content-length"]
        self._events = events
        self._ping_seconds = ping_seconds
        self._ping = ping
        self._waits = waits
        self._relay = relay
        self._started = False
        self._starting = asyncio.Lock()
        self._last = 0.0  # when something was sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._waits:
            await self._start(send)
        try:
            await _while_connected(receive, self._run(send, scope[SEND_BODY], scope.get(BODY_WRITER)))
        except ApiError as e:
            if not self._started:
                await e.response(scope["path"])(scope, receive, send)
            else:
                await send({"type": "http.response.body", "body": e.event(scope["path"]), "more_body": False})

    async def _start(self, send: Send) -> None:
        """Once. Nothing else is sent before it was."""
        async with self._starting:
            if not self._started:
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                self._started = True

    async def _run(self, send: Send, send_body: Send, writer: BodyWriter | None) -> None:
        """send: of the application, whose layers look at how a response starts. send_body, writer: below them."""
        self._last, sending = time.monotonic(), False
        if self._relay is not None and writer is not None:
            self._relay.generation.relay(writer.ready, self._sink(self._relay, writer))

        async def ping() -> None:
            while True:
                await asyncio.sleep(max(0.001, self._last + self._ping_seconds - time.monotonic()))
                if not sending and time.monotonic() - self._last >= self._ping_seconds:
                    await self._start(send)
                    await send_body({"type": "http.response.body", "body": self._ping, "more_body": True})
                    self._last = time.monotonic()

        pinging = asyncio.create_task(ping()) if self._ping_seconds else None
        try:
            async with aclosing(self._events) as events:
                async for event in events:
                    if not self._started:
                        await self._start(send)
                    sending = True
                    await send_body({"type": "http.response.body", "body": in_line(event), "more_body": True})
                    self._last, sending = time.monotonic(), False
        finally:
            if self._relay is not None:
                self._relay.generation.end_relay()
            if pinging is not None:
                pinging.cancel()
                await asyncio.gather(pinging, return_exceptions=True)
        await send_body({"type": "http.response.body", "body": b"", "more_body": False})

    def _sink(self, relay: Relay, writer: BodyWriter) -> Callable[[int, Delta], None]:
        written, write, monotonic = relay.written, writer.write, time.monotonic

        def put(choice: int, delta: Delta) -> None:
            if part := written(choice, delta):
                write(in_line(part))
                self._last = monotonic()

        return put


class Whole(Protocol):
    async def body(self) -> dict[str, Any]:
        """The whole answer. Raises ApiError."""


class WholeAnswer(Response):
    """The answer as one JSON body."""

    def __init__(self, answer: Whole, headers: dict[str, str]) -> None:
        super().__init__(None, 200)
        self._answer = answer
        self._extra = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await _while_connected(receive, self._answer.body())
        except ApiError as e:
            response = e.response(scope["path"])
        else:
            if body is None:
                return
            response = json_response(body, 200, self._extra)
        await response(scope, receive, send)


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
