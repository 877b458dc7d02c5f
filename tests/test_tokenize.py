"""POST /tokenize and /detokenize."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.server.tokenize import DETOKENIZE, TOKENIZE, DetokenizeRequest, TokenizeRequest
from octavo.text.tokenizer import load_tokenizer
from tests.serving import Server

HELLO = [{"role": "user", "content": "Hello there"}]
OF_CHAT: dict[str, Any] = {
    "add_generation_prompt": False, "chat_template_kwargs": {}, "documents": [], "reasoning_effort": "none",
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
}  # fmt: skip


@pytest.fixture(scope="module")
def server(data: Path) -> Iterator[Server]:
    with Server(data / "arch" / "llama", "--served-model-name", "tiny", "--num-threads", "1") as running:
        yield running


def test_texts(server: Server, data: Path) -> None:
    tokenizer = load_tokenizer(data / "arch" / "llama")
    for text in ("Hello there", "", "日本語 🦙 <|im_start|>", "word " * 5000):
        answer = server.post(TOKENIZE, {"prompt": text, "return_token_strs": True}).json()
        assert answer["tokens"] == tokenizer.encode(text) and answer["count"] == len(answer["tokens"])
        assert answer["token_strs"] == [tokenizer.id_to_token(i) for i in answer["tokens"]]
        assert answer["max_model_len"] == 512
        bare = server.post(TOKENIZE, {"prompt": text, "add_special_tokens": False}).json()
        assert bare["tokens"] == tokenizer.encode(text, add_special_tokens=False) and bare["token_strs"] is None
        assert server.post(DETOKENIZE, {"tokens": bare["tokens"]}).json() == {"prompt": text}


def test_conversations_have_the_tokens_of_chat(server: Server) -> None:
    for options in ({}, *({name: value} for name, value in OF_CHAT.items())):
        answer = server.post(TOKENIZE, {"messages": HELLO} | options)
        body = {"messages": HELLO, "max_tokens": 1, "return_token_ids": True} | options
        chat = server.post("/v1/chat/completions", body)
        assert answer.json()["tokens"] == chat.json()["choices"][0]["prompt_token_ids"], (options, answer.text)
    continued = [*HELLO, {"role": "assistant", "content": "So"}]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    text = server.post(DETOKENIZE, server.post(TOKENIZE, {"messages": continued} | options).json()).json()["prompt"]
    assert text.endswith("So")


REFUSALS: list[tuple[str, dict[str, Any], str]] = [
    (TOKENIZE, {}, "prompt"),
    (TOKENIZE, {"prompt": "a", "messages": HELLO}, "prompt"),
    (TOKENIZE, {"prompt": ["a"]}, "prompt"),
    (TOKENIZE, {"prompt": "x" * 2_000_000}, "prompt"),
    (TOKENIZE, {"messages": [{"role": "nobody"}]}, "messages"),
    (TOKENIZE, {"messages": HELLO, "chat_template": "{{ x }}"}, "chat_template"),
    (TOKENIZE, {"messages": HELLO, "tools": [{}]}, "tools"),
    *((TOKENIZE, {"prompt": "a", name: value}, name) for name, value in OF_CHAT.items()),
    (DETOKENIZE, {}, "tokens"),
    (DETOKENIZE, {"tokens": [320]}, "tokens"),
    (DETOKENIZE, {"tokens": [-1]}, "tokens"),
    (DETOKENIZE, {"tokens": [2**70]}, "tokens"),
    (DETOKENIZE, {"tokens": ["a"]}, "tokens"),
]


@pytest.mark.parametrize(("path", "body", "field"), REFUSALS)
def test_refusals_name_the_field(server: Server, path: str, body: dict[str, Any], field: str) -> None:
    answer = server.post(path, body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == field or (error["param"] or "").startswith(field), error


@pytest.mark.parametrize(
    ("path", "schema", "base"),
    [(TOKENIZE, TokenizeRequest, {"messages": HELLO}), (DETOKENIZE, DetokenizeRequest, {"tokens": [5]})],
)
def test_every_field_refuses_other_types_by_its_name(
    server: Server, path: str, schema: type[TokenizeRequest | DetokenizeRequest], base: dict[str, Any]
) -> None:
    for name in schema.__struct_fields__:
        for wrong in ([[[1.5]]], 1e308, -(2**70)):
            answer = server.post(path, base | {name: wrong})
            error = answer.json()["error"]
            assert answer.status_code == 400 and name in f"{error['param']} {error['message']}", (name, wrong, error)
    assert server.post(path, base | {"model": "other"}).status_code == 404
