"""The routes."""

from __future__ import annotations

from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp

from octavo import __version__
from octavo.server.adapters import add_adapter_routes
from octavo.server.anthropic import add_message_routes
from octavo.server.batches import Batches, add_batch_routes
from octavo.server.calls import Calls, call_of
from octavo.server.chat import chat
from octavo.server.completions import completion
from octavo.server.debug import add_debug_routes
from octavo.server.docs import add_docs_route
from octavo.server.embeddings import EMBEDDINGS, embeddings
from octavo.server.errors import ApiError, json_response
from octavo.server.files import add_file_routes
from octavo.server.ollama import add_ollama_routes
from octavo.server.openapi import add_openapi_route
from octavo.server.rerank import RERANK, SCORE, rerank, score
from octavo.server.responses import add_response_routes
from octavo.server.routes import BATCHED, CHAT, COMPLETIONS, GENERATION_PATHS, answer_whole, answered, generate
from octavo.server.routing import Routes
from octavo.server.service import Service
from octavo.server.streams import add_stream_routes
from octavo.server.tokenize import add_token_routes


def routes(service: Service) -> Routes:
    """All of them."""
    routes = Routes(service.config.strict)

    @routes.post(COMPLETIONS)
    async def completions(http: Request) -> Response:
        """The text that goes on where each prompt ends."""
        return await generate(service, http, completion)

    @routes.post(CHAT)
    async def chat_completions(http: Request) -> Response:
        """The next message of a conversation."""
        return await generate(service, http, chat)

    @routes.post(EMBEDDINGS)
    async def embed(http: Request) -> Response:
        """A vector of each text: pooled states of the model."""
        return await answered(service, http, embeddings)

    @routes.post(SCORE)
    async def score_texts(http: Request) -> Response:
        """How near texts are to each other: a classifier's score, or the cosine of their embeddings."""
        return await answered(service, http, score)

    @routes.post(RERANK)
    async def rerank_documents(http: Request) -> Response:
        """Documents by their nearness to a query: a classifier's score, or the cosine of their embeddings."""
        return await answered(service, http, rerank)

    @routes.get("/v1/models")
    async def models(http: Request) -> Response:
        """The model that is served, and the LoRA adapters that are loaded."""
        names = service.models
        listed = {"object": "list", "data": [service.card(name) for name in names]}
        return json_response({**listed, "has_more": False, "first_id": names[0], "last_id": names[-1]})

    @routes.get("/v1/models/{name:path}")
    async def model(http: Request) -> Response:
        """One of them, by its name."""
        return json_response(service.card(http.path_params["name"]))

    @routes.get("/health")
    async def health(http: Request) -> Response:
        """Liveness: the process answers and its engine, once loaded, lives."""
        dead = service.client.bounds is not None and not service.client.alive
        return json_response({"status": "dead" if dead else "alive"}, 503 if dead else 200)

    @routes.get("/health/ready")
    async def ready(http: Request) -> Response:
        """Readiness: a generation would be accepted now."""
        trouble = service.trouble
        return json_response({"status": trouble or "ready"}, 503 if trouble else 200)

    @routes.get("/metrics")
    async def metrics(http: Request) -> Response:
        """Prometheus series."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    add_message_routes(routes, service)
    add_stream_routes(routes, service)
    add_debug_routes(routes, service)
    add_adapter_routes(routes, service)
    add_token_routes(routes, service)
    add_file_routes(routes, lambda: service.files)
    add_batch_routes(routes, lambda: _batches(service))
    add_response_routes(routes, service)
    add_ollama_routes(routes, service)

    @routes.get("/version")
    async def version(http: Request) -> Response:
        """Of the server."""
        return json_response({"version": __version__})

    add_docs_route(routes)
    add_openapi_route(routes)
    return routes


async def _refused(http: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    call_of(http).error = error.message
    return error.response(http.url.path)


async def _left(http: Request, error: Exception) -> Response:
    return ApiError(499, "the client left before its request was whole").response()  # for the metrics


async def _not_routed(http: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = {404: f"there is no {http.url.path} here", 405: f"{http.url.path} does not take {http.method}"}
    refusal = ApiError(error.status_code, what.get(error.status_code, str(error.detail)))
    response = refusal.response(http.url.path)
    if error.status_code == 405:
        found = (route for route in http.app.routes if route.matches(http.scope)[0] is not Match.NONE)
        response.headers["allow"] = ", ".join(sorted({method for route in found for method in route.methods}))
    return response


async def _failed(http: Request, error: Exception) -> Response:
    call_of(http).error = f"{type(error).__name__}: {error}"
    return ApiError(500, f"internal error: {type(error).__name__}").response(http.url.path)


_ERRORS = {ApiError: _refused, ClientDisconnect: _left, HTTPException: _not_routed, Exception: _failed}


def create_app(service: Service) -> ASGIApp:
    app = Starlette(routes=routes(service).all, exception_handlers=_ERRORS)
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
