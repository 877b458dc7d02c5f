"""The requests of a batch file (JSONL, OpenAI's Batch API): reading, their order, running them.

They run in the order of their prompts, so that equal prefixes follow one another and are computed once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from octavo.server.calls import Call
from octavo.server.errors import ApiError
from octavo.server.files import write_whole
from octavo.server.parse import decode

MAX_LINES = 50_000
MAX_LINE = 32 * 2**20
MAX_ERRORS = 20
"""Faulty lines that are told of one file."""

BACKGROUND = 1000
"""Priority (lower is served earlier) of a request that brings none: behind live ones, which bring 0."""

RETRIES = 100
"""Of a request that a full queue refuses."""

RunOne = Callable[[str, bytes, Call], Awaitable[dict[str, Any]]]
"""(url, body, call) -> JSON object of the answer. Raises ApiError."""


class Line(NamedTuple):
    """One request of an input file."""

    custom_id: str
    url: str
    body: dict[str, Any]


class LineError(ValueError):
    def __init__(self, line: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.line = line
        self.param = param


def read_lines(path: Path, urls: Iterable[str], only: str | None = None) -> tuple[list[Line], list[LineError]]:
    """Requests of a JSONL file, and what is wrong with it. `urls` can be run; `only`: all must be of this one."""
    lines: list[Line] = []
    errors: list[LineError] = []
    seen: set[str] = set()
    known = tuple(urls)
    with open(path, "rb") as file:
        for number, text in enumerate(file, 1):
            if not text.strip():
                continue
            try:
                if len(lines) >= MAX_LINES:
                    raise LineError(number, f"a batch has at most {MAX_LINES} requests")
                lines.append(_read_line(number, text, known, only, seen))
            except LineError as e:
                errors.append(e)
                if len(errors) == MAX_ERRORS or len(lines) >= MAX_LINES:
                    break
    if not lines and not errors:
        errors.append(LineError(0, "the file has no request"))
    return lines, errors


def _read_line(number: int, text: bytes, urls: tuple[str, ...], only: str | None, seen: set[str]) -> Line:
    if len(text) > MAX_LINE:
        raise LineError(number, f"the line is longer than {MAX_LINE} bytes")
    try:
        fields = decode(text)
    except ApiError as e:
        raise LineError(number, e.message) from None
    custom_id, url, body = fields.get("custom_id"), fields.get("url"), fields.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        raise LineError(number, "custom_id must be a text that is not empty", "custom_id")
    if custom_id in seen:
        raise LineError(number, f"custom_id {custom_id!r:.80} is there twice", "custom_id")
    if fields.get("method", "POST") != "POST":
        raise LineError(number, f"method must be POST, got {fields['method']!r:.40}", "method")
    if url not in urls or (only is not None and url != only):
        raise LineError(number, f"url must be {only or ' or '.join(urls)}, got {url!r:.80}", "url")
    if not isinstance(body, dict):
        raise LineError(number, "body must be an object: the fields of the request", "body")
    if body.get("stream"):
        raise LineError(number, "stream must not be set: a batch is answered whole", "body")
    seen.add(custom_id)
    return Line(custom_id, str(url), body)


def in_order_of_prefixes(lines: Iterable[Line]) -> list[Line]:
    """Those with equal beginnings follow one another."""

    def beginning(line: Line) -> bytes:
        body = line.body
        prompt = body.get("messages") or body.get("prompt") or body.get("input")
        return msgspec.json.encode([line.url, body.get("tools"), prompt])

    return sorted(lines, key=beginning)


async def run_lines(
    lines: list[Line], run_one: RunOne, width: int, make_call: Callable[[], Call]
) -> AsyncIterator[dict[str, Any]]:
    """Entries of the output file as they come, at most `width` requests at once."""
    waiting = iter(await asyncio.to_thread(in_order_of_prefixes, lines))
    running: set[asyncio.Task[dict[str, Any]]] = set()
    try:
        while True:
            while len(running) < width and (line := next(waiting, None)) is not None:
                running.add(asyncio.create_task(_run_line(line, run_one, make_call())))
            if not running:
                return
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                yield task.result()
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _run_line(line: Line, run_one: RunOne, call: Call) -> dict[str, Any]:
    body = msgspec.json.encode({"priority": BACKGROUND, **line.body})
    for attempt in range(RETRIES):
        try:
            status, content = 200, await run_one(line.url, body, call)
            break
        except ApiError as e:
            status, content = e.status, e.body()
            if status not in (429, 503) or attempt == RETRIES - 1:
                break
            await asyncio.sleep(max(1, e.retry_after))
    response = {"status_code": status, "request_id": call.id, "body": content}
    return {"id": f"batch_req_{call.id}", "custom_id": line.custom_id, "response": response, "error": None}


def written_ids(path: Path) -> set[str]:
    """custom_ids that have a result in an output file. A line that was cut off by the end of a process is cut out."""
    if not path.exists():
        return set()
    lines = path.read_bytes().splitlines(keepends=True)
    if lines and not lines[-1].endswith(b"\n"):
        del lines[-1]
        write_whole(path, b"".join(lines))
    return {msgspec.json.decode(line)["custom_id"] for line in lines}
