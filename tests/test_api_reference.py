"""docs/API.md and /openapi.json tell what the live server does: field by field."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok

from octavo.config import ServerConfig
from octavo.request import LIMITS, PLAIN, Retention, Terms
from octavo.server.access import Caller
from octavo.server.calls import Call
from octavo.server.chat_fields import ChatRequest
from octavo.server.completion_fields import CompletionRequest
from octavo.server.ollama_fields import DEFAULTS
from octavo.server.openapi import BODIES, reference
from octavo.server.parse import parse
from octavo.server.routes import CHAT, COMPLETIONS, MESSAGES, OLLAMA_CHAT, RESPONSES
from octavo.server.service import Service
from tests.field_effects import OF_TERMS, TEMPLATE, TEXT, WITHOUT_EFFECT, Told, beside, effects
from tests.serving import Server
from tests.thinker import thinking_model
from tests.waiting import SECONDS

ROOT = Path(__file__).parents[1]
SCHEMAS: dict[str, type[msgspec.Struct]] = {COMPLETIONS: CompletionRequest, CHAT: ChatRequest}
REQUIRED = ("prompt", "messages")
WRONG: tuple[Any, ...] = ([[[1.5]]], 1e308, -(2**70), {"\u0000": []})
OBJECTS = ("chat_template_kwargs", "guided_json", "json_schema")
"""Take any JSON object."""


@pytest.fixture(scope="module")
def server(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Of a model that asks for BOS and may think. Its prompts are computed in several steps."""
    model = thinking_model(data, tmp_path_factory.mktemp("model"))
    config = model / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"add_bos_token": True}))
    options = (
        "--num-threads",
        "1",
        "--max-num-seqs",
        "16",
        "--max-num-batched-tokens",
        "32",
        "--chat-template",
        TEMPLATE,
    )
    with Server(model, "--served-model-name", "tiny", "--max-model-len", "1024", *options) as running:
        yield running


def test_the_page_is_up_to_date() -> None:
    assert (ROOT / "docs" / "API.md").read_text() == reference(), "make it anew: scripts/api-docs"


@pytest.mark.parametrize("path", SCHEMAS)
def test_every_field_has_its_effect(server: Server, path: str) -> None:
    """Seen with the field, and not without it."""
    known = effects(path)
    fields = {*SCHEMAS[path].__struct_fields__} - {*REQUIRED}
    assert fields == {*known, *((WITHOUT_EFFECT | OF_TERMS).keys() & fields)}
    for name, effect in known.items():
        body = beside(path, name)
        told = Told(server, path, body | {name: effect.value}, name)
        assert effect.seen(told), (name, told.raw[:500])
        assert not effect.seen(told.base), (name, told.base.raw[:500])
        assert "x-octavo-ignored" not in told.headers, name
    for name, value in WITHOUT_EFFECT.items():
        told = Told(server, path, beside(path, name) | {name: value}, name)
        assert told.ids == told.base.ids and "x-octavo-ignored" not in told.headers, name
    nothing = dict.fromkeys({*SCHEMAS[path].__struct_fields__, *SCHEMAS[path].REFUSED}, None)  # type: ignore[attr-defined]
    assert server.post(path, nothing | beside(path, "")).status_code == 200


@pytest.mark.parametrize("path", SCHEMAS)
def test_scheduler_and_cache_are_told(path: str) -> None:
    engine: Any = None
    service, call = Service(ServerConfig(model="any"), engine, "any"), Call("id", Caller())

    def terms(**fields: Any) -> Terms:
        body = beside(path, "") | fields
        return service._terms(parse(msgspec.json.encode(body), SCHEMAS[path], True).request, call)  # type: ignore[arg-type]

    expected: dict[str, Any] = {
        "priority": 1, "tenant": "me", "retention": Retention(seconds=300, priority=1), "total_seconds": 60, "ttft_seconds": 50,
    }  # fmt: skip
    given = {name: OF_TERMS[name] for name in ("priority", "user", "retention")}
    told = terms(**given, timeout=60, ttft_timeout=50, cache_salt="a")
    assert {name: getattr(told, name) for name in expected} == expected
    assert told.cache_salt.endswith("a") and terms() == PLAIN
    if path == CHAT:
        assert terms(prompt_cache_retention="24h").retention == Retention(seconds=86_400)


def as_responses(body: dict[str, Any]) -> dict[str, Any]:
    own = {"input": TEXT, "max_output_tokens": body["max_tokens"]}
    return own | {name: body[name] for name in body if name not in ("messages", "max_tokens")}


def as_messages(body: dict[str, Any]) -> dict[str, Any]:
    names = {"stop": "stop_sequences"}
    return {names.get(name, name): [value] if name == "stop" else value for name, value in body.items()}


def as_ollama(body: dict[str, Any]) -> dict[str, Any]:
    names = {"max_tokens": "num_predict", "repetition_penalty": "repeat_penalty"}
    options = {names.get(name, name): value for name, value in body.items() if name != "messages"}
    return {"model": "tiny", "messages": body["messages"], "stream": False, "options": options}


ADAPTED: dict[str, tuple[Any, Any, tuple[str, ...]]] = {
    RESPONSES: (
        as_responses,
        lambda answer: ("".join(item["content"][0]["text"] for item in answer["output"]), answer["usage"]["output_tokens"]),
        ("frequency_penalty", "ignore_eos", "logit_bias", "min_p", "min_tokens", "presence_penalty", "repetition_penalty",
         "seed", "stop", "temperature", "top_k", "top_p"),
    ),
    MESSAGES: (
        as_messages,
        lambda answer: (answer["content"][-1]["text"], answer["usage"]["output_tokens"]),
        ("seed", "stop", "temperature", "top_k", "top_p"),
    ),
    OLLAMA_CHAT: (
        as_ollama,
        lambda answer: (answer["message"]["content"], answer["eval_count"]),
        ("frequency_penalty", "min_p", "presence_penalty", "repeat_last_n", "repetition_penalty", "seed", "stop",
         "temperature", "top_k", "top_p", "typical_p"),
    ),
}  # fmt: skip
"""Route: its body for a body of chat, text and length of its answer, and the fields of chat that it has in its own form."""


@pytest.mark.parametrize("path", ADAPTED)
def test_adapted_routes_draw_as_chat_does(server: Server, path: str) -> None:
    """With each field, where it changes what chat says."""
    write, told, names = ADAPTED[path]
    defaults = DEFAULTS if path == OLLAMA_CHAT else {}
    for name in names:
        effect = effects(CHAT)[name]
        possible = {*names, "messages", "max_tokens"}
        plain = {key: value for key, value in beside(CHAT, name).items() if key in possible}
        plain["max_tokens"] = (
            40 if "penalty" in name or name == "repeat_last_n" else 12
        )  # no penalty without a repetition
        value = effect.value
        if name == "stop":  # also where no letter can be made likely
            value = Told(server, CHAT, defaults | plain | {"temperature": 0}).text[3:5]
        expected = []
        for more in ({}, {name: value}):
            chat = Told(server, CHAT, defaults | plain | more)
            expected.append((chat.text, chat.answer["usage"]["completion_tokens"]))
        assert expected[0] != expected[1], name
        answer = server.post(path, write(plain | {name: value}))
        assert answer.status_code == 200 and "x-octavo-ignored" not in answer.headers, (name, answer.text)
        assert told(answer.json()) == expected[1], name


@pytest.mark.parametrize("path", SCHEMAS)
def test_every_field_refuses_other_types_by_its_name(server: Server, path: str) -> None:
    for name in SCHEMAS[path].__struct_fields__:
        for value in WRONG:
            if name in OBJECTS and isinstance(value, dict):
                continue
            if name in ("mirostat_eta", "mirostat_tau") and isinstance(value, float | int):
                continue
            answer = server.post(path, beside(path, name) | {name: value})
            assert answer.status_code == 400, (name, value)
            error = answer.json()["error"]
            assert error["param"] == name or name in error["message"], (name, value, error)


@pytest.mark.parametrize("path", SCHEMAS)
def test_every_limit_is_kept_and_named(server: Server, path: str) -> None:
    tried = 0
    for name in SCHEMAS[path].__struct_fields__:
        if name not in LIMITS or (name, path) == ("logprobs", CHAT):
            continue
        low, high = LIMITS[name]
        for value in (low - 1, high + 1, low - 0.001, high * (1 + 2**-40) + 1e-9):
            answer = server.post(path, beside(path, name) | {name: value})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, name), (name, value, answer.text)
            tried += 1
    assert tried > 80


@pytest.mark.parametrize("path", SCHEMAS)
def test_the_document_knows_every_field(server: Server, path: str) -> None:
    document = server.http.get("/openapi.json").json()
    schema = SCHEMAS[path]
    properties = document["components"]["schemas"][schema.__name__]["properties"]
    assert set(properties) == {*schema.__struct_fields__, *getattr(schema, "REFUSED", {})}
    assert all(property.get("description") for property in properties.values())
    assert all("effect" in properties[name]["description"] for name in WITHOUT_EFFECT)
    assert path in document["paths"] and "/v1/abort" in document["paths"]


def names_its_fault(case: Any, error: Any) -> bool:
    """A refusal names a field or a part of the path, the body as a whole, or a path that is not there."""
    message, param = (error, None) if isinstance(error, str) else (error["message"], error.get("param"))
    fields = {parameter.name for parameter in case.operation.iter_parameters()}
    fields |= {*getattr(BODIES.get(case.operation.path), "__struct_fields__", ()), "body", "form", "model"}
    return bool(param or fields & {*re.findall(r"\w+", message)} or message.startswith("there is no /"))


def test_schemathesis_finds_no_server_error(server: Server) -> None:
    """Random calls of every operation, valid and not: an answer or a refusal, never a failure."""
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    called = 0
    for result in schema.get_all_operations():
        assert isinstance(result, Ok)
        operation = result.ok()

        @settings(
            max_examples=10, deadline=None, derandomize=True, database=None, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(case=operation.as_strategy())
        def call(case: Any) -> None:
            nonlocal called
            called += 1
            response = case.call(timeout=SECONDS)
            case.validate_response(response, checks=[not_a_server_error])
            if 400 <= response.status_code < 500:
                assert names_its_fault(case, response.json()["error"]), response.text

        call()
    assert called > 100
    assert server.complete(prompt="Hello", max_tokens=1)["usage"]["completion_tokens"] == 1
