"""The routes."""

from __future__ import annotations

from functools import partial

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp

from octavo import __version__
from octavo.server.adapters import add_adapter_routes
from octavo.server.anthropic import add_message_routes
from octavo.server.batches import Batches, batches_router
from octavo.server.calls import Calls, call_of
from octavo.server.chat import chat
from octavo.server.completions import completion
from octavo.server.debug import add_debug_routes
from octavo.server.docs import add_docs_route
from octavo.server.embeddings import EMBEDDINGS, embeddings
from octavo.server.errors import ApiError, json_response
from octavo.server.files import files_router
from octavo.server.ollama import ollama_router
from octavo.server.openapi import add_openapi_route
from octavo.server.rerank import RERANK, SCORE, rerank, score
from octavo.server.responses import responses_router
from octavo.server.routes import BATCHED, CHAT, COMPLETIONS, GENERATION_PATHS, answer_whole, answered, generate
from octavo.server.service import Service
from octavo.server.streams import add_stream_routes
from octavo.server.tokenize import add_token_routes


def routes(service: Service) -> FastAPI:
    """All of them, without what surrounds each call."""
    app = FastAPI(title="Octavo", docs_url=None, redoc_url=None, openapi_url=None)

    @app.post(COMPLETIONS)
    async def completions(http: Request) -> Response:
        """The text that goes on where each prompt ends."""
        return await generate(service, http, completion)

    @app.post(CHAT)
    async def chat_completions(http: Request) -> Response:
        """The next message of a conversation."""
        return await generate(service, http, chat)

    @app.post(EMBEDDINGS)
    async def embed(http: Request) -> Response:
        """A vector of each text: pooled states of the model."""
        return await answered(service, http, embeddings)

    @app.post(SCORE)
    async def score_texts(http: Request) -> Response:
        """How near texts are to each other: a classifier's score, or the cosine of their embeddings."""
        return await answered(service, http, score)

    @app.post(RERANK)
    async def rerank_documents(http: Request) -> Response:
        """Documents by their nearness to a query: a classifier's score, or the cosine of their embeddings."""
        return await answered(service, http, rerank)

    @app.get("/v1/models")
    async def models() -> Response:
        """The model that is served, and the LoRA adapters that are loaded."""
        names = service.models
        listed = {"object": "list", "data": [service.card(name) for name in names]}
        return json_response({**listed, "has_more": False, "first_id": names[0], "last_id": names[-1]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        """One of them, by its name."""
        return json_response(service.card(name))

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
        """Prometheus series."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    add_message_routes(app, service)
    add_stream_routes(app, service)
    add_debug_routes(app, service)
    add_adapter_routes(app, service)
    add_token_routes(app, service)
    app.include_router(files_router(lambda: service.files))
    app.include_router(batches_router(lambda: _batches(service)))
    app.include_router(responses_router(service))
    app.include_router(ollama_router(service))

    @app.get("/version")
    async def version() -> Response:
        """Of the server."""
        return json_response({"version": __version__})

    add_docs_route(app)
    add_openapi_route(app)

    @app.exception_handler(ApiError)
    async def refused(http: Request, error: ApiError) -> Response:
        call_of(http).error = error.message
        return error.response(http.url.path)

    @app.exception_handler(ClientDisconnect)
    async def left(http: Request, error: ClientDisconnect) -> Response:
        return ApiError(499, "the client left before its request was whole").response()  # for the metrics

    @app.exception_handler(HTTPException)
    async def not_routed(http: Request, error: HTTPException) -> Response:
        what = {404: f"there is no {http.url.path} here", 405: f"{http.url.path} does not take {http.method}"}
        refusal = ApiError(error.status_code, what.get(error.status_code, str(error.detail)))
        response = refusal.response(http.url.path)
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(Exception)
    async def failed(http: Request, error: Exception) -> Response:
        call_of(http).error = f"{type(error).__name__}: {error}"
        return ApiError(500, f"internal error: {type(error).__name__}").response(http.url.path)

    return app


def create_app(service: Service) -> ASGIApp:
    app = routes(service)
    config = service.config
    layered: ASGIApp = Calls(
        app, service.keys, service.metrics, service.tracer, GENERATION_PATHS, config.request_log, config.origins
    )
    if config.cors_origins:
        layered = CORSMiddleware(
            layered, allow_origins=config.origins, allow_methods=["*"], allow_headers=["*"],
            expose_headers=["x-request-id", "request-id", "x-octavo-ignored", "retry-after"],
        )  # fmt: skip
    return layered


def start_batches(service: Service) -> None:
    """Go on with those that an earlier server on the same directory left."""
    if service.config.files_dir is not None:
        _batches(service).start()


def _batches(service: Service) -> Batches:
    if service.batches is None:
        width = service.config.max_num_seqs
        service.batches = Batches(service.files, BATCHED, partial(answer_whole, service), width)
    return service.batches
