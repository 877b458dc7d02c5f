"""POST /v1/completions: from the fields of a request to its answer."""

from __future__ import annotations

from functools import partial

from octavo.server.calls import Call
from octavo.server.completion_answer import CompletionAnswer
from octavo.server.completion_fields import CompletionRequest
from octavo.server.errors import bad_request
from octavo.server.generation import Generation, Prompt
from octavo.server.parse import Parsed, parse
from octavo.server.service import Service, new_id
from octavo.text.infill import encode_inside


def completion(service: Service, body: bytes, call: Call) -> tuple[CompletionAnswer, Parsed[CompletionRequest]]:
    """The answer, not begun. Raises ApiError."""
    parsed = parse(body, CompletionRequest, service.config.strict)
    request = parsed.request
    service.served(request.model)  # before its texts are read
    generation = complete(service, request, call, new_id("cmpl", request.request_id))
    return CompletionAnswer(generation, generation.model, request), parsed


def complete(service: Service, request: CompletionRequest, call: Call, id: str) -> Generation:
    """The texts that go on where prompts end, or fill the gap before a suffix; not begun. Raises ApiError."""
    assert service.tokenizer is not None
    if request.suffix:
        prompts = _around(service, request, request.suffix)
    else:
        encode = partial(service.tokenizer.encode, add_special_tokens=request.add_special_tokens is not False)
        prompts = [
            service.encode(prompt, "prompt", encode, request)
            if isinstance(prompt, str)
            else service.given(prompt, request)
            for prompt in request.prompts()
        ]
    return service.generation(id, prompts, request, call)


def _around(service: Service, request: CompletionRequest, suffix: str) -> list[Prompt]:
    """Each prompt with the suffix, as the model marks them."""
    tokenizer, infill = service.tokenizer, service.infill
    assert tokenizer is not None
    if infill is None:
        raise bad_request("suffix needs a model that has tokens for infilling", "suffix", "unsupported_parameter")
    for name in ("echo", "truncate_prompt_tokens"):
        if getattr(request, name):
            raise bad_request(f"suffix and {name} exclude one another", name)
    after = service.encode(suffix, "suffix", partial(encode_inside, tokenizer), request).token_ids
    opening = tokenizer.encode("") if request.add_special_tokens is not False else []

    def encode(text: str) -> list[int]:
        return [*opening, *infill.prompt(tokenizer.encode(text, add_special_tokens=False), after)]

    prompts = []
    for prompt in request.prompts():
        if not isinstance(prompt, str):
            raise bad_request("suffix goes with prompts of text", "suffix")
        prompts.append(service.encode(prompt, "prompt", encode, request))
    request.stop_token_ids = [*(request.stop_token_ids or ()), *infill.ends]
    return prompts
