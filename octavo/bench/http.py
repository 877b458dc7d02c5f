"""Target: a server with OpenAI's completions, and streamed requests to it of which every token's time is kept."""

from __future__ import annotations

import asyncio
import itertools
import json
import ssl
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from octavo.config import ConfigError


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
        status, body, writer = await self._request("GET", "/v1/models", b"")
        answer = b"".join([data async for data in body])
        writer.close()
        if status != 200:
            raise ConfigError(f"{self.url}: /v1/models gives status {status}: {answer[:200]!r}")
        try:
            return str(json.loads(answer)["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            raise ConfigError(f"{self.url}: /v1/models names no model") from None

    async def complete(self, prompt: Sequence[int] | str, max_tokens: int, **fields: Any) -> Sent:
        """A greedy completion of `max_tokens` tokens, streamed."""
        body = {
            "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True}, **fields,
        }  # fmt: skip
        began = time.perf_counter()
        status, answer, writer = await self._request("POST", "/v1/completions", json.dumps(body).encode())
        answered = time.perf_counter() - began
        events: list[tuple[float, int]] = []
        usage: dict[str, Any] = {}
        error = ""
        try:
            if status != 200:
                error = b"".join([data async for data in answer]).decode(errors="replace").strip()
            async for data in sse_data(answer):
                if not data.startswith(b"{"):
                    continue
                chunk = json.loads(data)
                usage = chunk.get("usage") or usage
                for choice in chunk.get("choices", ()):
                    if "token_ids" in choice:
                        events.append((time.perf_counter(), len(choice["token_ids"] or ())))
                    elif choice.get("text"):
                        events.append((time.perf_counter(), 1))
        finally:
            writer.close()
        times = [at for at, count in events for _ in range(count)]
        missing = int(usage.get("completion_tokens", len(times))) - len(times)
        if times and missing > 0:  # several in one event, by a server that does not say which
            times += times[-1:] * missing
        return Sent(status, began, answered, times, error)

    async def _request(
        self, method: str, path: str, body: bytes
    ) -> tuple[int, AsyncIterator[bytes], asyncio.StreamWriter]:
        """Status, the body of the answer in pieces of any size, and what has to be closed."""
        reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls, limit=2**24)
        head = f"{method} {self._base}{path} HTTP/1.1\r\n{self._headers}content-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        line = await reader.readline()
        if not line.startswith(b"HTTP/1."):
            raise ConfigError(f"{self.url}: no answer by HTTP: {line[:80]!r}")
        status = int(line.split()[1])
        chunked = False
        while header := (await reader.readline()).strip():
            name, _, value = header.lower().partition(b":")
            chunked |= name == b"transfer-encoding" and value.strip() == b"chunked"
        return status, _chunks(reader) if chunked else _until_closed(reader), writer


async def _until_closed(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while data := await reader.read(2**16):
        yield data


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Of HTTP/1.1's chunked transfer coding (RFC 9112, 7.1)."""
    while size := int((await reader.readline()).partition(b";")[0] or b"0", 16):
        try:
            yield await reader.readexactly(size)
        except asyncio.IncompleteReadError as e:  # the server is gone
            yield e.partial
        await reader.readline()


async def sse_data(body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of each event of a stream (WHATWG HTML, server-sent events), however it was cut on its way."""
    rest, lines = b"", list[bytes]()
    async for piece in body:
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            if line.startswith(b"data:"):
                lines.append(line.removeprefix(b"data:").removeprefix(b" ").rstrip(b"\r"))
            elif not line.strip() and lines:
                yield b"\n".join(lines)
                lines.clear()
