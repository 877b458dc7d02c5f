"""/v1/responses, driven by OpenAI's client against a real server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jsonschema
import openai
import pydantic
import pytest

from octavo.request import FinishReason
from octavo.server.errors import ApiError
from octavo.server.responses_fields import ResponsesRequest
from octavo.server.responses_output import ResponseOutput
from octavo.server.responses_store import ResponseStore, StoredResponse
from octavo.text.assistant import MessageOutput
from octavo.text.chat import ChatPrompt
from octavo.text.output import Delta
from octavo.text.reasoning import FORMATS
from octavo.text.tokenizer import load_tokenizer
from octavo.text.tools import FAMILIES
from tests.serving import Server
from tests.thinker import thinking_server
from tests.waiting import until

RESPONSES = "/v1/responses"
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {"type": "function", "name": "get_weather", "parameters": PARAMETERS, "strict": True}
NOW: dict[str, Any] = {"type": "function", "name": "now", "description": "The time."}
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}},
    "required": ["colour"],
    "additionalProperties": False,
}
JSON = {"format": {"type": "json_schema", "name": "answer", "schema": SCHEMA}}


class Answer(pydantic.BaseModel):
    colour: Literal["red", "green"]


@pytest.fixture(scope="module")
def server(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with thinking_server(data, tmp_path_factory.mktemp("model")) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


EXTRA = ("seed", "ignore_eos", "thinking_token_budget", "chat_template_kwargs")
"""Fields that the client has no name for."""


def make(client: openai.OpenAI, **fields: Any) -> Any:
    fields["extra_body"] = {name: fields.pop(name) for name in EXTRA if name in fields}
    return client.responses.create(**{"model": "tiny", "input": "Hi", "max_output_tokens": 60, **fields})


def events_of(server: Server, method: str = "POST", path: str = RESPONSES, **body: Any) -> list[dict[str, Any]]:
    """Those of a stream, whose numbers must go up one by one."""
    with server.http.stream(method, path, **({"json": {**body, "stream": True}} if method == "POST" else {})) as answer:
        assert answer.status_code == 200, answer.read()
        lines = [line for line in answer.iter_lines() if line and not line.startswith("id:")]
    names, datas = lines[::2], [json.loads(line.removeprefix("data: ")) for line in lines[1::2]]
    assert [line.removeprefix("event: ") for line in names] == [event["type"] for event in datas]
    first = datas[0]["sequence_number"]
    assert [event["sequence_number"] for event in datas] == list(range(first, first + len(datas)))
    return datas


def joined(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The output items that the deltas add up to, each checked against what its events say when it is done."""
    items: list[dict[str, Any]] = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(items) and event["item"]["status"] == "in_progress"
            items.append(event["item"])
            continue
        if "output_index" not in event:
            continue
        item = items[event["output_index"]]
        if kind == "content_part.added":
            item["content"].append(event["part"])
        elif kind in ("output_text.delta", "reasoning_text.delta"):
            part = item["content"][event["content_index"]]
            part["text"] += event["delta"]
            if "logprobs" in part:
                part["logprobs"] += event["logprobs"]
        elif kind == "function_call_arguments.delta":
            item["arguments"] += event["delta"]
        elif kind in ("output_text.done", "reasoning_text.done"):
            assert event["text"] == item["content"][0]["text"]
        elif kind == "function_call_arguments.done":
            assert (event["arguments"], event["name"]) == (item["arguments"], item["name"])
        elif kind == "content_part.done":
            assert event["part"] == item["content"][0]
        else:
            assert kind == "output_item.done"
            assert {**event["item"], "status": "in_progress"} == item
            item["status"] = event["item"]["status"]
    return items


def without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in items]


CASES: list[dict[str, Any]] = [
    {},
    {"top_logprobs": 2, "include": ["message.output_text.logprobs"], "stop": ["e"]},
    {"text": JSON},
    {"text": {"format": {"type": "json_object"}}, "max_output_tokens": 9},
    {"tools": [WEATHER, NOW], "tool_choice": "required"},
    {"tools": [WEATHER, NOW], "tool_choice": "required", "max_output_tokens": 21, "top_logprobs": 1},
    {"tools": [WEATHER, NOW], "tool_choice": {"type": "function", "name": "now"}},
    {
        "tools": [WEATHER, NOW],
        "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "now"}]},
    },
    {"thinking_token_budget": 9, "chat_template_kwargs": {"thinking": True}, "top_logprobs": 1},
    {
        "thinking_token_budget": 9,
        "chat_template_kwargs": {"thinking": True},
        "tools": [WEATHER],
        "tool_choice": "required",
        "max_output_tokens": 120,
    },
    {"chat_template_kwargs": {"thinking": True}, "max_output_tokens": 5},
]


@pytest.mark.parametrize("fields", CASES, ids=lambda fields: "+".join(fields))
def test_stream_equals_whole(server: Server, fields: dict[str, Any]) -> None:
    body = {"input": "Hi", "max_output_tokens": 90, "seed": 1, **fields}
    answer = server.post(RESPONSES, body)
    assert answer.status_code == 200, answer.text
    whole = answer.json()
    events = events_of(server, **body)
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1]
    assert last["type"] == f"response.{whole['status']}"
    assert without_ids(joined(events)) == without_ids(whole["output"]) == without_ids(last["response"]["output"])
    for name in whole:
        if name not in ("id", "created_at", "completed_at", "output", "usage"):
            assert last["response"][name] == whole[name], name
    usage = last["response"]["usage"]
    for name in ("input_tokens", "output_tokens", "output_tokens_details", "total_tokens"):
        assert usage[name] == whole["usage"][name]
    if whole["status"] == "incomplete":
        assert whole["incomplete_details"] == {"reason": "max_output_tokens"}
        assert usage["output_tokens"] == body["max_output_tokens"]


def test_scores_are_those_of_the_text(server: Server) -> None:
    """Joined, the scored tokens are the text: neither reasoning nor calls are scored."""
    body = {"input": "Hi", "max_output_tokens": 60, "seed": 3, "top_logprobs": 2, "thinking_token_budget": 7}
    for more in ({}, {"chat_template_kwargs": {"thinking": True}}):
        output = server.post(RESPONSES, {**body, **more}).json()["output"]
        part = next(item for item in output if item["type"] == "message")["content"][0]
        seen = [score for score in part["logprobs"] if not score["token"].startswith("<|")]
        data = b"".join(bytes(score["bytes"]) for score in seen)
        assert data.decode("utf-8", "replace").strip() == part["text"].strip()
        assert all(len(score["top_logprobs"]) == 2 for score in part["logprobs"])
        assert (output[0]["type"] == "reasoning") == bool(more)


def test_the_client_reads_whole_and_streamed_answers(client: openai.OpenAI) -> None:
    whole = make(client, seed=5, instructions="Be short.", metadata={"a": "b"})
    assert whole.object == "response" and whole.metadata == {"a": "b"} and whole.output_text
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    fields: dict[str, Any] = {"instructions": "Be short.", "extra_body": {"seed": 5}, "max_output_tokens": 60}
    with client.responses.stream(model="tiny", input="Hi", **fields) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert text == whole.output_text


def test_parsed_output(client: openai.OpenAI) -> None:
    answer = make(client, text=JSON, seed=2, thinking_token_budget=5)
    assert answer.status == "completed"
    jsonschema.validate(json.loads(answer.output_text), SCHEMA)
    parsed = client.responses.parse(
        model="tiny", input="Hi", text_format=Answer, extra_body={"seed": 2, "thinking_token_budget": 5}
    )
    assert parsed.output_parsed == Answer(colour=parsed.output_parsed.colour)  # type: ignore[union-attr]


def test_tool_round_trip(client: openai.OpenAI) -> None:
    """By ids, and with all items given anew: the model reads the same."""
    fields: dict[str, Any] = {"tools": [WEATHER], "thinking_token_budget": 5}
    first = make(client, **fields, tool_choice="required", seed=1, max_output_tokens=90)
    calls = [item for item in first.output if item.type == "function_call"]
    assert calls
    for call in calls:
        jsonschema.validate(
            json.loads(call.arguments), PARAMETERS if call.name == "get_weather" else {"type": "object"}
        )
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "20"} for call in calls]
    by_id = make(client, previous_response_id=first.id, input=results, **fields, seed=4)
    items = [{"role": "user", "content": "Hi"}, *(item.model_dump() for item in first.output), *results]
    anew = make(client, input=items, **fields, seed=4)
    assert by_id.usage.input_tokens == anew.usage.input_tokens > first.usage.input_tokens
    assert [i.to_dict() | {"id": ""} for i in by_id.output] == [i.to_dict() | {"id": ""} for i in anew.output]


def test_reasoning_goes_back(client: openai.OpenAI) -> None:
    """As text or as its opaque form, which say the same."""
    first = make(
        client,
        seed=1,
        include=["reasoning.encrypted_content"],
        thinking_token_budget=6,
        chat_template_kwargs={"thinking": True},
    )
    reasoning, message = first.output
    assert reasoning.type == "reasoning" and reasoning.content[0].text and reasoning.encrypted_content
    assert first.usage.output_tokens_details.reasoning_tokens == 7  # and the end mark
    opaque = {"type": "reasoning", "summary": [], "encrypted_content": reasoning.encrypted_content}
    turns = [
        [{"role": "user", "content": "Hi"}, item, message.model_dump(), {"role": "user", "content": "So?"}]
        for item in (reasoning.model_dump(exclude={"encrypted_content"}), opaque)
    ]
    told, hidden = (make(client, input=turn, temperature=0) for turn in turns)
    assert told.output_text == hidden.output_text


def test_kept_responses(client: openai.OpenAI) -> None:
    first = make(client, input=[{"role": "user", "content": "One"}, {"role": "user", "content": "Two"}])
    assert client.responses.retrieve(first.id).to_dict() == first.to_dict()
    items = list(client.responses.input_items.list(first.id, order="asc", limit=1))
    assert [item.content[0].text for item in items] == ["One", "Two"]  # type: ignore[union-attr]
    second = make(client, input="Three", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.NotFoundError, match="there is no stored response"):
        make(client, previous_response_id=first.id)
    assert make(client, previous_response_id=second.id).usage.input_tokens > second.usage.input_tokens
    forgotten = make(client, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(forgotten.id)


def finished(client: openai.OpenAI, id: str) -> Any:
    until(lambda: client.responses.retrieve(id).status not in ("queued", "in_progress"), every=0.02)
    return client.responses.retrieve(id)


def test_background(client: openai.OpenAI, server: Server) -> None:
    fields: dict[str, Any] = {"seed": 7, "max_output_tokens": 200, "ignore_eos": True}
    whole = make(client, **fields)
    made = make(client, background=True, **fields)
    assert made.status == "queued" and made.background
    done = finished(client, made.id)
    assert (done.status, done.output_text) == (whole.status, whole.output_text)
    events = events_of(server, "GET", f"{RESPONSES}/{made.id}?stream=true")
    assert [event["type"] for event in events[:3]] == [
        "response.created", "response.queued", "response.in_progress",
    ]  # fmt: skip
    assert "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta") == whole.output_text
    rest = events_of(server, "GET", f"{RESPONSES}/{made.id}?stream=true&starting_after={len(events) - 3}")
    assert rest == events[-2:]
    streamed = make(client, background=True, stream=True, **fields)
    assert [e.type for e in streamed] == [e["type"] for e in events]
    assert client.responses.cancel(made.id).status == done.status


def test_a_background_response_that_fails_tells_why(client: openai.OpenAI) -> None:
    odd = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "odd"}}}
    made = make(client, background=True, text=odd)
    done = finished(client, made.id)
    assert done.status == "failed" and "text: the JSON schema" in done.error.message


def test_tenants_and_quotas(data: Path, tmp_path: Path) -> None:
    """A tenant sees its own responses; what is made in the background counts against the quota of its key."""
    keys = tmp_path / "keys.toml"
    keys.write_text(
        "\n".join(f'[[key]]\nname = "{name}"\nkey = "{name}"\ntokens_per_minute = 1' for name in ("alice", "bob"))
    )
    with thinking_server(data, tmp_path, "--api-key-file", str(keys)) as server:
        alice, bob = ({"authorization": f"Bearer {name}"} for name in ("alice", "bob"))
        body = {"input": "Hi", "background": True, "max_output_tokens": 90, "ignore_eos": True}
        made = server.http.post(RESPONSES, json=body, headers=alice).json()
        path = f"{RESPONSES}/{made['id']}"
        server.http.headers.update(alice)
        server.wait_for("octavo_http_requests_open", 0)
        assert server.http.get(path).json()["status"] == "incomplete"
        assert server.http.post(RESPONSES, json=body, headers=alice).status_code == 429
        for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
            assert server.http.request(method, f"{RESPONSES}/{made['id']}{path}", headers=bob).status_code == 404
        answer = server.http.post(RESPONSES, json={"input": "x", "previous_response_id": made["id"]}, headers=bob)
        assert (answer.status_code, answer.json()["error"]["param"]) == (404, "previous_response_id")


BAD: list[tuple[dict[str, Any], str]] = [
    ({"input": []}, "input"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
    ({"input": [{"role": "nobody", "content": "x"}]}, "input[0].role"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "[]"}]}, "input[0]"),
    ({"input": ["x"]}, "input[0]"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [NOW], "tool_choice": {"type": "file_search"}}, "tool_choice"),
    ({"include": ["file_search_call.results"]}, "include"),
    ({"truncation": "auto"}, "truncation"),
    ({"conversation": "c"}, "conversation"),
    ({"background": True, "store": False}, "background"),
    ({"text": {"verbosity": "low"}}, "text.verbosity"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "odd"}}}}, "text: JSON schema"),
    (
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "odd"}}}, "stream": True},
        "text: JSON schema",
    ),
    ({"reasoning": {"effort": "huge"}}, "reasoning"),
    ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
    ({"max_output_tokens": 5000}, "max_output_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"stream_options": {}}, "stream_options"),
]


@pytest.mark.parametrize(("fields", "name"), BAD, ids=lambda value: value if isinstance(value, str) else "")
def test_what_cannot_be_honoured_is_named(server: Server, fields: dict[str, Any], name: str) -> None:
    answer = server.post(RESPONSES, {"input": "Hi", **fields})
    error = answer.json()["error"]
    assert answer.status_code == 400 and name.split(": ")[-1] in error["message"], answer.text
    assert error["param"] == re.split(r"[\[.:]", name)[0]


SAMPLES: dict[str, Any] = {
    "background": True, "cache_salt": "a", "chat_template_kwargs": {"thinking": True}, "frequency_penalty": 0.5,
    "ignore_eos": True, "include": ["message.output_text.logprobs"], "instructions": "So.", "logit_bias": {"5": 1.0},
    "max_output_tokens": 3, "max_tool_calls": 1, "metadata": {"a": "b"}, "min_p": 0.1, "min_tokens": 1, "model": "tiny",
    "parallel_tool_calls": False, "presence_penalty": 0.5, "priority": 1, "prompt_cache_key": "k",
    "prompt_cache_retention": "24h", "reasoning": {"summary": "auto"}, "repetition_penalty": 1.1, "request_id": "r1",
    "safety_identifier": "s", "seed": 1, "stop": ["x"], "store": False, "stream": True,
    "stream_options": {"include_obfuscation": False}, "temperature": 0.5, "text": JSON, "thinking_token_budget": 2,
    "timeout": 60, "tool_choice": "none", "tools": [NOW], "top_k": 5, "top_logprobs": 1, "top_p": 0.5,
    "ttft_timeout": 60, "user": "me",
}  # fmt: skip
WRONG: tuple[Any, ...] = ([[[1.5]]], 1e308, -(2**70), {"\u0000": []})


def test_every_field_is_honoured_or_refused(server: Server) -> None:
    first = server.post(RESPONSES, {"input": "Hi", "max_output_tokens": 1}).json()
    samples = {**SAMPLES, "previous_response_id": first["id"], "input": "Hi"}
    assert set(samples) == set(ResponsesRequest.__struct_fields__)
    base = {"input": "Hi", "max_output_tokens": 2}
    for name, value in samples.items():
        together = {"stream": True} if name == "stream_options" else {}
        answer = server.post(RESPONSES, {**base, **together, name: value})
        assert answer.status_code == 200, (name, answer.text)
        assert "x-octavo-ignored" not in answer.headers, name
        for wrong in WRONG:
            if name == "chat_template_kwargs" and isinstance(wrong, dict):
                continue
            answer = server.post(RESPONSES, {**base, **together, name: wrong})
            error = answer.json()["error"]
            assert answer.status_code == 400 and (error["param"] == name or name in error["message"]), (name, wrong)
    for name, refused in ResponsesRequest.REFUSED.items():
        for neutral in (None, *refused.neutral):
            assert server.post(RESPONSES, {**base, name: neutral}).status_code == 200, name
        answer = server.post(RESPONSES, {**base, name: "odd"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)


def test_unknown_members_are_named(server: Server) -> None:
    item = {"role": "user", "content": [{"type": "input_text", "text": "Hi", "colour": "red"}], "mood": "good"}
    answer = server.post(RESPONSES, {"input": [item], "max_output_tokens": 1, "wing": 1})
    assert answer.headers["x-octavo-ignored"] == "wing, input[0].mood, input[0].content[0].colour"


def test_items_are_in_order_however_the_text_arrives(data: Path) -> None:
    """Content between calls is an item of its own, also where all of it comes at once."""
    tokenizer = load_tokenizer(data / "arch" / "llama")
    call = '<tool_call>\n{"name": "now", "arguments": {"a": "%s"}}\n</tool_call>'
    text = f"<think>\nHm.\n</think>\nFirst {call % 1} then {call % 2}\n{call % 3} last"
    kinds = ["reasoning", "message", "function_call", "message", "function_call", "function_call", "message"]
    parser = FAMILIES["hermes"][0]
    prompt = ChatPrompt("", False, None, None, False, frozenset(), parser, FORMATS[0], False, {"now": {}})
    whole = None
    for length in (len(text), 200, 40, 7, 1):
        output = ResponseOutput(MessageOutput(tokenizer, prompt), None, "x", False)
        cuts = [text[start : start + length] for start in range(0, len(text), length)]
        events = [event for cut in cuts for event in output.push(Delta(cut, [], [], None, None))]
        events += output.push(Delta("", [], [], FinishReason.STOP, None))
        assert [item["type"] for item in output.items] == kinds
        items = without_ids(output.items)
        assert without_ids(joined(json.loads(json.dumps(events)))) == items
        assert whole is None or items == whole
        whole = items
    assert [item["content"][0]["text"] for item in output.items if "content" in item] == [
        "Hm.",
        "First",
        "then",
        "last",
    ]


def test_the_store_is_bounded() -> None:
    store = ResponseStore(max_responses=3, max_bytes=2000)

    def add(id: str, size: int = 10, *, ends: bool = True) -> StoredResponse:
        response = StoredResponse("me", {"id": id, "status": "completed", "output": ["x" * size]}, [], [])
        store.add(response)
        if ends:
            store.finish(response)
        return response

    open_one = add("open", ends=False)
    for i in range(4):
        add(f"r{i}")
    assert len(store) == 3 and "open" in store and "r1" not in store and "r3" in store
    with pytest.raises(ApiError, match="there is no stored response r3"):
        store.get("r3", "somebody else")
    add("large", 1900)
    assert [id for id in ("open", "r2", "r3", "large") if id in store] == ["open", "large"]
    store.delete("large", "me")
    store.finish(open_one)
    assert len(store) == 1
    add("huge", 3000)
    assert len(store) == 0
