"""The routes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp

from octavo import __version__
from octavo.server.answer import Answer, events
from octavo.server.calls import Call, Calls, call_of
from octavo.server.chat import chat
from octavo.server.completions import completion
from octavo.server.errors import ApiError, json_response
from octavo.server.parse import Parsed
from octavo.server.service import Service
from octavo.server.stream import EventStream, WholeAnswer
from octavo.server.streams import add_stream_routes

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"

GENERATION_PATHS = frozenset({COMPLETIONS, CHAT})
"""Count as open requests and against quotas."""

MAX_BODY = 32 * 2**20
"""Bytes of a request body: a prompt of a million tokens as JSON numbers takes 7 MB."""

MAX_DISCARDED = 2**28
"""Bytes read of a body that is too large: its client does not look for the refusal before it has sent all."""

MAX_IGNORED = 2000
"""Characters of the header that names ignored fields: clients refuse large ones."""

LONG_BODY = 2**16
"""Bytes from which on a body is read and tokenised beside the event loop, which stays free: 64 KiB take 10 ms. So are
those with DRY: its sequence breakers are looked for in every token once."""


def create_app(service: Service) -> ASGIApp:
    app = FastAPI(title="Octavo", docs_url=None, redoc_url=None, openapi_url=None)

    @app.post(COMPLETIONS)
    async def completions(http: Request) -> Response:
        return await _generate(service, http, completion)

    @app.post(CHAT)
    async def chat_completions(http: Request) -> Response:
        return await _generate(service, http, chat)

    @app.get("/v1/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": [_card(service)]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        service.check_model(name)
        return json_response(_card(service))

    @app.get("/health")
    async def health() -> Response:
        """Liveness: the process answers and its engine, once loaded, lives."""
        dead = service.client.bounds is not None and not service.client.alive
        return json_response({"status": "dead" if dead else "alive"}, 503 if dead else 200)

    @app.get("/health/ready")
    async def ready() -> Response:
        """Readiness: a generation would be accepted now."""
        trouble = service.trouble
        return json_response({"status": trouble or "ready"}, 503 if trouble else 200)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    add_stream_routes(app, service)

    @app.get("/version")
    async def version() -> Response:
        return json_response({"version": __version__})

    @app.exception_handler(ApiError)
    async def refused(http: Request, error: ApiError) -> Response:
        call_of(http).error = error.message
        return error.response()

    @app.exception_handler(ClientDisconnect)
    async def left(http: Request, error: ClientDisconnect) -> Response:
        return ApiError(499, "the client left before its request was whole").response()  # for the metrics

    @app.exception_handler(HTTPException)
    async def not_routed(http: Request, error: HTTPException) -> Response:
        what = {404: f"there is no {http.url.path} here", 405: f"{http.url.path} does not take {http.method}"}
        response = ApiError(error.status_code, what.get(error.status_code, str(error.detail))).response()
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(Exception)
    async def failed(http: Request, error: Exception) -> Response:
        call_of(http).error = f"{type(error).__name__}: {error}"
        return ApiError(500, f"internal error: {type(error).__name__}").response()

    config = service.config
    layered: ASGIApp = Calls(app, service.keys, service.metrics, service.tracer, GENERATION_PATHS, config.request_log)
    if config.cors_origins:
        layered = CORSMiddleware(
            layered, allow_origins=config.cors_origins.split(","), allow_methods=["*"], allow_headers=["*"],
            expose_headers=["x-request-id", "x-octavo-ignored"],
        )  # fmt: skip
    return layered


async def _generate(
    service: Service, http: Request, answer_of: Callable[[Service, bytes, Call], tuple[Answer, Parsed[Any]]]
) -> Response:
    if service.trouble is not None:
        raise ApiError(503, service.trouble, code="not_ready", retry_after=1)
    body = await _body(http)
    if len(body) > LONG_BODY or b"dry_multiplier" in body:
        answer, parsed = await asyncio.to_thread(answer_of, service, body, call_of(http))
    else:
        answer, parsed = answer_of(service, body, call_of(http))
    headers = {"x-octavo-ignored": _header(parsed.ignored)} if parsed.ignored else {}
    if not parsed.request.stream:
        return WholeAnswer(answer, headers)
    stream = events(answer)
    if parsed.request.resumable:
        caller, grace = call_of(http).caller.name, service.config.resume_seconds
        stream = service.streams.add(answer.generation.id, stream, caller, grace).read(0)
    return EventStream(stream, headers, service.config.sse_ping_seconds)


async def _body(http: Request) -> bytes:
    parts, size = [], 0
    async for part in http.stream():
        size += len(part)
        if size <= MAX_BODY:
            parts.append(part)
        elif size > MAX_DISCARDED:
            break
    if size > MAX_BODY:
        raise ApiError(413, f"the body is larger than {MAX_BODY} bytes")
    return b"".join(parts)


def _card(service: Service) -> dict[str, Any]:
    bounds = service.client.bounds
    return {
        "id": service.model,
        "object": "model",
        "created": service.created,
        "owned_by": "octavo",
        "max_model_len": bounds.max_model_len if bounds else None,
    }


def _header(names: list[str]) -> str:
    """A list of any names as the value of a header: printable ASCII of bounded length."""
    text = ", ".join(names)[: MAX_IGNORED + 1].encode("unicode_escape").decode()
    return text if len(text) <= MAX_IGNORED else text[:MAX_IGNORED] + "..."
