"""Beam search by the engine, against a plain one that computes every sequence from its beginning, without a cache."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from octavo.backends.reference import ReferenceBackend, forward_logits
from octavo.config import EngineConfig
from octavo.engine.core import Engine
from octavo.engine.messages import Add, Progress
from octavo.models import build_graph
from octavo.request import FinishReason, SamplingParams
from tests.plain_beam import Distribution, Search, plain_beam_search
from tests.random_model import random_model, save
from tests.short_answer import after_a_short_answer

MAX_MODEL_LEN = 64
EOS = 2  # of models that `save` writes

SHAPES: list[dict[str, Any]] = [
    {},
    {"vocab_size": 33, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16},
    {"vocab_size": 70, "num_hidden_layers": 1, "attention_bias": True, "tie_word_embeddings": True},
    {"hidden_size": 40, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 32, "intermediate_size": 65},
]


def random_search(rng: random.Random, vocab_size: int) -> tuple[list[int], SamplingParams]:
    prompt = [rng.randrange(vocab_size) for _ in range(rng.choice([1, 7, 16, 33]))]
    width = rng.choice([1, 2, 3, 5])
    return prompt, SamplingParams(
        use_beam_search=True,
        temperature=0,
        best_of=width,
        n=rng.randint(1, width),
        max_tokens=rng.choice([3, 8, 17]),
        min_tokens=rng.choice([0, 2]),
        stop_token_ids=rng.sample(range(vocab_size), rng.choice([0, 1, 3])),
        length_penalty=rng.choice([1.0, 0.0, 1.8, -0.5]),
        early_stopping=rng.choice([True, False, "never"]),
    )


def plain(distribution: Distribution, prompt: list[int], params: SamplingParams) -> Search:
    assert params.max_tokens is not None
    return plain_beam_search(
        distribution, prompt, width=params.num_candidates, ends={EOS, *params.stop_token_ids}, limit=params.max_tokens,
        min_tokens=params.min_tokens, length_penalty=params.length_penalty, early_stopping=params.early_stopping,
    )  # fmt: skip


def run(engine: Engine, searches: list[tuple[list[int], SamplingParams]]) -> list[list[Progress]]:
    """All searches at once; each one's answers, best first."""
    answers: list[list[Progress]] = [[] for _ in searches]
    for i, (prompt, params) in enumerate(searches):
        engine.add(Add(str(i), prompt, params, seed=i))
    while (output := engine.step()) is not None:
        for progress in output.progress:
            answers[int(progress.id)].append(progress)
        engine.loaded.scheduler.check()
    for (_, params), found in zip(searches, answers, strict=True):
        assert [progress.choice for progress in found] == list(range(params.n))
    return answers


@pytest.mark.parametrize("shape", range(len(SHAPES)))
def test_beams_are_those_of_numpy(tmp_path: Path, shape: int) -> None:
    """In float32, where kernels and definition differ in the last bits only: decisions closer than that are passed over."""
    model = random_model(seed=shape, **SHAPES[shape])
    graph = build_graph(model, "f32")
    weights = ReferenceBackend().pack(graph, model)
    known: dict[tuple[int, ...], NDArray[np.float64]] = {}

    def distribution(ids: list[int]) -> NDArray[np.float64]:
        if tuple(ids) not in known:
            logits = forward_logits(graph, weights, ids)[-1].astype(np.float64)
            shifted = logits - logits.max()
            known[tuple(ids)] = shifted - np.log(np.exp(shifted).sum())
        return known[tuple(ids)]

    rng = random.Random(shape)
    searches = [random_search(rng, graph.vocab_size) for _ in range(8)]
    engine = Engine(
        EngineConfig(
            model=str(save(model, tmp_path / "model")), max_model_len=MAX_MODEL_LEN, activations="f32", num_threads=1
        )
    )
    num_compared = 0
    for (prompt, params), answers in zip(searches, run(engine, searches), strict=True):
        want = plain(distribution, prompt, params)
        if want.margin < 1e-5:
            continue
        num_compared += 1
        for progress, found in zip(answers, want.best, strict=False):
            assert progress.token_ids == found.token_ids
            assert progress.logprob == pytest.approx(found.logprob, abs=1e-4)
            assert (progress.finish_reason is FinishReason.STOP) == found.stopped
    assert num_compared >= 4


def test_beams_are_bit_equal_to_recomputation(tmp_path: Path) -> None:
    """The distributions of the same engine without a cache, one sequence at a time: tokens and logprobs are equal."""
    path = str(save(random_model(seed=9, vocab_size=32), tmp_path / "model"))
    alone = Engine(EngineConfig(model=path, max_model_len=MAX_MODEL_LEN, prefix_caching=False, num_threads=1))
    known: dict[tuple[int, ...], list[float]] = {}

    def distribution(ids: list[int]) -> list[float]:
        if tuple(ids) not in known:
            alone.add(Add("a", ids, SamplingParams(max_tokens=1, temperature=0, logprobs=32), seed=0))
            output = alone.step()
            assert output is not None
            scores = output.progress[0].logprobs[0]
            known[tuple(ids)] = [
                logprob for _, logprob in sorted(zip(scores.top_ids, scores.top_logprobs, strict=True))
            ]
        return known[tuple(ids)]

    rng = random.Random(3)
    searches = [random_search(rng, 32) for _ in range(16)]
    block_bytes = alone.loaded.kv.block_bytes
    for options in ({}, {"kv_cache_memory": 6 * block_bytes, "max_num_seqs": 3}):
        engine = Engine(EngineConfig(model=path, max_model_len=MAX_MODEL_LEN, num_threads=1, **options))  # type: ignore[arg-type]
        after_a_short_answer(engine)
        for (prompt, params), answers in zip(searches, run(engine, searches), strict=True):
            want = plain(distribution, prompt, params).best
            for progress, found in zip(answers, want, strict=False):
                assert (progress.token_ids, progress.logprob) == (found.token_ids, found.logprob)
        assert engine.stats().kv_blocks_held == 0
    assert engine.stats().preemptions > 0


def test_beams_share_the_prompt(tmp_path: Path) -> None:
    """Eight beams of a prompt of 200 tokens: its 12 whole blocks are held once."""
    path = str(save(random_model(max_position_embeddings=256), tmp_path / "model"))
    engine = Engine(EngineConfig(model=path, max_model_len=256, num_threads=1))
    params = SamplingParams(use_beam_search=True, n=8, temperature=0, max_tokens=20, ignore_eos=True)
    engine.add(Add("a", [i % 50 for i in range(200)], params, seed=1))
    most = 0
    while engine.step() is not None:
        most = max(most, engine.stats().kv_blocks_held)
    assert 12 + 8 <= most <= 12 + 8 * 2  # 200 + 20 tokens end in the second block behind the shared ones
    assert engine.stats().prompt_tokens == 200


def test_a_beam_whose_logits_are_invalid_ends_its_search_only(tmp_path: Path) -> None:
    model = random_model(seed=2)
    model.tensors["model.embed_tokens.weight"][5] = np.nan
    engine = Engine(EngineConfig(model=str(save(model, tmp_path / "model")), max_model_len=64, num_threads=1))
    good = SamplingParams(use_beam_search=True, n=3, temperature=0, max_tokens=1, ignore_eos=True)
    bad, fine = run(engine, [([1, 5], good), ([1, 2], good)])
    assert [p.finish_reason for p in bad] == [FinishReason.ERROR] * 3
    assert all("no finite logit" in (p.error or "") and p.token_ids == [] for p in bad)
    assert [p.finish_reason for p in fine] == [FinishReason.LENGTH] * 3
    assert engine.stats().kv_blocks_held == 0
