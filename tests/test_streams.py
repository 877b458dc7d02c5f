"""Streams: usage, progress, pings, ids; taken up again, aborted, read too slowly."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import shutil
import weakref
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import zmq

from octavo.config import EngineConfig
from octavo.engine.client import MAX_PENDING, MAX_PENDING_PER_CHOICE, EngineClient, SlowReader, Stream
from octavo.engine.messages import Add, Progress
from octavo.engine.supervisor import EngineProcess
from octavo.request import FinishReason, SamplingParams
from octavo.server.errors import ApiError
from octavo.server.resume import MAX_BYTES, ResumableStream, ResumableStreams
from tests.serving import Server
from tests.waiting import SECONDS

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
LONG = {"prompt": "Hello", "max_tokens": 400, "ignore_eos": True, "seed": 1}


@pytest.fixture(scope="module")
def server(data: Path) -> Iterator[Server]:
    options = ("--resume-seconds", "3600", "--max-num-batched-tokens", "64")
    with Server(data / "arch" / "llama", "--served-model-name", "tiny", *options) as running:
        yield running


def text_of(chunks: list[dict[str, Any]]) -> str:
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


def test_continuous_usage_grows_to_the_last(server: Server) -> None:
    body = {"prompt": ["Hello", "Hello there"], "n": 2, "max_tokens": 12, "return_token_ids": True, "seed": 3}
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = server.events(COMPLETIONS, {**body, "stream_options": options})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == counts[-2]
    assert chunks[-1]["choices"] == []
    ids = [token for chunk in chunks for choice in chunk["choices"] for token in choice["token_ids"]]
    assert len(ids) == counts[-1] == server.complete(**body)["usage"]["completion_tokens"]
    only = server.events(COMPLETIONS, {**body, "stream_options": {"continuous_usage_stats": True}})
    assert all(chunk["choices"] and chunk["usage"] for chunk in only)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/api/generate"])
def test_no_text_breaks_a_line(server: Server, path: str) -> None:
    """JSON allows line ends of Unicode in strings; clients that read lines of text break there."""
    text = "one\u2028two\u0085three\u2029four"
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 64, "stream": True, "structured_outputs": {"choice": [text]}}
    if path == "/api/generate":
        body = {"model": "tiny", "prompt": text, "stream": True, "format": {"const": text}, "raw": True}
    elif path == COMPLETIONS:
        body["prompt"] = text
    else:
        body["messages"] = [{"role": "user", "content": text}]
    with server.http.stream("POST", path, json=body) as response:
        assert response.status_code == 200, response.read()
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith(("data: {", "{"))]
    parts = [json.dumps(json.loads(line), ensure_ascii=False) for line in lines]
    assert sum(part.count("\u2028") + part.count("\u0085") + part.count("\u2029") for part in parts) >= 3


def test_progress_of_the_prompt_is_told(server: Server) -> None:
    body = {"prompt": [7, 8, 9] * 90, "max_tokens": 2, "return_progress": True, "stream": True}
    chunks = server.events(COMPLETIONS, body)
    told = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
    assert [p["processed"] for p in told] == [64, 128, 192, 256]
    assert {p["total"] for p in told} == {270} and {p["cache"] for p in told} == {0}
    assert all(a["time_ms"] <= b["time_ms"] for a, b in itertools.pairwise(told))


def test_prompt_scores_are_streamed_once(server: Server) -> None:
    body = {"max_tokens": 4, "prompt_logprobs": 2, "seed": 1}
    whole = server.complete(prompt=["Hello", "a b"], **body)
    chunks = server.events(COMPLETIONS, {"prompt": ["Hello", "a b"], **body})
    for choice in whole["choices"]:
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert [c.get("prompt_logprobs") for c in mine] == [choice["prompt_logprobs"]] + [None] * (len(mine) - 1)
    chat = {"messages": [{"role": "user", "content": "Hi"}], **body}
    expected = server.post(CHAT, chat).json()["prompt_logprobs"]
    told = [chunk["prompt_logprobs"] for chunk in server.events(CHAT, chat) if "prompt_logprobs" in chunk]
    assert told == [expected] and expected[0] is None


def test_sampling_values_are_told(server: Server, data: Path, tmp_path: Path) -> None:
    body = {"prompt": "a", "max_tokens": 1, "top_k": 4, "return_sampling_params": True, "bad_words": ["x"]}
    answer = server.complete(**body)
    values = answer["sampling_params"]
    assert (values["top_k"], values["temperature"], values["max_tokens"]) == (4, 1.0, 1)
    chunks = server.events(COMPLETIONS, body | {"seed": values["seed"]})  # the seed that was drawn gives the same again
    assert chunks[0]["sampling_params"] == values and text_of(chunks) == answer["choices"][0]["text"]
    two = server.complete(**body | {"prompt": ["a", "b"]})["sampling_params"]["seed"]
    assert len(set(two)) == 2
    model = tmp_path / "llama"
    shutil.copytree(data / "arch" / "llama", model)
    (model / "generation_config.json").write_text(
        '{"temperature": 0.6, "top_k": 20, "max_new_tokens": 5, "eos_token_id": 2}'
    )
    for option, temperature, top_k in (("auto", 0.6, 20), ("none", 1.0, 0)):
        with Server(model, "--generation-config", option) as other:
            told = other.complete(prompt="a", max_tokens=1, return_sampling_params=True)["sampling_params"]
            assert (told["temperature"], told["top_k"]) == (temperature, top_k)
            given = other.complete(prompt="a", max_tokens=1, temperature=0, return_sampling_params=True)
            assert given["sampling_params"]["temperature"] == 0


# ---------------------------------------------------------------- taken up again


def read(response: httpx.Response, count: int = 10**9) -> list[tuple[int, str]]:
    """(id, data) of the next events of a stream."""
    events, id = list[tuple[int, str]](), -1
    for line in response.iter_lines():
        if line.startswith("id: "):
            id = int(line[4:])
        elif line.startswith("data: "):
            events.append((id, line[6:]))
            if len(events) == count:
                break
    return events


def test_a_stream_is_taken_up_where_it_broke(server: Server) -> None:
    body = {**LONG, "stream": True, "resumable": True, "request_id": "a", "stream_options": {"include_usage": True}}
    with (
        httpx.Client(base_url=server.url, timeout=SECONDS) as first,
        first.stream("POST", COMPLETIONS, json=body) as response,
    ):
        events = read(response, 7)
    id = json.loads(events[0][1])["id"]
    for count in (5, 10**9):
        last_id = {"last-event-id": str(events[-1][0])}
        with httpx.stream("GET", f"{server.url}/v1/streams/{id}", headers=last_id, timeout=SECONDS) as response:
            assert response.status_code == 200
            events += read(response, count)
    assert [number for number, _ in events] == list(range(len(events)))
    assert events[-1][1] == "[DONE]"
    assert text_of([json.loads(data) for _, data in events[:-1]]) == server.complete(**LONG)["choices"][0]["text"]
    whole = read(server.http.get(f"/v1/streams/{id}"))
    assert whole == events
    again = server.post(COMPLETIONS, body)
    assert (again.status_code, again.json()["error"]["param"]) == (400, "request_id")
    for last in ("x", "-2", "9" * 10):
        assert server.http.get(f"/v1/streams/{id}", headers={"last-event-id": last}).status_code == 400
    assert server.http.get(f"/v1/streams/{id}", headers={"last-event-id": "99999"}).status_code == 410
    assert server.http.get("/v1/streams/nobody").status_code == 404


async def numbered(count: int, size: int = 10) -> AsyncGenerator[bytes, None]:
    for i in range(count):
        yield b"%d" % i + b"x" * size
        await asyncio.sleep(0)


def test_only_so_much_of_a_stream_is_kept() -> None:
    async def scenario() -> None:
        stream = ResumableStream(numbered(40, MAX_BYTES // 10), None)
        await asyncio.wait_for(stream.ended.wait(), SECONDS)
        with pytest.raises(ApiError, match="are kept") as caught:
            stream.check(3)
        assert caught.value.status == 410
        late = [event async for event in stream.read(0)]
        assert len(late) == 1 and b"events_forgotten" in late[0]
        kept = [event async for event in stream.read(stream._first)]
        assert sum(map(len, kept)) < MAX_BYTES * 1.1 and b"id: 39\n" in kept[-1]

    asyncio.run(scenario())


def test_streams_of_others_do_not_exist() -> None:
    async def scenario() -> None:
        streams = ResumableStreams()
        stream = streams.add("a", numbered(3), "me", 0.01)
        assert streams.get("a", "me") is stream
        for id, caller in (("a", "you"), ("a", ""), ("b", "me")):
            with pytest.raises(ApiError) as caught:
                streams.get(id, caller)
            assert caught.value.status == 404
            streams.check(id, caller)  # may be taken
        with pytest.raises(ApiError, match="still kept"):
            streams.check("a", "me")
        assert len([event async for event in stream.read(0)]) == 3
        await asyncio.wait_for(stream.over.wait(), SECONDS)
        await asyncio.sleep(0)
        with pytest.raises(ApiError):
            streams.get("a", "me")
        streams.check("a", "me")

    asyncio.run(scenario())


def test_a_stream_that_nobody_ever_read_ends() -> None:
    async def endless() -> AsyncGenerator[bytes, None]:
        while True:
            await asyncio.sleep(0.001)
            yield b""

    async def scenario() -> None:
        stream = ResumableStream(endless(), 0.01)
        await asyncio.wait_for(stream.over.wait(), SECONDS)
        await asyncio.wait_for(stream.ended.wait(), SECONDS)

    asyncio.run(scenario())


def test_prompts_are_truncated_where_asked(server: Server) -> None:
    ids = list(range(3, 203))
    short = server.complete(prompt=ids[-5:], max_tokens=3, temperature=0)
    cut = server.complete(prompt=ids, max_tokens=3, temperature=0, truncate_prompt_tokens=5, return_token_ids=True)
    assert (
        cut["choices"][0]["prompt_token_ids"] == ids[-5:] and cut["choices"][0]["text"] == short["choices"][0]["text"]
    )
    fits = server.complete(prompt=[5] * 600, max_tokens=100, truncate_prompt_tokens=-1)["usage"]
    assert fits["prompt_tokens"] == 412
    echoed = server.complete(prompt="Hello there", max_tokens=0, echo=True, truncate_prompt_tokens=2)
    assert "Hello there".endswith(echoed["choices"][0]["text"])


def test_tokens_of_logprobs_as_ids(server: Server) -> None:
    body = {"prompt": "Hello", "max_tokens": 3, "logprobs": 2, "seed": 5, "return_token_ids": True}
    choice = server.complete(**body, return_tokens_as_token_ids=True)["choices"][0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert choice["logprobs"]["text_offset"] == server.complete(**body)["choices"][0]["logprobs"]["text_offset"]


@asynccontextmanager
async def client_alone(data: Path) -> AsyncGenerator[EngineClient, None]:
    """Of an engine that was never started."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    client = EngineClient(EngineProcess(EngineConfig(model=str(data / "arch" / "llama"))), context)
    client._loop = asyncio.get_running_loop()
    client._dead = client._loop.create_future()
    try:
        yield client
    finally:
        context.destroy(linger=0)


def stream_of(client: EngineClient, id: str) -> Stream:
    """With two choices."""
    stream = Stream(client, [Add(id, [1], SamplingParams(n=2), 0)])
    client._readers[id] = weakref.ref(stream), 0
    return stream


def test_a_reader_that_is_too_slow_is_told(data: Path) -> None:
    async def scenario(client: EngineClient) -> None:
        stream = stream_of(client, "a")
        for i in range(MAX_PENDING + 2 * MAX_PENDING_PER_CHOICE):
            stream._push(0, Progress("a", i % 2, i // 2, [5], [], 0))
        index, progress = await anext(stream)
        assert index == progress.index == 0
        stream._push(0, Progress("a", 0, 9999, [5], [], 0))
        assert client._leaving == {}
        stream._push(0, Progress("a", 1, 9999, [5], [], 0))  # one too many: the request is given up
        assert client._leaving == {"a": 2} and "a" not in client._readers
        with pytest.raises(SlowReader, match="so slowly that 4608 parts"):
            await anext(stream)
        ending = stream_of(client, "b")
        for i in range(MAX_PENDING + 2 * MAX_PENDING_PER_CHOICE):
            ending._push(0, Progress("b", 0, i, [5], [], 0))
        ending._push(0, Progress("b", 0, 9999, [5], [], 0, FinishReason.LENGTH))
        assert client._leaving == {"a": 2, "b": 1}  # the end of the other choice is still to come

    run(data, scenario)


def test_what_is_relayed_keeps_its_order(data: Path) -> None:
    """At random times the relay takes what comes, or the reader does, who works on each for a while."""

    async def scenario(client: EngineClient) -> None:
        draw = random.Random(6)
        stream = stream_of(client, "a")
        seen: list[tuple[str, int]] = []

        def relay(index: int, progress: Progress) -> bool:
            takes = progress.finish_reason is None and draw.random() < 0.7
            if takes:
                seen.append(("relay", progress.index))
            return takes

        stream.relay = relay

        async def read() -> None:
            async for _, progress in stream:
                for _ in range(draw.randrange(3)):
                    await asyncio.sleep(0)
                seen.append(("reader", progress.index))

        reading = asyncio.create_task(read())
        for i in range(300):
            stream._push(0, Progress("a", 0, i, [5], [], 0))
            for _ in range(draw.randrange(8)):
                await asyncio.sleep(0)
        for choice in range(2):
            stream._push(0, Progress("a", choice, 300 + choice, [5], [], 0, FinishReason.LENGTH))
        await reading
        assert [index for _, index in seen] == [*range(302)]
        assert min(Counter(who for who, _ in seen).values()) > 50

    run(data, scenario)


def test_a_fault_of_the_relay_is_its_readers(data: Path) -> None:
    async def scenario(client: EngineClient) -> None:
        stream = stream_of(client, "a")

        def relay(index: int, progress: Progress) -> bool:
            raise ValueError("no such text")

        stream.relay = relay
        reading = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        stream._push(0, Progress("a", 0, 0, [5], [], 0))
        with pytest.raises(ValueError, match="no such text"):
            await reading
        await stream.aclose()
        assert stream.relay is None and client._leaving == {"a": 2}

    run(data, scenario)


def run(data: Path, scenario: Callable[[EngineClient], Awaitable[None]]) -> None:
    async def running() -> None:
        async with client_alone(data) as client:
            await scenario(client)

    asyncio.run(running())
