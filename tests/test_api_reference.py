"""docs/API.md and /openapi.json tell what the live server does: field by field."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok

from octavo.request import LIMITS
from octavo.server.chat_fields import ChatRequest
from octavo.server.completion_fields import CompletionRequest
from octavo.server.openapi import reference
from octavo.server.routes import CHAT, COMPLETIONS
from tests.serving import Server

ROOT = Path(__file__).parents[1]
HELLO = [{"role": "user", "content": "Hello there"}]
SCHEMAS: dict[str, type[msgspec.Struct]] = {COMPLETIONS: CompletionRequest, CHAT: ChatRequest}
STREAM = {"stream": True}
SCHEMA = {"type": "object"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}

SAMPLES: dict[str, Any] = {
    "add_generation_prompt": False, "add_special_tokens": False, "allowed_token_ids": [5, 6], "bad_words": ["so"],
    "best_of": 2, "cache_salt": "a", "chat_template_kwargs": {}, "dry_allowed_length": 3, "dry_base": 1.5,
    "dry_multiplier": 0.5, "dry_penalty_last_n": 50, "dry_sequence_breakers": ["\n"], "dynatemp_exponent": 2.0,
    "dynatemp_range": 0.5, "echo": True, "explain": True, "frequency_penalty": 0.5, "grammar": 'start: "a" | "b"',
    "guided_choice": ["a", "b"], "guided_decoding_backend": "auto", "guided_grammar": 'start: "a" | "b"',
    "guided_json": SCHEMA, "guided_regex": "a|b", "ignore_eos": True, "include_reasoning": False,
    "include_stop_str_in_output": True, "json_schema": SCHEMA, "logit_bias": {"5": 1.5}, "max_completion_tokens": 2,
    "max_tokens": 2, "min_p": 0.1, "min_tokens": 1, "mirostat_eta": 0.1, "mirostat_tau": 5.0, "n": 2, "n_predict": -1,
    "parallel_tool_calls": False, "presence_penalty": 0.5, "priority": -1, "prompt_cache_key": "k", "prompt_logprobs": 1,
    "documents": [], "reasoning_effort": "none", "repeat_last_n": 20, "repetition_penalty": 1.1, "request_id": "r1",
    "retention": {"seconds": 300, "priority": 1, "num_tokens": 100}, "prompt_cache_retention": "24h",
    "response_format": {"type": "json_object"}, "return_sampling_params": True, "return_token_ids": True,
    "return_tokens_as_token_ids": True, "safety_identifier": "s", "samplers": ["top_k", "temperature"], "seed": 5,
    "skip_special_tokens": False, "suffix": "x", "stop": ["x"], "stop_token_ids": [5], "stream": True,
    "structured_outputs": {"choice": ["a", "b"]}, "temperature": 0.5, "timeout": 60.0, "ttft_timeout": 60.0, "thinking_token_budget": 5, "top_k": 5,
    "top_n_sigma": 1.0, "top_p": 0.5, "truncate_prompt_tokens": 3, "typical_p": 0.5, "use_beam_search": True, "user": "me",
    "xtc_probability": 0.5, "xtc_threshold": 0.2, "tools": [TOOL], "model": "tiny",
}  # fmt: skip
TOGETHER: dict[str, dict[str, Any]] = {  # what goes with fields that ask for another
    "early_stopping": {"early_stopping": True, "use_beam_search": True},
    "length_penalty": {"length_penalty": 2.0, "use_beam_search": True},
    "resumable": {"resumable": True, **STREAM},
    "return_progress": {"return_progress": True, **STREAM},
    "stream_options": {"stream_options": {"include_usage": True}, **STREAM},
    "tool_choice": {"tool_choice": "auto", "tools": [TOOL]},
    "top_logprobs": {"top_logprobs": 2, "logprobs": True},
    "guided_whitespace_pattern": {"guided_json": SCHEMA, "guided_whitespace_pattern": " "},
    "continue_final_message": {
        "continue_final_message": True,
        "add_generation_prompt": False,
        "messages": [*HELLO, {"role": "assistant", "content": "So"}],
    },
}
REQUIRED = ("prompt", "messages")
OF_OTHER_MODELS = ("thinking_token_budget", "suffix")
"""This one does not think, and has no tokens for infilling."""
WRONG: tuple[Any, ...] = ([[[1.5]]], 1e308, -(2**70), {"\u0000": []})
OBJECTS = ("chat_template_kwargs", "guided_json", "json_schema")
"""Take any JSON object."""


@pytest.fixture(scope="module")
def server(data: Path) -> Iterator[Server]:
    with Server(data / "arch" / "llama", "--served-model-name", "tiny") as running:
        yield running


def base(path: str) -> dict[str, Any]:
    return {"max_tokens": 2, **({"prompt": "Hello"} if path == COMPLETIONS else {"messages": HELLO})}


def test_the_page_is_up_to_date() -> None:
    assert (ROOT / "docs" / "API.md").read_text() == reference(), "make it anew: scripts/api-docs"


@pytest.mark.parametrize("path", SCHEMAS)
def test_every_field_is_honoured(server: Server, path: str) -> None:
    for name in SCHEMAS[path].__struct_fields__:
        if name in REQUIRED:
            continue
        value: Any = 2 if (name, path) == ("logprobs", COMPLETIONS) else True
        body = base(path) | TOGETHER.get(name, {name: SAMPLES.get(name, value)})
        if name in ("max_completion_tokens", "n_predict"):
            del body["max_tokens"]
        assert name in SAMPLES or name in TOGETHER or name == "logprobs", f"{name} has no sample"
        answer = server.post(path, body)
        if name in OF_OTHER_MODELS:
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
            continue
        assert answer.status_code == 200, (name, answer.text)
        assert "x-octavo-ignored" not in answer.headers, name
    nothing = dict.fromkeys({*SCHEMAS[path].__struct_fields__, *SCHEMAS[path].REFUSED}, None)  # type: ignore[attr-defined]
    assert server.post(path, nothing | base(path)).status_code == 200


@pytest.mark.parametrize("path", SCHEMAS)
def test_every_field_refuses_other_types_by_its_name(server: Server, path: str) -> None:
    for name in SCHEMAS[path].__struct_fields__:
        for value in WRONG:
            if name in OBJECTS and isinstance(value, dict):
                continue
            if name in ("mirostat_eta", "mirostat_tau") and isinstance(value, float | int):
                continue
            together = {key: v for key, v in TOGETHER.get(name, {}).items() if key != name}
            answer = server.post(path, base(path) | together | {name: value})
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
            answer = server.post(path, base(path) | TOGETHER.get(name, {}) | {name: value})
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
    assert path in document["paths"] and "/v1/abort" in document["paths"]


def test_schemathesis_finds_no_server_error(server: Server) -> None:
    """Random calls of every operation, valid and not: an answer or a refusal, never a failure."""
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    called = 0
    for result in schema.get_all_operations():
        assert isinstance(result, Ok)
        operation = result.ok()
        if operation.path in ("/v1/files", "/v1/batches"):
            continue

        @settings(
            max_examples=10, deadline=None, derandomize=True, database=None, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(case=operation.as_strategy())
        def call(case: Any) -> None:
            nonlocal called
            called += 1
            response = case.call(timeout=60)
            case.validate_response(response, checks=[not_a_server_error])

        call()
    assert called > 100
    assert server.complete(prompt="Hello", max_tokens=1)["usage"]["completion_tokens"] == 1
