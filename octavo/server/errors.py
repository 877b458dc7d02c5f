"""Errors in the form that OpenAI's clients understand, for every way a request can fail."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response

MAX_MESSAGE = 1000
"""Characters of a message: it may quote what the client sent, and that may be megabytes."""


class ApiError(Exception):
    """A refusal: an HTTP status, one sentence, the field at fault and a code that programs can read."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry_after: int = 0
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message if len(message) <= MAX_MESSAGE else message[:MAX_MESSAGE] + "..."
        self.param = param
        self.code = code
        self.retry_after = retry_after  # seconds; 0: say nothing

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        headers = {"retry-after": str(self.retry_after)} if self.retry_after else None
        return json_response(self.body(), self.status, headers)

    def event(self) -> bytes:
        """As the last event of a stream that had begun."""
        return b"data: " + msgspec.json.encode(self.body()) + b"\n\n"


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")
