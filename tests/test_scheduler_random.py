"""The scheduler by random operations: every request ends with exactly the tokens it has when it runs alone."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from octavo.request import FinishReason, ParameterError, Request, Terms
from tests.paged_engine import Door, Engine, make, random_prompt
from tests.paged_model import MAX_TOP, Windows

WINDOWS: list[Windows] = [(None,)] * 5 + [(None, None), (None, 20), (17, None), (33,)]


def random_terms(rng: random.Random) -> Terms:
    limits = [None] * 8 + [0.02, 0.5]
    return Terms(
        priority=rng.choice([0, 0, 1]),
        tenant=rng.choice(["", "a", "b"]),
        total_seconds=rng.choice(limits),
        ttft_seconds=rng.choice(limits),
    )


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
        target_itl=rng.choice([None, None, 0.02]),
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
                request = make(f"r{turn}", prompt, choice, rng.getrandbits(64), terms=random_terms(rng), **params)
                request.arrival = engine.now
                if rng.random() < 0.1:
                    engine.doors.append(Door())
                    request.gates.append(engine.doors[-1])
                requests.append(engine.add(request))
        elif rng.random() < 0.15 and requests:
            victim = rng.choice(requests)
            engine.scheduler.abort(victim.id, rng.choice([-1, victim.choice]))
            engine.scheduler.check()
        elif rng.random() < 0.2 and engine.doors:
            door = engine.doors.pop(rng.randrange(len(engine.doors)))
            door.opened = rng.random() < 0.8
            door.error = None if door.opened else ParameterError("structured", "it will never be ready")
        else:
            for _ in range(rng.randint(1, 12)):
                step = engine.schedule()
                if step is None:
                    break
                if rng.random() < 0.05:  # while the step is in flight
                    victim = rng.choice(requests)
                    engine.scheduler.abort(victim.id, rng.choice([-1, victim.choice]))
                engine.commit(step, rng.choice([0.001, 0.005, 0.02]) + 1e-4 * step.num_tokens)
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


@pytest.mark.parametrize("part", [*range(4), *(pytest.param(part, marks=pytest.mark.long) for part in range(4, 20))])
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
        "timeout",
        "error",
        "preempted",
        "recomputed",
        "left the window",
        "kept scores",
    ):
        assert seen[what] > 0, f"no history reached: {what}"
