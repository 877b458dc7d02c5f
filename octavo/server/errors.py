"""Errors for every way a request can fail, in the form that the clients of a path understand."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Self

import msgspec
from starlette.responses import Response

MAX_MESSAGE = 1000
"""Characters of a message: it may quote what the client sent, and that may be megabytes."""


ANTHROPIC = "/v1/messages"
"""Paths of Anthropic's API begin so."""

OLLAMA = "/api/"
"""Paths of Ollama's API begin so."""

_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


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

    def renamed(self, names: Mapping[str, str]) -> Self:
        """The same with the fields as another protocol calls them. names: field -> its name there."""
        words = re.compile(r"\b(" + "|".join(map(re.escape, names)) + r")\b")
        message = words.sub(lambda found: names[found[0]], self.message)
        param = names.get(self.param, self.param) if self.param else None
        return type(self)(self.status, message, param=param, code=self.code, retry_after=self.retry_after)

    def body(self, path: str = "") -> dict[str, Any]:
        """In Anthropic's or Ollama's form where the path is of their API, else in OpenAI's."""
        if path.startswith((ANTHROPIC, OLLAMA)):
            fallback = "invalid_request_error" if self.status < 500 else "api_error"
            kind = _ANTHROPIC_TYPES.get(self.status, fallback)
            named = self.param is None or self.param in self.message
            message = self.message if named else f"{self.param}: {self.message}"
            if path.startswith(OLLAMA):
                return {"error": message}
            return {"type": "error", "error": {"type": kind, "message": message}}
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self, path: str = "") -> Response:
        headers = {"retry-after": str(self.retry_after)} if self.retry_after else {}
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return json_response(self.body(path), self.status, headers)

    def event(self, path: str = "") -> bytes:
        """As the last event of a stream that had begun."""
        name = b"event: error\n" if path.startswith(ANTHROPIC) else b""
        return name + b"data: " + msgspec.json.encode(self.body(path)) + b"\n\n"


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")
