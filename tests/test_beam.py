"""Beam search: its choices alone, and through the scheduler by random operations."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest

from octavo.engine.admission import Bounds
from octavo.engine.messages import Add
from octavo.request import FinishReason, ParameterError, Request, SamplingParams, Terms, TokenLogprobs
from octavo.sched import recent
from octavo.sched.beam import BeamSearch
from octavo.sched.live import Update
from octavo.sched.step import Step
from tests.paged_engine import Engine, make, random_prompt
from tests.paged_model import VOCAB, Windows, scores_after
from tests.plain_beam import Found, plain_beam_search

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
                assert not search.is_ready
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


# ---- through the scheduler


def find(params: SamplingParams, prompt: list[int], max_model_len: int, windows: Windows) -> list[Found]:
    """The answers of a search over the paged model, by the plain one."""
    limit = max_model_len - len(prompt)
    return plain_beam_search(
        lambda ids: scores_after(ids, windows), prompt,
        width=params.num_candidates, ends={VOCAB - 1, *params.stop_token_ids} if not params.ignore_eos else set(),
        limit=limit if params.max_tokens is None else min(limit, params.max_tokens), min_tokens=params.min_tokens,
        length_penalty=params.length_penalty, early_stopping=params.early_stopping,
    ).best[: params.n]  # fmt: skip


class Searches(Engine):
    """The scheduler's engine of the tests, with searches whose answers it collects."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.answers: dict[str, list[Update]] = {}
        self.asked: dict[str, Request] = {}

    def search(self, id: str, prompt: list[int], terms: Terms | None = None, **params: Any) -> None:
        self.asked[id] = make(id, prompt, terms=terms, **{"temperature": 0, "use_beam_search": True, **params})
        search = BeamSearch(self.asked[id], self.limits.max_model_len)
        self.scheduler.add(search.first, search)
        self.scheduler.check()

    def commit(self, step: Step, seconds: float = 0.01) -> None:
        updates = self.scheduler.commit(step, self.model.run(self.batches.build(step)))
        self.scheduler.check()
        self.now += seconds
        self.scheduler.took(step, seconds)
        for update in updates:
            if update.request.id in self.asked:
                self.answers.setdefault(update.request.id, []).append(update)
            else:
                self.updated.setdefault(update.request.key, []).extend(update.token_ids)

    def verify_searches(self) -> None:
        for id, request in self.asked.items():
            if id not in self.answers:
                continue
            want = find(request.params, request.prompt_ids, self.limits.max_model_len, self.model.windows)
            answers = self.answers[id]
            assert [a.request.choice for a in answers] == list(range(request.params.n))
            assert [a.request.output_ids for a in answers] == [found.token_ids for found in want], id
            assert [a.logprob for a in answers] == [found.logprob for found in want]
            explanations = self.scheduler.explain(id)
            assert [(e.choice, e.state) for e in explanations] == [
                (a.request.choice, str(a.request.finish_reason)) for a in answers
            ]


def play(seed: int) -> Counter[str]:
    rng = random.Random(seed)
    num_blocks, max_seqs = rng.randint(2, 12), rng.randint(1, 7)
    engine = Searches(
        num_blocks=num_blocks,
        max_tokens=rng.choice([max_seqs, 16, 64]) + max_seqs,
        max_rows=max_seqs + rng.choice([0, 16]),
        max_seqs=max_seqs,
        max_model_len=num_blocks * 16 + 1,
        enabled=rng.random() < 0.8,
        windows=rng.choice([(None,), (None,), (None, None), (None, 20), (40,)]),
    )
    others, aborted, known = [], set[str](), list[list[int]]()
    for turn in range(rng.randint(2, 8)):
        known.append(random_prompt(rng, known, num_blocks * 8))
        if rng.random() < 0.7:
            width = rng.randint(1, 5)
            engine.search(
                f"s{turn}", known[-1], best_of=width, n=rng.randint(1, width), max_tokens=rng.choice([1, 6, 20, 40]),
                ignore_eos=rng.random() < 0.5, early_stopping=rng.choice([True, False, "never"]),
                length_penalty=rng.choice([0.0, 1.0, 1.5]), logprobs=rng.choice([None, 2]),
                prompt_logprobs=rng.choice([None, None, 1]),
            )  # fmt: skip
        else:
            others.append(engine.add(make(f"r{turn}", known[-1], seed=turn, max_tokens=rng.choice([1, 9, 40]))))
        for _ in range(rng.randint(0, 8)):
            step = engine.schedule()
            if step is None:
                break
            if rng.random() < 0.04:
                victim = rng.choice(step.work).request.id
                ended = engine.scheduler.abort(victim, rng.choice([-1, 0]))
                if victim in engine.asked and ended:
                    aborted.add(victim)
                    assert [r.choice for r in ended] == list(range(engine.asked[victim].params.n))
                    assert all(r.finish_reason is FinishReason.ABORT for r in ended)
                    assert engine.scheduler.abort(victim) == []
            engine.commit(step)
            resting = [live for live in engine.scheduler._running if live.resting]
            engine.seen["rested"] += len(resting)
    engine.finish()
    assert engine.answers.keys() == engine.asked.keys() - aborted
    engine.verify_searches()
    for request in others:
        engine.verify(request)
    explanations = [e for id in engine.answers for e in engine.scheduler.explain(id)]
    engine.seen["preempted"] += sum(e.preemptions for e in explanations)
    engine.seen["recomputed"] += sum(e.recomputed_tokens for e in explanations)
    engine.seen["cached"] += sum(e.cached_tokens for e in explanations)
    engine.seen["aborted"] += len(aborted)
    engine.seen["crowded"] += any(r.params.num_candidates > max_seqs for r in engine.asked.values())
    return engine.seen


@pytest.mark.parametrize("part", range(2))
def test_random_histories_with_searches(part: int) -> None:
    """Beams are preempted, wait for slots and blocks and share those of others; the answers are the plain ones."""
    seen: Counter[str] = Counter()
    for seed in range(part * 30, (part + 1) * 30):
        try:
            seen += play(seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
    for what in ("rested", "preempted", "recomputed", "cached", "aborted", "crowded", "copy"):
        assert seen[what] > 0, f"no history reached: {what}"


def test_a_search_tells_of_its_prompt_and_then_of_its_answers_alone() -> None:
    engine = Searches(num_blocks=16, max_tokens=8)
    terms = Terms(reports_prefill=True)
    engine.search("s", [1, 2, 3] * 7, terms, best_of=3, n=2, max_tokens=4, ignore_eos=True, logprobs=1)
    engine.finish()
    told, engine.answers["s"] = engine.answers["s"][:-2], engine.answers["s"][-2:]
    assert [(update.token_ids, update.logprobs) for update in told] == [([], [])] * 2, "8 and 16 of 21 tokens"
    engine.verify_searches()


def test_a_deadline_ends_the_whole_search() -> None:
    engine = Searches(num_blocks=20)
    terms = Terms(total_seconds=5.0)
    engine.search("s", [1, 2, 3], n=3, max_tokens=100, ignore_eos=True, terms=terms)
    for _ in range(4):
        assert engine.step()
    assert engine.scheduler.stats()["num_running"] == 3
    engine.now += 6
    assert engine.scheduler.schedule() is None
    dropped = engine.scheduler.dropped()
    assert [(u.request.choice, u.request.finish_reason, u.param) for u in dropped] == [
        (choice, FinishReason.TIMEOUT, "total_seconds") for choice in range(3)
    ]
    assert not engine.scheduler.has_work and engine.cache.usage().num_held == 0


def test_only_the_last_choices_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent, "MAX_RECENT", 5)
    engine = Searches(num_blocks=20)
    for i in range(6):
        engine.search(f"s{i}", [i % VOCAB], n=2, max_tokens=2)
        engine.finish()
    known = [i for i in range(6) if engine.scheduler.explain(f"s{i}")]
    assert known == [4, 5]
