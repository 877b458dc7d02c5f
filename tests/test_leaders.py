"""Equal prefixes are computed once: followers wait for a leader, and one takes over however the leader ends."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from octavo.request import FinishReason, Request, Terms
from tests.paged_engine import Engine, make

PROMPT = [1, 2, 3] * 20  # 60 tokens


def aborted(engine: Engine, leader: Request) -> None:
    assert engine.scheduler.abort(leader.id) == [leader]


def aborted_in_flight(engine: Engine, leader: Request) -> None:
    step = engine.schedule()
    assert step is not None
    engine.scheduler.abort(leader.id)
    engine.commit(step)


def failed(engine: Engine, leader: Request) -> None:
    step = engine.schedule()
    assert step is not None
    result = engine.model.run(engine.batches.build(step))
    result.invalid[:] = True
    engine.scheduler.commit(step, result)
    assert leader.finish_reason is FinishReason.ERROR


def timed_out(engine: Engine, leader: Request) -> None:
    engine.now += 100
    engine.step()
    assert leader.finish_reason is FinishReason.TIMEOUT


def preempted(engine: Engine, leader: Request) -> None:
    engine.scheduler._preempt(engine.scheduler._running[0], engine.now)
    assert leader.tables == []


def flushed(engine: Engine, leader: Request) -> None:
    engine.cache.flush()


def goes_on(engine: Engine, leader: Request) -> None:
    pass


@pytest.mark.parametrize(
    ("how", "most_computed"),
    [
        (goes_on, 60 + 2 + 5), (aborted, 60 + 16 + 5), (aborted_in_flight, 60 + 32 + 5), (failed, 60 + 32 + 5),
        (timed_out, 60 + 16 + 5), (preempted, 60 + 16 + 2 + 5), (flushed, 3 * 60),
    ],
)  # fmt: skip
def test_followers_go_on_however_their_leader_ends(how: Callable[[Engine, Request], None], most_computed: int) -> None:
    engine = Engine(64, max_tokens=16, max_seqs=4)
    terms = Terms(total_seconds=50.0)
    leader = engine.add(make("a", PROMPT, max_tokens=3, prompt_logprobs=0, terms=terms))
    followers = [engine.add(make(i, [*PROMPT[:n], 5, 5], max_tokens=3)) for i, n in (("b", 60), ("c", 40))]
    engine.step()
    assert leader.num_computed > 0 and not any(follower.tables for follower in followers)
    how(engine, leader)
    engine.finish()
    for request in (leader, *followers):
        engine.verify(request)
    assert engine.scheduler.stats()["prompt_tokens"] <= most_computed + 2


@pytest.mark.parametrize(("leads", "wants", "waits"), [(None, 1, False), (2, 1, True), (1, 2, False), (1, None, True)])
def test_nobody_waits_for_blocks_without_the_scores_it_wants(leads: int | None, wants: int | None, waits: bool) -> None:
    engine = Engine(64, max_tokens=32, max_seqs=4)
    leader = engine.add(make("a", PROMPT, max_tokens=2, prompt_logprobs=leads))
    follower = engine.add(make("b", PROMPT, max_tokens=2, prompt_logprobs=wants))
    engine.step()
    assert leader.tables and [gate.reason for gate in follower.gates] == (["leader"] if waits else [])
    engine.finish()
    for request in (leader, follower):
        engine.verify(request)
    if waits:
        assert engine.scheduler.stats()["prompt_tokens"] == 60 + 1
