"""What the scheduler does in one situation after another, on a model that is a pure function of the prefix."""

from __future__ import annotations

import random
from unittest.mock import ANY

import numpy as np
import pytest

from octavo.backends.base import StepResult
from octavo.request import FinishReason, ParameterError
from octavo.sched.preempt import MAX_PREEMPTIONS
from octavo.sched.step import Draft, Work
from tests.paged_engine import Door, Engine, make
from tests.paged_model import VOCAB
from tests.simulated import Machine, whole


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


@pytest.mark.parametrize("in_step", [False, True])
def test_abort_within_one_step_in_every_state(in_step: bool) -> None:
    """Waiting, behind a gate, behind a leader, in prefill, in decode, forked from an equal prompt."""
    prompts = {
        "decode": [1, 2, 3],
        "fork": [1, 2, 3],
        "prefill": [4] * 200,
        "leader": [4] * 200,
        "gate": [5],
        "last slot": [7, 7],
        "queue": [6] * 9,
    }
    for state in prompts:
        engine = Engine(64, max_tokens=24, max_seqs=4)
        requests = {}
        for name, prompt in prompts.items():
            request = requests[name] = make(name, prompt, max_tokens=30, ignore_eos=True)
            if name == "gate":
                request.gates.append(Door())
            engine.add(request)
            engine.step()
        reasons = engine.scheduler.stats()["waiting_by_reason"]
        assert reasons == {"leader": 1, "grammar": 1, "slots": 1} and requests["prefill"].num_computed < 200
        assert requests["decode"].output_ids and requests["fork"].num_cached == 2
        step = engine.schedule() if in_step else None
        assert engine.scheduler.abort(state) == [requests[state]]
        if step is not None:
            engine.commit(step)
        assert not engine.scheduler.is_live(state) and requests[state].tables == []
        requests["gate"].gates.clear()
        engine.finish()
        for name, request in requests.items():
            if name != "gate" or state != "gate":
                engine.verify(request)


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


@pytest.mark.parametrize("output_len", [16, 64, 200])
@pytest.mark.parametrize("oversize", [False, True])
@pytest.mark.parametrize("cold", [True, False])
def test_pool_for_four_load_of_sixteen(output_len: int, oversize: bool, cold: bool) -> None:
    """All finish, few tokens are computed again, and one request as large as the pool harms nobody. A cold engine goes by
    what was asked for; one whose answers were short so far learns that these are not."""
    blocks_each = -(-(60 + output_len - 1) // 16)
    engine = Engine(4 * blocks_each, max_seqs=16, max_tokens=64, max_model_len=4 * blocks_each * 16 + 1)
    if not cold:
        engine.after_a_short_answer()
    rng = random.Random(5)
    prompts = [[rng.randrange(VOCAB) for _ in range(60)] for _ in range(16)]
    lengths = [output_len] * 16
    if oversize:
        lengths[3] = 4 * blocks_each * 16 + 1 - 60
    requests = [
        engine.add(make(f"r{i}", prompt, seed=i, max_tokens=n, ignore_eos=True))
        for i, (prompt, n) in enumerate(zip(prompts, lengths, strict=True))
    ]
    engine.finish()
    for request in requests:
        engine.verify(request)
    stats = engine.scheduler.stats()
    most = 0.25 if not cold else 0.1 if oversize else 0
    assert stats["recomputed_tokens"] <= most * (16 * 60 + sum(lengths))
    assert max(request.num_preemptions for request in requests) <= MAX_PREEMPTIONS


@pytest.mark.parametrize("seed", range(3))
def test_pool_for_four_with_answers_of_all_lengths(seed: int) -> None:
    """Far longer than their prompts, some ten times as long as others, at once and in three waves."""
    rng = random.Random(seed)
    machine = Machine(num_blocks=4 * 20, max_model_len=4 * 20 * 16)
    requests = [machine.add(f"r{i}", 16, rng.randint(30, 300)) for i in range(16)]
    for i in range(16, 48):
        while machine.scheduler.has_work and rng.random() < 0.97:
            machine.step()
        requests.append(machine.add(f"r{i}", 16, rng.randint(30, 300)))
    machine.finish()
    assert all(map(whole, requests))
    stats = machine.scheduler.stats()
    assert stats["recomputed_tokens"] <= 0.25 * sum(request.num_tokens for request in requests)


def test_answers_are_expected_to_be_as_long_as_the_last_ones() -> None:
    """Prompts of which nothing but scores was wanted say nothing of it."""
    engine = Engine(64)
    for i, length in enumerate([20, 10, 30]):
        engine.add(make(f"r{i}", [i] * 4, max_tokens=length, ignore_eos=True))
        engine.add(make(f"s{i}", [i] * 4, max_tokens=0, prompt_logprobs=0))
        engine.finish()
    assert engine.scheduler._headroom.mean_length == pytest.approx(20)
    for i in range(60):
        engine.add(make(f"t{i}", [i % 9] * 4, max_tokens=5, ignore_eos=True))
        engine.finish()
    assert engine.scheduler._headroom.mean_length == pytest.approx(5, abs=0.1)


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
    engine = Engine(9, max_seqs=4, max_tokens=16).after_a_short_answer()
    requests = [engine.add(make(f"r{i}", [i], seed=i, max_tokens=100, ignore_eos=True)) for i in range(12)]
    engine.finish()
    for request in requests:
        engine.verify(request)
    assert 1 <= max(request.num_preemptions for request in requests) <= MAX_PREEMPTIONS
    assert engine.scheduler.stats()["recomputed_tokens"] < 0.5 * 12 * 100


@pytest.mark.parametrize("num_preemptions", [MAX_PREEMPTIONS - 1, MAX_PREEMPTIONS])
def test_the_victim_loses_least_unless_it_was_preempted_often(num_preemptions: int) -> None:
    engine = Engine(7).after_a_short_answer()
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
    engine = Engine(7).after_a_short_answer()
    low = engine.add(make("1", [1] * 40, max_tokens=50, ignore_eos=True))
    high = engine.add(make("2", [2] * 30, priority=1, max_tokens=50, ignore_eos=True))
    engine.finish()
    assert low.num_preemptions > high.num_preemptions == 0


def test_a_higher_priority_does_not_wait_for_a_slot() -> None:
    """One of the lowest priority makes way, loses nothing that it had computed, and goes on as soon as there is a slot."""
    engine = Engine(64, max_seqs=4)
    batch = [
        engine.add(make(f"b{i}", [i] * 40, priority=-1000 if i else -1, max_tokens=100, ignore_eos=True))
        for i in range(4)
    ]
    for _ in range(20):
        engine.step()
    equal = engine.add(make("equal", [8] * 20, priority=-1000, max_tokens=5, ignore_eos=True))
    live = engine.add(make("live", [9] * 20, max_tokens=5, ignore_eos=True))
    for _ in range(6):
        engine.step()
    assert live.finish_reason is FinishReason.LENGTH and not equal.output_ids
    assert [request.num_preemptions for request in batch].count(1) == 1 and batch[0].num_preemptions == 0
    engine.finish()
    assert engine.scheduler.stats()["recomputed_tokens"] == 0
    for request in [*batch, equal, live]:
        engine.verify(request)


def test_requests_of_a_higher_priority_do_not_push_one_out_for_ever() -> None:
    engine = Engine(64, max_seqs=1)
    low = engine.add(make("low", [1] * 20, max_tokens=30, ignore_eos=True))
    engine.step()
    for i in range(10):
        engine.add(make(f"high{i}", [2 + i] * 20, priority=1, max_tokens=3, ignore_eos=True))
        for _ in range(4):
            engine.step()
    assert low.num_preemptions == MAX_PREEMPTIONS
    engine.finish()
    engine.verify(low)


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
    assert engine.scheduler.schedule() is None and not engine.scheduler.has_work
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
    with pytest.raises(
        ValueError, match="cannot hold the 65 tokens of prompt and output that were asked for: it has room for 64"
    ):
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
