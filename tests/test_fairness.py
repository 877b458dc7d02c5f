"""Who is served when more is asked for than there is time: tenants, priorities, age. In simulated time."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from octavo.request import FinishReason, Request
from octavo.sched.fairness import MAX_TENANTS, FairShares
from octavo.sched.queue import AGE_SECONDS, aged
from tests.simulated import Machine, whole


def jain(shares: list[float]) -> float:
    """Jain's index of fairness: 1 where all have the same, 1/n where one has all."""
    return sum(shares) ** 2 / (len(shares) * sum(share * share for share in shares))


def both_wait(machine: Machine, *tenants: str) -> bool:
    return {live.request.terms.tenant for live in machine.scheduler._queue} >= set(tenants)


@pytest.mark.parametrize("seed", range(2))
def test_two_tenants_ten_to_one(seed: int) -> None:
    """One sends ten times as much as the other, which is backlogged as well."""
    rng = random.Random(seed)
    machine = Machine(max_seqs=8)
    for i in range(660):
        machine.add(f"r{i}", rng.randint(20, 300), rng.randint(5, 80), tenant="small" if i % 11 == 10 else "large")
    while both_wait(machine, "small", "large"):
        machine.step()
    assert min(machine.served.values()) > 5_000
    assert jain(list(machine.served.values())) >= 0.95
    machine.finish()


def test_shares_are_of_work_not_of_requests() -> None:
    """Long answers against long prompts: a token drawn counts as two."""
    rng = random.Random(1)
    machine = Machine(max_seqs=16)
    requests: dict[str, list[Request]] = {"writes": [], "reads": []}
    for i in range(300):
        tenant, prompt, output = ("reads", 400, 10) if i % 3 else ("writes", 20, 100)
        requests[tenant].append(machine.add(f"r{i}", rng.randint(1, 2 * prompt), output, tenant=tenant))
    while both_wait(machine, "writes", "reads"):
        machine.step()
    work = [sum(r.num_computed + len(r.output_ids) + (r.num_tokens if r.finish_reason else 0) for r in begun)
            for begun in requests.values()]  # fmt: skip
    assert min(work) > 1000 and jain([float(w) for w in work]) >= 0.9
    machine.finish()


def test_a_newcomer_after_idle_does_not_monopolise() -> None:
    rng = random.Random(0)
    machine = Machine(max_seqs=8)
    machine.add("early", 50, 5, tenant="new")
    for i in range(400):
        machine.add(f"old{i}", rng.randint(20, 200), 20, tenant="old")
    while machine.served["old"] < 15_000:
        machine.step()
    for i in range(200):
        machine.add(f"new{i}", rng.randint(20, 200), 20, tenant="new")
    before = Counter(machine.served)
    while machine.served["new"] - before["new"] < 5_000:
        machine.step()
    gained = [machine.served[t] - before[t] for t in ("old", "new")]
    assert jain([float(g) for g in gained]) >= 0.95, "what it did not use it cannot claim now"
    machine.finish()


@pytest.mark.parametrize("part", [*range(4), *(pytest.param(part, marks=pytest.mark.long) for part in range(4, 16))])
def test_everyone_is_served_under_any_mix(part: int) -> None:
    """1,000 random mixes of priority and tenant (4,000 in the long run), with a stream of the most urgent that never ends."""
    for seed in range(part * 250, (part + 1) * 250):
        rng = random.Random(seed)
        seconds = rng.choice([20.0, 100.0, 100.0, 100.0])
        machine = Machine(max_seqs=rng.choice([1, 2, 4]), max_tokens=64, seconds_of=lambda load, s=seconds: s)
        low, high = rng.choice([(0, 1), (-3, 3), (-(2**31), 2**31)])
        tenants = [f"t{i}" for i in range(rng.randint(1, 5))]
        requests = [
            machine.add(f"r{i}", rng.randint(1, 8), rng.randint(1, 2), tenant=rng.choice(tenants), priority=rng.randint(low, high))
            for i in range(rng.randint(2, 6))
        ]  # fmt: skip
        levels = {request.terms.priority for request in requests}
        while not all(map(whole, requests)):
            for i in range(2 * machine.limits.max_seqs - len(machine.scheduler._queue)):
                machine.add(f"urgent{len(machine.steps)}-{i}", 1, 1, tenant=rng.choice(tenants), priority=high)
            machine.step()
            longest = len(requests) * (34 * AGE_SECONDS + seconds * len(levels) * 4)
            assert machine.now < longest, f"seed {seed}: {[r.terms for r in requests if not whole(r)]}"


def test_age_makes_up_any_distance() -> None:
    assert aged(0, AGE_SECONDS * 0.99) == 0 and aged(0, AGE_SECONDS) == 1
    assert aged(0, 2 * AGE_SECONDS) == 3
    assert aged(-(2**31), 33 * AGE_SECONDS) > 2**31


def test_priority_decides_before_shares_and_age_after_a_while() -> None:
    machine = Machine(max_seqs=1, seconds_of=lambda load: 4.0)
    low = machine.add("low", 1, 1, priority=0, tenant="a")
    for i in range(5):
        machine.add(f"high{i}", 1, 1, priority=1, tenant="b")
    order = []
    while machine.scheduler.has_work:
        order += [update.request.id for update in machine.step()]
    assert order.index(low.id) == 3, "after 12 of 10 seconds"


def test_the_longest_cached_prefix_goes_first_but_not_for_ever() -> None:
    machine = Machine(max_seqs=1, max_tokens=64)
    system = list(range(5, 53))
    machine.add("first", system, 1)
    machine.finish()
    miss = machine.add("miss", 48, 1)
    for i in range(20):
        machine.add(f"hit{i}", [*system, 100 + i], 1)
    order = []
    while machine.scheduler.has_work:
        order += [update.request.id for update in machine.step()]
    assert order[0] == "hit0" and order[8] == miss.id


def test_an_aborted_prompt_is_no_service() -> None:
    machine = Machine(max_seqs=1)
    machine.add("a", 5000, 5, tenant="a")
    machine.step()
    assert machine.scheduler._shares.served("a") == 5000
    machine.scheduler.abort("a")
    assert machine.scheduler._shares.served("a") == 512


def test_idle_tenants_are_forgotten_in_time() -> None:
    shares = FairShares()
    shares.arrive("waits")
    for i in range(3 * MAX_TENANTS):
        shares.arrive(f"t{i}")
        shares.charge(f"t{i}", i, 0)
        shares.leave(f"t{i}")
    assert len(shares._counters) <= MAX_TENANTS + 1
    assert shares.served(f"t{3 * MAX_TENANTS - 1}") == 3 * MAX_TENANTS - 1
    shares.charge("waits", 10**6, 0)
    shares.arrive("t0")
    assert shares.served("t0") == 10**6, "a return from idle begins where those who wait are"


@pytest.mark.parametrize("tenant", ["", "me"])
def test_the_order_within_a_tenant_is_that_of_arrival(tenant: str) -> None:
    machine = Machine(max_seqs=2)
    requests = [machine.add(f"r{i}", 10 + i % 3, 3, tenant=tenant) for i in range(12)]
    order = []
    while machine.scheduler.has_work:
        order += [u.request.id for u in machine.step() if u.request.finish_reason is FinishReason.LENGTH]
    assert order == [request.id for request in requests]
