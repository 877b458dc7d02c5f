"""Limits of time and of the queue: what is refused, when, and in which words."""

from __future__ import annotations

import concurrent.futures
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo.request import FinishReason, Request, SamplingParams, Terms
from octavo.sched.deadlines import LEAST_LOOKS, Deadlines
from octavo.sched.live import Live, Update
from tests.serving import Server
from tests.simulated import Machine, whole

COMPLETIONS = "/v1/completions"


# Limits of time, in simulated time


def warm(machine: Machine) -> None:
    machine.add("warm", 1000, 50)
    machine.finish()


def run(machine: Machine) -> dict[str, Update]:
    """The last update of each request."""
    last = {}
    while machine.scheduler.has_work:
        for update in machine.step():
            last[update.request.id] = update
        machine.scheduler.check()
    return last


def test_a_request_that_waits_too_long_is_ended() -> None:
    machine = Machine(max_seqs=1)
    warm(machine)
    machine.add("first", 50, 1000)
    late = machine.add("late", 50, 5, ttft_seconds=0.5)
    last = run(machine)
    assert late.finish_reason is FinishReason.TIMEOUT and late.output_ids == [] and late.num_computed == 0
    assert last["late"].param == "ttft_seconds"
    assert "the first token" in (last["late"].error or "") and "0.5 s" in (last["late"].error or "")
    assert last["first"].request.finish_reason is FinishReason.LENGTH


def test_a_hopeless_prompt_is_not_computed() -> None:
    machine = Machine()
    warm(machine)
    before = machine.served[""]
    hopeless = machine.add("hopeless", 8000, 5, ttft_seconds=2.0)  # takes 10 s
    also = machine.add("also", 8000, 5, total_seconds=2.0)
    fine = machine.add("fine", 8000, 5, ttft_seconds=60.0)
    last = run(machine)
    for request in (hopeless, also):
        assert request.finish_reason is FinishReason.TIMEOUT
        assert "cannot be there within the limit of 2 s" in (last[request.id].error or "")
    assert last["hopeless"].param == "ttft_seconds" and last["also"].param == "total_seconds"
    assert machine.served[""] - before == 8000 + 4 and whole(fine)


def test_nothing_is_hopeless_where_nothing_like_it_ran() -> None:
    """The first step of all, of one token, says nothing of four thousand. Those themselves do."""
    machine = Machine()
    machine.add("first", 1, 1)
    machine.finish()
    fine = machine.add("fine", 4000, 1, ttft_seconds=60.0)
    machine.finish()
    assert whole(fine)
    machine = Machine()
    hopeless = machine.add("hopeless", 6000, 1, ttft_seconds=4.0)
    began = machine.now
    run_until(machine, hopeless)
    assert hopeless.finish_reason is FinishReason.TIMEOUT and machine.now - began < 3.9


def test_what_is_cached_is_not_hopeless() -> None:
    machine = Machine()
    prompt = list(range(8000))
    machine.add("first", prompt, 1)
    machine.finish()
    second = machine.add("second", [*prompt, 1], 5, ttft_seconds=2.0)
    machine.finish()
    assert whole(second)


def test_a_prefill_that_falls_behind_is_dropped_before_its_time_is_up() -> None:
    machine = Machine()
    warm(machine)
    slow = machine.add("slow", 6000, 5, ttft_seconds=7.0)  # enough alone
    machine.step()
    for i in range(4):
        machine.add(f"rival{i}", 400, 3000)
    began = machine.now
    run_until(machine, slow)
    assert slow.finish_reason is FinishReason.TIMEOUT
    assert machine.now - began < 6.0


def run_until(machine: Machine, request: Request) -> None:
    while request.finish_reason is None:
        machine.step()


def test_the_whole_answer_has_a_limit_too() -> None:
    machine = Machine()
    warm(machine)
    request = machine.add("r", 50, 5000, total_seconds=1.0, ttft_seconds=0.5)
    began = machine.now
    run_until(machine, request)
    assert request.finish_reason is FinishReason.TIMEOUT and len(request.output_ids) > 50
    assert 1.0 <= machine.now - began < 1.1
    assert machine.scheduler.stats()["kv_blocks_held"] == 0


def test_limits_of_those_who_ended_are_forgotten() -> None:
    machine = Machine()
    for _ in range(3):
        machine.add("r", 10, 2, total_seconds=5.0)
        machine.finish()
    machine.now += 10
    again = machine.add("r", 10, 2)
    machine.finish()
    assert whole(again) and machine.scheduler.next_deadline() is None


def test_limits_far_away_keep_nothing_of_who_ended() -> None:
    over: set[Live] = set()
    deadlines = Deadlines(lambda live: 0.0, over.__contains__)
    patient = Terms(total_seconds=604_800.0, ttft_seconds=604_800.0)
    for number in range(10 * LEAST_LOOKS):
        live = Live(Request(str(number), 0, [1], SamplingParams(), 0, terms=patient), number, 1)
        deadlines.add(live)
        assert list(deadlines.missed(0.0)) == []
        if number % 10:
            over.add(live)
    assert 2 * LEAST_LOOKS <= len(deadlines) <= 5 * LEAST_LOOKS  # two of each tenth request are still to come
    assert len(list(deadlines.missed(604_800.0))) == 2 * LEAST_LOOKS


def test_what_stop_strings_end_counts_for_the_time_to_come() -> None:
    """They are found in the API process, which then aborts: such outputs take as long as others."""
    predicted = []
    for max_tokens in (100, 1000):
        machine = Machine(max_seqs=4)
        for i in range(40):
            machine.add(f"r{i}", 50, max_tokens)
        while machine.scheduler.has_work:
            machine.step()
            for live in list(machine.scheduler._running):
                if len(live.request.output_ids) == 100:
                    machine.scheduler.abort(live.request.id)
        for i in range(8):
            machine.add(f"late{i}", 50, max_tokens)
        predicted.append(machine.scheduler.stats()["waiting_seconds"])
    assert predicted[1] == pytest.approx(predicted[0], rel=0.1)
    assert predicted[0] > 0.5


# Over HTTP


@pytest.fixture(scope="module")
def server(data: Path) -> Iterator[Server]:
    options = (
        "--max-num-seqs",
        "1",
        "--max-queued-requests",
        "1",
        "--num-threads",
        "1",
        "--ttft-timeout-seconds",
        "60",
    )
    with Server(data / "arch" / "llama", *options) as running:
        yield running


def body(**fields: Any) -> dict[str, Any]:
    return {"prompt": [1, 2, 3], "max_tokens": 30, "temperature": 0, "ignore_eos": True, **fields}


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_is_a_429(server: Server, stream: bool) -> None:
    """However many come at once: one is served, one waits, and the others are refused with Retry-After."""

    def send(i: int) -> httpx.Response:
        return server.post(COMPLETIONS, body(prompt=[1, 2, i + 1], stream=stream))

    refused = 'octavo_requests_refused_total{bound="max_queued_requests"}'
    before = server.metric(refused)
    with concurrent.futures.ThreadPoolExecutor(12) as pool, server.frozen():
        sent = [pool.submit(send, i) for i in range(12)]
        server.wait_for(refused, before + 10)
    answers = [answer.result() for answer in sent]
    assert Counter(answer.status_code for answer in answers) == {200: 2, 429: 10}
    for answer in answers:
        if answer.status_code == 429:
            assert int(answer.headers["retry-after"]) >= 1
            assert "max-queued-requests is 1" in answer.json()["error"]["message"]
    server.wait_idle()
    server.complete(**body())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("field", ["timeout", "ttft_timeout"])
def test_a_limit_of_the_request_is_a_408(server: Server, field: str, stream: bool) -> None:
    answer = server.post(COMPLETIONS, body(**{field: 1e-6}, stream=stream))
    assert answer.status_code == 408
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == (field, field) and "limit of 1e-06 s" in error["message"]
    server.wait_for("octavo_requests_running", 0)


def test_a_limit_of_the_server_is_a_504(data: Path) -> None:
    with Server(data / "arch" / "llama", "--timeout-seconds", "0.000001", "--num-threads", "1") as server:
        answer = server.post(COMPLETIONS, body())
        assert answer.status_code == 504 and answer.json()["error"]["code"] == "timeout"
        assert server.post(COMPLETIONS, body(timeout=1e-7)).status_code == 408
        assert server.post(COMPLETIONS, body(timeout=10)).status_code == 504, "no more patient than the server"


@pytest.mark.parametrize("value", [0, -1, "1", True])
def test_limits_are_checked(server: Server, value: object) -> None:
    answer = server.post(COMPLETIONS, body(timeout=value))
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "timeout"


def test_the_series_of_the_scheduler(server: Server) -> None:
    server.complete(**body(user="me"))
    for name in (
        "octavo_recomputed_ratio", "octavo_step_prediction_error", "octavo_tokens_waiting",
        "octavo_engine_step_seconds_predicted_total", 'octavo_requests_refused_total{bound="ttft_timeout"}',
    ):  # fmt: skip
        assert server.metric(name) >= 0
    assert server.metric('octavo_tenant_tokens_total{tenant="me"}') >= 33
