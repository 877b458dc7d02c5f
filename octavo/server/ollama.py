"""Ollama's API, on the paths of chat and completions: /api/chat, /api/generate, and what is told of the model."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from octavo import __version__
from octavo.server.calls import Call
from octavo.server.chat import encoded, written
from octavo.server.completions import complete
from octavo.server.errors import ApiError, bad_request, json_response
from octavo.server.fields import RequestBody, about
from octavo.server.messages import chat_messages
from octavo.server.model_facts import ModelFacts, read_facts
from octavo.server.ollama_answer import OllamaAnswer
from octavo.server.ollama_embed import embed, embed_old
from octavo.server.ollama_fields import (
    NAMES,
    ChatForm,
    CompletionForm,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaRequest,
    model_name,
)
from octavo.server.ollama_messages import as_chat
from octavo.server.parse import Parsed, ignored_header, parse
from octavo.server.routes import (
    OLLAMA_CHAT,
    OLLAMA_EMBED,
    OLLAMA_EMBEDDINGS,
    OLLAMA_GENERATE,
    OLLAMA_SHOW,
    prepared,
)
from octavo.server.routes import answered as answered_whole
from octavo.server.routing import Routes
from octavo.server.service import Service, new_id
from octavo.server.stream import EventStream, Relay, WholeAnswer
from octavo.text.chat import ChatOptions

R = TypeVar("R", bound=OllamaRequest)

_NEVER = "9999-12-31T23:59:59Z"
"""When a model that stays loaded is unloaded: clients show what they are told."""


class ShowRequest(RequestBody, kw_only=True):
    """POST /api/show."""

    model: Annotated[str, about("The name in /api/tags.")]
    verbose: Annotated[bool | None, about("Everything is told anyway.")] = None


def chat(service: Service, body: bytes, call: Call) -> tuple[OllamaAnswer | None, Parsed[OllamaChatRequest]]:
    """The answer, not begun; None: there is nothing to answer. Raises ApiError."""
    return _read(service, body, call, OllamaChatRequest, _chat)


def generate(service: Service, body: bytes, call: Call) -> tuple[OllamaAnswer | None, Parsed[OllamaGenerateRequest]]:
    """The same of /api/generate."""
    return _read(service, body, call, OllamaGenerateRequest, _generate)


def _read(
    service: Service, body: bytes, call: Call, schema: type[R], make: Callable[..., OllamaAnswer | None]
) -> tuple[OllamaAnswer | None, Parsed[R]]:
    parsed = parse(body, schema, service.config.strict)
    _check_model(service, parsed.request.model)
    try:
        return make(service, parsed.request, parsed.ignored, call), parsed
    except ApiError as e:
        raise e.renamed(NAMES) from None


def _chat(service: Service, request: OllamaChatRequest, ignored: list[str], call: Call) -> OllamaAnswer | None:
    if not request.messages:
        return None
    messages = chat_messages(as_chat(request.messages, ignored), [])
    return _converse(service, request, messages, ignored, call)


def _generate(service: Service, request: OllamaGenerateRequest, ignored: list[str], call: Call) -> OllamaAnswer | None:
    if not request.prompt and not request.suffix:
        return None
    prompt = request.prompt or ""
    if not request.raw and not request.suffix:
        messages: list[dict[str, Any]] = [{"role": "user", "content": prompt}]
        if request.system:
            messages.insert(0, {"role": "system", "content": request.system})
        return _converse(service, request, messages, ignored, call)
    for name in ("system", "think"):
        if getattr(request, name):
            raise bad_request(f"{name} goes with a chat template, not with raw or suffix", name)
    completion = CompletionForm(
        model=model_name(request.model),
        prompt=prompt,
        suffix=request.suffix,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        **request.read_options(_max_model_len(service), ignored),
    )
    generation = complete(service, completion, call, new_id("ollama"))
    return OllamaAnswer(generation, request.model, call, None, is_chat=False)


def _converse(
    service: Service,
    request: OllamaChatRequest | OllamaGenerateRequest,
    messages: list[dict[str, Any]],
    ignored: list[str],
    call: Call,
) -> OllamaAnswer:
    tools, choice = (request.tools, request.tool_choice) if isinstance(request, OllamaChatRequest) else (None, None)
    form = ChatForm(
        model=model_name(request.model),
        messages=[],
        tools=tools,
        tool_choice=choice,
        logprobs=request.logprobs,
        top_logprobs=request.top_logprobs,
        reasoning_effort=request.think if isinstance(request.think, str) else None,
        **request.read_options(_max_model_len(service), ignored),
    )
    thinking = request.think if isinstance(request.think, bool) else None

    def options() -> ChatOptions:
        return dataclasses.replace(form.chat_options(), thinking=thinking)

    conversation = written(service, options, messages, ignored)
    parser = conversation.new_parser()
    if thinking and (parser is None or not parser.may_reason):
        raise bad_request("think: the model does not reason", "think", "unsupported_parameter")
    prompt = encoded(service, form, conversation)
    generation = service.generation(new_id("ollama"), [prompt], form, call, conversation)
    is_chat = isinstance(request, OllamaChatRequest)
    return OllamaAnswer(generation, request.model, call, conversation, is_chat=is_chat)


def add_ollama_routes(routes: Routes, service: Service) -> None:
    async def answered(http: Request, make: Callable[..., Any], *, is_chat: bool) -> Response:
        answer, parsed = await prepared(service, http, make)
        headers = ignored_header(parsed.ignored)
        if answer is None:
            said = {"message": {"role": "assistant", "content": ""}} if is_chat else {"response": ""}
            loaded = {"model": parsed.request.model, "created_at": _now(), **said, "done": True, "done_reason": "load"}
            return json_response(loaded, 200, headers)
        answer.generation.begin()
        if parsed.request.stream is False:
            return WholeAnswer(answer, headers)
        waits = answer.generation.may_be_refused
        relay = Relay(answer.generation, answer.written)
        return EventStream(answer.lines(), headers, 0, waits=waits, relay=relay, media_type="application/x-ndjson")

    @routes.post(OLLAMA_CHAT)
    async def ollama_chat(http: Request) -> Response:
        """The next message of a conversation, in Ollama's form."""
        return await answered(http, chat, is_chat=True)

    @routes.post(OLLAMA_GENERATE)
    async def ollama_generate(http: Request) -> Response:
        """The answer to a prompt, the text that goes on where it ends, or the text before a suffix, in Ollama's form."""
        return await answered(http, generate, is_chat=False)

    @routes.post(OLLAMA_EMBED)
    async def ollama_embed(http: Request) -> Response:
        """A vector of each text, in Ollama's form."""
        return await answered_whole(service, http, embed)

    @routes.post(OLLAMA_EMBEDDINGS)
    async def ollama_embeddings(http: Request) -> Response:
        """A vector of one text, not normalised, in Ollama's older form."""
        return await answered_whole(service, http, embed_old)

    @routes.get("/api/tags")
    async def tags(http: Request) -> Response:
        """The model that is served and its adapters, in Ollama's form."""
        return json_response({"models": _entries(service, await facts())})

    @routes.get("/api/ps")
    async def ps(http: Request) -> Response:
        """The same as loaded: it stays so while the server runs."""
        bounds = service.client.bounds
        kept = {"size_vram": 0, "expires_at": _NEVER}
        loaded = [] if bounds is None else [entry | kept for entry in _entries(service, await facts())]
        return json_response({"models": [{**entry, "context_length": _max_model_len(service)} for entry in loaded]})

    @routes.post(OLLAMA_SHOW)
    async def show(http: Request) -> Response:
        """What the model's files tell of it, its chat template, and what it can do."""
        ignored = (await prepared(service, http, _show_request)).ignored
        known = await facts()
        return json_response(_shown(service, known), 200, ignored_header(ignored))

    @routes.get("/api/version")
    async def version(http: Request) -> Response:
        """Of the server: Octavo's, not Ollama's."""
        return json_response({"version": __version__})

    read: list[ModelFacts] = []

    async def facts() -> ModelFacts:
        if not read:
            read.append(await asyncio.to_thread(read_facts, Path(service.config.model)))
        return read[0]


def _show_request(service: Service, body: bytes, call: Call) -> Parsed[ShowRequest]:
    parsed = parse(body, ShowRequest, service.config.strict)
    _check_model(service, parsed.request.model)
    return parsed


def _check_model(service: Service, name: str) -> None:
    service.served(model_name(name))


def _max_model_len(service: Service) -> int:
    bounds = service.client.bounds
    assert bounds is not None
    return bounds.max_model_len


def _details(facts: ModelFacts) -> dict[str, Any]:
    count = facts.num_parameters
    return {
        "parent_model": "",
        "format": facts.format,
        "family": facts.architecture,
        "families": [facts.architecture],
        "parameter_size": f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.2f}M",
        "quantization_level": facts.quantization,
    }


def _entries(service: Service, facts: ModelFacts) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "model": name,
            "modified_at": facts.modified.isoformat(),
            "size": facts.num_bytes,
            "digest": facts.digest if name == service.model else service.client.adapters[name].digest,
            "details": _details(facts) | {"parent_model": "" if name == service.model else service.model},
        }
        for name in service.models
    ]


def _shown(service: Service, facts: ModelFacts) -> dict[str, Any]:
    form, tokenizer = service.chat, service.tokenizer
    assert form is not None and tokenizer is not None
    template = form.source
    bounds = service.client.bounds
    assert bounds is not None
    capabilities = bounds.abilities.names()
    if bounds.abilities.generates:
        more = {"tools": template, "thinking": form.reasoning, "insert": service.infill is not None}
        capabilities = ["completion", *(name for name, can in more.items() if can)]
    numbers = {
        "context_length": "max_position_embeddings",
        "embedding_length": "hidden_size",
        "block_count": "num_hidden_layers",
        "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads",
        "vocab_size": "vocab_size",
    }
    own = {f"{facts.architecture}.{name}": facts.config[key] for name, key in numbers.items() if facts.config.get(key)}
    return {
        "modified_at": facts.modified.isoformat(),
        "template": template or "",
        "details": _details(facts),
        "model_info": {
            "general.architecture": facts.architecture,
            "general.parameter_count": facts.num_parameters,
            **own,
        },
        "capabilities": capabilities,
    }


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")
