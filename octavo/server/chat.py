"""POST /v1/chat/completions: from the fields of a request to its answer."""

from __future__ import annotations

from octavo.request import ParameterError
from octavo.server.calls import Call
from octavo.server.chat_answer import ChatAnswer
from octavo.server.chat_fields import ChatRequest
from octavo.server.errors import bad_request
from octavo.server.messages import chat_messages
from octavo.server.parse import Parsed, parse
from octavo.server.service import Service, new_id


def chat(service: Service, body: bytes, call: Call) -> tuple[ChatAnswer, Parsed[ChatRequest]]:
    """The answer, not begun. Raises ApiError."""
    parsed = parse(body, ChatRequest, service.config.strict)
    request = parsed.request
    service.check_model(request.model)
    form = service.chat
    assert form is not None
    messages = chat_messages(request.messages, parsed.ignored)
    try:
        options = request.chat_options()
        conversation = form.prompt(messages, options)
    except ParameterError as e:
        raise bad_request(str(e), e.param) from None
    parsed.ignored.extend(f"chat_template_kwargs.{name}" for name in form.unread(options))
    if parsed.ignored and service.config.strict:
        field = parsed.ignored[0].split("[")[0].split(".")[0]
        raise bad_request(f"unknown field: {', '.join(parsed.ignored)}", field, "unknown_parameter")
    prompt = service.encode(conversation.text, "messages", form.encode, request)
    id = new_id("chatcmpl", request.request_id)
    generation = service.generation(id, [prompt], request, call, conversation)
    return ChatAnswer(generation, service.model, request, conversation), parsed
