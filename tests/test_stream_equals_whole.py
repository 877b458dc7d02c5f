"""P6: the joined deltas of a stream are the answer that is not streamed, wherever it is cut: text, scores, ids, usage.

The tiny model writes bytes at random: most of its characters are parts of UTF-8 that no whole one follows, so a text
that is cut anywhere is cut in the middle of characters, and stop strings meet borders of tokens at every place.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from octavo.text.tokenizer import Tokenizer, load_tokenizer
from tests.serving import Server

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
PIECES = ["Hello", " there", "é", "日本", "🙂", "👨‍👩‍👧", "\n\n", "<|user|>", "the quick", "\u0301", " ", "٣", "x" * 40]
TOOLS = [
    {"type": "function", "function": {"name": "find", "parameters": {
        "type": "object", "properties": {"é": {"type": "string", "maxLength": 6}}, "required": ["é"],
        "additionalProperties": False}}},
    {"type": "function", "function": {"name": "now"}},
]  # fmt: skip
Choice = dict[str, Any]


@pytest.fixture(scope="module")
def server(data: Path) -> Iterator[Server]:
    with Server(data / "arch" / "llama", "--max-num-seqs", "16", "--max-model-len", "2048") as running:
        yield running


@pytest.fixture(scope="module")
def tokenizer(data: Path) -> Tokenizer:
    return load_tokenizer(data / "arch" / "llama")


def streamed(server: Server, path: str, body: dict[str, Any]) -> tuple[list[Choice], dict[str, Any]]:
    """Choices and usage, put together from the chunks."""
    chunks = server.events(path, {**body, "stream_options": {"include_usage": True}})
    choices: dict[int, Choice] = {}
    for chunk in chunks:
        for part in chunk["choices"]:
            choice = choices.setdefault(part["index"], {"text": "", "token_ids": [], "logprobs": [], "calls": []})
            assert not choice.get("finish_reason"), "nothing comes behind the end"
            choice["text"] += (part["text"] if path == COMPLETIONS else part["delta"].get("content")) or ""
            for call in part.get("delta", {}).get("tool_calls", ()):
                if "name" in call["function"]:
                    choice["calls"].append([call["function"]["name"], ""])
                choice["calls"][call["index"]][1] += call["function"]["arguments"]
            choice["token_ids"] += part.get("token_ids", [])
            choice["logprobs"] += entries(part["logprobs"])
            choice |= {name: part.get(name) for name in ("finish_reason", "stop_reason")}
    return [choices[index] for index in sorted(choices)], chunks[-1]["usage"]


def whole(server: Server, path: str, body: dict[str, Any]) -> tuple[list[Choice], dict[str, Any]]:
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    answer = response.json()
    choices = [
        {
            "text": choice["text"] if path == COMPLETIONS else choice["message"]["content"] or "",
            "logprobs": entries(choice["logprobs"]),
            "calls": [list(call["function"].values()) for call in choice.get("message", {}).get("tool_calls", ())],
            **{name: choice[name] for name in ("token_ids", "finish_reason", "stop_reason")},
        }
        for choice in answer["choices"]
    ]
    return choices, answer["usage"]


def entries(logprobs: dict[str, Any] | None) -> list[Any]:
    """One entry per token, in either API's form."""
    if logprobs is None:
        return []
    if "content" in logprobs:
        return list(logprobs["content"] or [])
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return list(zip(*(logprobs[name] for name in names), strict=True))


def check(server: Server, path: str, body: dict[str, Any]) -> list[Choice]:
    """Streamed equals whole, ids equal usage, scores stand beside ids."""
    body = {**body, "return_token_ids": True}
    expected, usage = whole(server, path, body)
    got, streamed_usage = streamed(server, path, body)
    assert got == expected
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [usage[name] for name in counts] == [streamed_usage[name] for name in counts]
    assert usage["completion_tokens"] == sum(len(choice["token_ids"]) for choice in expected)
    for choice in expected:
        assert len(choice["logprobs"]) in (0, len(choice["token_ids"]))
    return expected


def random_body(rng: random.Random, chat: bool) -> dict[str, Any]:
    text = "".join(rng.choice(PIECES) for _ in range(rng.randrange(1, 6)))
    body: dict[str, Any] = {"seed": rng.randrange(1000), "max_tokens": rng.randrange(1, 40)}
    if chat:
        body |= {"messages": [{"role": "user", "content": text}]}
        body |= rng.choice([{}, {"logprobs": True, "top_logprobs": rng.randrange(4)}])
        if rng.random() < 0.5:
            body |= {"tools": TOOLS[: rng.randrange(1, 3)], "max_tokens": rng.randrange(1, 120)}
            body |= rng.choice(
                [{}, {"tool_choice": "required"}, {"tool_choice": "required", "parallel_tool_calls": False}]
            )
    else:
        body |= {"prompt": rng.choice([text, [text, "a"], [5, 6, 7], [[5], [300, 301]]])}
        body |= rng.choice([{}, {"logprobs": rng.randrange(4)}])
    body |= rng.choice([{}, {"temperature": 0}, {"top_k": 20}, {"xtc_probability": 0.5, "min_p": 0.01}])
    body |= rng.choice([{}, {"n": rng.randrange(2, 4)}])
    body |= rng.choice([{}, {"ignore_eos": True}, {"skip_special_tokens": False}, {"stop_token_ids": [40, 41, 42, 43]}])
    return body


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_random_requests(server: Server, path: str) -> None:
    """Then again with stop strings that are taken from the answer itself."""
    rng = random.Random(path)

    def one(body: dict[str, Any], seed: int) -> int:
        own = random.Random(seed)
        choices = check(server, path, body)
        texts = [choice["text"] for choice in choices if len(choice["text"]) > 3]
        for text in texts:
            start = own.randrange(len(text) - 1)
            stops = [text[start : start + own.randrange(1, 5)], own.choice(["zzz", text[-2:], "\ufffd"])]
            extra = {"include_stop_str_in_output": own.random() < 0.3, "min_tokens": own.choice([0, 0, 3])}
            extra["min_tokens"] = min(extra["min_tokens"], body["max_tokens"])
            check(server, path, {**body, "stop": stops, **extra})
        return sum(len(choice["calls"]) for choice in choices)

    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(one, random_body(rng, path == CHAT), i) for i in range(25)]
        assert (sum(done.result() for done in calls) > 3) == (path == CHAT)


@pytest.mark.parametrize("width", [1, 2, 5])
def test_stop_strings_at_every_position(server: Server, width: int) -> None:
    """The text ends where its first stop string begins, wherever that is."""
    body: dict[str, Any] = {"prompt": "Hello", "max_tokens": 40, "seed": 12, "ignore_eos": True, "logprobs": 1}
    text = check(server, COMPLETIONS, body)[0]["text"]

    def one(start: int) -> None:
        stop = text[start : start + width]
        cut = check(server, COMPLETIONS, {**body, "stop": stop})[0]
        assert cut["text"] == text[: text.index(stop)]
        assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", stop)

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(one, start) for start in range(len(text) - width + 1)]:
            done.result()


def test_every_length_ends_in_the_middle_of_characters(server: Server, tokenizer: Tokenizer) -> None:
    body: dict[str, Any] = {"prompt": "日本", "seed": 4, "ignore_eos": True}
    ids = check(server, COMPLETIONS, {**body, "max_tokens": 40})[0]["token_ids"]
    broken = 0
    for length in range(1, 41):
        choice = check(server, COMPLETIONS, {**body, "max_tokens": length})[0]
        assert choice["token_ids"] == ids[:length]
        assert choice["text"] == tokenizer.decode(ids[:length], continues=True)
        broken += choice["text"].endswith("\ufffd")
    assert broken > 5
