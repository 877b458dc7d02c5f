"""Who is refused when too much waits, and what that keeps: in simulated time."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from octavo.bench.stall import percentile
from octavo.engine.messages import Add, Stats
from octavo.engine.overload import Asking, Backlog, Overloaded, QueueBounds
from octavo.request import Request, SamplingParams, Terms
from octavo.sched.cost import Load
from tests.simulated import Machine
from tests.test_fairness import jain


def add(tokens: int, n: int = 1, id: str = "r", **terms: object) -> Add:
    return Add(id, [1] * tokens, SamplingParams(n=n), seed=0, terms=Terms(**terms))  # type: ignore[arg-type]


def asking(tokens: int = 1, **terms: object) -> Asking:
    return Asking.of(add(tokens, **terms))  # type: ignore[arg-type]


def backlog_of(requests: int | None, tokens: int | None, seqs: int = 1) -> Backlog:
    return Backlog(seqs, QueueBounds(requests, tokens))


def alike(load: Load) -> float:
    """A token of a prompt takes as long as one of a stream: 600 a second, whatever the batch."""
    return 5e-3 + 1.7e-3 * load.num_tokens + 1e-7 * load.num_context


def fast(load: Load) -> float:
    """What binds is the number of slots."""
    return 1e-3 + 2.5e-4 * load.num_tokens + 5e-7 * load.num_context + 2e-4 * load.num_rows


def test_it_counts_what_is_on_the_way() -> None:
    backlog, idle = backlog_of(2, None, seqs=2), Stats()
    for i in range(4):  # two run, two wait: none of them known to the engine yet
        backlog.check(idle, asking())
        backlog.sent(add(10, id=f"r{i}"))
    with pytest.raises(Overloaded, match="2 requests wait, 2 of them yours, max-queued-requests is 2"):
        backlog.check(idle, asking())
    busy = Stats(received=4, num_running=2, num_waiting=2, waiting_seconds=4.2)
    with pytest.raises(Overloaded, match="try again in 5 s") as refused:
        backlog.check(busy, asking())
    assert (refused.value.bound, refused.value.retry_after) == ("max_queued_requests", 5)
    backlog.check(Stats(received=4, num_running=2, num_waiting=1), asking())
    backlog.check(Stats(received=4, num_running=1), asking())


def test_without_a_queue_only_those_who_would_wait_are_refused() -> None:
    backlog = backlog_of(0, None)
    backlog.check(Stats(), asking())
    backlog.sent(add(1))
    with pytest.raises(Overloaded):
        backlog.check(Stats(), asking())
    backlog.check(Stats(received=1), asking())


def test_nothing_is_too_large_and_a_prompt_counts_until_its_first_token() -> None:
    backlog = backlog_of(None, 100, seqs=8)
    backlog.check(Stats(), asking(10**6))
    backlog.sent(add(10**6, n=3))  # computed once
    with pytest.raises(Overloaded, match="1000000 prompt tokens wait, 1000000 of them yours, max-queued-tokens is 100"):
        backlog.check(Stats(received=3, num_running=3), asking(10**6))  # five slots are free
    backlog.begun("r")
    backlog.check(Stats(received=3, num_running=3), asking(10**6))


def test_a_short_prompt_is_not_refused_for_a_long_one() -> None:
    """It goes beside it: as many tokens of both are computed. Nor is anybody for what has a lower priority."""
    backlog = backlog_of(None, 256, seqs=8)
    backlog.sent(add(8000, id="long"))
    backlog.sent(add(8000, id="batch", priority=-1000))
    backlog.check(Stats(), asking(128))
    with pytest.raises(Overloaded):
        backlog.check(Stats(), asking(128, priority=-1000))
    with pytest.raises(Overloaded):
        backlog.check(Stats(), asking(8000))
    backlog.check(Stats(), asking(8000, priority=1))


def test_one_tenant_leaves_room_for_others() -> None:
    backlog = backlog_of(12, None)
    waiting = Counter[str]()
    for tenant in "a" * 50 + "b" * 50 + "c" * 50:
        num_waiting = sum(waiting.values())
        try:
            backlog.check(Stats(num_running=1, num_waiting=num_waiting, received=num_waiting), asking(tenant=tenant))
        except Overloaded:
            continue
        waiting[tenant] += 1
        backlog.sent(add(1, id=f"{tenant}{waiting[tenant]}", tenant=tenant))
    assert waiting == {"a": 12, "b": 6, "c": 4}


@pytest.mark.parametrize(("bounds", "least"), [(QueueBounds(16, None), 0.95), (QueueBounds(None, 256), 0.85)])
def test_tenants_are_served_alike_at_overload(bounds: QueueBounds, least: float) -> None:
    """One sends ten times as much as the other, which sends more than its half as well. Shares of two prompts are coarse."""
    crowd = Crowd(bounds, 40.0, seed=1, tenants=["small"] + 10 * ["large"])
    assert jain([float(n) for n in crowd.served_of.values()]) >= least
    assert crowd.served_of.total() > 100


@pytest.mark.parametrize(("machine", "seconds"), [(alike, 60), (fast, 20)])
def test_those_accepted_at_overload_are_served_as_in_usual_times(
    machine: Callable[[Load], float], seconds: float
) -> None:
    """Requests at random times, at 0.8 and at 3 times what can be served, 16 at once. Where nobody waits for a slot and two
    prompts at most come first, the first token is as soon; a queue instead serves hardly more, and later."""

    def crowd(bounds: QueueBounds, rate: float) -> Crowd:
        return Crowd(bounds, rate, seed=0, machine=machine, seconds=seconds)

    bounded, patient = QueueBounds(0, 2 * 128), QueueBounds(16, None)
    capacity = crowd(bounded, 15.0).per_second
    usual, over = (crowd(bounded, load * capacity) for load in (0.8, 3.0))
    assert over.first_p99 <= 1.3 * usual.first_p99 and over.gap_p99 <= 1.3 * usual.gap_p99
    assert usual.num_refused < 0.15 * usual.num_sent and over.num_refused > 0.5 * over.num_sent
    late = crowd(patient, 3 * capacity)
    assert over.per_second >= 0.97 * late.per_second and late.first_p99 > 2 * over.first_p99


class Crowd:
    """Requests of 128 tokens in and 64 out at random times."""

    def __init__(
        self, bounds: QueueBounds, rate: float, seed: int, tenants: list[str] | None = None,
        machine: Callable[[Load], float] = alike, seconds: float = 60,
    ) -> None:  # fmt: skip
        self.num_sent = self.num_refused = 0
        self.served_of = Counter[str]()
        self._seconds = seconds
        self._play(Machine(seconds_of=machine), Backlog(16, bounds), rate, random.Random(seed), tenants or [""])

    def _play(self, machine: Machine, backlog: Backlog, rate: float, rng: random.Random, tenants: list[str]) -> None:
        for i in range(4):
            machine.add(f"warm{i}", 200, 20)
        machine.finish()
        begins = machine.now
        middle, ends = begins + self._seconds / 3, begins + self._seconds
        sent: list[tuple[float, Request]] = []
        for at in itertools.takewhile(lambda at: at < ends, times(rng, begins, rate)):
            while machine.now < at and machine.scheduler.has_work:
                for update in machine.step():
                    backlog.begun(update.request.id)
            machine.now = max(machine.now, at)
            tenant = rng.choice(tenants)
            self.num_sent += 1
            try:
                backlog.check(Stats(**machine.scheduler.stats(), received=len(sent)), asking(128, tenant=tenant))
            except Overloaded:
                self.num_refused += 1
                continue
            backlog.sent(add(128, id=f"r{len(sent)}", tenant=tenant))
            sent.append((at, machine.add(f"r{len(sent)}", 128, 64, tenant=tenant)))
        self.served_of.update(request.terms.tenant for _, request in sent)
        machine.finish()
        tokens = [machine.token_times[request.key] for _, request in sent]
        busy = sum(middle <= at < ends for each in tokens for at in each)
        self.per_second = busy / 64 / (ends - middle)  # when it had been busy for a while
        self.first_p99 = percentile([each[0] - at for (at, _), each in zip(sent, tokens, strict=True)], 0.99)
        self.gap_p99 = percentile([gap for _, request in sent for gap in machine.gaps(request)], 0.99)


def times(rng: random.Random, now: float, rate: float) -> Iterator[float]:
    while True:
        now += rng.expovariate(rate)
        yield now
