"""P8: whatever is sent, the answer is a 4xx that names the field, and eight streams beside it keep their bits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo.server.embeddings import EMBEDDINGS
from octavo.server.openapi import BODIES
from octavo.server.rerank import RERANK, SCORE
from octavo.server.routes import (
    CHAT,
    COMPLETIONS,
    COUNT_TOKENS,
    MESSAGES,
    OLLAMA_CHAT,
    OLLAMA_GENERATE,
    RESPONSES,
)
from octavo.server.tokenize import DETOKENIZE, TOKENIZE
from tests.serving import Server

HELLO = [{"role": "user", "content": "Hello there"}]
VOCAB = 320
DEEP = 20_000


NUMBERS = (
    "frequency_penalty", "presence_penalty", "repetition_penalty", "temperature", "top_p", "min_p", "typical_p",
    "top_n_sigma", "xtc_probability", "xtc_threshold", "dynatemp_range", "dynatemp_exponent", "dry_multiplier", "dry_base",
    "length_penalty",
)  # fmt: skip
WHOLE = (
    "max_tokens", "min_tokens", "n", "best_of", "seed", "top_k", "repeat_last_n", "dry_allowed_length",
    "dry_penalty_last_n", "prompt_logprobs", "priority", "truncate_prompt_tokens", "n_predict",
)  # fmt: skip


def fields(path: str, **members: Any) -> bytes:
    base: dict[str, Any] = {"prompt": "Hello"} if path == COMPLETIONS else {"messages": HELLO}
    return json.dumps({"max_tokens": 4, **base, **members}).encode()


def raw(path: str, name: str, value: bytes) -> bytes:
    """A body in which `value` stands as it is."""
    return fields(path)[:-1] + b', "%b": %b}' % (name.encode(), value)


def corpus() -> Iterator[tuple[str, bytes, str | None]]:
    """(path, body, the field that the refusal must name; None: the body as a whole is at fault)."""
    for path in (COMPLETIONS, CHAT):
        yield path, b"", None
        yield path, b"{", None
        yield path, b"[]", None
        yield path, b"null", None
        yield path, b"{}", "prompt" if path == COMPLETIONS else "messages"
        yield path, b"\xff\xfe{}", None
        yield path, b"[" * DEEP, None
        yield path, b"NaN", None
        for name in (*NUMBERS, *WHOLE):
            for value in (
                b"1e999",
                b"-1e999",
                b"1e308",
                b"-1e308",
                b'"5"',
                b"[]",
                b"{}",
                b"true",
                b"9" * 3000,
                b"-" + b"9" * 30,
            ):
                yield path, raw(path, name, value), name
            yield path, raw(path, name, b"NaN"), None  # no JSON
        for name in WHOLE:
            yield path, raw(path, name, b"0.5"), name
        for name in ("stop_token_ids", "allowed_token_ids"):
            for ids in ([VOCAB], [-1], [2**31], [2**63], [1.5], ["5"], [None], [[5]], {"5": 5}, 5):
                yield path, fields(path, **{name: ids}), name
        for key in (str(VOCAB), "-1", "99999999999", "1e3", "", "0x5", "５"):
            yield path, fields(path, logit_bias={key: 1}), "logit_bias"
        for bias in (101, -100.5, None, "1", [1], 1e300):
            yield path, fields(path, logit_bias={"5": bias}), "logit_bias"
        yield path, raw(path, "logit_bias", b'{"5": 1e999}'), "logit_bias"
        yield path, fields(path, stop=[f"x{i}" for i in range(100_000)]), "stop"
        yield path, fields(path, stop=[""]), "stop"
        yield path, fields(path, stop=[5]), "stop"
        yield path, fields(path, bad_words=[f"a{i}" for i in range(100_000)]), "bad_words"
        yield path, fields(path, bad_words=["", " "]), "bad_words"
        yield path, fields(path, bad_words=["x" * 10_000]), "bad_words"
        yield path, fields(path, dry_multiplier=1, dry_sequence_breakers=["x" * 10_000]), "dry_sequence_breakers"
        yield path, fields(path, allowed_token_ids=[]), "allowed_token_ids"
        yield path, fields(path, allowed_token_ids=[2], min_tokens=1), "min_tokens"
        yield path, fields(path, samplers=["top_k"] * 100_000), "samplers"
        yield path, fields(path, samplers=["nothing"]), "samplers"
        yield path, fields(path, samplers=["top_k"], min_p=0.5), "min_p"
        yield path, fields(path, min_tokens=5), "min_tokens"
        yield path, fields(path, stream_options={"include_usage": True}), "stream_options"
        yield path, fields(path, stream=True, stream_options={"nothing": True}), "stream_options"
        yield path, fields(path, request_id="a\nb"), "request_id"
        yield path, fields(path, model=5), "model"
        for name in ("user", "cache_salt", "chat_template_kwargs" if path == CHAT else "prompt"):
            yield path, raw(path, name, b'"\xff\xfe"'), name
            yield path, raw(path, name, b'"\\ud800"'), name
            yield path, raw(path, name, b"[" * DEEP + b"]" * DEEP), name
            yield path, raw(path, name, b'{"a":' * DEEP + b"1" + b"}" * DEEP), name
    prompts: list[Any] = [[VOCAB], [-1], [[5, VOCAB]], [2**64], [1.5], [[]], [], [5, "a"], [[[5]]], {}, None, [None]]
    for prompt in prompts:
        yield COMPLETIONS, fields(COMPLETIONS, prompt=prompt), "prompt"
    conversations: list[Any] = [
        [],
        {},
        "a",
        [5],
        [{}],
        [{"role": "x", "content": "a"}],
        [{"role": "user", "content": 5}],
    ]
    for messages in conversations:
        yield CHAT, fields(CHAT, messages=messages), "messages"
    for logprobs in (33, -1, 2**40, True, "1"):
        yield COMPLETIONS, fields(COMPLETIONS, logprobs=logprobs), "logprobs"
    for top in (33, -1, 2**40, "1"):
        yield CHAT, fields(CHAT, logprobs=True, top_logprobs=top), "top_logprobs"


@pytest.fixture(scope="module")
def server(data: Path) -> Iterator[Server]:
    with Server(data / "arch" / "llama", "--max-num-seqs", "16") as running:
        yield running


def stream(server: Server, seed: int) -> list[int]:
    """Token ids of a stream that lasts as long as the context."""
    body = {"prompt": [seed + 5, 6, 7], "max_tokens": 300, "ignore_eos": True, "seed": seed, "return_token_ids": True}
    chunks = server.events(COMPLETIONS, body)
    return [token for chunk in chunks for choice in chunk["choices"] for token in choice["token_ids"]]


OTHERS: dict[str, dict[str, Any]] = {
    RESPONSES: {"input": "Hello", "max_output_tokens": 4},
    MESSAGES: {"messages": HELLO, "max_tokens": 4},
    COUNT_TOKENS: {"messages": HELLO},
    EMBEDDINGS: {"input": "Hello"},
    SCORE: {"text_1": "Hello", "text_2": "there"},
    RERANK: {"query": "Hello", "documents": ["there"]},
    TOKENIZE: {"prompt": "Hello"},
    DETOKENIZE: {"tokens": [5]},
    OLLAMA_CHAT: {"model": "llama", "messages": HELLO, "options": {"num_predict": 4}},
    OLLAMA_GENERATE: {"model": "llama", "prompt": "Hello", "options": {"num_predict": 4}},
}
"""Bodies of the other routes that read texts."""

NO_VALUES = (
    b"1e999",
    b'"\xff\xfe"',
    b'"\\ud800"',
    b'{"a":' * DEEP + b"1" + b"}" * DEEP,
    b"[[[1.5]]]",
)
"""Of no field."""

OF_TOKENS: tuple[tuple[str, dict[str, Any], str], ...] = tuple(
    (path, {name: value}, name)
    for path, name, values in (
        (DETOKENIZE, "tokens", ([VOCAB], [-1], [2**64], [1.5], [None], "5")),
        (EMBEDDINGS, "input", ([VOCAB], [[-1]], [2**64], [1.5], [], [[]], {})),
        (RESPONSES, "logit_bias", ({str(VOCAB): 1}, {"-1": 1}, {"5": 101}, {"x": 1})),
        (RESPONSES, "stop", ([f"x{i}" for i in range(100_000)], [""], [5])),
        (MESSAGES, "stop_sequences", ([f"x{i}" for i in range(100_000)], [""], [5])),
        (OLLAMA_CHAT, "options", ({"seed": 1.5}, {"num_predict": 2**70}, {"stop": [5]}, [], "x")),
        (RERANK, "documents", ([], [5], [{}], ["x"] * 3000)),
        (SCORE, "text_2", ([], [5], ["x"] * 3000)),
    )
    for value in values
)  # fmt: skip


def corpus_of_others() -> Iterator[tuple[str, bytes, str | None]]:
    """The same of the other routes: each field with values that no field takes."""
    for path, base in OTHERS.items():
        for body in (b"", b"{", b"[]", b"null", b"\xff\xfe{}", b"[" * DEEP, b"NaN"):
            yield path, body, None
        for name in BODIES[path].__struct_fields__:
            others = json.dumps({key: value for key, value in base.items() if key != name}).encode()
            for value in NO_VALUES:
                yield (
                    path,
                    others[:-1] + b'%b"%b": %b}' % (b", " if len(others) > 2 else b"", name.encode(), value),
                    name,
                )
    for path, members, name in OF_TOKENS:
        yield path, json.dumps(OTHERS[path] | members).encode(), name


def is_refused(answer: httpx.Response, name: str | None) -> bool:
    """In the form of the route's protocol."""
    if answer.status_code != 400:
        return False
    error = answer.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    return (
        bool(message) if name is None else name in message or (isinstance(error, dict) and error.get("param") == name)
    )


def test_bad_requests_are_refused_by_field_and_harm_nobody(server: Server) -> None:
    """Eight streams run while the bodies are sent."""
    alone = [stream(server, seed) for seed in range(8)]
    assert all(len(ids) == 300 for ids in alone)
    wrong: list[tuple[Any, ...]] = []
    with ThreadPoolExecutor(8) as pool, httpx.Client(base_url=server.url, timeout=120) as client:
        for start in range(0, len(CORPUS), 300):
            streams = [pool.submit(stream, server, seed) for seed in range(8)]
            beside = 0
            for path, body, name in CORPUS[start : start + 300]:
                answer = client.post(path, content=body)
                beside += all(running.running() for running in streams)
                exact = path in (COMPLETIONS, CHAT)
                if not is_refused(answer, name) or (exact and answer.json()["error"]["param"] != name):
                    wrong.append((path, body[:200], name, answer.status_code, answer.text[:200]))
            assert [running.result() for running in streams] == alone
            assert beside > 0
    assert not wrong, f"{len(wrong)} of {len(CORPUS)}, e.g. {wrong[:12]}"


CORPUS = [*corpus(), *corpus_of_others()]
