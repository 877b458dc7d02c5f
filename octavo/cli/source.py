"""Where the answers of a conversation come from: a model of this machine, or a server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from octavo.engine.client import EngineError
from octavo.request import ParameterError

OnChunk = Callable[[dict[str, Any]], None]
"""Takes the chunks of a streamed answer, in OpenAI's form."""


class Source(Protocol):
    name: str

    def check(self, path: str, body: dict[str, Any]) -> None:
        """Raises ParameterError where it is known already that the answer to `body` would be refused."""

    def stream(self, path: str, body: dict[str, Any], on_chunk: OnChunk) -> None:
        """Answer a body piece by piece. An interrupt ends the answer and is raised on.

        Raises ParameterError where it is refused, EngineError or OSError where it fails.
        """


def refusal(status: int, message: str, param: str | None = None) -> Exception:
    """What an HTTP error is to a command."""
    return ParameterError(param or "", message) if status == 400 else EngineError(message)


def read_chunk(line: bytes) -> dict[str, Any] | None:
    """The chunk that a line of server-sent events holds. Raises EngineError where it tells of an error."""
    if not line.startswith(b"data:"):
        return None
    data = line[5:].strip()
    if data == b"[DONE]":
        return None
    try:
        chunk = msgspec.json.decode(data, type=dict[str, Any])
    except msgspec.DecodeError as e:
        raise EngineError(f"the stream has an event that is no JSON object: {e}") from None
    if "error" in chunk:
        raise EngineError(error_message(chunk))
    return chunk


def error_message(body: Any) -> str:
    """Of an error in OpenAI's form, or in whatever form a server has."""
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)
