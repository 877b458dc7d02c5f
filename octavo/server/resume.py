"""Streams that may be taken up again after the connection broke: their events are numbered, and kept for a while."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing

from octavo.server.errors import ApiError, bad_request

MAX_BYTES = 2**20
"""Of the events that a stream keeps: some thousand chunks. The oldest are forgotten."""

MAX_STREAMS = 256
"""Resumable streams at a time, so that all of them keep 256 MiB at most."""


class ResumableStream:
    """Runs an answer whether anybody reads it or not. Without a reader it ends after a time of grace, if it has one.

    Events [first, first + len(events)) are kept; event i is sent with "id: i".
    """

    def __init__(self, events: AsyncGenerator[bytes, None], grace_seconds: float | None) -> None:
        self._events: deque[bytes] = deque()
        self._first = 0
        self.num_bytes = 0  # of them
        self.ended = asyncio.Event()  # no more events come
        self._readers = 0
        self._grace_seconds = grace_seconds
        self._more = asyncio.Event()
        self._task = asyncio.create_task(self._run(events))
        self.over = asyncio.Event()  # nobody may take it up any more
        self._grace: asyncio.TimerHandle | None = None
        self._begin_grace()

    async def read(self, start: int) -> AsyncGenerator[bytes, None]:
        """Events from number `start` on, as they come. Ending the iteration early starts the time of grace."""
        self._readers += 1
        if self._grace is not None:
            self._grace.cancel()
        try:
            while True:
                if start < self._first:
                    error = ApiError(410, f"events before {self._first} are forgotten", code="events_forgotten")
                    yield error.event()
                    return
                if start < self._first + len(self._events):
                    yield b"id: %d\n%b" % (start, self._events[start - self._first])
                    start += 1
                elif self.ended.is_set():
                    return
                else:
                    self._more.clear()
                    await self._more.wait()
        finally:
            self._readers -= 1
            if self._readers == 0:
                self._begin_grace()

    def check(self, start: int) -> None:
        """Raise ApiError where `start` is no event that may be asked for."""
        if not self._first <= start <= self._first + len(self._events):
            raise ApiError(
                410, f"events {self._first} to {self._first + len(self._events) - 1} are kept, not {start}",
                param="last-event-id", code="events_forgotten",
            )  # fmt: skip

    async def _run(self, events: AsyncGenerator[bytes, None]) -> None:
        try:
            async with aclosing(events):
                async for event in events:
                    self._events.append(event)
                    self.num_bytes += len(event)
                    while self.num_bytes > MAX_BYTES and len(self._events) > 1:
                        self.num_bytes -= len(self._events.popleft())
                        self._first += 1
                    self._more.set()
        except ApiError as e:  # refused before anything came
            self._events.append(e.event())
        finally:
            self.ended.set()
            self._more.set()

    def _begin_grace(self) -> None:
        if self._grace_seconds is not None:
            self._grace = asyncio.get_running_loop().call_later(self._grace_seconds, self._end)

    def _end(self) -> None:
        """The time of grace is over."""
        self._task.cancel()  # aborts what is left
        self.over.set()


class ResumableStreams:
    """Those of one server, by whose they are and the id of the answer: callers do not know of each other's."""

    def __init__(self) -> None:
        self._streams: dict[tuple[str, str], ResumableStream] = {}
        self._watching: set[asyncio.Task[None]] = set()

    def check(self, id: str, caller: str) -> None:
        """Before `add`. Raises ApiError 400 for an id of which a stream is kept, 429 where there are too many."""
        if (caller, id) in self._streams:
            raise bad_request(f"a resumable stream with the id {id} is still kept", "request_id")
        if len(self._streams) >= MAX_STREAMS:
            raise ApiError(
                429, f"{MAX_STREAMS} resumable streams are kept already", param="resumable", code="too_many_streams",
                retry_after=1,
            )  # fmt: skip

    def add(self, id: str, events: AsyncGenerator[bytes, None], caller: str, grace_seconds: float) -> ResumableStream:
        """Start one that `check` has passed."""
        stream = self._streams[caller, id] = ResumableStream(events, grace_seconds)
        task = asyncio.create_task(self._forget(caller, id))
        self._watching.add(task)
        task.add_done_callback(self._watching.discard)
        return stream

    def get(self, id: str, caller: str) -> ResumableStream:
        """Raises ApiError 404, also where it is another caller's."""
        stream = self._streams.get((caller, id))
        if stream is None:
            raise ApiError(404, f"there is no resumable stream {id!r:.100}", param="id", code="stream_not_found")
        return stream

    async def _forget(self, caller: str, id: str) -> None:
        await self._streams[caller, id].over.wait()
        del self._streams[caller, id]
