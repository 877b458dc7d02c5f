"""Perplexity of the demo model on a fixed text, against float32 transformers on the dequantised weights.

Tokens without BOS, consecutive windows of 1,024 that do not overlap (the last one shorter), positions from 0 in each,
the first token of a window unscored.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.text.tokenizer import load_tokenizer

WINDOW = 1024


@pytest.fixture(scope="module")
def expected(data: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((data / "perplexity.json").read_text())
    return found


@pytest.fixture(scope="module")
def ids(demo: Path, data: Path, expected: dict[str, Any]) -> list[int]:
    text = (data / "gpl-3.txt").read_text()
    found = load_tokenizer(demo).encode(text, add_special_tokens=False)
    assert (len(found), found[: len(expected["first_ids"])]) == (expected["num_tokens"], expected["first_ids"])
    return found


@pytest.fixture(scope="module")
def in_float32(demo: Path, ids: list[int]) -> list[float]:
    return negative_logprobs(demo, ids, activations="f32")


def negative_logprobs(model: Path, ids: list[int], **options: Any) -> list[float]:
    windows = [ids[i : i + WINDOW] for i in range(0, len(ids), WINDOW)]
    params = SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=0)
    with LLM(str(model), max_model_len=WINDOW, max_num_seqs=8, **options) as llm:
        outputs = llm.generate([{"prompt_token_ids": w} for w in windows], params)
    found = []
    for window, output in zip(windows, outputs, strict=True):
        assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == len(window)
        for token, scores in zip(window[1:], output.prompt_logprobs[1:], strict=True):
            assert scores is not None
            found.append(-scores[token].logprob)
    return found


def perplexity(found: list[float]) -> float:
    return math.exp(math.fsum(found) / len(found))


def test_in_float32(in_float32: list[float], expected: dict[str, Any]) -> None:
    assert len(in_float32) == expected["num_scored"]
    assert perplexity(in_float32) == pytest.approx(expected["perplexity"], rel=1e-4)
    assert in_float32[: len(expected["first_nll"])] == pytest.approx(expected["first_nll"], abs=2e-3)


def test_in_the_own_format(demo: Path, ids: list[int], expected: dict[str, Any]) -> None:
    value = perplexity(negative_logprobs(demo, ids))
    print(f"{value:.4f}, {value / expected['perplexity'] - 1:+.3%}")
    assert value == pytest.approx(expected["perplexity"], rel=4e-3)


def test_int8_caches_alone(demo: Path, ids: list[int], in_float32: list[float]) -> None:
    found = negative_logprobs(demo, ids, activations="f32", kv_dtype="int8")
    value, without = perplexity(found), perplexity(in_float32)
    print(f"{value:.4f}, {value / without - 1:+.3%}")
    assert value == pytest.approx(without, rel=5e-3)
