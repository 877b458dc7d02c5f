"""The scheduler by random operations: every request ends with exactly the tokens it has when it runs alone."""

from __future__ import annotations

import random
from collections import Counter
from unittest.mock import ANY

import numpy as np
import pytest

from octavo.backends.base import Limits, StepResult
from octavo.cache.blocks import GroupSpec
from octavo.cache.kv import KvCache
from octavo.request import FinishReason, ParameterError, Request, SamplingParams, Terms
from octavo.sched.batch import BatchBuilder
from octavo.sched.preempt import MAX_PREEMPTIONS
from octavo.sched.scheduler import Scheduler
from octavo.sched.step import Draft, Step, Work
from tests.paged_model import MAX_TOP, VOCAB, PagedModel, Windows, expected


class Engine:
    """Scheduler, batches and the pure-function model, checked after every operation."""

    def __init__(
        self, num_blocks: int, max_tokens: int = 64, max_rows: int = 64, max_seqs: int = 8,
        max_model_len: int = 512, enabled: bool = True, windows: Windows = (None,),
    ) -> None:  # fmt: skip
        self.limits = Limits(max_tokens, max_rows, max_seqs, max_model_len)
        self.cache = KvCache([GroupSpec(num_blocks + g, w) for g, w in enumerate(windows)], enabled)
        self.scheduler = Scheduler(self.cache, self.limits)
        self.batches = BatchBuilder(self.limits, len(windows))
        self.model = PagedModel(windows)
        self.seen: Counter[str] = Counter()
        self.scored: dict[tuple[str, int], list[float]] = {}
        self.updated: dict[tuple[str, int], list[int]] = {}

    def add(self, request: Request) -> Request:
        self.scheduler.add(request)
        self.scheduler.check()
        return request

    def schedule(self) -> Step | None:
        step = self.scheduler.schedule()
        self.scheduler.check()
        if step is None:
            return None
        assert 1 <= step.num_tokens <= self.limits.max_tokens
        assert sum(work.num_rows for work in step.work) <= self.limits.max_rows
        assert len(step.work) <= self.limits.max_seqs
        assert len({work.slot for work in step.work}) == len(step.work)
        for work in step.work:
            for table in work.request.tables:
                assert len(table) == -(-work.stop // 16), "blocks are for the tokens of this step only"
            self.seen["resumed"] += work.request.num_preemptions > 0
            self.seen["chunk"] += work.stop < work.request.num_tokens
            self.seen["left the window"] += any(-1 in table for table in work.request.tables)
            self.seen["kept scores"] += (
                work.request.params.prompt_logprobs is not None and 0 < work.start == work.request.num_cached
            )
            self.seen["shared"] += work.start >= 16 and work.start == work.request.num_cached
        self.seen["copy"] += len(step.copies[0])
        return step

    def commit(self, step: Step) -> None:
        updates = self.scheduler.commit(step, self.model.run(self.batches.build(step)))
        self.scheduler.check()
        for update in updates:
            request = update.request
            output = self.updated.setdefault(request.key, [])
            output += update.token_ids
            assert output == request.output_ids
            assert len(update.logprobs) == (len(update.token_ids) if request.params.logprobs is not None else 0)

    def step(self) -> bool:
        step = self.schedule()
        if step is not None:
            self.commit(step)
        return step is not None

    def finish(self, most_steps: int = 10_000) -> None:
        for _ in range(most_steps):
            if not self.step():
                break
        assert not self.scheduler.has_work, "requests wait for ever"
        usage = self.cache.usage()
        assert usage.num_held == usage.num_filled == 0

    def verify(self, request: Request) -> None:
        output, scores = expected(request, self.limits.max_model_len, self.model.windows)
        if request.finish_reason is FinishReason.ABORT:
            output = output[: len(request.output_ids)]
        else:
            assert self.updated.get(request.key, []) == output
            stopped = bool(output) and output[-1] in request.stop_ids
            assert request.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
        assert request.output_ids == output
        if request.params.prompt_logprobs is not None:
            assert [s.logprob for s in request.prompt_logprobs] == scores[: len(request.prompt_logprobs)]
            assert request.finish_reason is FinishReason.ABORT or len(request.prompt_logprobs) == len(scores)


def make(id: str, prompt: list[int], choice: int = 0, seed: int = 1, priority: int = 0, **params: object) -> Request:
    eos = frozenset({VOCAB - 1})
    return Request(id, choice, prompt, SamplingParams(**params), seed, eos, Terms(priority=priority))  # type: ignore[arg-type]


WINDOWS: list[Windows] = [(None,)] * 5 + [(None, None), (None, 20), (17, None), (33,)]


def random_prompt(rng: random.Random, known: list[list[int]], longest: int) -> list[int]:
    """A prompt that often continues, repeats or leaves an earlier sequence."""
    length = rng.randint(1, longest)
    fresh = [rng.randrange(VOCAB) for _ in range(length)]
    if not known or rng.random() < 0.25:
        return fresh
    old = rng.choice(known)
    cut = rng.choice([len(old), len(old) // 16 * 16, rng.randint(0, len(old))])
    return (old[:cut] + (fresh if rng.random() < 0.7 else []))[:longest] or fresh


def play(seed: int) -> Counter[str]:
    """One random history; what it reached."""
    rng = random.Random(seed)
    num_blocks = rng.randint(3, 11)
    max_seqs = rng.randint(1, 6)
    engine = Engine(
        num_blocks,
        max_tokens=rng.choice([max_seqs, 16, 33, 128]) + max_seqs,
        max_rows=max_seqs + rng.choice([0, 5, 64]),
        max_seqs=max_seqs,
        max_model_len=num_blocks * 16 + 1,
        enabled=rng.random() < 0.9,
        windows=rng.choice(WINDOWS),
    )
    longest = num_blocks * 16 // 2
    known: list[list[int]] = []
    requests: list[Request] = []
    for turn in range(rng.randint(3, 20)):
        if rng.random() < 0.6:
            prompt = random_prompt(rng, known, longest)
            known.append(prompt)
            score = rng.choice([None] * 8 + [0, MAX_TOP])
            max_tokens = rng.choice([0 if score is not None else 1, 1, 5, 20, 40, None])
            params: dict[str, object] = {
                "max_tokens": max_tokens,
                "min_tokens": rng.choice([0, 0, min(9, max_tokens or 0)]),
                "ignore_eos": rng.random() < 0.6,
                "presence_penalty": rng.choice([0, 0, 1]),
                "logprobs": rng.choice([None, MAX_TOP]),
                "prompt_logprobs": score,
            }
            for choice in range(rng.choice([1, 1, 1, 3])):
                request = make(f"r{turn}", prompt, choice, rng.getrandbits(64), rng.choice([0, 0, 1]), **params)
                requests.append(engine.add(request))
        elif rng.random() < 0.15 and requests:
            victim = rng.choice(requests)
            engine.scheduler.abort(victim.id, rng.choice([-1, victim.choice]))
            engine.scheduler.check()
        else:
            for _ in range(rng.randint(1, 12)):
                step = engine.schedule()
                if step is None:
                    break
                if rng.random() < 0.05:  # while the step is in flight
                    victim = rng.choice(requests)
                    engine.scheduler.abort(victim.id, rng.choice([-1, victim.choice]))
                engine.commit(step)
    engine.finish()
    for request in requests:
        engine.verify(request)
        known.append(request.prompt_ids + request.output_ids)
        engine.seen["aborted"] += request.finish_reason is FinishReason.ABORT
    stats = engine.scheduler.stats()
    assert stats["kv_blocks_held"] == stats["num_running"] == stats["num_waiting"] == 0
    engine.seen["preempted"] = stats["preemptions"]
    engine.seen["recomputed"] = stats["recomputed_tokens"]
    return engine.seen


@pytest.mark.parametrize("part", range(4))
def test_random_histories(part: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(part * 75, (part + 1) * 75):
        try:
            seen += play(seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
    for what in (
        "resumed",
        "chunk",
        "shared",
        "copy",
        "aborted",
        "preempted",
        "recomputed",
        "left the window",
        "kept scores",
    ):
        assert seen[what] > 0, f"no history reached: {what}"


def test_no_prefix_token_is_computed_twice() -> None:
    engine = Engine(64, max_tokens=24)
    prompt = [1, 2, 3, 4, 5] * 9  # 45 tokens: two full blocks and a part of one
    requests = [engine.add(make(f"r{i}", prompt, seed=i, max_tokens=4)) for i in range(5)]
    engine.finish()
    for request in requests:
        engine.verify(request)
    stats = engine.scheduler.stats()
    assert stats["prompt_tokens"] == 45 + 4  # each of the other four computes the last token only
    assert stats["cached_tokens"] == 4 * 44


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32])
def test_choices_share_the_prompt(length: int) -> None:
    engine = Engine(64)
    prompt = [i % 5 for i in range(length)]
    choices = [engine.add(make("a", prompt, c, seed=3, max_tokens=20, ignore_eos=True)) for c in range(4)]
    engine.finish()
    for request in choices:
        engine.verify(request)
    assert engine.scheduler.stats()["prompt_tokens"] == length + 3


def test_a_second_turn_reuses_all_but_the_last_token() -> None:
    engine = Engine(64)
    first = engine.add(make("a", [1, 2, 3, 4, 5], max_tokens=30, ignore_eos=True))
    engine.finish()
    second = engine.add(make("b", first.prompt_ids + first.output_ids + [1, 1], max_tokens=2))
    engine.finish()
    engine.verify(second)
    assert engine.scheduler.stats()["cached_tokens"] == 5 + 30 - 1  # the last token drawn was never computed


def test_a_follower_goes_on_when_its_leader_is_aborted() -> None:
    engine = Engine(64, max_tokens=16)
    leader, follower = (engine.add(make(i, [1, 2, 3] * 20, max_tokens=3)) for i in "ab")
    engine.step()
    assert follower.num_computed == 0 < leader.num_computed
    assert engine.scheduler.abort("a") == [leader]
    engine.finish()
    engine.verify(follower)
    assert engine.scheduler.stats()["prompt_tokens"] == 60


def test_nobody_waits_for_a_prompt_that_was_computed_before_a_preemption() -> None:
    """The leader resumes behind its prompt, from a copy whose source is then evicted."""
    engine = Engine(16)
    leader = engine.add(make("a", [1, 2, 3, 4, 5] * 4, max_tokens=200, ignore_eos=True))
    for _ in range(6):
        engine.step()
    engine.scheduler._preempt(engine.scheduler._running[0], 0.0)
    engine.step()
    assert leader.num_cached == 25
    pool, index = engine.cache.groups[0].pool, engine.cache.groups[0].prefixes
    source = pool.oldest()
    index.remove(source)
    pool.drop(source)
    equal = engine.add(make("b", leader.prompt_ids, max_tokens=2))
    engine.step()
    assert equal.output_ids
    engine.finish()
    engine.verify(leader)
    engine.verify(equal)


def test_abort_frees_blocks_at_once() -> None:
    engine = Engine(16, max_tokens=16, max_seqs=1)
    running, waiting = (engine.add(make(i, [int(i)] * 40, max_tokens=30)) for i in "12")
    engine.step()
    assert engine.cache.usage().num_held == 1
    assert engine.scheduler.abort("2") == [waiting]
    assert engine.scheduler.abort("1") == [running]
    assert engine.scheduler.abort("1") == []
    assert engine.cache.usage().num_held == 0
    assert not engine.scheduler.has_work


def test_decodes_go_on_beside_a_long_prompt() -> None:
    engine = Engine(64, max_tokens=32)
    short = engine.add(make("a", [1], max_tokens=40, ignore_eos=True))
    engine.step()
    engine.add(make("b", [2, 3] * 150, max_tokens=1))
    for _ in range(9):
        before = len(short.output_ids)
        engine.step()
        assert len(short.output_ids) == before + 1
    engine.finish()


def test_priority_then_arrival() -> None:
    engine = Engine(64, max_seqs=1, max_tokens=64)
    for i, priority in enumerate((0, 0, 5)):
        engine.add(make(f"r{i}", [i], priority=priority, max_tokens=2, ignore_eos=True))
    engine.finish()
    assert [id for id, _ in engine.updated] == ["r2", "r0", "r1"]


def test_pool_for_four_load_of_sixteen() -> None:
    """LESSONS C.11: all finish, and the share of recomputed tokens is bounded."""
    engine = Engine(4 * 8, max_seqs=16, max_tokens=64)
    rng = random.Random(5)
    requests = [
        engine.add(make(f"r{i}", [rng.randrange(VOCAB) for _ in range(60)], seed=i, max_tokens=64, ignore_eos=True))
        for i in range(16)
    ]
    engine.finish()
    for request in requests:
        engine.verify(request)
    stats = engine.scheduler.stats()
    assert stats["preemptions"] > 0
    assert stats["recomputed_tokens"] < 0.5 * 16 * 124


def test_admission_leaves_a_block_for_those_who_run() -> None:
    engine = Engine(4)
    running = engine.add(make("1", [1] * 20, max_tokens=40, ignore_eos=True))
    engine.step()
    waiting = engine.add(make("2", [2] * 20, max_tokens=2, ignore_eos=True))
    engine.step()
    assert waiting.tables == [] and len(running.output_ids) == 2
    engine.finish()
    assert engine.scheduler.stats()["preemptions"] == 0


def test_work_taken_back_gives_back_its_tokens_and_rows() -> None:
    draft = Draft(num_tokens=10, num_rows=1)
    request = make("a", [1] * 8)
    work = draft.portion(request, 0)
    assert work == Work(request, 0, 0, 8, 8, 0, True)
    draft.add(work)
    assert (draft.num_tokens, draft.num_rows) == (2, 0)
    assert draft.portion(make("b", [1] * 2), 1) == Work(ANY, 1, 0, 1, 2, 0, False), "no row is left to draw from"
    draft.drop(0)
    draft.drop(1)
    assert (draft.num_tokens, draft.num_rows, draft.work) == (10, 1, {})


def test_no_request_is_recomputed_for_ever() -> None:
    engine = Engine(9, max_seqs=4, max_tokens=16)
    requests = [engine.add(make(f"r{i}", [i], seed=i, max_tokens=100, ignore_eos=True)) for i in range(12)]
    engine.finish()
    for request in requests:
        engine.verify(request)
    assert 1 <= max(request.num_preemptions for request in requests) <= MAX_PREEMPTIONS
    assert engine.scheduler.stats()["recomputed_tokens"] < 0.5 * 12 * 100


@pytest.mark.parametrize("num_preemptions", [MAX_PREEMPTIONS - 1, MAX_PREEMPTIONS])
def test_the_victim_loses_least_unless_it_was_preempted_often(num_preemptions: int) -> None:
    engine = Engine(7)
    large, small = (
        engine.add(make(i, [int(i)] * n, max_tokens=50, ignore_eos=True)) for i, n in (("1", 40), ("2", 30))
    )
    engine.step()
    small.num_preemptions = num_preemptions
    while not engine.scheduler.stats()["preemptions"]:
        engine.step()
    victim = large if num_preemptions == MAX_PREEMPTIONS else small
    assert victim.tables == [] and victim.num_preemptions > 0
    engine.finish()
    for request in (large, small):
        engine.verify(request)


def test_the_victim_has_the_lowest_priority() -> None:
    engine = Engine(7)
    low = engine.add(make("1", [1] * 40, max_tokens=50, ignore_eos=True))
    high = engine.add(make("2", [2] * 30, priority=1, max_tokens=50, ignore_eos=True))
    engine.finish()
    assert low.num_preemptions > high.num_preemptions == 0


class Door:
    """A gate that the test opens, or shuts for ever."""

    def __init__(self, reason: str = "grammar") -> None:
        self.reason = reason
        self.opened = False
        self.error: ParameterError | None = None

    def is_open(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.opened


def test_a_closed_gate_holds_one_request_and_blocks_nobody() -> None:
    engine = Engine(64, max_seqs=1)
    door, later = Door(), Door("disk")
    held = make("a", [1, 2], max_tokens=3, ignore_eos=True)
    held.gates += [door, later]
    engine.add(held)
    other = engine.add(make("b", [3], max_tokens=3, ignore_eos=True))
    assert engine.scheduler.stats()["waiting_by_reason"] == {"grammar": 1, "step": 1}
    while engine.step():
        pass
    assert other.finish_reason is FinishReason.LENGTH
    assert engine.scheduler.has_work and held.tables == []
    door.opened = True
    assert not engine.step()
    assert engine.scheduler.stats()["waiting_by_reason"] == {"disk": 1}
    later.opened = True
    engine.finish()
    engine.verify(held)


def test_a_gate_that_never_opens_ends_its_request() -> None:
    engine = Engine(64)
    door, held = Door(), make("a", [1, 2])
    held.gates.append(door)
    engine.add(held)
    door.error = ParameterError("structured", "too large")
    assert not engine.step() and not engine.scheduler.has_work
    (update,) = engine.scheduler.dropped()
    assert update[:3] == (held, [], []) and (update.error, update.param) == ("too large", "structured")
    assert held.finish_reason is FinishReason.ERROR and engine.scheduler.dropped() == []


def test_abort_behind_a_gate() -> None:
    engine = Engine(64)
    held = make("a", [1, 2])
    held.gates.append(Door())
    engine.add(held)
    engine.step()
    assert engine.scheduler.abort("a") == [held]
    assert not engine.scheduler.has_work
    engine.scheduler.check()


def test_what_can_never_fit_is_refused() -> None:
    engine = Engine(4)
    with pytest.raises(ValueError, match="cannot hold the 65 tokens"):
        engine.scheduler.add(make("a", [1] * 60, max_tokens=6))
    engine.add(make("b", [1] * 60, max_tokens=5, ignore_eos=True))
    engine.finish()


def test_a_request_as_large_as_the_pool_runs_among_others() -> None:
    engine = Engine(6, max_seqs=4)
    large = engine.add(make("a", [1] * 60, max_tokens=37, ignore_eos=True))
    others = [engine.add(make(f"r{i}", [i, 2], max_tokens=40, ignore_eos=True)) for i in range(3)]
    engine.finish()
    for request in (large, *others):
        engine.verify(request)


def test_an_invalid_row_ends_its_request_only() -> None:
    engine = Engine(16)
    bad, good = (engine.add(make(i, [int(i), 3], max_tokens=4, ignore_eos=True)) for i in "12")
    step = engine.schedule()
    assert step is not None
    result: StepResult = engine.model.run(engine.batches.build(step))
    result.invalid[[work.request for work in step.work].index(bad)] = True
    updates = engine.scheduler.commit(step, result)
    engine.updated[good.key] = list(good.output_ids)
    assert [(u.request, bool(u.error)) for u in updates] == [(bad, True), (good, False)]
    assert bad.finish_reason is FinishReason.ERROR and bad.output_ids == []
    engine.scheduler.check()
    engine.finish()
    engine.verify(good)


def test_min_tokens_masks_end_tokens() -> None:
    engine = Engine(64)
    for seed in range(20):
        request = engine.add(make(f"r{seed}", [seed % VOCAB], seed=seed, min_tokens=12, max_tokens=200))
        engine.finish()
        engine.verify(request)
        assert len(request.output_ids) > 12
        assert VOCAB - 1 not in request.output_ids[:12]


def test_prompt_scores_take_nothing_from_the_cache() -> None:
    engine = Engine(64, max_tokens=40, max_rows=8)
    prompt = [1, 2, 3] * 15
    engine.add(make("a", prompt, max_tokens=1))
    engine.finish()
    request = engine.add(make("b", prompt, max_tokens=0, prompt_logprobs=2))
    engine.finish()
    engine.verify(request)
    assert [s.token_id for s in request.prompt_logprobs] == prompt[1:]
    assert all(len(s.top_ids) == 2 for s in request.prompt_logprobs)
    assert engine.scheduler.stats()["cached_tokens"] == 0


def test_prompt_scores_are_kept_with_the_blocks() -> None:
    """Another 20 continuations of a scored prompt: each computes itself and the token before it."""
    engine = Engine(64, max_tokens=40, max_rows=8)
    prompt = [1, 2, 3, 4, 5] * 9
    requests = [make(f"r{i}", [*prompt, i % 7, i // 7, 6, 6], max_tokens=0, prompt_logprobs=2) for i in range(21)]
    for request in requests:
        engine.add(request)
    engine.finish()
    for request in requests:
        engine.verify(request)
        assert [s.token_id for s in request.prompt_logprobs] == request.prompt_ids[1:]
        assert all(len(s.top_ids) == 2 for s in request.prompt_logprobs)
    assert engine.scheduler.stats()["prompt_tokens"] <= 49 + 20 * 5
    assert 0 < engine.cache.usage().score_bytes <= engine.cache.usage().num_cached * 16 * 4 * (2 + 2 * 2)


@pytest.mark.parametrize("asked", [0, 1, 2])
def test_kept_scores_serve_those_who_ask_for_no_more(asked: int) -> None:
    engine = Engine(64)
    prompt = [1, 2, 3, 4, 5] * 9
    engine.add(make("a", prompt, max_tokens=1, prompt_logprobs=1))
    engine.finish()
    request = engine.add(make("b", prompt, max_tokens=1, prompt_logprobs=asked))
    engine.finish()
    engine.verify(request)
    assert engine.scheduler.stats()["cached_tokens"] == (44 if asked <= 1 else 0)


def test_a_window_holds_its_blocks_only() -> None:
    engine = Engine(64, max_tokens=32, windows=(None, 40))
    request = engine.add(make("a", [1, 2, 3] * 100, max_tokens=100, ignore_eos=True))
    while engine.step():
        if request.tables:
            whole, window = (group.pool.num_held for group in engine.cache.groups)
            assert whole == -(-request.num_computed // 16)
            assert window <= 40 // 16 + 2
    engine.verify(request)


def test_waste_counts_are_exact() -> None:
    engine = Engine(64)
    engine.add(make("a", [1, 2] * 10, max_tokens=40, ignore_eos=True))
    for _ in range(14):
        engine.step()
    stats = engine.scheduler.stats()
    assert (stats["kv_blocks_held"], stats["kv_slots_filled"]) == (3, 33)
    assert np.sum(engine.cache.groups[0].pool.filled) == 33
