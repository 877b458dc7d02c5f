"""POST /v1/chat/completions: from the fields of a request to its answer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from octavo.request import ParameterError
from octavo.server.calls import Call
from octavo.server.chat_answer import ChatAnswer
from octavo.server.chat_fields import ChatRequest
from octavo.server.errors import bad_request
from octavo.server.generation import Generation, Prompt
from octavo.server.messages import chat_messages
from octavo.server.parse import Parsed, parse
from octavo.server.service import Service, new_id
from octavo.text.chat import ChatOptions, ChatPrompt


def chat(service: Service, body: bytes, call: Call) -> tuple[ChatAnswer, Parsed[ChatRequest]]:
    """The answer, not begun. Raises ApiError."""
    parsed = parse(body, ChatRequest, service.config.strict)
    request = parsed.request
    service.served(request.model)  # before its texts are read
    messages = chat_messages(request.messages, parsed.ignored)
    id = new_id("chatcmpl", request.request_id)
    generation, conversation = converse(service, request, messages, parsed.ignored, call, id)
    return ChatAnswer(generation, generation.model, request, conversation), parsed


def converse(
    service: Service, request: ChatRequest, messages: list[dict[str, Any]], ignored: list[str], call: Call, id: str
) -> tuple[Generation, ChatPrompt]:
    """The answer to checked messages, not begun, and the conversation as the model reads it: what every protocol of
    chat comes to. Variables that the template does not read are added to `ignored`. Raises ApiError."""
    conversation = written(service, request.chat_options, messages, ignored)
    prompt = encoded(service, request, conversation)
    return service.generation(id, [prompt], request, call, conversation), conversation


def written(
    service: Service, options_of: Callable[[], ChatOptions], messages: list[dict[str, Any]], ignored: list[str]
) -> ChatPrompt:
    """The conversation as the model reads it. Raises ApiError."""
    form = service.chat
    assert form is not None
    try:
        options = options_of()
        conversation = form.prompt(messages, options)
    except ParameterError as e:
        raise bad_request(str(e), e.param) from None
    ignored.extend(f"chat_template_kwargs.{name}" for name in form.unread(options))
    if ignored and service.config.strict:
        field = ignored[0].split("[")[0].split(".")[0]
        raise bad_request(f"unknown field: {', '.join(ignored)}", field, "unknown_parameter")
    return conversation


def encoded(service: Service, request: ChatRequest, conversation: ChatPrompt) -> Prompt:
    """Its tokens. Raises ApiError."""
    assert service.chat is not None
    encode = partial(service.chat.encode, add_special_tokens=request.add_special_tokens)
    return service.encode(conversation.text, "messages", encode, request)
