"""Anthropic's API: POST /v1/messages and /v1/messages/count_tokens, on the path of chat."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from octavo.server.anthropic_answer import PING, MessagesAnswer
from octavo.server.anthropic_cache import Marked, mark
from octavo.server.anthropic_fields import NAMES, CountTokensRequest, MessagesRequest
from octavo.server.anthropic_messages import chat_form, read_conversation
from octavo.server.calls import Call
from octavo.server.chat import encoded, written
from octavo.server.chat_fields import ChatRequest
from octavo.server.errors import ApiError, bad_request, json_response
from octavo.server.generation import Prompt
from octavo.server.messages import chat_messages
from octavo.server.parse import ignored_header, parse
from octavo.server.routes import COUNT_TOKENS, MESSAGES, prepared
from octavo.server.routing import Routes
from octavo.server.service import Service, new_id
from octavo.server.stream import EventStream, Relay, WholeAnswer
from octavo.text.chat import ChatOptions, ChatPrompt

VERSIONS = ("2023-06-01", "2026-10-21")
"""Of the protocol, as the header anthropic-version names them. What is sent and read here is the same in both; a later
one is answered like the last of them, since clients name their version always."""

T = TypeVar("T")


class _Read(NamedTuple):
    """A request as the path of chat takes it."""

    chat: ChatRequest
    conversation: ChatPrompt
    prompt: Prompt
    marked: Marked


def add_message_routes(routes: Routes, service: Service) -> None:
    @routes.post(MESSAGES)
    async def messages(http: Request) -> Response:
        """The next message of a conversation, in Anthropic's form."""
        _check_version(http)
        answer, request, ignored = await prepared(service, http, _answer)
        answer.generation.begin()
        headers = ignored_header(ignored)
        if not request.stream:
            return WholeAnswer(answer, headers)
        seconds, waits = service.config.sse_ping_seconds, answer.generation.may_be_refused
        relay = Relay(answer.generation, answer.written)
        return EventStream(answer.events(), headers, seconds, waits=waits, relay=relay, ping=PING)

    @routes.post(COUNT_TOKENS)
    async def count_tokens(http: Request) -> Response:
        """How many input tokens such a conversation has."""
        _check_version(http)
        num_tokens, ignored = await prepared(service, http, _count)
        return json_response({"input_tokens": num_tokens}, headers=ignored_header(ignored))


def _answer(service: Service, body: bytes, call: Call) -> tuple[MessagesAnswer, MessagesRequest, list[str]]:
    """The answer, not begun. Raises ApiError."""
    return _renamed(lambda: _begin(service, body, call))


def _begin(service: Service, body: bytes, call: Call) -> tuple[MessagesAnswer, MessagesRequest, list[str]]:
    request, ignored = parse(body, MessagesRequest, service.config.strict)
    chat, conversation, prompt, marked = _read(service, request, ignored)
    chat.retention = marked.retention()
    generation = service.generation(new_id("msg", request.request_id), [prompt], chat, call, conversation)
    shows = request.thinking is None or request.thinking.display != "omitted"
    return MessagesAnswer(generation, generation.model, conversation, marked, shows_thinking=shows), request, ignored


def _count(service: Service, body: bytes, call: Call) -> tuple[int, list[str]]:
    """Input tokens, and unknown fields. Raises ApiError."""

    def count() -> tuple[int, list[str]]:
        request, ignored = parse(body, CountTokensRequest, service.config.strict)
        return len(_read(service, request, ignored).prompt.token_ids), ignored

    return _renamed(count)


def _read(service: Service, request: CountTokensRequest, ignored: list[str]) -> _Read:
    form = service.chat
    assert form is not None
    service.served(request.model)
    conversation = read_conversation(request.messages, request.system, request.tools, request.cache_control, ignored)
    chat = request.chat_request(conversation.tools)
    chat.continue_final_message = conversation.continues
    if chat.reasoning_effort is not None and form.unread(ChatOptions(variables={"reasoning_effort": ""})):
        if chat.reasoning_effort != "high":  # the default, which asks for nothing
            ignored.append("output_config.effort")
        chat.reasoning_effort = None
    kind = request.thinking.type if request.thinking is not None else None

    def options() -> ChatOptions:
        return dataclasses.replace(chat.chat_options(), thinking=None if kind is None else kind != "disabled")

    messages = chat_messages(chat_form(conversation.turns), ignored)
    prompt = written(service, options, messages, ignored)
    tokens = encoded(service, chat, prompt)
    marked = Marked({})
    if conversation.breakpoints:
        marked = mark(form, conversation, options(), prompt.text, len(tokens.token_ids))
    return _Read(chat, prompt, tokens, marked)


def _renamed(work: Callable[[], T]) -> T:
    """Errors name the fields as they are called here."""
    try:
        return work()
    except ApiError as e:
        raise e.renamed(NAMES) from None


def _check_version(http: Request) -> None:
    given = http.headers.get("anthropic-version", VERSIONS[-1])
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", given) or given < VERSIONS[0]:
        raise bad_request(f"anthropic-version must be {VERSIONS[0]} or later, got {given!r:.80}")
