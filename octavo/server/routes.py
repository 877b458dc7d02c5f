"""What the generation routes share: from the body of an HTTP request to its answer, streamed or whole."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from octavo.server.answer import Answer, events
from octavo.server.body import read_body
from octavo.server.calls import Call, call_of
from octavo.server.chat import chat
from octavo.server.completions import completion
from octavo.server.embeddings import EMBEDDINGS, embeddings
from octavo.server.errors import ApiError
from octavo.server.parse import Parsed, ignored_header
from octavo.server.rerank import RERANK, SCORE
from octavo.server.service import Service
from octavo.server.stream import EventStream, Relay, Whole, WholeAnswer

T = TypeVar("T")

AnswerOf = Callable[[Service, bytes, Call], tuple[Answer, Parsed[Any]]]
"""From a body to the answer, not begun. Raises ApiError."""

WholeOf = Callable[[Service, bytes, Call], tuple[Whole, Parsed[Any]]]
"""The same of an answer that may not be streamed. It begins by itself."""

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
COUNT_TOKENS = "/v1/messages/count_tokens"
OLLAMA_CHAT = "/api/chat"
OLLAMA_GENERATE = "/api/generate"
OLLAMA_EMBED = "/api/embed"
OLLAMA_EMBEDDINGS = "/api/embeddings"
OLLAMA_SHOW = "/api/show"

ANSWERS: dict[str, AnswerOf] = {COMPLETIONS: completion, CHAT: chat}

BATCHED: dict[str, WholeOf] = {**ANSWERS, EMBEDDINGS: embeddings}
"""What a batch can run, too."""

OTHER_PATHS = frozenset(
    {MESSAGES, OLLAMA_CHAT, OLLAMA_GENERATE, OLLAMA_EMBED, OLLAMA_EMBEDDINGS, RESPONSES, SCORE, RERANK}
)
"""Of the protocols that are adapted onto chat, and of comparing texts."""

GENERATION_PATHS = frozenset(BATCHED) | OTHER_PATHS
"""Count as open requests and against quotas."""

LONG_BODY = 2**16
"""Bytes from which on a body is read and tokenised beside the event loop, which stays free: 64 KiB take 10 ms. So are
those with DRY: its sequence breakers are looked for in every token once. And the first that spells a special token. And
a response that follows another, for the conversation before it may be long."""


async def generate(service: Service, http: Request, answer_of: AnswerOf) -> Response:
    """The response to a generation request. Raises ApiError."""
    answer, parsed = await prepared(service, http, answer_of)
    call, id = call_of(http), answer.generation.id
    if parsed.request.resumable:
        service.streams.check(id, call.caller.name)
    answer.generation.begin()
    headers = ignored_header(parsed.ignored)
    if not parsed.request.stream:
        return WholeAnswer(answer, headers)
    stream, relay = events(answer), Relay(answer.generation, answer.chunk)
    if parsed.request.resumable:
        kept = service.streams.add(id, stream, call.caller.name, service.config.resume_seconds)
        call.lasts = kept.ended
        return EventStream(
            kept.read(0), headers, service.config.sse_ping_seconds, waits=answer.generation.may_be_refused
        )
    waits = answer.generation.may_be_refused
    return EventStream(stream, headers, service.config.sse_ping_seconds, waits=waits, relay=relay)


async def answered(service: Service, http: Request, answer_of: WholeOf) -> Response:
    """The response to a request whose answer is never streamed. Raises ApiError."""
    answer, parsed = await prepared(service, http, answer_of)
    return WholeAnswer(answer, ignored_header(parsed.ignored))


async def prepared(service: Service, http: Request, prepare: Callable[[Service, bytes, Call], T]) -> T:
    """What a route makes of its body, beside the event loop where that takes long. Raises ApiError."""
    if service.trouble is not None:
        raise ApiError(503, service.trouble, code="not_ready", retry_after=1)
    body = await read_body(http)
    copies = service.tokenizer is not None and service.tokenizer.copies_for(body)
    if copies or len(body) > LONG_BODY or any(name in body for name in (b"dry_multiplier", b"previous_response_id")):
        return await asyncio.to_thread(prepare, service, body, call_of(http))
    return prepare(service, body, call_of(http))


async def answer_whole(service: Service, path: str, body: bytes, call: Call) -> dict[str, Any]:
    """The answer to a body that was sent to a path of BATCHED. Raises ApiError."""
    if service.trouble is not None:
        raise ApiError(503, service.trouble, code="not_ready", retry_after=1)
    answer, _ = await asyncio.to_thread(BATCHED[path], service, body, call)
    return await answer.body()
