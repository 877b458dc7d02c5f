"""Structured output over HTTP: every field that asks for it, refusals before the first byte, streams that equal the whole."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from octavo.request import MAX_STRUCTURED
from tests.schemas import COUNT, SCHEMAS, Schema, closed
from tests.serving import Server

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
PERSON = closed(name={"type": "string", "pattern": "^[A-Z][a-z]{2,8}$"}, age=COUNT)
BOMB = {"type": "integer", "multipleOf": 100_000_007}
TAG = {"begin": "<call=f>", "schema": closed(x=COUNT), "end": "</call>"}


DEEP: dict[str, Any] = {}
for _ in range(480):
    DEEP = {"properties": DEEP}
"""Less deep than what a body may be, deeper than what is followed in it."""


@pytest.fixture(scope="module")
def server(data: Path) -> Iterator[Server]:
    with Server(data / "arch" / "llama", "--served-model-name", "tiny") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def is_person(text: str) -> bool:
    value = json.loads(text)
    jsonschema.validate(value, PERSON)
    return list(value) == ["name", "age"]


SIX_DIGITS = re.compile("[0-9]{6}").fullmatch


@pytest.mark.parametrize(
    ("fields", "holds"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON}}}, is_person),
        ({"response_format": {"type": "json_object", "schema": PERSON}}, is_person),
        ({"structured_outputs": {"json": PERSON}}, is_person),
        ({"structured_outputs": {"json": json.dumps(PERSON)}}, is_person),
        ({"structured_outputs": {"json": PERSON, "disable_any_whitespace": True}},
         lambda t: is_person(t) and " " not in t),
        ({"structured_outputs": {"json": {"properties": {"a": COUNT}, "type": "object", "required": ["a"]},
                                 "disable_additional_properties": True}}, lambda t: list(json.loads(t)) == ["a"]),
        ({"structured_outputs": {"json": PERSON, "whitespace_pattern": "~"}}, lambda t: is_person(t.replace("~", ""))),
        ({"structured_outputs": {"regex": "[0-9]{6}"}}, SIX_DIGITS),
        ({"structured_outputs": {"choice": ["left", "right"]}}, {"left", "right"}.__contains__),
        ({"structured_outputs": {"grammar": 'root ::= [0-9] [0-9]{5}'}}, SIX_DIGITS),
        ({"structured_outputs": {"grammar": 'start: "<" /[a-z]{3}/ ">"'}}, re.compile("<[a-z]{3}>").fullmatch),
        ({"guided_json": PERSON}, is_person),
        ({"guided_json": json.dumps(PERSON), "guided_decoding_backend": "auto"}, is_person),
        ({"guided_regex": "^[0-9]{6}$"}, SIX_DIGITS),
        ({"guided_choice": ["left", "right"]}, {"left", "right"}.__contains__),
        ({"guided_grammar": "start: /[0-9]{6}/"}, SIX_DIGITS),
        ({"json_schema": PERSON}, is_person),
        ({"grammar": "root ::= [0-9]{6}"}, SIX_DIGITS),
        ({"response_format": {"type": "text"}, "guided_choice": ["left"]}, "left".__eq__),
    ],
    ids=lambda value: json.dumps(value)[:70] if isinstance(value, dict) else "",
)  # fmt: skip
def test_every_field(server: Server, fields: dict[str, Any], holds: Any) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 200, "seed": 1, **fields}
    answer = server.post(CHAT, body)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert holds(choice["message"]["content"]), choice
    again = server.complete(prompt="Hi", max_tokens=200, seed=2, **fields)
    assert holds(again["choices"][0]["text"]), again


def test_json_object_is_an_object(server: Server) -> None:
    body = {"prompt": "Hi", "response_format": {"type": "json_object"}, "max_tokens": 300, "stop": ["\n"]}
    text = server.complete(**body)["choices"][0]["text"]
    assert text.startswith("{")


def test_structural_tags(server: Server) -> None:
    format = {"type": "structural_tag", "structures": [TAG], "triggers": ["<call="]}
    for fields in ({"response_format": format}, {"structured_outputs": {"structural_tag": json.dumps(format)}}):
        assert server.complete(prompt="Hi", max_tokens=5, **fields)["usage"]["completion_tokens"] > 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"if": {}, "not": {}}}}},
         "response_format", '"if", "not"'),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": BOMB}}},
         "response_format", "4 seconds of processor time"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema.schema is required"),
        ({"response_format": {"type": "json_object", "triggers": ["<"]}}, "response_format", "structural_tag"),
        ({"response_format": {"type": "yaml"}}, "response_format", "yaml"),
        ({"response_format": {"type": "structural_tag", "structures": [TAG], "triggers": ["["]}},
         "response_format", "structures[0].begin"),
        ({"guided_regex": "(?=a)b"}, "guided_regex", "look"),
        ({"guided_regex": ""}, "guided_regex", "empty"),
        ({"guided_regex": "a" * (MAX_STRUCTURED + 1)}, "guided_regex", str(MAX_STRUCTURED)),
        ({"guided_choice": []}, "guided_choice", "not empty"),
        ({"guided_choice": [1]}, "guided_choice", "str"),
        ({"guided_grammar": "start: nowhere"}, "guided_grammar", "nowhere"),
        ({"guided_json": "{"}, "guided_json", "JSON schema"),
        ({"guided_json": {"type": "objct"}}, "guided_json", "objct"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex", "guided_json and guided_regex"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "guided_json"),
        ({"guided_decoding_backend": "outlines"}, "guided_decoding_backend", "outlines"),
        ({"json_schema": PERSON, "grammar": "start: /a/"}, "grammar", "json_schema and grammar"),
        ({"structured_outputs": {}}, "structured_outputs", "says nothing"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "json and regex"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs", "JSON only"),
        ({"structured_outputs": {"yaml": "a"}}, "structured_outputs", "yaml"),
        ({"structured_outputs": {"json": DEEP, "disable_additional_properties": True}}, "structured_outputs", "nested too deeply"),
        ({"guided_json": True, "use_beam_search": True, "n": 2, "temperature": 0}, "guided_json", "use_beam_search"),
    ],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else "",
)  # fmt: skip
def test_refusals(server: Server, path: str, stream: bool, fields: dict[str, Any], param: str, said: str) -> None:
    """A 400 that names the field, also where the answer was to be streamed."""
    if stream and fields.get("use_beam_search"):
        return  # refused for another reason
    prompt: dict[str, Any] = (
        {"prompt": "Hi"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "Hi"}]}
    )
    answer = server.post(path, {**prompt, "max_tokens": 4, "stream": stream, **fields})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and said in error["message"], error


def test_stream_equals_whole(server: Server) -> None:
    """Tokens that are forced come several at a time."""
    most = 0
    for i, schema in enumerate(SCHEMAS[30::17]):
        body = {
            "prompt": "Hi", "seed": i, "max_tokens": 70, "n": 2, "return_token_ids": True, "guided_json": schema,
            "logprobs": 1 if i % 3 == 0 else None, "stop": ["zz", '":'] if i % 4 == 1 else None,
        }  # fmt: skip
        whole = server.complete(**body)
        chunks = server.events(COMPLETIONS, body | {"stream_options": {"include_usage": True}})
        for usage in (chunks[-1]["usage"], whole["usage"]):
            del usage["prompt_tokens_details"]  # the second finds the prompt in the cache
        assert chunks[-1]["usage"] == whole["usage"]
        for choice in whole["choices"]:
            parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
            assert "".join(part["text"] for part in parts) == choice["text"]
            assert [t for part in parts for t in part["token_ids"]] == choice["token_ids"]
            assert parts[-1]["finish_reason"] == choice["finish_reason"]
            most = max(most, *(len(part["token_ids"]) for part in parts))
        assert whole["usage"]["completion_tokens"] == sum(len(c["token_ids"]) for c in whole["choices"])
    assert most > 1


def test_openai_client(client: openai.OpenAI) -> None:
    format: Any = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON}}
    messages: Any = [{"role": "user", "content": "Who?"}]
    whole = client.chat.completions.create(
        model="tiny", messages=messages, response_format=format, seed=1, max_tokens=200
    )
    text = whole.choices[0].message.content
    assert text is not None and is_person(text)
    streamed = client.chat.completions.create(
        model="tiny", messages=messages, response_format=format, seed=1, max_tokens=200, stream=True
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == text
    format["json_schema"]["schema"] = {"type": "array", "uniqueItems": True}
    with pytest.raises(openai.BadRequestError, match="uniqueItems"):
        client.chat.completions.create(model="tiny", messages=messages, response_format=format, stream=True)


def test_metrics(server: Server) -> None:
    names = [f"octavo_grammars_{what}_total" for what in ("compiled", "reused", "refused")]
    before = [server.metric(name) for name in names]
    for fields in ({"guided_regex": "metric [0-9]{5}"}, {"guided_regex": "metric [0-9]{5}"}):
        server.complete(prompt="Hi", max_tokens=30, **fields)
    assert server.post(COMPLETIONS, {"prompt": "Hi", "guided_regex": "metric ("}).status_code == 400
    for name, value in zip(names, before, strict=True):
        server.wait_for(name, value + 1)
    assert server.metric("octavo_engine_forced_tokens_total") > 0


def test_bombs_beside_live_streams(server: Server) -> None:
    """What is refused harms nobody, and a client that leaves while its grammar is compiled leaves nothing behind."""
    fine = {"prompt": "Once", "max_tokens": 120, "ignore_eos": True, "seed": 3, "guided_regex": "[a-z ]+"}
    want = server.complete(**fine)["choices"][0]["text"]
    got: list[str] = []
    streams = [
        threading.Thread(target=lambda: got.append(server.complete(**fine)["choices"][0]["text"])) for _ in range(4)
    ]
    for stream in streams:
        stream.start()
    schema: Schema = {"type": "integer", "multipleOf": 100_000_007}  # takes all the time that it may
    with server.asking(COMPLETIONS, {"prompt": "Hi", "guided_json": schema}):
        server.wait_for("octavo_requests_waiting", 1)
    for stream in streams:
        stream.join()
    assert got == 4 * [want]
    server.wait_idle()
