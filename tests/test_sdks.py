"""The official Python SDKs drive the routes: sync and async, whole and streamed, plain, with tools and with a schema."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import anthropic
import jsonschema
import ollama
import openai
import pytest

from tests.serving import Server
from tests.thinker import START, thinking_server

HELLO = [{"role": "user", "content": "Hi"}]
SCHEMA = {
    "type": "object", "properties": {"colour": {"enum": ["red", "green"]}}, "required": ["colour"],
    "additionalProperties": False,
}  # fmt: skip
FUNCTION: dict[str, Any] = {"name": "paint", "parameters": SCHEMA}
TOOL: dict[str, Any] = {"type": "function", "function": FUNCTION}
SILENT = {str(START): -100}
"""A bias: the model does not begin to think."""


@pytest.fixture(scope="module")
def server(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with thinking_server(data, tmp_path_factory.mktemp("model")) as running:
        yield running


async def told(value: Any) -> Any:
    """What a method of either kind of client returns."""
    return await value if inspect.isawaitable(value) else value


CLIENTS: dict[str, Callable[[str], Any]] = {
    "openai": lambda url: openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0),
    "openai async": lambda url: openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0),
    "anthropic": lambda url: anthropic.Anthropic(base_url=url, api_key="none", max_retries=0),
    "anthropic async": lambda url: anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0),
    "ollama": lambda url: ollama.Client(host=url),
    "ollama async": lambda url: ollama.AsyncClient(host=url),
}


def drive(server: Server, kind: str, work: Callable[[Any], Awaitable[Any]]) -> Any:
    async def go() -> Any:
        client = CLIENTS[kind](server.url)
        try:
            return await work(client)
        finally:
            await told(client.close())

    return asyncio.run(go())


# What is asked, and what an answer says: its text and its calls


class Said(NamedTuple):
    text: str
    calls: list[tuple[str, Any]]


def said(text: Any, calls: list[tuple[str, Any]]) -> Said:
    return Said(str(text or ""), [(name, json.loads(a) if isinstance(a, str) else a) for name, a in calls])


def of_pieces(pieces: list[tuple[str, str, str]]) -> Said:
    """Of what events add: ("text", "", text), ("call", name, arguments) or ("arguments", "", more of them)."""
    text, calls = "", []
    for kind, name, piece in pieces:
        if kind == "text":
            text += piece
        elif kind == "call":
            calls.append((name, piece))
        else:
            calls[-1] = (calls[-1][0], calls[-1][1] + piece)
    return said(text, calls)


def completion_pieces(chunk: Any) -> list[tuple[str, str, str]]:
    return [("text", "", choice.text) for choice in chunk.choices]


def chat_pieces(chunk: Any) -> list[tuple[str, str, str]]:
    pieces = []
    for delta in (choice.delta for choice in chunk.choices):
        pieces += [("text", "", delta.content)] if delta.content else []
        for call in delta.tool_calls or ():
            name = call.function.name
            pieces.append(("call" if name else "arguments", name or "", call.function.arguments))
    return pieces


def response_pieces(event: Any) -> list[tuple[str, str, str]]:
    if event.type == "response.output_item.added" and event.item.type == "function_call":
        return [("call", event.item.name, "")]
    if event.type in ("response.output_text.delta", "response.function_call_arguments.delta"):
        return [("text" if "text" in event.type else "arguments", "", event.delta)]
    return []


def message_pieces(event: Any) -> list[tuple[str, str, str]]:
    if event.type == "content_block_start" and event.content_block.type == "tool_use":
        return [("call", event.content_block.name, "")]
    if event.type == "content_block_delta":
        is_text = event.delta.type == "text_delta"
        return [("text", "", event.delta.text) if is_text else ("arguments", "", event.delta.partial_json)]
    return []


def ollama_pieces(part: Any) -> list[tuple[str, str, str]]:
    calls = [("call", c.function.name, json.dumps(c.function.arguments)) for c in part.message.tool_calls or ()]
    return [("text", "", part.message.content or ""), *calls]


class Route(NamedTuple):
    sdk: str
    ask: Callable[..., Any]  # client, fields
    whole: Callable[[Any], Said]
    pieces: Callable[[Any], list[tuple[str, str, str]]]
    cases: dict[str, dict[str, Any]]


JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
ROUTES = {
    "completions": Route(
        "openai",
        lambda client, **fields: client.completions.create(model="tiny", prompt="Hi", seed=1, max_tokens=40, **fields),
        lambda answer: said(answer.choices[0].text, []),
        completion_pieces,
        {"plain": {}, "schema": {"extra_body": {"guided_json": SCHEMA}}},
    ),
    "chat": Route(
        "openai",
        lambda client, **fields: client.chat.completions.create(
            model="tiny", messages=HELLO, seed=1, max_tokens=90, logit_bias=SILENT, **fields
        ),
        lambda answer: said(
            answer.choices[0].message.content,
            [(c.function.name, c.function.arguments) for c in answer.choices[0].message.tool_calls or ()],
        ),
        chat_pieces,
        {"plain": {}, "tools": {"tools": [TOOL], "tool_choice": "required"}, "schema": {"response_format": JSON_SCHEMA}},
    ),
    "responses": Route(
        "openai",
        lambda client, **fields: client.responses.create(
            model="tiny", input="Hi", max_output_tokens=90, extra_body={"seed": 1, "logit_bias": SILENT}, **fields
        ),
        lambda answer: said(
            answer.output_text, [(i.name, i.arguments) for i in answer.output if i.type == "function_call"]
        ),
        response_pieces,
        {
            "plain": {},
            "tools": {"tools": [{"type": "function", **FUNCTION}], "tool_choice": "required"},
            "schema": {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}},
        },
    ),
    "messages": Route(
        "anthropic",
        lambda client, **fields: client.messages.create(
            model="tiny", messages=HELLO, max_tokens=90, thinking={"type": "disabled"}, extra_body={"seed": 1}, **fields
        ),
        lambda answer: said(
            "".join(block.text for block in answer.content if block.type == "text"),
            [(block.name, block.input) for block in answer.content if block.type == "tool_use"],
        ),
        message_pieces,
        {
            "plain": {},
            "tools": {"tools": [{"name": "paint", "input_schema": SCHEMA}], "tool_choice": {"type": "any"}},
            "schema": {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        },
    ),
    "api/chat": Route(
        "ollama",
        lambda client, **fields: client.chat(
            "tiny", HELLO, think=False, options={"seed": 1, "num_predict": 40}, **fields
        ),
        lambda answer: of_pieces(ollama_pieces(answer)),
        ollama_pieces,
        {"plain": {}, "tools": {"tools": [TOOL]}, "schema": {"format": SCHEMA}},
    ),
    "api/generate": Route(
        "ollama",
        lambda client, **fields: client.generate(
            "tiny", "Hi", think=False, options={"seed": 1, "num_predict": 40}, **fields
        ),
        lambda answer: said(answer.response, []),
        lambda part: [("text", "", part.response)],
        {"plain": {}, "schema": {"format": SCHEMA}},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "case"), [(name, case) for name, route in ROUTES.items() for case in route.cases])
def test_four_ways_to_the_same_answer(server: Server, name: str, case: str) -> None:
    route = ROUTES[name]
    fields = route.cases[case]

    async def both(client: Any) -> tuple[Said, Said]:
        whole = route.whole(await told(route.ask(client, **fields)))
        stream = await told(route.ask(client, stream=True, **fields))
        events = [event async for event in stream] if hasattr(stream, "__aiter__") else list(stream)
        return whole, of_pieces([piece for event in events for piece in route.pieces(event)])

    answers = [*drive(server, route.sdk, both), *drive(server, f"{route.sdk} async", both)]
    assert answers == answers[:1] * 4
    text, calls = answers[0]
    if case == "schema":
        jsonschema.validate(json.loads(text), SCHEMA)
    elif case == "tools" and route.sdk != "ollama":  # it cannot demand a call
        assert calls
        for called, arguments in calls:
            assert called == "paint"
            jsonschema.validate(arguments, SCHEMA)
    else:
        assert text


@pytest.mark.parametrize("kind", ["openai", "openai async"])
def test_other_routes_of_openai(server: Server, kind: str) -> None:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Hi", "max_tokens": 1}}

    async def work(client: Any) -> None:
        assert [model.id for model in (await told(client.models.list())).data] == ["tiny"]
        assert (await told(client.models.retrieve("tiny"))).owned_by == "octavo"
        vectors = await told(client.embeddings.create(model="tiny", input=["a", "b"]))
        assert [entry.index for entry in vectors.data] == [0, 1] and len(vectors.data[0].embedding) == 64

        content = json.dumps(line).encode()
        file = await told(client.files.create(file=("in.jsonl", content), purpose="batch"))
        assert (await told(client.files.retrieve(file.id))).bytes == len(content)
        assert (await told(client.files.content(file.id))).content == content
        assert file.id in [each.id for each in (await told(client.files.list(purpose="batch", order="asc"))).data]
        batch = await told(
            client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        )
        while (now := await told(client.batches.retrieve(batch.id))).status == "in_progress":
            await asyncio.sleep(0.02)
        assert now.status == "completed" and now.request_counts.completed == 1
        assert batch.id in [each.id for each in (await told(client.batches.list(limit=5))).data]
        with pytest.raises(openai.BadRequestError, match="nothing to cancel"):
            await told(client.batches.cancel(batch.id))
        assert (await told(client.files.delete(file.id))).deleted

        made = await told(client.responses.create(model="tiny", input="Hi", max_output_tokens=2, background=True))
        assert (await told(client.responses.cancel(made.id))).id == made.id
        assert (await told(client.responses.retrieve(made.id))).id == made.id
        items = await told(client.responses.input_items.list(made.id, order="asc"))
        assert [item.content[0].text for item in items.data] == ["Hi"]
        await told(client.responses.delete(made.id))
        with pytest.raises(openai.NotFoundError):
            await told(client.responses.retrieve(made.id))

    drive(server, kind, work)


@pytest.mark.parametrize("kind", ["anthropic", "anthropic async"])
def test_other_routes_of_anthropic(server: Server, kind: str) -> None:
    async def work(client: Any) -> None:
        assert [model.id for model in (await told(client.models.list())).data] == ["tiny"]
        assert (await told(client.models.retrieve("tiny"))).display_name == "tiny"
        counted = await told(client.messages.count_tokens(model="tiny", messages=HELLO))
        message = await told(client.messages.create(model="tiny", messages=HELLO, max_tokens=1))
        assert counted.input_tokens == message.usage.input_tokens

    drive(server, kind, work)


@pytest.mark.parametrize("kind", ["ollama", "ollama async"])
def test_other_routes_of_ollama(server: Server, kind: str) -> None:
    async def work(client: Any) -> None:
        assert [model.model for model in (await told(client.list())).models] == ["tiny"]
        assert [model.model for model in (await told(client.ps())).models] == ["tiny"]
        assert "completion" in (await told(client.show("tiny"))).capabilities
        assert len((await told(client.embed("tiny", ["a", "b"]))).embeddings) == 2

    drive(server, kind, work)
