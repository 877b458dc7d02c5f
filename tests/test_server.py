"""The HTTP API, against a real server process on a tiny model."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from starlette.requests import Request

from octavo.server.routes import LONG_BODY, prepared
from tests.serving import Server
from tests.waiting import SECONDS

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello there"}]


@pytest.fixture(scope="module")
def server(data: Path) -> Iterator[Server]:
    with Server(
        data / "arch" / "llama", "--served-model-name", "tiny", "--max-num-seqs", "16", "--num-threads", "2"
    ) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_models_and_health(server: Server, client: openai.OpenAI) -> None:
    models = client.models.list().data
    assert [model.id for model in models] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "octavo"
    assert server.http.get("/health").json() == {"status": "alive"}
    assert server.http.get("/health/ready").json() == {"status": "ready"}


def test_start_says_what_it_did(server: Server) -> None:
    text = "\n".join(server.printed)
    assert "ready in " in text
    assert "KV cache" in text
    assert "tokenizer " in text


def test_forms_of_prompt_agree(server: Server) -> None:
    greedy = {"temperature": 0, "max_tokens": 8, "ignore_eos": True, "return_token_ids": True}
    texts = ["Hello", "The quick brown fox"]
    single = [server.complete(prompt=text, **greedy)["choices"][0] for text in texts]
    ids = [choice["prompt_token_ids"] for choice in single]
    together = server.complete(prompt=texts, **greedy)
    assert [choice["index"] for choice in together["choices"]] == [0, 1]
    by_ids = server.complete(prompt=ids, **greedy)
    one = server.complete(prompt=ids[1], **greedy)
    for choices in (together["choices"], by_ids["choices"], [single[0], one["choices"][0]]):
        assert [choice["text"] for choice in choices] == [choice["text"] for choice in single]
    assert together["usage"]["prompt_tokens"] == sum(map(len, ids))
    assert together["usage"]["completion_tokens"] == 16


def test_defaults_of_length(server: Server) -> None:
    """Completions end after 16 tokens, chat at the end of the context."""
    answer = server.complete(prompt="Hello", ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["choices"][0]["finish_reason"] == "length"
    chat = server.post(CHAT, {"messages": HELLO, "ignore_eos": True}).json()
    assert chat["usage"]["total_tokens"] == server.http.get("/v1/models").json()["data"][0]["max_model_len"]


def test_cached_tokens_are_told(server: Server) -> None:
    prompt = list(range(100, 164))
    first = server.complete(prompt=prompt, max_tokens=1)["usage"]
    again = server.complete(prompt=prompt, max_tokens=1)["usage"]
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert again["prompt_tokens_details"]["cached_tokens"] == 63


REQUESTS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"seed": 7, "n": 3},
    {"seed": 8, "logprobs": 3},
    {"seed": 9, "logprobs": 0, "n": 2},
    {"seed": 10, "min_tokens": 5, "presence_penalty": 1, "repetition_penalty": 1.2, "top_k": 50, "min_p": 0.01},
    {"seed": 11, "return_token_ids": True, "logit_bias": {"5": 20}},
]


@pytest.mark.parametrize("fields", REQUESTS, ids=lambda fields: "+".join(fields))
@pytest.mark.parametrize("echo", [False, True])
def test_stream_equals_whole_completion(server: Server, fields: dict[str, Any], echo: bool) -> None:
    body = {"prompt": ["Hello", [5, 6, 7]], "max_tokens": 24, "echo": echo, **fields}
    whole = server.complete(**body)
    chunks = server.events(COMPLETIONS, {**body, "stream_options": {"include_usage": True}})
    assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]}
    assert chunks[-1]["choices"] == []
    assert _without_cache(chunks[-1]["usage"]) == _without_cache(whole["usage"])
    for expected in whole["choices"]:
        mine = [chunk["choices"][0] for chunk in chunks[:-1] if chunk["choices"][0]["index"] == expected["index"]]
        assert "".join(choice["text"] for choice in mine) == expected["text"]
        assert [choice["finish_reason"] for choice in mine] == [None] * (len(mine) - 1) + [expected["finish_reason"]]
        if expected["logprobs"] is None:
            assert all(choice["logprobs"] is None for choice in mine)
        else:
            for key, values in expected["logprobs"].items():
                assert [value for choice in mine for value in choice["logprobs"][key]] == values
        if "return_token_ids" in fields:
            assert [token for choice in mine for token in choice["token_ids"]] == expected["token_ids"]


@pytest.mark.parametrize(
    "fields", [{"temperature": 0}, {"seed": 3, "n": 2, "logprobs": True, "top_logprobs": 2}], ids=str
)
def test_stream_equals_whole_chat(server: Server, fields: dict[str, Any]) -> None:
    body = {"messages": HELLO, "max_completion_tokens": 24, **fields}
    whole = server.post(CHAT, body).json()
    chunks = server.events(CHAT, body)
    for expected in whole["choices"]:
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == expected["index"]]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(choice["delta"].get("content", "") for choice in mine) == expected["message"]["content"]
        if expected["logprobs"]:
            joined = [entry for choice in mine if choice["logprobs"] for entry in choice["logprobs"]["content"]]
            assert joined == expected["logprobs"]["content"]
            assert all(len(entry["top_logprobs"]) == 2 for entry in joined)


def test_stop_strings(server: Server) -> None:
    """Cut at every place of the text, over token borders, streamed or not: the same, and counted as cut."""
    body = {"prompt": "Hello", "temperature": 0, "max_tokens": 24, "ignore_eos": True}
    text = server.complete(**body)["choices"][0]["text"]
    stops = [text[i : i + 3] for i in range(0, len(text) - 3, 4)]
    for stop in stops:
        whole = server.complete(**body, stop=stop)
        choice = whole["choices"][0]
        assert choice["text"] == text[: text.index(stop)]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
        chunks = server.events(COMPLETIONS, {**body, "stop": [stop], "stream_options": {"include_usage": True}})
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == choice["text"]
        assert _without_cache(chunks[-1]["usage"]) == _without_cache(whole["usage"])
        kept = server.complete(**body, stop=stop, include_stop_str_in_output=True)["choices"][0]["text"]
        assert kept == choice["text"] + stop
    server.wait_for("octavo_kv_blocks_held", 0)


def test_seeds(server: Server) -> None:
    body = {"prompt": "Hello", "max_tokens": 24, "ignore_eos": True, "return_token_ids": True}
    same = [server.complete(**body, seed=1)["choices"][0]["token_ids"] for _ in range(2)]
    assert same[0] == same[1]
    drawn = {tuple(server.complete(**body)["choices"][0]["token_ids"]) for _ in range(3)}
    assert len(drawn) == 3
    equal_prompts = {**body, "prompt": ["Hello"] * 3}
    drawn = {tuple(choice["token_ids"]) for choice in server.complete(**equal_prompts)["choices"]}
    assert len(drawn) == 3
    assert [choice["token_ids"] for choice in server.complete(**equal_prompts, seed=1)["choices"]] == same[:1] * 3
    choices = server.complete(**body, seed=1, n=3)["choices"]
    assert choices[0]["token_ids"] == same[0]
    assert len({tuple(choice["token_ids"]) for choice in choices}) == 3


def test_scores_of_the_prompt(server: Server) -> None:
    """Echo with no output, as evaluation harnesses ask for it, agrees with prompt_logprobs."""
    prompt = [5, 6, 7, 8, 9]
    echoed = server.complete(prompt=prompt, max_tokens=0, echo=True, logprobs=1)["choices"][0]["logprobs"]
    scores = server.complete(prompt=prompt, max_tokens=1, prompt_logprobs=1)["choices"][0]["prompt_logprobs"]
    assert echoed["token_logprobs"][0] is None
    assert scores[0] is None
    assert len(echoed["tokens"]) == len(prompt)
    for position in range(1, len(prompt)):
        assert scores[position][str(prompt[position])]["logprob"] == echoed["token_logprobs"][position]


def test_openai_client(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="tiny", messages=HELLO, temperature=0, max_tokens=12)  # type: ignore[arg-type]
    stream = client.chat.completions.create(
        model="tiny",
        messages=HELLO,
        temperature=0,
        max_tokens=12,
        stream=True,
        stream_options={"include_usage": True},  # type: ignore[arg-type]
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == whole.choices[0].message.content
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12


def test_openai_client_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="other", prompt="Hello")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="tiny", prompt="Hello", temperature=-1)
    assert refused.value.param == "temperature"


def test_many_at_once(server: Server) -> None:
    """Each gets what it gets alone."""
    bodies = [{"prompt": [9 + i, 3, 4], "seed": i, "max_tokens": 20, "return_token_ids": True} for i in range(40)]
    alone = [server.complete(**body)["choices"][0]["token_ids"] for body in bodies]
    with concurrent.futures.ThreadPoolExecutor(40) as pool:
        together = list(pool.map(lambda body: server.complete(**body)["choices"][0]["token_ids"], bodies))
    assert together == alone
    server.wait_for("octavo_requests_running", 0)
    server.wait_for("octavo_kv_blocks_held", 0)


def test_long_prompts_do_not_stop_the_others(server: Server) -> None:
    """A body of 440 kB is tokenised while health is answered."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        long = pool.submit(server.post, COMPLETIONS, {"prompt": "long words " * 40_000})
        while not long.done():
            server.http.get("/health").raise_for_status()
    assert long.result().status_code == 400
    assert "512" in long.result().json()["error"]["message"]


def test_a_long_body_is_read_beside_the_event_loop() -> None:
    async def scenario() -> None:
        goes_on = threading.Event()

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"x" * (LONG_BODY + 1)}

        def prepare(service: Any, body: bytes, call: Any) -> int:
            assert goes_on.wait(SECONDS)
            return len(body)

        service: Any = SimpleNamespace(trouble=None, tokenizer=None)
        preparing = prepared(service, Request({"type": "http", "headers": [], "octavo.call": None}, receive), prepare)
        asyncio.get_running_loop().call_later(0.01, goes_on.set)
        assert await preparing == LONG_BODY + 1

    asyncio.run(scenario())


def test_metrics_match_what_was_answered(server: Server) -> None:
    names = ("octavo_prompt_tokens_total", "octavo_output_tokens_total", "octavo_prompts_total")
    before = [server.metric(name) for name in names]
    usage = server.complete(prompt=["Hello", "Hello there"], n=2, max_tokens=5, ignore_eos=True)["usage"]
    gained = [server.metric(name) - value for name, value in zip(names, before, strict=True)]
    assert gained == [usage["prompt_tokens"], usage["completion_tokens"], 2]
    assert server.metric("octavo_time_to_first_token_seconds_count") > 0
    assert server.metric("octavo_inter_token_seconds_count") > 0


def _without_cache(usage: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in usage.items() if key != "prompt_tokens_details"}
