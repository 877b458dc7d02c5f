"""Protocol: what uvicorn does with a connection, with bounds on what a client may send before it is a request."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from octavo.server.errors import ApiError

BODY_WRITER = "octavo.body_writer"
"""Of a scope: the BodyWriter of its answer."""

MAX_HEAD = 2**16
"""Bytes of a request line and its headers: they are joined as they come, which takes long of endless ones."""

HEAD_SECONDS = 60.0
"""For a head to arrive: a connection holds a file descriptor."""


class BodyWriter:
    """Writes parts of a body without a task that waits for it: what `send` of the application does, where nothing has to be
    waited for. Not for the last part."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    def ready(self) -> bool:
        """A chunked body is being sent, and its reader is not behind."""
        cycle = self._cycle
        return bool(
            cycle.chunked_encoding
            and cycle.response_started
            and not (cycle.flow.write_paused or cycle.disconnected or cycle.response_complete)
        )

    def write(self, part: bytes) -> None:
        """Where `ready`. The part is not empty, which would be the last chunk (RFC 9112, 7.1)."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(part), part))


class Protocol(HttpToolsProtocol):
    """One connection. What is no HTTP is refused in the form of every other refusal."""

    _in_head = False
    _num_bytes = 0  # of the head, behind those that came with its first
    _deadline: asyncio.TimerHandle | None = None
    _answered: RequestResponseCycle | None = None  # the request that is being answered; `cycle` may be one behind it

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True
            self._answered.message_event.set()

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        continues = self._in_head
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self._refuse(400, "this is no HTTP request")
            return
        self._num_bytes = self._num_bytes + len(data) if continues and self._in_head else 0
        if self._num_bytes > MAX_HEAD:
            self._refuse(431, f"the request line and headers are longer than {MAX_HEAD} bytes")

    def _feed(self, data: bytes) -> None:
        """An offer to speak another protocol, as Java's client makes of HTTP/2, is not taken up: the parser, which leaves
        what follows to that protocol, is given the request again without it. Raises HttpParserError."""
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as e:
                method = self.parser.get_method()
                if method == b"CONNECT":
                    raise httptools.HttpParserError("this is no proxy") from None
                lines = [b"%b: %b" % each for each in self.headers if each[0] not in (b"upgrade", b"connection")]
                data = b"\r\n".join([b"%b %b HTTP/1.1" % (method, self.url), *lines, b"", data[e.args[0] :]])

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._await_head()

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._in_head = False
        self._stop_waiting()
        super().on_headers_complete()
        if len(self.pipeline) == 1:  # behind one request that waits the connection is still read, to see its end
            self.flow.resume_reading()

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        cycle.scope[BODY_WRITER] = BodyWriter(cycle)  # type: ignore[literal-required]
        super()._start_asgi_task(cycle, app)

    def _await_head(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(HEAD_SECONDS, self._give_up)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        if self._in_head:
            self._refuse(408, f"the request did not come within {HEAD_SECONDS:g} seconds")
        self.transport.close()

    def _refuse(self, status: int, message: str) -> None:
        """Unless an answer is being written."""
        if self.transport.is_closing():
            return
        answered = self._answered
        if answered is None or not answered.response_started or answered.response_complete:
            body = msgspec.json.encode(ApiError(status, message).body())
            head = (
                f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()
