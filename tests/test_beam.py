"""Beam search: its choices alone, and through the scheduler by random operations."""

from __future__ import annotations

import random

import numpy as np
import pytest

from octavo.engine.admission import Bounds
from octavo.engine.messages import Add
from octavo.request import FinishReason, ParameterError, Request, SamplingParams, TokenLogprobs
from octavo.sched.beam import BeamSearch
from tests.plain_beam import plain_beam_search

MAX_MODEL_LEN = 40


def distribution(token_ids: list[int], vocab: int, grain: float, seed: int) -> list[float]:
    """Of one prefix. Coarse logprobs make equal ones common."""
    rng = random.Random(f"{seed} {token_ids}")
    return [float(np.float32(-grain * rng.randrange(1, 40))) for _ in range(vocab)]


def scores_of(logprobs: list[float], num_top: int) -> TokenLogprobs:
    order = sorted(range(len(logprobs)), key=lambda token: (-logprobs[token], token))[:num_top]
    return TokenLogprobs(order[0], logprobs[order[0]], 1, order, [logprobs[token] for token in order])


def random_case(seed: int) -> tuple[int, list[int], SamplingParams, frozenset[int]]:
    """(vocabulary, prompt, params, end tokens) that `Bounds` accept."""
    rng = random.Random(seed)
    vocab = rng.choice([4, 7, 12, 30])
    eos = frozenset(rng.sample(range(vocab), rng.choice([0, 1, 1, 2])))
    stop_ids = rng.sample(range(vocab), rng.choice([0, 0, 1]))
    width = rng.randint(1, min(8, vocab - len(eos) - len(stop_ids)))
    max_tokens = rng.choice([1, 2, 5, 9, None])
    params = SamplingParams(
        use_beam_search=True,
        best_of=width,
        n=rng.randint(1, width),
        temperature=rng.choice([0, 1]),
        length_penalty=rng.choice([1.0, 0.0, 2.0, 0.7, -1.0]),
        early_stopping=rng.choice([True, False, "never"]),
        stop_token_ids=stop_ids,
        ignore_eos=rng.random() < 0.2,
        max_tokens=max_tokens,
        min_tokens=rng.choice([0, 0, min(3, max_tokens or 3)]),
        logprobs=rng.choice([None, 0, 2]),
    )
    prompt = [rng.randrange(vocab) for _ in range(rng.randint(1, MAX_MODEL_LEN - (max_tokens or rng.randint(1, 12))))]
    return vocab, prompt, params, eos


@pytest.mark.parametrize("part", range(2))
def test_a_search_finds_what_the_plain_one_finds(part: int) -> None:
    reached = dict.fromkeys(("stop", "length", "fork", "drop", "early"), 0)
    for seed in range(part * 300, (part + 1) * 300):
        vocab, prompt, params, eos = random_case(seed)
        Bounds(vocab, MAX_MODEL_LEN, eos).check(Add("a", prompt, params, 1))
        request = Request("a", 0, prompt, params, 1, eos)
        search = BeamSearch(request, MAX_MODEL_LEN)
        grain = random.Random(seed).choice([0.01, 0.5])
        live = [search.first]
        while not search.done:
            assert search.beams == live or set(search.beams) == set(live)
            random.Random(seed).shuffle(live)  # in any order
            for beam in live:
                assert not search.is_ready and not search.rests(beam)
                logprobs = distribution(beam.token_ids(0, beam.num_tokens), vocab, grain, seed)
                num_top = beam.params.logprobs
                assert num_top is not None and num_top <= vocab
                search.take(beam, scores_of(logprobs, num_top))
            assert search.is_ready
            turn = search.turn()
            live = [beam for beam in live if beam not in turn.dropped] + [child for _, child in turn.forks]
            reached["fork"] += len(turn.forks)
            reached["drop"] += len(turn.dropped)
        assert not live
        limit = MAX_MODEL_LEN - len(prompt)
        limit = limit if params.max_tokens is None else min(limit, params.max_tokens)
        ends = set(request.stop_ids)
        want = plain_beam_search(
            lambda ids: distribution(ids, vocab, grain, seed), prompt,  # noqa: B023
            width=params.num_candidates, ends=ends, limit=limit, min_tokens=params.min_tokens,
            length_penalty=params.length_penalty, early_stopping=params.early_stopping,
        ).best  # fmt: skip
        answers = search.answers()
        assert len(answers) == params.n
        for choice, (answer, found) in enumerate(zip(answers, want, strict=False)):
            assert answer.request.choice == choice
            assert (answer.request.output_ids, answer.logprob) == (found.token_ids, found.logprob), seed
            assert (answer.request.finish_reason is FinishReason.STOP) == found.stopped
            reached["stop" if found.stopped else "length"] += 1
            reached["early"] += len(found.token_ids) < limit
            if params.logprobs is not None:
                assert [score.token_id for score in answer.scores] == found.token_ids
                assert all(len(score.top_ids) == min(params.logprobs, vocab) for score in answer.scores)
                assert sum(score.logprob for score in answer.scores) == pytest.approx(found.logprob)
                for i, score in enumerate(answer.scores):
                    row = distribution(prompt + found.token_ids[:i], vocab, grain, seed)
                    assert score.logprob == row[score.token_id]
                    assert score.rank == 1 + sum((-x, t) < (-score.logprob, score.token_id) for t, x in enumerate(row))
    assert all(reached.values()), reached


def test_a_width_that_end_tokens_leave_no_room_for_is_refused() -> None:
    bounds = Bounds(100, 50, frozenset({1, 2}))
    bounds.check(Add("a", [1], SamplingParams(use_beam_search=True, n=30), 1))
    bounds.check(Add("a", [1], SamplingParams(use_beam_search=True, n=32, ignore_eos=True), 1))
    for params, field in (
        (SamplingParams(use_beam_search=True, n=31), "n"),
        (SamplingParams(use_beam_search=True, best_of=31), "best_of"),
        (SamplingParams(use_beam_search=True, best_of=30, stop_token_ids=[2, 3]), "best_of"),
    ):
        with pytest.raises(ParameterError, match="may look at 32") as refused:
            bounds.check(Add("a", [1], params, 1))
        assert refused.value.param == field
    with pytest.raises(ParameterError, match="may look at 4"):
        Bounds(4, 50, frozenset({1})).check(Add("a", [1], SamplingParams(use_beam_search=True, n=4), 1))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0.5), ("top_p", 0.9), ("top_k", 5), ("min_p", 0.1), ("presence_penalty", 1.0),
        ("frequency_penalty", 1.0), ("repetition_penalty", 1.1), ("logit_bias", {1: 2.0}), ("stop", ["x"]),
        ("max_tokens", 0), ("early_stopping", "always"), ("length_penalty", 11), ("best_of", 1), ("n", 9),
    ],
)  # fmt: skip
def test_what_beam_search_cannot_honour_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ParameterError) as refused:
        SamplingParams(**{"use_beam_search": True, "n": 2, "best_of": 8, field: value})  # type: ignore[arg-type]
    assert refused.value.param == ("best_of" if field == "n" else field)


@pytest.mark.parametrize(("field", "value"), [("length_penalty", 0.5), ("early_stopping", True)])
def test_what_only_beam_search_has_is_refused_without_it(field: str, value: object) -> None:
    with pytest.raises(ParameterError, match="needs use_beam_search") as refused:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert refused.value.param == field


def test_neutral_values_are_no_reason_to_refuse() -> None:
    SamplingParams(use_beam_search=True, n=2, temperature=0, top_k=-1, top_p=1, logit_bias={}, stop=[], seed=4)
