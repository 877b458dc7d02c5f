"""Anthropic's API over HTTP, with the official client, against a real server process."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import anthropic
import jsonschema
import pytest

from octavo.server.anthropic_fields import CountTokensRequest, MessagesRequest, Metadata
from tests.serving import Server
from tests.thinker import thinking_server

MESSAGES = "/v1/messages"
COUNT_TOKENS = "/v1/messages/count_tokens"
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {"name": "get_weather", "description": "The weather.", "input_schema": CITY}
NOW: dict[str, Any] = {"name": "now", "input_schema": {"type": "object"}}
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
CACHED = {"type": "ephemeral"}
PING_SECONDS = 0.05


@pytest.fixture(scope="module")
def server(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with thinking_server(
        data, tmp_path_factory.mktemp("model"), "--api-key", "secret", "--sse-ping-seconds", str(PING_SECONDS)
    ) as running:
        running.http.headers["x-api-key"] = "secret"
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="secret", max_retries=0) as sdk_client:
        yield sdk_client


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": HELLO, "max_tokens": 60, "seed": 1, **fields}


def ask(server: Server, **fields: Any) -> dict[str, Any]:
    response = server.post(MESSAGES, body(**fields))
    assert response.status_code == 200, response.text
    message: dict[str, Any] = response.json()
    return message


def stream(server: Server, **fields: Any) -> list[dict[str, Any]]:
    """The events without pings, each of which has the name of its type."""
    with server.http.stream("POST", MESSAGES, json=body(stream=True, **fields)) as response:
        assert response.status_code == 200, response.read()
        lines = [line for line in response.iter_lines() if line]
    names = [line.removeprefix("event: ") for line in lines[::2]]
    events = [json.loads(line.removeprefix("data: ")) for line in lines[1::2]]
    assert names == [event["type"] for event in events]
    return [event for event in events if event["type"] != "ping"]


def sdk(fields: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the client's methods: it has no sampling parameters any more."""
    own = ("seed", "temperature", "top_k", "top_p", "chat_template_kwargs")
    return {
        **{name: value for name, value in fields.items() if name not in own},
        "extra_body": {name: value for name, value in fields.items() if name in own},
    }


def count(messages: list[Any] = HELLO, **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": messages, **fields}


def comparable(message: Any) -> dict[str, Any]:
    told: dict[str, Any] = message if isinstance(message, dict) else message.model_dump(exclude_none=True)
    told = json.loads(json.dumps({name: value for name, value in told.items() if name != "id" and value is not None}))
    for block in told["content"]:
        block.pop("parsed_output", None)
        if block["type"] == "tool_use":
            assert block.pop("id").startswith("call_")
    told["usage"] = {name: told["usage"][name] for name in ("input_tokens", "output_tokens", "output_tokens_details")}
    return told


ANY = {"type": "any"}
CASES: list[dict[str, Any]] = [
    {},
    {"max_tokens": 0},
    {"temperature": 0, "top_k": 5, "top_p": 0.9, "system": "Be brief."},
    {"tools": [WEATHER, NOW], "tool_choice": ANY, "max_tokens": 110},
    {"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "get_weather"}, "max_tokens": 30},
    {"tools": [WEATHER], "tool_choice": ANY, "stop_sequences": ["city", "zzz"]},
    {"tools": [WEATHER], "tool_choice": {**ANY, "disable_parallel_tool_use": True}, "max_tokens": 110},
    {"tools": [NOW], "tool_choice": {"type": "none"}},
    {"thinking": {"type": "enabled", "budget_tokens": 9}},
    {"thinking": {"type": "enabled", "budget_tokens": 9, "display": "omitted"}},
    {"thinking": {"type": "enabled", "budget_tokens": 9}, "tools": [WEATHER], "tool_choice": ANY, "max_tokens": 110},
    {"thinking": {"type": "disabled"}},
    {"output_config": {"format": {"type": "json_schema", "schema": CITY}}},
    {"messages": [*HELLO, {"role": "assistant", "content": "The answer is"}]},
]


@pytest.mark.parametrize("fields", CASES, ids=lambda fields: "+".join(fields) or "plain")
def test_stream_equals_whole(server: Server, client: anthropic.Anthropic, fields: dict[str, Any]) -> None:
    """As the client adds the events up, and whatever the kind of block."""
    arguments = sdk(body(**fields))
    whole = client.messages.create(**arguments)
    with client.messages.stream(**arguments) as streamed:
        last = streamed.get_final_message()
    assert comparable(last) == comparable(whole)
    told = ("messages", "system", "tools", "tool_choice", "thinking", "output_config")
    counted = client.messages.count_tokens(
        model="tiny", **{name: arguments[name] for name in told if name in arguments}
    )
    assert whole.usage.input_tokens == counted.input_tokens > 0
    assert (whole.usage.cache_read_input_tokens, whole.usage.cache_creation_input_tokens) == (0, 0)


def test_events_come_in_order(server: Server) -> None:
    fields: dict[str, Any] = {
        "thinking": {"type": "enabled", "budget_tokens": 9},
        "tools": [WEATHER],
        "max_tokens": 110,
    }
    events = stream(server, tool_choice=ANY, **fields)
    assert events[0]["type"] == "message_start"
    assert events[0]["message"]["usage"]["input_tokens"] > 0 and events[0]["message"]["content"] == []
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    assert events[-2]["usage"]["output_tokens"] <= 110
    kinds, index, delta_of = (
        [],
        -1,
        {"thinking": "thinking_delta", "text": "text_delta", "tool_use": "input_json_delta"},
    )
    for before, event in pairwise(events[:-2]):
        if event["type"] == "content_block_start":
            assert before["type"] in ("message_start", "content_block_stop")
            kinds.append(event["content_block"]["type"])
            index += 1
        elif event["type"] == "content_block_delta" and event["delta"]["type"] != "signature_delta":
            assert event["delta"]["type"] == delta_of[kinds[-1]]
        assert event["index"] == index
    assert kinds[:2] == ["thinking", "tool_use"]


def test_silent_streams_get_pings(server: Server) -> None:
    """One in each time of silence."""
    with server.frozen():
        began = time.monotonic()
        with server.http.stream("POST", MESSAGES, json=body(stream=True)) as response:
            lines = (line for line in response.iter_lines() if line)
            assert [next(lines) for _ in range(10)] == ["event: ping", 'data: {"type":"ping"}'] * 5
        assert time.monotonic() - began > 5 * PING_SECONDS


def test_tool_round_trip(client: anthropic.Anthropic) -> None:
    conversation: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "Weather?"}]}]
    tools: dict[str, Any] = {"tools": [WEATHER], "tool_choice": {**ANY, "disable_parallel_tool_use": True}}
    first = client.messages.create(**sdk(body(messages=conversation, max_tokens=200, **tools)))
    assert first.stop_reason == "tool_use"
    call = first.content[-1]
    assert call.type == "tool_use"
    jsonschema.validate(call.input, CITY)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "Sunny"}]}
    conversation += [
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result, {"type": "text", "text": "So?"}]},
    ]
    second = client.messages.create(**sdk(body(messages=conversation, tools=[WEATHER], tool_choice={"type": "none"})))
    assert second.content[0].type == "text"
    counted = client.messages.count_tokens(**count(conversation, tools=[WEATHER], tool_choice={"type": "none"}))
    assert counted.input_tokens == second.usage.input_tokens
    failed = [*conversation[:2], {"role": "user", "content": [{**result, "is_error": True}]}]
    longer = client.messages.count_tokens(**count(failed))
    shorter = client.messages.count_tokens(**count([*conversation[:2], {"role": "user", "content": [result]}]))
    assert longer.input_tokens > shorter.input_tokens


def test_why_it_ended(server: Server) -> None:
    text = ask(server)["content"][0]["text"]
    cut = ask(server, stop_sequences=[text[5:8], "zzz"])
    assert (cut["stop_reason"], cut["stop_sequence"]) == ("stop_sequence", text[5:8])
    assert cut["content"][0]["text"] == text[: text.index(text[5:8])]
    full = ask(server, max_tokens=5)
    assert (full["stop_reason"], full["stop_sequence"], full["usage"]["output_tokens"]) == ("max_tokens", None, 5)
    format = {"type": "json_schema", "schema": CITY}
    formed = ask(server, output_config={"format": format}, thinking={"type": "disabled"}, max_tokens=300)
    assert formed["stop_reason"] == "end_turn"
    jsonschema.validate(json.loads(formed["content"][0]["text"]), CITY)


def test_thinking_has_a_budget(server: Server) -> None:
    message = ask(server, thinking={"type": "enabled", "budget_tokens": 7})
    thought = message["content"][0]
    assert thought["type"] == "thinking" and thought["signature"] == "" and thought["thinking"]
    assert 0 < message["usage"]["output_tokens_details"]["thinking_tokens"] <= 8
    hidden = ask(server, thinking={"type": "enabled", "budget_tokens": 7, "display": "omitted"})
    assert hidden["content"] == [{**thought, "thinking": ""}, *message["content"][1:]]
    assert hidden["usage"] == message["usage"]
    turns = [*HELLO, {"role": "assistant", "content": message["content"]}, *HELLO]
    assert ask(server, messages=turns)["content"]
    for seed in range(4):  # also where the model begins to think by itself
        silent = ask(
            server,
            thinking={"type": "disabled"},
            seed=seed,
            output_config={"format": {"type": "json_schema", "schema": CITY}},
        )
        assert [block["type"] for block in silent["content"]] == ["text"]
        assert silent["usage"]["output_tokens_details"]["thinking_tokens"] <= 2


def test_a_prefill_is_continued(server: Server) -> None:
    prefilled = [*HELLO, {"role": "assistant", "content": [{"type": "text", "text": "The answer is"}]}]
    message = ask(server, messages=prefilled, temperature=0)
    chat = server.post(
        "/v1/chat/completions",
        {"messages": prefilled, "temperature": 0, "max_tokens": 60, "continue_final_message": True},
    ).json()
    assert message["content"][0]["text"] == chat["choices"][0]["message"]["content"]
    assert message["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]


def test_cache_control_counts_as_anthropic_does(server: Server) -> None:
    system = [
        {"type": "text", "text": "You know all about rivers, lakes and seas. " * 4},
        {"type": "text", "text": "You are brief.", "cache_control": {**CACHED, "ttl": "1h"}},
    ]
    fields: dict[str, Any] = {"system": system, "max_tokens": 2}
    total = server.post(COUNT_TOKENS, {"system": system, "messages": HELLO}).json()["input_tokens"]
    first, second = (ask(server, **fields)["usage"] for _ in range(2))
    marked = total - first["input_tokens"]
    assert marked > 100 and first["input_tokens"] == second["input_tokens"] > 5
    for usage in (first, second):
        assert usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"] == marked
        hour = usage["cache_creation"]["ephemeral_1h_input_tokens"]
        assert hour == usage["cache_creation_input_tokens"] and not usage["cache_creation"]["ephemeral_5m_input_tokens"]
    assert first["cache_creation_input_tokens"] > 100 and second["cache_creation_input_tokens"] == 0

    turns = [
        {"role": "user", "content": [{"type": "text", "text": "Tell me of the Danube. " * 6, "cache_control": CACHED}]}
    ]
    both = ask(server, **fields, messages=turns)["usage"]
    assert both["cache_read_input_tokens"] >= marked
    assert both["cache_creation"]["ephemeral_5m_input_tokens"] == both["cache_creation_input_tokens"] > 20
    again = stream(server, **fields, messages=turns)
    assert again[0]["message"]["usage"]["cache_creation_input_tokens"] == 0
    read = both["cache_read_input_tokens"] + both["cache_creation_input_tokens"]
    assert again[-2]["usage"]["cache_read_input_tokens"] == read
    plain = ask(server, system=system[:1], messages=turns[:0] or HELLO, cache_control=CACHED, max_tokens=1)["usage"]
    assert plain["input_tokens"] < 20 and plain["cache_read_input_tokens"] > 100


def test_users_are_tenants() -> None:
    """As `user` is in chat, where no API key says more."""
    request = MessagesRequest(messages=HELLO, max_tokens=1, metadata=Metadata(user_id="ann"))
    assert request.chat_request([]).user == "ann"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"messages": []}, "messages is empty"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role must be user, assistant or system"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]: blocks of type 'image'"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "role user has no blocks of type tool_use"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text must be a string"),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}]}]},
        "messages[0].content[0].tool_use_id is 'a', which is the id of no tool_use",
    ),
    (
        {"messages": [*HELLO, {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "now", "input": {}}]}]},
        "messages[1] has a tool_use block without a tool_result",
    ),
    ({"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": ""}]}]}, "'redacted_thinking'"),
    ({"system": [{"type": "document"}]}, "system[0]: blocks of type 'document' are not supported, only text"),
    ({"system": [{"type": "text", "text": "x", "cache_control": {"type": "x"}}]}, "system[0].cache_control must be"),
    ({"system": [{"type": "text", "text": "x", "cache_control": {**CACHED, "ttl": "9m"}}]}, "cache_control.ttl must be 5m or 1h"),
    ({"cache_control": {**CACHED, "ttl": ["5m"]}}, "cache_control.ttl must be 5m or 1h"),
    ({"system": [{"type": "text", "text": "x", "citations": [{}]}]}, "system[0].citations is not supported"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]: tools of type 'web_search_20250305'"),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name must be"),
    ({"tools": [{"name": "a"}]}, "tools[0].input_schema is required"),
    ({"tools": [{"name": "a", "input_schema": {"type": "string"}}]}, "tools[0].input_schema must be a JSON schema"),
    ({"tools": [{**NOW, "defer_loading": True}]}, "tools[0].defer_loading is not supported"),
    ({"tool_choice": ANY}, "tool_choice needs tools"),
    ({"tools": [NOW], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice names 'x'"),
    ({"tools": [NOW], "tool_choice": {"type": "tool"}}, "tool_choice.name goes with type tool"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 60}}, "thinking.budget_tokens must be less than max_tokens"),
    ({"stop_sequences": ["a"] * 65}, "stop_sequences has 65 items; at most 64"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "no type"}}}}, "output_config.format"),
    ({"temperature": -1}, "temperature must be between"),
    ({"max_tokens": 5000}, "tokens"),
    ({"service_tier": "priority"}, "service_tier is not supported"),
    ({"mcp_servers": [{}]}, "mcp_servers is not supported"),
    ({"request_id": "a b"}, "request_id must have"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_what_cannot_be_honoured_is_refused_by_name(
    server: Server, client: anthropic.Anthropic, fields: dict[str, Any], message: str
) -> None:
    answer = server.post(MESSAGES, body(**fields))
    assert answer.status_code == 400, answer.text
    error = answer.json()
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert message in error["error"]["message"]
    assert server.post(MESSAGES, body(stream=True, **fields)).json() == error
    if fields.get("max_tokens", 1) is not None:
        with pytest.raises(anthropic.BadRequestError):
            client.messages.create(**sdk(body()) | {"extra_body": fields})


def test_errors_have_anthropics_types(server: Server, client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(model="gpt", max_tokens=1, messages=HELLO)  # type: ignore[arg-type]
    assert missing.value.body == {
        "type": "error",
        "error": {"type": "not_found_error", "message": "there is no model 'gpt' here; this server has 'tiny'"},
    }
    assert missing.value.request_id
    with pytest.raises(anthropic.AuthenticationError) as stranger:
        client.with_options(api_key="wrong").messages.create(model="tiny", max_tokens=1, messages=HELLO)  # type: ignore[arg-type]
    assert stranger.value.type == "authentication_error"
    assert server.http.get(MESSAGES).json()["error"]["type"] == "invalid_request_error"
    assert server.post(MESSAGES + "/batches", {}).json()["error"]["type"] == "not_found_error"
    assert server.post("/v1/nothing", {}).json()["error"]["param"] is None
    late = sdk(body(max_tokens=900))
    late["extra_body"] |= {"timeout": 0.05}
    with client.messages.stream(**late) as streamed, pytest.raises(anthropic.APIStatusError, match="timeout"):
        streamed.until_done()


def test_models(client: anthropic.Anthropic) -> None:
    (model,) = client.models.list()
    assert (model.id, model.display_name, model.type) == ("tiny", "tiny", "model")
    assert client.models.retrieve("tiny").created_at == model.created_at
    with pytest.raises(anthropic.NotFoundError):
        client.models.retrieve("gpt")


@pytest.mark.parametrize(
    ("version", "status"), [("2023-06-01", 200), ("2026-10-21", 200), ("2023-01-01", 400), ("x", 400)]
)
def test_versions(server: Server, version: str, status: int) -> None:
    answer = server.http.post(COUNT_TOKENS, json={"messages": HELLO}, headers={"anthropic-version": version})
    assert answer.status_code == status
    assert status == 200 or "anthropic-version" in answer.json()["error"]["message"]


SAMPLES: dict[str, Any] = {
    "cache_control": CACHED, "cache_salt": "a", "chat_template_kwargs": {"thinking": True}, "max_tokens": 2,
    "messages": HELLO, "metadata": {"user_id": "me"}, "model": "tiny", "output_config": {"effort": "high"},
    "priority": -1, "request_id": "r1", "seed": 5, "stop_sequences": ["x"], "stream": True, "system": "Be kind.",
    "temperature": 0.5, "thinking": {"type": "adaptive"}, "timeout": 60.0, "tool_choice": {"type": "auto"},
    "tools": [NOW], "top_k": 5, "top_p": 0.5, "ttft_timeout": 60.0,
}  # fmt: skip


@pytest.mark.parametrize("path", [MESSAGES, COUNT_TOKENS])
def test_field_by_field(server: Server, path: str) -> None:
    schema: type[CountTokensRequest] = MessagesRequest if path == MESSAGES else CountTokensRequest
    base = {"messages": HELLO} | ({"max_tokens": 2} if path == MESSAGES else {})
    for name in schema.__struct_fields__:
        answer = server.post(path, base | {name: SAMPLES[name]})
        assert answer.status_code == 200, (name, answer.text)
        assert "x-octavo-ignored" not in answer.headers, name
        wrong: Any
        for wrong in ([[[1.5]]], 1e308, -(2**70), {"\u0000": []}):
            if name == "chat_template_kwargs" and isinstance(wrong, dict):
                continue
            answer = server.post(path, base | {name: wrong})
            assert answer.status_code == 400 and name in answer.json()["error"]["message"], (name, wrong, answer.text)
    for name, refused in schema.REFUSED.items():
        answer = server.post(path, base | {name: {"a": 1}})
        assert answer.json()["error"]["message"] == f"{name} is not supported: {refused.why}"
        for neutral in (None, *refused.neutral):
            assert server.post(path, base | {name: neutral}).status_code == 200
    nothing = dict.fromkeys({*schema.__struct_fields__, *schema.REFUSED}, None)
    assert server.post(path, nothing | base).status_code == 200


def test_what_is_not_known_is_named(server: Server) -> None:
    block = {"type": "text", "text": "x", "cache_control": {**CACHED, "scope": "global"}, "new": 1}
    billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=1a2b;"}
    fields = {"system": [billing, block], "context_management": {"edits": []}, "output_config": {"effort": "max"}}
    answer = server.post(MESSAGES, body(**fields))
    assert answer.status_code == 200
    assert answer.headers["x-octavo-ignored"].split(", ") == [
        "context_management", "system[0]", "system[1].new", "system[1].cache_control.scope", "output_config.effort",
    ]  # fmt: skip
    without = body(system=[{"type": "text", "text": "x"}])
    assert sum(answer.json()["usage"][name] for name in ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")) == (
        server.post(MESSAGES, without).json()["usage"]["input_tokens"]
    )  # fmt: skip
