"""EngineClient: the API process's side of an engine process, for asyncio.

One message comes in per step and is handed to the streams it concerns; nothing polls.
"""

from __future__ import annotations

import asyncio
import itertools
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import NamedTuple

import msgspec
import zmq

from octavo.config import EngineConfig
from octavo.engine.admission import Bounds
from octavo.engine.messages import (
    Abort,
    Add,
    Command,
    Event,
    Explain,
    Flush,
    LoadAdapter,
    Loading,
    Progress,
    Ready,
    Reply,
    Shutdown,
    Stats,
    StepOutput,
    UnloadAdapter,
)
from octavo.engine.overload import UNBOUNDED, Asking, Backlog, QueueBounds
from octavo.engine.spawn import Spawned
from octavo.engine.supervisor import EngineProcess
from octavo.explain import Explanation
from octavo.weights.adapter_config import AdapterError

KEEP_SECONDS = 2.0
"""An engine that was told to end may take so long to write what its disk cache is to keep."""

CLOSE_SECONDS = 3.0
"""And gets so much longer: a step, not a drain."""


MAX_PENDING = 4096
MAX_PENDING_PER_CHOICE = 256
"""Progress that a stream keeps for a reader that is slow, half a kilobyte each: 2 MB, or minutes of one choice."""

_NOBODY: tuple[Callable[[], None], int] = (lambda: None), 0
"""Reads what comes of a request that was left."""

LAST_EVENTS_MS = 50
"""What an engine sent before it ended has arrived in this process by then, but not in ZeroMQ's queue."""


class EngineError(RuntimeError):
    """The engine could not start. The message is one line for the user."""


class SlowReader(RuntimeError):
    """A stream was read so slowly that too much waited; its request was aborted."""


class EngineDead(RuntimeError):
    """The engine process has ended with requests open."""


class NamedAdapter(NamedTuple):
    digest: str
    path: str


class EngineClient:
    """Belongs to one event loop, that of the first `ready`. `launch` needs none."""

    def __init__(
        self, process: EngineProcess, context: zmq.Context[zmq.Socket[bytes]], bounds: QueueBounds = UNBOUNDED
    ) -> None:
        self.process = process
        self.stats = Stats()
        self.loading: Loading | None = None  # how far it is, where that takes long; until it is ready
        self._on_loading: Callable[[Loading], None] = lambda loading: None
        self._backlog = Backlog(process.config.max_num_seqs, bounds)
        self.bounds: Bounds | None = None
        self.adapters: dict[str, NamedAdapter] = {}  # by name; the engine knows them by their digests
        self._context = context
        self._commands = _bound(context, zmq.PUSH, process.commands)
        self._events = _bound(context, zmq.PULL, process.events)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)
        self._readers: dict[str, tuple[weakref.ref[Stream], int]] = {}  # by the id of a request, with its index there
        self._asked: dict[int, asyncio.Future[Reply]] = {}  # by ticket
        self._tickets = itertools.count()
        self._leaving: dict[str, int] = {}  # aborted ids -> choices whose end the engine has not told yet
        self._failed: str | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    @classmethod
    def launch(
        cls,
        config: EngineConfig,
        bounds: QueueBounds = UNBOUNDED,
        on_loading: Callable[[Loading], None] = lambda loading: None,
        spawned: Spawned | None = None,
    ) -> EngineClient:
        """Start the engine process and return at once. `config.model` is a path on this machine.

        on_loading: told how far it is, while `ready` waits for long. spawned: the process, where it is there already.
        """
        client = cls(EngineProcess(config), zmq.Context(), bounds)
        client._on_loading = on_loading
        client.process.start(spawned)
        return client

    async def ready(self) -> Ready:
        """Wait until the model is loaded. Raises EngineError with the engine's message where that failed."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._ready: asyncio.Future[Ready] = self._loop.create_future()
            self._dead: asyncio.Future[str] = self._loop.create_future()
            self._loop.add_reader(self._events.fileno(), self._on_events)
            self._loop.add_reader(self.process.lifeline, self._on_death)
            self._on_events()  # the descriptor tells of changes only
        return await asyncio.shield(self._ready)

    @property
    def alive(self) -> bool:
        """The process runs and its model is loaded."""
        return self.bounds is not None and not self._dead.done()

    async def wait_dead(self) -> str:
        """Until the engine has ended; how. After `ready` was called."""
        return await asyncio.shield(self._dead)

    def submit(self, *adds: Add) -> Stream:
        """Queue requests; iterate over what all of their choices gain: (index of the request, Progress).

        Raises ParameterError where one can never be served, EngineDead where no engine runs. Leaving the iteration
        early aborts what is left.
        """
        if self.bounds is None or self._dead.done():
            raise EngineDead(self._dead.result() if self.bounds else "the engine is not ready")
        for add in adds:
            self.bounds.check(add)
            if add.id in self._readers or add.id in self._leaving:
                raise ValueError(f"request id {add.id} is in use")
        stream = Stream(self, adds)
        reader = weakref.ref(stream)
        for index, add in enumerate(adds):
            self._readers[add.id] = reader, index
            self._backlog.sent(add)
            self._send(add)
        return stream

    def check_backlog(self, add: Add) -> None:
        """Before the first of a client's requests is submitted. Raises Overloaded where too much waits already."""
        self._backlog.check(self.stats, Asking.of(add))

    def abort(self, id: str, choice: int = -1) -> None:
        """End a request or one choice. Its last Progress has finish reason ABORT, unless it ended before."""
        if id in self._readers:
            self._send(Abort(id, choice))

    async def explain(self, id: str) -> list[Explanation]:
        """Of the request `id`, or of `id`-0, `id`-1 and so on, live or ended not long ago. Raises EngineDead."""
        return (await self._ask(Explain(next(self._tickets), id))).explanations

    async def flush(self) -> int:
        """Forget the cached blocks that no live request uses; how many these were. Raises EngineDead."""
        return (await self._ask(Flush(next(self._tickets)))).num_blocks

    async def load_adapter(self, path: str) -> str:
        """The digest of the LoRA adapter at a path of this machine, which requests may use from now on.

        Raises AdapterError with one line for the user where it cannot be served, EngineDead.
        """
        reply = await self._ask(LoadAdapter(next(self._tickets), path))
        if reply.error is not None:
            raise AdapterError(reply.error)
        return reply.adapter

    async def unload_adapter(self, digest: str) -> None:
        """Forget an adapter, as soon as those that use it have ended. Raises EngineDead."""
        await self._ask(UnloadAdapter(next(self._tickets), digest))

    async def close(self, keep_seconds: float = KEEP_SECONDS) -> None:
        """End the engine, at once for open requests. May be called again."""
        if self._closed:
            return
        self._closed = True
        loop = asyncio.get_running_loop()
        told = self.process.alive and self._send(Shutdown(keep_seconds))
        if self._loop is not None:
            loop.remove_reader(self._events.fileno())
            loop.remove_reader(self.process.lifeline)
            if not self._dead.done():  # streams are told before the engine has ended: it may be in a long step
                self._end("the engine was shut down before the answer was complete")
        await loop.run_in_executor(None, self.process.stop, keep_seconds + CLOSE_SECONDS if told else 0)
        self._context.destroy(linger=0)

    async def _ask(self, command: Explain | Flush | LoadAdapter | UnloadAdapter) -> Reply:
        if self.bounds is None or self._dead.done():
            raise EngineDead(self._dead.result() if self.bounds else "the engine is not ready")
        assert self._loop is not None
        reply: asyncio.Future[Reply] = self._loop.create_future()
        self._asked[command.ticket] = reply
        self._send(command)
        try:
            return await reply
        finally:
            del self._asked[command.ticket]

    def _send(self, command: Command) -> bool:
        """False: no engine is there to take it, not yet or no more; of its death the lifeline tells."""
        try:
            self._commands.send(self._encoder.encode(command), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _on_events(self) -> None:
        while True:  # to the end: the descriptor fires once per change
            try:
                event = self._decoder.decode(self._events.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            if isinstance(event, StepOutput):
                self.stats = event.stats or self.stats
                for progress in event.progress:
                    if progress.token_ids or progress.finish_reason is not None:
                        self._backlog.begun(progress.id)
                    reader, index = self._readers.get(progress.id, _NOBODY)
                    stream = reader()
                    if stream is not None:
                        stream._push(index, progress)
                    elif progress.finish_reason is not None:
                        self._leaving[progress.id] -= 1
                        if self._leaving[progress.id] == 0:
                            del self._leaving[progress.id]
            elif isinstance(event, Loading):
                self.loading = event
                self._on_loading(event)
            elif isinstance(event, Ready):
                self.loading = None
                eos_ids = frozenset(event.eos_ids)
                self.bounds = Bounds(event.vocab_size, event.max_model_len, eos_ids, event.abilities)
                for name, path in self.process.config.adapters:
                    self.adapters[name] = NamedAdapter(event.adapters[name], path)
                if not self._ready.done():
                    self._ready.set_result(event)
            elif isinstance(event, Reply):
                reply = self._asked.get(event.ticket)
                if reply is not None and not reply.done():
                    reply.set_result(event)
            else:
                self._failed = event.message

    def _on_death(self) -> None:
        assert self._loop is not None
        self._loop.remove_reader(self.process.lifeline)
        while self._events.poll(LAST_EVENTS_MS):  # the thread that receives may be behind
            self._on_events()
        self._end(self._failed or self.process.how_it_ended())

    def _end(self, reason: str) -> None:
        self._dead.set_result(reason)
        if not self._ready.done():
            self._ready.set_exception(EngineError(reason))
        for reader in {reader for reader, _ in self._readers.values()}:
            stream = reader()
            if stream is not None:
                stream._fail(reason)
        for reply in self._asked.values():
            if not reply.done():
                reply.set_exception(EngineDead(reason))

    def _leave(self, id: str, num_open: int) -> None:
        self._readers.pop(id, None)
        if not self._closed and not self._dead.done():
            self._leaving[id] = num_open
            self._send(Abort(id))


class Stream(AsyncIterator[tuple[int, Progress]]):
    """Progress of requests in order of arrival, with the index of the request, until every choice of all has finished.
    One reader.

    `relay` may take what comes while the reader waits: it has worked off all before, so that the order is kept, and it is
    not woken. False: it is the reader's. What `relay` raises is raised to the reader.
    """

    def __init__(self, client: EngineClient, adds: Sequence[Add]) -> None:
        self._client = client
        self._open = {
            add.id: add.params.n for add in adds
        }  # choices that have not finished, of requests that have some
        self._items: deque[tuple[int, Progress]] = deque()
        self._most = MAX_PENDING + MAX_PENDING_PER_CHOICE * sum(self._open.values())
        self._slow = False
        self._waiter: asyncio.Future[None] | None = None
        self._reason: str | None = None
        self._error: Exception | None = None
        self.relay: Callable[[int, Progress], bool] | None = None

    async def __anext__(self) -> tuple[int, Progress]:
        while not self._items:
            if self._error is not None:
                raise self._error
            if self._slow:
                raise SlowReader(f"the answer was read so slowly that {self._most} parts of it were waiting")
            if self._reason is not None:
                raise EngineDead(self._reason)
            if not self._open:
                raise StopAsyncIteration
            assert self._client._loop is not None
            self._waiter = self._client._loop.create_future()
            await self._waiter
        return self._items.popleft()

    async def aclose(self) -> None:
        """Abort what is left. Done by itself when the stream is dropped."""
        self._leave()

    def __del__(self) -> None:
        self._leave()

    def _leave(self) -> None:
        self._items.clear()
        self.relay = None
        still_open, self._open = self._open, {}
        if self._reason is None:
            for id, num_open in still_open.items():
                self._client._leave(id, num_open)

    def _push(self, index: int, progress: Progress) -> None:
        if progress.finish_reason is not None:
            self._open[progress.id] -= 1
            if self._open[progress.id] == 0:
                del self._open[progress.id], self._client._readers[progress.id]
        if self.relay is not None and self._waiter is not None and not self._waiter.done():
            try:
                if self.relay(index, progress):
                    return
            except Exception as error:  # one request's fault, which the others of the step have nothing to do with
                self._error = error
                self._wake()
                return
        if len(self._items) >= self._most:
            self._slow = True
            self._leave()
            return
        self._items.append((index, progress))
        self._wake()

    def _fail(self, reason: str) -> None:
        self._reason = reason
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _bound(context: zmq.Context[zmq.Socket[bytes]], kind: int, address: str) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = context.socket(kind)
    socket.set_hwm(0)
    socket.bind(address)
    return socket
