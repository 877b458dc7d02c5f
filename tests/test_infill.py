"""`suffix`: prompts with the tokens that mark where the text is missing."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from octavo.text.infill import encode_inside, find_infill
from octavo.text.tokenizer import load_tokenizer
from tests.serving import Server
from tests.thinker import add_special_tokens

PREFIX, SUFFIX, MIDDLE, END = 316, 317, 318, 319
QWEN = {"<|fim_prefix|>": PREFIX, "<|fim_suffix|>": SUFFIX, "<|fim_middle|>": MIDDLE, "<|file_sep|>": END}
FAMILIES: list[tuple[dict[str, int], list[int]]] = [
    (QWEN, [PREFIX, 1, 2, SUFFIX, 3, MIDDLE]),
    ({"<fim_prefix>": PREFIX, "<fim_suffix>": SUFFIX, "<fim_middle>": MIDDLE}, [PREFIX, 1, 2, SUFFIX, 3, MIDDLE]),
    ({"[PREFIX]": PREFIX, "[SUFFIX]": SUFFIX}, [SUFFIX, 3, PREFIX, 1, 2]),
    (
        {"<[fim-prefix]>": PREFIX, "<[fim-suffix]>": SUFFIX, "<[fim-middle]>": MIDDLE},
        [SUFFIX, 3, PREFIX, 1, 2, MIDDLE],
    ),
]


def model_with(data: Path, folder: Path, tokens: dict[str, int]) -> Path:
    shutil.copytree(data / "arch" / "llama", folder)
    add_special_tokens(folder, tokens)
    return folder


@pytest.fixture(scope="module")
def server(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(model_with(data, tmp_path_factory.mktemp("model") / "coder", QWEN)) as running:
        yield running


@pytest.mark.parametrize(("tokens", "prompt"), FAMILIES, ids=lambda value: next(iter(value)) if value else "")
def test_families(data: Path, tmp_path: Path, tokens: dict[str, int], prompt: list[int]) -> None:
    infill = find_infill(load_tokenizer(model_with(data, tmp_path / "coder", tokens)))
    assert infill is not None and infill.prompt([1, 2], [3]) == prompt
    assert infill.ends == ((END,) if END in tokens.values() else ())


def test_models_without_the_tokens(data: Path) -> None:
    assert find_infill(load_tokenizer(data / "arch" / "llama")) is None


def test_no_space_is_put_before_the_suffix(data: Path) -> None:
    """Whatever the tokenizer does at the beginning of a text."""
    for folder in sorted((data / "tokenizers").iterdir()):
        if not (folder / "tokenizer.json").exists() or folder.name == "tiny-wordpiece":  # of encoders
            continue
        tokenizer = load_tokenizer(folder)
        for text in ("word and more", " word", ")\n", ""):
            ids = encode_inside(tokenizer, text)
            assert tokenizer.decode(ids, continues=True) == text, folder.name


def test_the_gap_is_filled(server: Server, data: Path) -> None:
    """By the prompt that marks both texts, which may be given in tokens too."""
    fields: dict[str, Any] = {"max_tokens": 12, "seed": 3, "return_token_ids": True}
    filled = server.complete(prompt="def f(", suffix="):", **fields)["choices"][0]
    ids = filled["prompt_token_ids"]
    assert ids[ids.index(PREFIX) :][0] == PREFIX and ids[-1] == MIDDLE and SUFFIX in ids
    same = server.complete(prompt=ids, stop_token_ids=[END], **fields)["choices"][0]
    assert (filled["text"], filled["token_ids"]) == (same["text"], same["token_ids"])
    ended = server.complete(prompt="def f(", suffix="):", max_tokens=5, logit_bias={END: 100})["choices"][0]
    assert (ended["finish_reason"], ended["text"]) == ("stop", "")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        streamed = client.completions.create(
            model=server.http.get("/v1/models").json()["data"][0]["id"],
            prompt="def f(", suffix="):", max_tokens=12, seed=3, stream=True,
        )  # fmt: skip
        assert "".join(chunk.choices[0].text for chunk in streamed) == filled["text"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"echo": True}, "echo"), ({"prompt": [5, 6]}, "suffix"), ({"truncate_prompt_tokens": 3}, "truncate_prompt_tokens")],
)  # fmt: skip
def test_what_does_not_go_with_it(server: Server, fields: dict[str, Any], param: str) -> None:
    answer = server.post("/v1/completions", {"prompt": "a", "suffix": "b", **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
