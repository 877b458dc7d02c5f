"""The step-time model and what it is for: streams that are not held up by prompts, in simulated time."""

from __future__ import annotations

import itertools
import random
import statistics

import pytest

from octavo.sched.budget import FEW_TOKENS, ITL_FACTOR, LEAST_ITL
from octavo.sched.cost import LEAST_TAIL, Load, StepCost, load_of
from octavo.sched.step import Work
from tests.simulated import Machine, seconds_of, whole


def random_load(rng: random.Random) -> Load:
    num_decodes, chunk = rng.randrange(17), rng.choice([0, 0, 16, 64, 256, 512])
    if not num_decodes and not chunk:
        num_decodes = 1
    contexts = [rng.randrange(1, 4000) for _ in range(num_decodes)]
    start = rng.randrange(8000)
    pairs = sum(contexts) + chunk * start + chunk * (chunk + 1) / 2
    return Load(
        1, num_decodes + chunk, pairs, sum(contexts) + (start + chunk if chunk else 0), num_decodes + bool(chunk)
    )


def errors(cost: StepCost, loads: list[Load], speed: float = 1.0) -> list[float]:
    return [abs(cost.predict(load) / (speed * seconds_of(load)) - 1) for load in loads]


def test_load_counts_tokens_pairs_context_and_rows() -> None:
    request = object()
    works = [Work(request, 0, 100, 1, 0, 0, True), Work(request, 1, 10, 4, 10, 2, False)]  # type: ignore[arg-type]
    assert load_of(works) == Load(1, 5, 101 + (11 + 12 + 13 + 14), 101 + 14, 1 + 2)


@pytest.mark.parametrize("seed", range(4))
def test_it_learns_beside_noise_and_outliers(seed: int) -> None:
    rng = random.Random(seed)
    cost = StepCost()
    for _ in range(200):
        load = random_load(rng)
        slow = 8 if rng.random() < 0.05 else 1
        cost.observe(load, seconds_of(load) * rng.uniform(0.9, 1.1) * slow)
    found = errors(cost, [random_load(rng) for _ in range(200)])
    assert statistics.median(found) < 0.05 and sorted(found)[190] < 0.15
    assert 0.02 < cost.error < 0.1


def test_it_follows_a_machine_that_becomes_slower() -> None:
    rng = random.Random(0)
    cost = StepCost()
    for speed in (1, 2):
        for _ in range(400):
            load = random_load(rng)
            cost.observe(load, speed * seconds_of(load))
        assert statistics.median(errors(cost, [random_load(rng) for _ in range(100)], speed)) < 0.05


def test_hours_of_decoding_do_not_forget_what_a_prefill_costs() -> None:
    rng = random.Random(0)
    cost = StepCost()
    for _ in range(100):
        load = random_load(rng)
        cost.observe(load, seconds_of(load))
    for i in range(5000):
        load = Load(1, 8, 8 * (100 + i % 500), 8 * (100 + i % 500), 8)
        cost.observe(load, seconds_of(load) * rng.uniform(0.8, 1.2))
    prefill = Load(1, 512, 512 * 513 / 2, 512, 1)
    assert max(errors(cost, [prefill])) < 0.1


def test_it_is_a_function_of_what_it_saw() -> None:
    predictions = []
    for _ in range(2):
        rng, cost = random.Random(3), StepCost()
        for _ in range(50):
            load = random_load(rng)
            cost.observe(load, seconds_of(load) * rng.uniform(0.5, 3))
        predictions.append([cost.predict(random_load(rng)) for _ in range(20)])
    assert predictions[0] == predictions[1]
    assert min(predictions[0]) > 0


def test_the_tokens_that_fit_a_time_take_that_time() -> None:
    rng, cost = random.Random(1), StepCost()
    assert cost.predict(random_load(rng)) == 0 and cost.most_tokens(0, 1.0) > 10**9
    for _ in range(100):
        load = random_load(rng)
        cost.observe(load, seconds_of(load))
    for _ in range(100):
        start, seconds = rng.randrange(30_000), rng.uniform(0, 0.5)
        n = cost.most_tokens(start, seconds)
        assert n == 0 or cost.seconds(start, n) <= seconds * (1 + 1e-6)
        assert cost.seconds(start, n + 1) > seconds * (1 - 1e-6)
    whole_prefill = sum(seconds_of(Load(1, 500, 500 * s + 125_250, s + 500, 0)) for s in range(0, 4000, 500))
    assert cost.prefill_seconds(0, 4000, 500) == pytest.approx(whole_prefill, rel=0.02)


USUAL = Load(1, 16, 16 * 150, 16 * 150, 16)
"""Of the streams beside a long prompt."""


def warm(machine: Machine, name: str = "warm") -> None:
    """Steps of every kind, so that the model is known."""
    for i in range(4):
        machine.add(f"{name}{i}", 700, 20)
    machine.finish()


def streams_beside(
    prompt_len: int, machine: Machine | None = None, **options: object
) -> tuple[Machine, list[float], float]:
    """16 streams, and a prompt that comes between: the machine, the streams' gaps meanwhile, the prompt's seconds."""
    machine = machine or Machine(max_seqs=17, **options)  # type: ignore[arg-type]
    warm(machine)
    streams = [machine.add(f"s{i}", 50, 2000) for i in range(16)]
    for _ in range(100):
        machine.step()
    began = machine.now
    long = machine.add("long", prompt_len, 1)
    while not long.output_ids:
        machine.step()
    gaps = [
        b - a for s in streams for a, b in itertools.pairwise(machine.token_times[s.key])
        if b > began
    ]  # fmt: skip
    assert len(gaps) > 100
    return machine, gaps, machine.now - began


def test_a_long_prompt_does_not_hold_up_streams() -> None:
    usual = seconds_of(USUAL)
    alone = sum(seconds_of(Load(1, 512, 512 * s + 131_328, s + 512, 0)) for s in range(0, 8192, 512))
    _, gaps, seconds = streams_beside(8192)
    assert max(gaps) <= 1.1 * max(LEAST_ITL, ITL_FACTOR * usual) / LEAST_TAIL
    num_steps = len(gaps) / 16
    assert seconds <= 2 * alone + num_steps * usual
    _, gaps, _ = streams_beside(8192, target_itl=10.0)  # a chunk as large as a step may be
    assert max(gaps) > 4 * max(LEAST_ITL, 3 * usual)


@pytest.mark.parametrize("share", [0.02, 0.05])
def test_a_machine_that_is_taken_away_now_and_then_gets_less_prefill_beside_streams(share: float) -> None:
    rng = random.Random(1)

    def disturbed(load: Load) -> float:
        return seconds_of(load) * rng.uniform(0.9, 1.1) * (1.9 if rng.random() < share else 1)

    machine = Machine(max_seqs=17, seconds_of=disturbed)
    for i in range(8):
        warm(machine, str(i))
    _, gaps, _ = streams_beside(8192, machine)
    context = 150 + len(gaps) // 16 // 2  # of each stream, halfway
    usual = seconds_of(Load(1, 16, 16 * context, 16 * context, 16))
    assert sorted(gaps)[int(0.99 * len(gaps))] <= 3 * usual


def test_a_machine_that_is_slow_for_seconds_gets_less_prefill_beside_streams() -> None:
    """Half again as long for a fifth of the time. Predictions follow; the target does not."""
    steps = itertools.count()

    def disturbed(load: Load) -> float:
        return seconds_of(load) * (1.5 if next(steps) % 500 >= 400 else 1)

    machine = Machine(max_seqs=17, seconds_of=disturbed)
    for i in range(8):
        warm(machine, str(i))
    _, gaps, _ = streams_beside(8192, machine)
    context = 150 + len(gaps) // 16 // 2
    usual = seconds_of(Load(1, 16, 16 * context, 16 * context, 16))
    assert sorted(gaps)[int(0.99 * len(gaps))] <= 3 * usual


def test_what_prompts_alone_say_of_decodes_does_not_last() -> None:
    """Many steps of whole portions, as of long prompts after a start: the step that their fits make of a few decodes is far
    too long, and is forgotten with the first decodes."""
    cost = StepCost()

    def ran(load: Load) -> None:
        cost.predict(load)
        cost.observe(load, seconds_of(load) + (0.1 if load.num_tokens > 16 else 0))

    for start in range(0, 512 * 512, 512):
        ran(Load(1, 512, 512 * (start % 8192) + 131_328, start % 8192 + 512, 1))
    assert cost.predict(USUAL) > 2 * seconds_of(USUAL)
    for _ in range(32):
        ran(USUAL)
    assert cost.usual(USUAL) <= 1.1 * seconds_of(USUAL)


def test_a_long_context_is_computed_in_small_portions() -> None:
    """Attention of a block of tokens takes 96 ms at the end of this prompt: it goes on in few."""

    def slow(load: Load) -> float:
        return seconds_of(load) + 1e-6 * load.num_pairs

    machine, gaps, _ = streams_beside(6000, seconds_of=slow)
    usual = slow(load_of(machine.steps[-1].work[:16]))
    assert max(gaps) <= 1.1 * max(LEAST_ITL, ITL_FACTOR * usual) / LEAST_TAIL
    portions = [step.work[-1].num_tokens for step in machine.steps if step.work[-1].request.id == "long"]
    assert portions[0] >= 16 and FEW_TOKENS <= min(portions) < 16 and not any(n % FEW_TOKENS for n in portions[1:-1])


def test_the_target_is_what_is_held() -> None:
    for target in (0.05, 0.1):
        _, gaps, _ = streams_beside(2000, target_itl=target)
        assert 0.6 * target < statistics.median(gaps) < 1.1 * target
    _, gaps, _ = streams_beside(200, target_itl=1e-6)  # cannot be held: the prompt goes on in small steps
    assert max(gaps) < 0.05


def test_a_burst_of_prompts_takes_hardly_longer_than_without_a_target() -> None:
    def seconds(load: Load) -> float:  # of two AVX2 cores
        return 3e-3 + 9e-4 * load.num_tokens + 1e-7 * load.num_pairs + 4e-7 * load.num_context + 3e-4 * load.num_rows

    def burst(target_itl: float | None) -> float:
        machine = Machine(max_seqs=64, seconds_of=seconds, target_itl=target_itl)
        warm(machine)
        began = machine.now
        for i in range(64):
            machine.add(str(i), 256, 128)
        machine.finish()
        return machine.now - began

    assert burst(None) <= 1.06 * burst(10.0)


def test_a_short_prompt_behind_long_ones_is_not_blocked() -> None:
    machine = Machine(max_seqs=8)
    warm(machine)
    long = [machine.add(f"long{i}", 8000, 1) for i in range(2)]
    machine.step()
    short = machine.add("short", 200, 1)
    machine.step()
    assert whole(short) and not any(request.output_ids for request in long)
    while not long[0].output_ids:
        machine.step()
    assert long[1].num_computed < 8000, "the first goes on at half speed at least"
    machine.finish()


def test_the_oldest_is_not_starved_by_short_ones() -> None:
    machine = Machine(max_seqs=8)
    warm(machine)
    long = machine.add("long", 4000, 1)
    for i in range(40):
        machine.add(f"short{i}", 400, 1)
        machine.add(f"other{i}", 400, 1)
        machine.step()
        if long.output_ids:
            break
    assert 8 <= i <= 17, "half of each step of 512"
    machine.finish()


def test_a_follower_makes_its_leader_as_urgent_as_itself() -> None:
    machine = Machine(max_seqs=4)
    warm(machine)
    prompt = list(range(5000, 9000))
    leader = machine.add("leader", prompt, 1)
    machine.step()
    other = machine.add("other", 4000, 1, priority=1)
    follower = machine.add("follower", [*prompt, 1], 1, priority=2)
    while not other.output_ids:
        machine.step()
    assert whole(leader) and whole(follower)
