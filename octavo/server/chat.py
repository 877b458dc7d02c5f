"""POST /v1/chat/completions: from the fields of a request to its answer."""

from __future__ import annotations

from octavo.server.calls import Call
from octavo.server.chat_answer import ChatAnswer
from octavo.server.chat_fields import ChatRequest
from octavo.server.errors import bad_request
from octavo.server.messages import chat_messages
from octavo.server.parse import Parsed, parse
from octavo.server.service import Service, new_id
from octavo.text.chat import ChatFormat, ChatOptions
from octavo.text.template import ChatTemplateError


def chat(service: Service, body: bytes, call: Call) -> tuple[ChatAnswer, Parsed[ChatRequest]]:
    """The answer, not begun. Raises ApiError."""
    parsed = parse(body, ChatRequest, service.config.strict)
    request = parsed.request
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
        form = ChatFormat(service.tokenizer)
        text = form.prompt(messages, ChatOptions(add_generation_prompt=generates, variables=variables)).text
    except ChatTemplateError as e:
        raise bad_request(str(e), "messages") from None
    prompt = service.encode(text, "messages", form.encode)
    id = new_id("chatcmpl")
    answer = ChatAnswer(
        service.generation(id, [prompt], request, call, continues=False),
        id,
        service.model,
        prompt_scores=request.prompt_logprobs is not None,
        include_usage=request.include_usage(),
        return_token_ids=bool(request.return_token_ids),
    )
    return answer, parsed
