"""POST /v1/completions: from the fields of a request to its answer."""

from __future__ import annotations

from functools import partial

from octavo.server.calls import Call
from octavo.server.completion_answer import CompletionAnswer
from octavo.server.completion_fields import CompletionRequest
from octavo.server.parse import Parsed, parse
from octavo.server.service import Service, new_id


def completion(service: Service, body: bytes, call: Call) -> tuple[CompletionAnswer, Parsed[CompletionRequest]]:
    """The answer, not begun. Raises ApiError."""
    parsed = parse(body, CompletionRequest, service.config.strict)
    request = parsed.request
    service.check_model(request.model)
    assert service.tokenizer is not None
    encode = partial(service.tokenizer.encode, add_special_tokens=request.add_special_tokens is not False)
    prompts = [
        service.encode(prompt, "prompt", encode, request) if isinstance(prompt, str) else service.given(prompt, request)
        for prompt in request.prompts()
    ]
    id = new_id("cmpl", request.request_id)
    generation = service.generation(id, prompts, request, call)
    return CompletionAnswer(generation, service.model, request), parsed
