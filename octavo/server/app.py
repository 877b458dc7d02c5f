"""The routes. Everything that a request needs beside its own fields is in one `Service`."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.config import ServerConfig
from octavo.engine.client import EngineClient
from octavo.request import ParameterError, SamplingParams, Terms
from octavo.server.answer import Answer, ChatAnswer, CompletionAnswer
from octavo.server.errors import ApiError, bad_request, json_response
from octavo.server.generation import Generation, Prompt
from octavo.server.messages import chat_messages
from octavo.server.metrics import Metrics
from octavo.server.openai import ChatRequest, CompletionRequest, GenerationRequest, parse_chat, parse_completion
from octavo.server.stream import EventStream, WholeAnswer
from octavo.text.chat import ChatTemplateError, encode_rendered, render
from octavo.text.tokenizer import Tokenizer

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"

MAX_BODY = 32 * 2**20
"""Bytes of a request body: a prompt of a million tokens as JSON numbers takes 7 MB."""

MAX_DISCARDED = 2**28
"""Bytes read of a body that is too large: its client does not look for the refusal before it has sent all."""

MIN_TEXT = 2**20
CHARACTERS_PER_TOKEN = 128
"""Most characters of a text per token of the context, and MIN_TEXT at least. Tokenising takes a second and 120 MB per
million characters, so that a text that can never fit is refused before."""

MAX_IGNORED = 2000
"""Characters of the header that names ignored fields: clients refuse large ones."""

LONG_BODY = 2**16
"""Bytes from which on a body is read and tokenised beside the event loop, which stays free: 64 KiB take 10 ms."""


@dataclass
class Service:
    """A model being served. `tokenizer` comes once it is loaded, `draining` when the server was told to end."""

    config: ServerConfig
    client: EngineClient
    model: str  # name in answers
    created: int = field(default_factory=lambda: int(time.time()))
    tokenizer: Tokenizer | None = None
    draining: bool = False

    def __post_init__(self) -> None:
        self.metrics = Metrics(lambda: self.client.stats)

    @property
    def trouble(self) -> str | None:
        """Why no generation is accepted now."""
        if self.draining:
            return "the server is shutting down"
        if self.client.bounds is None or self.tokenizer is None:
            return "the model is still loading"
        return None if self.client.alive else "the engine has ended"

    def generation(self, id: str, prompts: list[Prompt], request: GenerationRequest) -> Generation:
        tokenizer, bounds = self.tokenizer, self.client.bounds
        assert tokenizer is not None and bounds is not None
        params = _params(request)
        seeds = [self.seed() if params.seed is None else params.seed for _ in prompts]
        terms = Terms(priority=-(request.priority or 0))
        continues = isinstance(request, CompletionRequest)
        return Generation(
            self.client, tokenizer, bounds, self.metrics, id, prompts, params, seeds, terms, continues=continues
        )

    def seed(self) -> int:
        """For a prompt whose request brings none."""
        return int.from_bytes(os.urandom(8), "little") if self.config.seed is None else self.config.seed

    def encode(self, text: str, param: str, encode: Callable[[str], list[int]]) -> Prompt:
        """Token ids by `encode` of a text that may fit the context. Raises ApiError naming the field `param`."""
        bounds = self.client.bounds
        assert bounds is not None
        most = max(MIN_TEXT, CHARACTERS_PER_TOKEN * bounds.max_model_len)
        if len(text) > most:
            raise bad_request(
                f"the prompt has {len(text)} characters; at most {most} are read, "
                f"and prompt and output together may have {bounds.max_model_len} tokens",
                param, "context_length_exceeded",
            )  # fmt: skip
        try:
            ids = encode(text)
        except ValueError as e:  # text that is no Unicode
            raise bad_request(str(e), param) from None
        if len(ids) > bounds.max_model_len:  # before more texts are read
            raise bad_request(
                f"the prompt has {len(ids)} tokens; prompt and output together may have {bounds.max_model_len}",
                param, "context_length_exceeded",
            )  # fmt: skip
        return Prompt(ids, text)

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.model:
            raise ApiError(
                404, f"there is no model {name!r} here; this server has {self.model!r}",
                param="model", code="model_not_found",
            )  # fmt: skip


def create_app(service: Service) -> ASGIApp:
    app = FastAPI(title="Octavo", docs_url=None, redoc_url=None, openapi_url=None)

    @app.post(COMPLETIONS)
    async def completions(http: Request) -> Response:
        return await _generate(service, http, _completion)

    @app.post(CHAT)
    async def chat_completions(http: Request) -> Response:
        return await _generate(service, http, _chat)

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

    @app.exception_handler(ApiError)
    async def refused(http: Request, error: ApiError) -> Response:
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
        return ApiError(500, f"internal error: {type(error).__name__}").response()

    return _Counted(app, service.metrics)


class _Counted:
    """Counts answers by path and status, and the generation requests that are open, from their headers on."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = scope.get("route")
                self._metrics.response(route.path if route else "other", message["status"])
            await send(message)

        if scope["path"] not in (COMPLETIONS, CHAT):
            await self._app(scope, receive, counted)
            return
        with self._metrics.open_request():
            await self._app(scope, receive, counted)


async def _generate(service: Service, http: Request, answer_of: Callable[..., tuple[Answer, Any]]) -> Response:
    if service.trouble is not None:
        raise ApiError(503, service.trouble, code="not_ready", retry_after=1)
    body = await _body(http)
    if len(body) > LONG_BODY:
        answer, parsed = await asyncio.to_thread(answer_of, service, body)
    else:
        answer, parsed = answer_of(service, body)
    headers = {"x-octavo-ignored": _header(parsed.ignored)} if parsed.ignored else {}
    return (EventStream if parsed.request.stream else WholeAnswer)(answer, headers)


def _completion(service: Service, body: bytes) -> tuple[Answer, Any]:
    parsed = parse_completion(body, service.config.strict)
    request: CompletionRequest = parsed.request
    service.check_model(request.model)
    assert service.tokenizer is not None
    encode = partial(service.tokenizer.encode, add_special_tokens=request.add_special_tokens is not False)
    prompts = [
        service.encode(prompt, "prompt", encode) if isinstance(prompt, str) else Prompt(prompt, None)
        for prompt in request.prompts()
    ]
    id = _id("cmpl")
    answer = CompletionAnswer(
        service.generation(id, prompts, request),
        id,
        service.model,
        echo=bool(request.echo),
        prompt_scores=request.prompt_logprobs is not None,
        include_usage=request.include_usage(),
        return_token_ids=bool(request.return_token_ids),
    )
    return answer, parsed


def _chat(service: Service, body: bytes) -> tuple[Answer, Any]:
    parsed = parse_chat(body, service.config.strict)
    request: ChatRequest = parsed.request
    service.check_model(request.model)
    assert service.tokenizer is not None
    messages = chat_messages(request.messages, parsed.ignored)
    if parsed.ignored and service.config.strict:
        raise bad_request(f"unknown field: {', '.join(parsed.ignored)}", "messages", "unknown_parameter")
    variables = request.chat_template_kwargs or {}
    for name in ("messages", "add_generation_prompt"):
        if name in variables:
            raise bad_request(f"chat_template_kwargs has {name}, a field of its own", "chat_template_kwargs")
    generates = request.add_generation_prompt is not False
    try:
        text = render(service.tokenizer, messages, add_generation_prompt=generates, **variables)
    except ChatTemplateError as e:
        raise bad_request(str(e), "messages") from None
    prompt = service.encode(text, "messages", partial(encode_rendered, service.tokenizer))
    id = _id("chatcmpl")
    answer = ChatAnswer(
        service.generation(id, [prompt], request),
        id,
        service.model,
        prompt_scores=request.prompt_logprobs is not None,
        include_usage=request.include_usage(),
        return_token_ids=bool(request.return_token_ids),
    )
    return answer, parsed


def _params(request: GenerationRequest) -> SamplingParams:
    try:
        return request.sampling_params()
    except ParameterError as e:
        raise bad_request(str(e), e.param) from None


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


def _id(kind: str) -> str:
    return f"{kind}-{os.urandom(12).hex()}"


def _header(names: list[str]) -> str:
    """A list of any names as the value of a header: printable ASCII of bounded length."""
    text = ", ".join(names)[: MAX_IGNORED + 1].encode("unicode_escape").decode()
    return text if len(text) <= MAX_IGNORED else text[:MAX_IGNORED] + "..."
