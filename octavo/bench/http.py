"""Target: a server with OpenAI's completions, and streamed requests to it of which every token's time is kept."""

from __future__ import annotations

import asyncio
import itertools
import re
import ssl
import time
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import msgspec
import uvloop

from octavo.config import ConfigError

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    """On the event loop that takes the least."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


class Sent(NamedTuple):
    """One request. Seconds, of `time.perf_counter` where they are moments."""

    status: int
    began: float
    answered: float  # from there to the first byte of the answer
    times: list[float]  # moments of all tokens; those that come in one event have one moment
    error: str  # the answer, where it is no stream

    @property
    def first(self) -> float:
        """From the beginning to the first token; 0 where none came."""
        return self.times[0] - self.began if self.times else 0.0

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in itertools.pairwise(self.times)]

    @property
    def num_tokens(self) -> int:
        return len(self.times)


class Target:
    """`url` with or without /v1 at its end. Raises ConfigError for what is no URL."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as e:
            raise ConfigError(f"{url}: {e}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{url} is no address of a server, as http://127.0.0.1:8000 is")
        self.url = url
        self._host = parts.hostname
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = port or (443 if self._tls else 80)
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = f"host: {parts.netloc}\r\nconnection: close\r\ncontent-type: application/json\r\n"
        if api_key is not None:
            self._headers += f"authorization: Bearer {api_key}\r\n"

    async def model(self) -> str:
        """The first that it serves."""
        status, body = _content(await self._pieces("GET", "/v1/models", b""), self.url)
        answer = b"".join(piece.data for piece in body)
        if status != 200:
            raise ConfigError(f"{self.url}: /v1/models gives status {status}: {answer[:200]!r}")
        try:
            return str(msgspec.json.decode(answer)["data"][0]["id"])
        except (msgspec.DecodeError, LookupError, TypeError):
            raise ConfigError(f"{self.url}: /v1/models names no model") from None

    async def complete(self, prompt: Sequence[int] | str, max_tokens: int, **fields: Any) -> Sent:
        """A greedy completion of `max_tokens` tokens, streamed."""
        body = {
            "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True}, **fields,
        }  # fmt: skip
        began = time.perf_counter()
        pieces = await self._pieces("POST", "/v1/completions", msgspec.json.encode(body))
        status, content = _content(pieces, self.url)
        answered = pieces[0].at - began
        if status != 200:
            error = b"".join(piece.data for piece in content).decode(errors="replace").strip()
            return Sent(status, began, answered, [], error)
        times: list[float] = []
        num_tokens = 0
        for at, data in sse_data(content):
            if not data.startswith(b"{"):
                continue
            chunk = _decode(data)
            if chunk.usage is not None:
                num_tokens = chunk.usage.completion_tokens
            for choice in chunk.choices:
                if choice.token_ids is not msgspec.UNSET:
                    times += [at] * len(choice.token_ids or ())
                elif choice.text:
                    times.append(at)
        if times:  # several in one event, by a server that does not say which
            times += times[-1:] * (num_tokens - len(times))
        return Sent(status, began, answered, times, "")

    async def _pieces(self, method: str, path: str, body: bytes) -> list[Piece]:
        """What comes until the server closes the connection."""
        head = f"{method} {self._base}{path} HTTP/1.1\r\n{self._headers}content-length: {len(body)}\r\n\r\n"
        loop = asyncio.get_running_loop()
        transport, kept = await loop.create_connection(_Kept, self._host, self._port, ssl=self._tls)
        try:
            transport.write(head.encode() + body)
            return await kept.whole
        finally:
            transport.close()


class Piece(NamedTuple):
    at: float  # when it came
    data: bytes


LOOK_SECONDS = 0.001
"""Between two looks of the client at its connections: a server writes all streams of a step one after the other, and a client
that is woken for each takes from the processor of the server what no client on another machine would."""

_BUFFER = memoryview(bytearray(2**16))
"""What was read last, of any connection."""


class _Kept(asyncio.BufferedProtocol):
    """Keeps what comes. It is read when all is there: who is measured on the same machine shall have its processors."""

    _looked = 0.0  # of all connections

    def __init__(self) -> None:
        self._pieces: list[Piece] = []
        self.whole: asyncio.Future[list[Piece]] = asyncio.get_running_loop().create_future()

    def get_buffer(self, sizehint: int) -> memoryview:
        return _BUFFER

    def buffer_updated(self, nbytes: int) -> None:
        now = time.perf_counter()
        self._pieces.append(Piece(now, bytes(_BUFFER[:nbytes])))
        if now > _Kept._looked + LOOK_SECONDS:
            time.sleep(LOOK_SECONDS)
            _Kept._looked = time.perf_counter()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.whole.done():
            self.whole.set_result(self._pieces)


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _Choice(msgspec.Struct):
    text: str | None = None
    token_ids: list[int] | msgspec.UnsetType | None = msgspec.UNSET


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None


_decode = msgspec.json.Decoder(_Chunk).decode


def _content(pieces: list[Piece], url: str) -> tuple[int, list[Piece]]:
    """Status and content of an answer by HTTP/1.1. Raises ConfigError where it is none."""
    whole = b"".join(piece.data for piece in pieces)
    head, _, _ = whole.partition(b"\r\n\r\n")
    line, *headers = head.lower().split(b"\r\n")
    if not line.startswith(b"http/1.") or len(line.split()) < 2:
        raise ConfigError(f"{url}: no answer by HTTP: {whole[:80]!r}")
    passed, content = len(head) + 4, []
    for at, data in pieces:
        if len(data) > passed:
            content.append(Piece(at, data[passed:]))
        passed = max(0, passed - len(data))
    chunked = any(re.fullmatch(rb"transfer-encoding:\s*chunked\s*", header) for header in headers)
    return int(line.split()[1]), list(_unchunked(content)) if chunked else content


def _unchunked(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Of the chunked transfer coding (RFC 9112, 7.1)."""
    rest, left = b"", 0  # not looked at yet; of a chunk what is to come, with the line end behind it
    for at, data in pieces:
        rest += data
        while rest:
            if left > 2:
                content = rest[: left - 2]
                yield Piece(at, content)
                rest, left = rest[len(content) :], left - len(content)
            elif left:
                cut = min(left, len(rest))
                rest, left = rest[cut:], left - cut
            else:
                line, ended, behind = rest.partition(b"\r\n")
                if not ended:
                    break
                left = int(line.partition(b";")[0], 16) + 2
                if left == 2:
                    return
                rest = behind


def sse_data(body: Iterable[Piece]) -> Iterator[Piece]:
    """The data of each event of a stream (WHATWG HTML, server-sent events), with the moment at which it was whole,
    however it was cut on its way."""
    rest, lines = b"", list[bytes]()
    for at, data in body:
        *whole, rest = (rest + data).split(b"\n")
        for line in whole:
            if line.startswith(b"data:"):
                lines.append(line.removeprefix(b"data:").removeprefix(b" ").rstrip(b"\r"))
            elif not line.strip() and lines:
                yield Piece(at, b"\n".join(lines))
                lines.clear()
