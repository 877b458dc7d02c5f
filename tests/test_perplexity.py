"""Perplexity of the demo model on a fixed text, against float32 transformers on the dequantised weights.

Tokens without BOS, consecutive windows of 1,024 that do not overlap (the last one shorter), positions from 0 in each,
the first token of a window unscored.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from octavo import LLM, SamplingParams

WINDOW = 1024


def negative_logprobs(llm: LLM, ids: list[int]) -> list[float]:
    windows = [ids[i : i + WINDOW] for i in range(0, len(ids), WINDOW)]
    params = SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=0)
    outputs = llm.generate([{"prompt_token_ids": w} for w in windows], params)
    found = []
    for window, output in zip(windows, outputs, strict=True):
        assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == len(window)
        for token, scores in zip(window[1:], output.prompt_logprobs[1:], strict=True):
            assert scores is not None
            found.append(-scores[token].logprob)
    return found


@pytest.mark.parametrize(
    ("activations", "kv_dtype", "tolerance"),
    [("auto", "auto", 4e-3), ("f32", "auto", 1e-4), ("f32", "int8", 5e-3)],  # the last: of int8 caches alone
)
def test_perplexity(demo: Path, data: Path, activations: str, kv_dtype: str, tolerance: float) -> None:
    expected = json.loads((data / "perplexity.json").read_text())
    options = {"activations": activations, "kv_dtype": kv_dtype}
    with LLM(str(demo), **options, max_model_len=WINDOW, max_num_seqs=8) as llm:
        ids = llm.get_tokenizer().encode((data / "gpl-3.txt").read_text(), add_special_tokens=False)
        assert (len(ids), ids[: len(expected["first_ids"])]) == (expected["num_tokens"], expected["first_ids"])
        found = negative_logprobs(llm, ids)
    assert len(found) == expected["num_scored"]
    value = math.exp(math.fsum(found) / len(found))
    print(f"activations {activations}, KV cache {kv_dtype}: {value:.4f}, {value / expected['perplexity'] - 1:+.3%}")
    assert value == pytest.approx(expected["perplexity"], rel=tolerance)
    if (activations, kv_dtype) == ("f32", "auto"):
        assert found[: len(expected["first_nll"])] == pytest.approx(expected["first_nll"], abs=2e-3)
