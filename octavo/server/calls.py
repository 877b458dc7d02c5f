"""Calls: what surrounds every HTTP request: its id, its caller, the count, the log line and the trace."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from collections.abc import Container
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.config import RequestLog
from octavo.server.access import Caller, Keys, check_origin
from octavo.server.docs import DOCS
from octavo.server.errors import ANTHROPIC, ApiError
from octavo.server.metrics import Metrics
from octavo.server.tracing import Tracer

LOG = logging.getLogger("octavo.requests")

SEND_BODY = "octavo.send_body"
"""Of a scope: what sends parts of a body, below all that looks at how a response starts."""

OPEN_PATHS = ("/", "/health", DOCS)
"""Need no API key: liveness, which says nothing about anybody, and the page that asks for a key to read the rest."""

SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
"""Change nothing."""

QUIET_PATHS = ("/health", "/health/ready", "/metrics")
"""Polled by machines: logged only where they fail."""

_ID = re.compile(rb"[!-~]{1,128}")
"""A request id that is taken over: printable ASCII without blanks."""


def log_to_stderr() -> None:
    """Where the log lines of requests go, as they are."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    LOG.handlers = [handler]
    LOG.propagate = False
    LOG.setLevel(logging.INFO)


class Call:
    """One HTTP request on its way, and what came of it. Times are of the monotonic clock, in seconds."""

    def __init__(
        self, id: str, caller: Caller, path: str = "", traceparent: str | None = None, wants_text: bool = False
    ) -> None:
        self.id = id
        self.caller = caller
        self.path = path
        self.traceparent = traceparent
        self.started = time.monotonic()
        self.status = 0
        self.answer_id: str | None = None
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_output_tokens = 0
        self.finish_reasons: list[str] = []
        self.queue_seconds: float | None = None  # of the first choice; known with its first token
        self.first_token: float | None = None
        self.error: str | None = None
        self.lasts: asyncio.Event | None = None  # set when the work ends that outlives the HTTP answer
        self.wants_text = wants_text
        self.prompts: list[str] | None = None  # only where texts are logged
        self.outputs: list[str] | None = None

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens

    def line(self) -> dict[str, Any]:
        """The log line. Token counts and times, no text unless asked for."""
        ended = time.monotonic()
        line: dict[str, Any] = {
            "time": round(time.time(), 3),
            "request_id": self.id,
            "path": self.path,
            "status": self.status,
            "seconds": round(ended - self.started, 4),
        }
        if self.caller.name:
            line["key"] = self.caller.name
        if self.answer_id is not None:
            line |= {
                "id": self.answer_id,
                "prompt_tokens": self.num_prompt_tokens,
                "cached_tokens": self.num_cached_tokens,
                "output_tokens": self.num_output_tokens,
                "finish_reasons": self.finish_reasons,
            }
        if self.queue_seconds is not None:
            line["queue_seconds"] = round(self.queue_seconds, 4)
        if self.first_token is not None:
            line["first_token_seconds"] = round(self.first_token - self.started, 4)
        if self.error is not None:
            line["error"] = self.error
        for name in ("prompts", "outputs"):
            if (texts := getattr(self, name)) is not None:
                line[name] = texts
        return line


def call_of(http: Request) -> Call:
    """Of the request that a route was given."""
    call: Call = http.scope["octavo.call"]
    return call


class Calls:
    """The outermost layer of the application."""

    def __init__(
        self,
        app: ASGIApp,
        keys: Keys,
        metrics: Metrics,
        tracer: Tracer,
        generation_paths: frozenset[str],
        log: RequestLog,
        origins: Container[str] = (),
    ) -> None:
        """origins: of web pages that may use the server."""
        self._app = app
        self._keys = keys
        self._metrics = metrics
        self._tracer = tracer
        self._generation_paths = generation_paths
        self._log = log
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        id = given.decode() if _ID.fullmatch(given) else os.urandom(12).hex()
        traceparent = headers.get(b"traceparent", b"").decode("latin-1") or None
        scope[SEND_BODY] = send
        call = scope["octavo.call"] = Call(id, Caller(), scope["path"], traceparent, self._log == "text")

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                call.status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", id.encode())]
                if scope["path"].startswith(ANTHROPIC):  # as its clients call it
                    message["headers"].append((b"request-id", id.encode()))
                route = scope.get("route")
                self._metrics.response(route.path if route else "other", call.status)
            await send(message)

        generates = scope["path"] in self._generation_paths and scope["method"] == "POST"
        is_open: AbstractContextManager[None] = self._metrics.open_request() if generates else nullcontext()
        entered = False
        try:
            with is_open:
                if scope["path"] not in OPEN_PATHS:
                    call.caller = self._keys.caller(headers)
                if not self._keys.needed and scope["method"] not in SAFE_METHODS:
                    check_origin(headers, self._origins)
                if generates:
                    call.caller.enter()
                    entered = True
                await self._app(scope, receive, counted)
                if call.lasts is not None:  # open, whether anybody reads it or not
                    await call.lasts.wait()
        except ApiError as e:
            call.error = e.message
            await e.response(scope["path"])(scope, receive, counted)
        finally:
            if entered:
                call.caller.leave(call.num_tokens)
            self._end(call)

    def _end(self, call: Call) -> None:
        self._tracer.end(call)
        if self._log != "off" and (call.path not in QUIET_PATHS or call.status >= 400):
            LOG.info(msgspec.json.encode(call.line()).decode())
