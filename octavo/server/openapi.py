"""The API as a document: /openapi.json, and the tables of docs/API.md. Made of the routes and of the requests' schemas."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from octavo import __version__
from octavo.request import LIMITS
from octavo.server.adapters import LOAD, UNLOAD, LoadAdapterRequest, UnloadAdapterRequest
from octavo.server.anthropic_fields import CountTokensRequest, MessagesRequest
from octavo.server.batches import BATCHES, BatchRequest
from octavo.server.chat_fields import ChatRequest
from octavo.server.completion_fields import CompletionRequest
from octavo.server.embeddings import EMBEDDINGS, EmbeddingRequest
from octavo.server.errors import ANTHROPIC, json_response
from octavo.server.fields import Refused
from octavo.server.files import FILES, UploadForm
from octavo.server.ollama import ShowRequest
from octavo.server.ollama_embed import EmbedRequest, OldEmbedRequest
from octavo.server.ollama_fields import OllamaChatRequest, OllamaGenerateRequest
from octavo.server.queries import QUERIES, Query
from octavo.server.rerank import RERANK, SCORE, RerankRequest, ScoreRequest
from octavo.server.responses_fields import ResponsesRequest
from octavo.server.routes import (
    CHAT,
    COMPLETIONS,
    COUNT_TOKENS,
    MESSAGES,
    OLLAMA_CHAT,
    OLLAMA_EMBED,
    OLLAMA_EMBEDDINGS,
    OLLAMA_GENERATE,
    OLLAMA_SHOW,
    RESPONSES,
)
from octavo.server.routing import Routes
from octavo.server.streams import ABORT, AbortRequest
from octavo.server.tokenize import DETOKENIZE, TOKENIZE, DetokenizeRequest, TokenizeRequest

OPENAPI = "/openapi.json"

BODIES: dict[str, type[msgspec.Struct]] = {
    COMPLETIONS: CompletionRequest,
    CHAT: ChatRequest,
    RESPONSES: ResponsesRequest,
    ABORT: AbortRequest,
    MESSAGES: MessagesRequest,
    COUNT_TOKENS: CountTokensRequest,
    FILES: UploadForm,
    BATCHES: BatchRequest,
    EMBEDDINGS: EmbeddingRequest,
    SCORE: ScoreRequest,
    RERANK: RerankRequest,
    TOKENIZE: TokenizeRequest,
    DETOKENIZE: DetokenizeRequest,
    OLLAMA_CHAT: OllamaChatRequest,
    OLLAMA_GENERATE: OllamaGenerateRequest,
    OLLAMA_EMBED: EmbedRequest,
    OLLAMA_EMBEDDINGS: OldEmbedRequest,
    OLLAMA_SHOW: ShowRequest,
    LOAD: LoadAdapterRequest,
    UNLOAD: UnloadAdapterRequest,
}
"""Schemas of the bodies that routes take."""

FORMS = frozenset({FILES})
"""Bodies that are no JSON, but multipart/form-data."""

_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "The field at fault."},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}

_ANTHROPIC_ERROR = {
    "type": "object",
    "properties": {
        "type": {"const": "error"},
        "error": {"type": "object", "properties": {"type": {"type": "string"}, "message": {"type": "string"}}},
    },
}


def add_openapi_route(routes: Routes) -> None:
    """Last of all routes: it tells of those before it."""
    made = cache(partial(document, list(routes.all)))  # at the first use: making it takes long for a start

    @routes.get(OPENAPI)
    async def openapi(http: Request) -> Response:
        """This document."""
        return json_response(made())


class Operation(NamedTuple):
    method: str
    path: str
    summary: str
    body: type[msgspec.Struct] | None
    query: type[Query] | None


def operations(routes: Iterable[Route]) -> Iterator[Operation]:
    for route in routes:
        for method in sorted((route.methods or set()) - {"HEAD"}):
            path = route.path.replace(":path}", "}")
            body = BODIES.get(route.path) if method == "POST" else None
            query = QUERIES.get(route.path) if method == "GET" else None
            yield Operation(method, path, " ".join((route.endpoint.__doc__ or "").split()), body, query)


def document(routes: Iterable[Route]) -> dict[str, Any]:
    """OpenAPI 3.1."""
    schemas = _schemas("#/components/schemas/{name}")
    for schema in BODIES.values():
        properties = schemas[schema.__name__]["properties"]
        for name, property in properties.items():
            _add_limits(name, property)
        for name, refused in getattr(schema, "REFUSED", {}).items():
            properties[name] = {"description": f"Refused: {refused.why}.", "enum": [None, *refused.neutral]}
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations(routes):
        refusal = _refusal("AnthropicError" if operation.path.startswith(ANTHROPIC) else "Error")
        entry: dict[str, Any] = {"responses": {"200": {"description": "As asked."}, "4XX": refusal, "5XX": refusal}}
        if operation.summary:
            entry["summary"] = operation.summary
        if operation.body is not None:
            schema_of = {"schema": {"$ref": f"#/components/schemas/{operation.body.__name__}"}}
            kind = "multipart/form-data" if operation.path in FORMS else "application/json"
            entry["requestBody"] = {"required": True, "content": {kind: schema_of}}
        names = [part[1:-1] for part in operation.path.split("/") if part.startswith("{")]
        parameters = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            for name in names
        ] + (_parameters(operation.query, schemas) if operation.query else [])
        if parameters:
            entry["parameters"] = parameters
        paths.setdefault(operation.path, {})[operation.method.lower()] = entry
    return {
        "openapi": "3.1.0",
        "info": {"title": "Octavo", "version": __version__},
        "paths": paths,
        "components": {"schemas": {**schemas, "Error": _ERROR, "AnthropicError": _ANTHROPIC_ERROR}},
    }


def _schemas(ref_template: str) -> dict[str, Any]:
    """By their names: of all bodies and queries."""
    types = [*BODIES.values(), *QUERIES.values()]
    _, schemas = msgspec.json.schema_components(types, ref_template=ref_template)
    for path in FORMS:
        for property in schemas[BODIES[path].__name__]["properties"].values():
            if property.pop("contentEncoding", None):
                property["format"] = "binary"
    return schemas


def _parameters(query: type[Query], schemas: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A parameter has no null: it is left out."""
    parameters = []
    for name, property in schemas[query.__name__]["properties"].items():
        form = {key: value for key, value in property.items() if key not in ("description", "default", "anyOf")}
        (form,) = [f for f in property.get("anyOf", [form]) if f.get("type") != "null" and f.get("enum") != [None]]
        form = form | ({"enum": [v for v in form["enum"] if v is not None]} if "enum" in form else {})
        parameters.append({"name": name, "in": "query", "description": property["description"], "schema": form})
    return parameters


def _refusal(form: str) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{form}"}}}
    return {"description": "Refused, or failed: why, and the field at fault.", "content": content}


def _add_limits(name: str, property: dict[str, Any]) -> None:
    if name in LIMITS:
        low, high = LIMITS[name]
        for form in property.get("anyOf", [property]):
            if form.get("type") in ("integer", "number"):
                form.update(minimum=low, maximum=high)


# ---------------------------------------------------------------- docs/API.md


def markdown(routes: Iterable[Route]) -> str:
    """Every route, and every field of every body: honoured, or refused with which message."""
    lines = ["# The HTTP API", "", "Made by `scripts/api-docs` from the schemas; a test compares.", "", _INTRODUCTION]
    lines += ["", "## Routes", "", "| method | path | |", "|---|---|---|"]
    lines += [f"| {o.method} | `{o.path}` | {o.summary} |" for o in operations(routes)]
    schemas = _schemas("{name}")
    posted, asked = ((method, each.items()) for method, each in (("POST", BODIES), ("GET", QUERIES)))
    for method, path, body in [(method, *item) for method, items in (posted, asked) for item in items]:
        kind = "parameter" if method == "GET" else "field"
        lines += ["", f"## {method} {path}", "", f"| {kind} | value | meaning |", "|---|---|---|"]
        schema = schemas[body.__name__]
        for name, property in sorted(schema["properties"].items()):
            _add_limits(name, property)
            required = " *(required)*" if name in schema.get("required", ()) else ""
            text = property.get("description", "").replace("|", "\\|")
            lines.append(f"| `{name}` | {_type(property)} | {text}{required} |")
        aliases = getattr(body, "ALIASES", {})
        lines += [f"| `{alias}` | | Another name of `{name}`. |" for alias, name in sorted(aliases.items())]
        refused: dict[str, Refused] = getattr(body, "REFUSED", {})
        if refused:
            lines += ["", "Refused with a 400, but for null and the values that ask for nothing:", ""]
            lines += ["| field | passes | message |", "|---|---|---|"]
            for name, (why, neutral) in sorted(refused.items()):
                passes = ", ".join(f"`{msgspec.json.encode(value).decode()}`" for value in neutral)
                lines.append(f"| `{name}` | {passes} | {name} is not supported: {why} |")
    return "\n".join(lines) + "\n"


def _type(property: dict[str, Any]) -> str:
    """The forms of a value in words, without null, which always means the same as absent."""
    forms = [form for form in property.get("anyOf", [property]) if form.get("type") != "null"]
    return " or ".join(map(_form, forms))


def _form(form: dict[str, Any]) -> str:
    if "$ref" in form:
        return f"`{form['$ref']}`"
    if "anyOf" in form:
        return " or ".join(map(_form, form["anyOf"]))
    if form.get("type") == "array":
        return f"list of {_form(form.get('items') or {})}"
    if "enum" in form:
        return " or ".join(f"`{msgspec.json.encode(value).decode()}`" for value in form["enum"])
    kind: str = "bytes" if form.get("format") == "binary" else form.get("type", "anything")
    low, high = form.get("minimum"), form.get("maximum")
    if low is None or high is None or high - low >= 2**32:
        return kind
    return f"{kind} of at least {low:g}" if high >= 2**31 - 1 else f"{kind}, {low:g} to {high:g}"


_INTRODUCTION = """\
A body is one JSON object. Null means the same as absent. A value that cannot be honoured is a 400 whose `error.param`
names the field; an unknown field is named in the header `x-octavo-ignored`, or refused with `--strict`. So are the
parameters of a GET.

* **Length.** An omitted `max_tokens` is 16 for completions and the rest of the context for chat. A prompt and an output
  that do not fit together are a 400 with the numbers; nothing is cut unless `truncate_prompt_tokens` asks for it.
* **Size.** A body has 32 MiB at most, prompts and `n` make 16384 choices at most. What an answer gives of its prompts,
  for each choice, has at most 524288 entries: token ids (`return_token_ids`, `echo`) and scores with their alternatives
  (`prompt_logprobs`); the scores of an output that is not streamed have 4194304. Beyond it is a 400 that names the field.
* **Sampling.** Order: allowed tokens and grammar, `logit_bias` and `bad_words`, the repetition, presence and frequency
  penalties, DRY, temperature, `top_n_sigma`, `top_k`, `min_p`, `typical_p`, `top_p`, XTC, one draw. `samplers` names
  another order, and then a value of a sampler that it leaves out is refused. `logprobs` are of the model's own
  distribution. Defaults are the API's; with `--generation-config auto` those of the model's generation_config.json.
  `return_sampling_params` tells the values that were used.
* **Streams.** `stream_options.continuous_usage_stats` puts the usage so far into every chunk, `return_progress` tells
  how much of the prompt is computed. A silent stream gets a comment every `--sse-ping-seconds`.
* **Errors** below `/v1/messages` have Anthropic's form ([ANTHROPIC.md](ANTHROPIC.md)): the message names the field.
* **Broken connections.** A client that leaves ends its generation. With `resumable` the events are numbered, and the
  generation goes on for `--resume-seconds`: `GET /v1/streams/{id}` with the header `Last-Event-ID` goes on behind that
  event. Some thousand of the last events are kept. Without the header it begins with the first. What goes on without a
  reader is an open request until it ends: for quotas, the log and the end of the server. Its `request_id` is taken while
  its events are kept.
* **Vectors.** `/v1/embeddings` pools the states of the decoder after its final norm: `pooling` takes the last token's by
  default, and vectors have length 1. `/v1/score` and `/v1/rerank` give the cosine of two such vectors; no cross-encoder
  is served. A model that was not trained for it tells texts apart, but not well by their meaning.
* **Abort.** `POST /v1/abort` with `{"id": "cmpl-..."}` ends a generation: its open choices finish with the reason
  `abort` and what they have. `request_id` chooses the id beforehand.
* **Responses.** `/v1/responses` is an adapter onto chat. A response is kept in memory unless `store` is false: the last
  1000, and 256 MiB with their conversations; the oldest are dropped, and none outlives the server. `background` makes one
  while nobody waits: at most 256 at a time, with 1 MiB of the last events, which `GET /v1/responses/{id}?stream=true`
  gives behind `starting_after`. A cancelled one ends its stream with `response.incomplete` and the status `cancelled`.
  Scores are of the tokens of the text, not of reasoning and calls. Reasoning is given itself, and is never summed up.
* **Adapters.** A LoRA adapter is chosen by its name as `model`, on every route ([OPERATIONS.md](OPERATIONS.md)).
* **Infilling.** `suffix` works with models whose tokenizer marks prefix and suffix: the tokens of Qwen, StarCoder,
  Granite, DeepSeek, CodeLlama, CodeGemma, GLM, Seed, Codestral.
* **Ollama.** `/api/chat` and `/api/generate` are adapters onto chat and completions; sampling defaults are Ollama's,
  but those of generation_config.json come first. Errors are `{"error": "..."}`. Durations are in nanoseconds; waiting
  is in `total_duration` alone. `/api/embed` is an adapter onto embeddings, and cuts nothing unless `truncate` asks
  for it. A call whose arguments are no JSON object, as one cut off, is told as content. The routes that pull, push,
  make and delete models are not there: a server serves one model."""


def reference() -> str:
    """docs/API.md. No engine is started."""
    from octavo.config import ServerConfig
    from octavo.server.app import routes
    from octavo.server.service import Service

    engine: Any = None  # no route is called
    return markdown(routes(Service(ServerConfig(model="any"), engine, "any")).all)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(reference())
