"""Perplexity of a text: how many tokens a model hesitates between, on average."""

from __future__ import annotations

import math
from collections.abc import Sequence

from octavo.llm import LLM
from octavo.request import SamplingParams


def perplexity(llm: LLM, token_ids: Sequence[int], window: int = 1024, use_tqdm: bool = False) -> float:
    """Of consecutive windows that do not overlap, the last perhaps shorter, positions from 0 on in each.

    The first token of a window is not scored. ValueError where no token is.
    """
    windows = [list(token_ids[i : i + window]) for i in range(0, len(token_ids), window)]
    params = SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=0)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in windows], params, use_tqdm=use_tqdm)
    found: list[float] = []
    for ids, output in zip(windows, outputs, strict=True):
        scores = output.prompt_logprobs or []
        found += [-scored[token].logprob for token, scored in zip(ids[1:], scores[1:], strict=True) if scored]
    if not found:
        raise ValueError("the text has too few tokens to score any")
    return math.exp(math.fsum(found) / len(found))
