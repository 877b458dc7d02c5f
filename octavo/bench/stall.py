"""What a long prompt does to streams beside it."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from octavo.bench.report import Result, Runs, result
from octavo.bench.stolen import stolen_seconds
from octavo.config import MAX_ITL, EngineConfig
from octavo.engine.core import Engine
from octavo.engine.messages import Abort, Add
from octavo.request import SamplingParams

NUM_STREAMS = 16
STREAM_PROMPT = 64
TOKENS_BEFORE = 20
"""Of each stream, before the prompt comes."""

FACTOR = 3
LEAST_SECONDS = 0.05
"""A gap may be so many times the usual one, or so long."""


class Run(NamedTuple):
    """Seconds."""

    usual: float  # median gap of the same tokens of the streams by themselves
    gaps: list[float]  # beside the prompt
    undisturbed: list[float]  # those of which the host of the machine took nothing
    alone: float  # the prompt by itself
    beside: float  # and beside the streams
    num_steps: int

    @property
    def p99(self) -> float:
        return percentile(self.gaps, 0.99)

    @property
    def bound(self) -> float:
        return max(LEAST_SECONDS, FACTOR * self.usual)

    @property
    def prefill_bound(self) -> float:
        return 2 * self.alone + self.num_steps * self.usual


def measure(config: EngineConfig, prompt_len: int, repeat: int) -> Result:
    """Milliseconds of the 99th percentile of the streams' gaps beside the prompt."""
    seen = Runs(config, repeat, "long prompt beside streams")
    runs = _runs(config, prompt_len, seen)
    without_target = dataclasses.replace(config, target_itl=MAX_ITL)
    (fixed,) = _runs(without_target, prompt_len, Runs(without_target, 1, "long prompt in large portions"))
    worst = max(runs, key=lambda run: run.p99 / run.bound)
    slowest = max(runs, key=lambda run: run.beside / run.prefill_bound)
    return result(
        "stall",
        f"{NUM_STREAMS} greedy streams, and a prompt of {prompt_len} random tokens that comes between; the 99th percentile "
        "of the gaps between two tokens of a stream until the prompt's first token",
        "ms",
        [1000 * run.p99 for run in runs],
        held=all(run.p99 <= run.bound and run.beside <= run.prefill_bound for run in runs),
        usual_gap_ms=round(1000 * worst.usual, 1),
        bound_ms=round(1000 * worst.bound, 1),
        longest_gap_ms=round(1000 * max(worst.gaps), 1),
        undisturbed_p99_ms=round(1000 * percentile(worst.undisturbed, 0.99), 1) if worst.undisturbed else None,
        prefill_s=round(slowest.beside, 3),
        prefill_alone_s=round(slowest.alone, 3),
        prefill_bound_s=round(slowest.prefill_bound, 3),
        fixed_chunk_p99_ms=round(1000 * fixed.p99, 1),
        fixed_chunk_prefill_s=round(fixed.beside, 3),
        **seen.beside(),
    )


def _runs(config: EngineConfig, prompt_len: int, runs: Runs) -> list[Run]:
    engine = Engine(config)
    draw = random.Random(2)
    _prefill(engine, draw, "warm", prompt_len)
    return [_run(engine, draw, str(run), prompt_len) for run in runs]


def _run(engine: Engine, draw: random.Random, name: str, prompt_len: int) -> Run:
    alone = _prefill(engine, draw, f"{name}-alone", prompt_len)
    prompts = [_random_ids(engine, draw, STREAM_PROMPT) for _ in range(NUM_STREAMS)]
    with _streams(engine, prompts, f"{name}-beside") as times:
        began = time.perf_counter()
        long = f"{name}-long"
        engine.add(Add(long, _random_ids(engine, draw, prompt_len), SamplingParams(max_tokens=1), seed=0))
        num_steps = 0
        disturbed: set[float] = set()  # ends of steps
        while long not in times:
            before = stolen_seconds()
            now = _step(engine, times)
            num_steps += 1
            if stolen_seconds() != before:
                disturbed.add(now)
        beside = time.perf_counter() - began
        del times[long]
        gaps = [gap for seen in times.values() for gap in _gaps(seen)]
        undisturbed = [
            b - a for seen in times.values() for a, b in itertools.pairwise(seen) if b not in disturbed
        ]  # fmt: skip
    with _streams(engine, prompts, f"{name}-usual") as times:  # as many tokens, since steps grow with the context
        for _ in range(num_steps):
            _step(engine, times)
        usual = statistics.median(gap for seen in times.values() for gap in _gaps(seen))
    return Run(usual, gaps, undisturbed, alone, beside, num_steps)


@contextlib.contextmanager
def _streams(engine: Engine, prompts: Sequence[list[int]], name: str) -> Iterator[dict[str, list[float]]]:
    """Greedy streams that have begun, and the times of their tokens from the last on; they end with the block."""
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    ids = [f"{name}-{i}" for i in range(len(prompts))]
    for id, prompt in zip(ids, prompts, strict=True):
        engine.add(Add(id, prompt, params, seed=0))
    times: dict[str, list[float]] = {id: [] for id in ids}
    while min(map(len, times.values())) <= TOKENS_BEFORE:
        _step(engine, times)
    for seen in times.values():
        del seen[:-1]
    yield times
    for id in ids:
        engine.abort(Abort(id))
    while engine.step() is not None:
        pass


def _prefill(engine: Engine, draw: random.Random, id: str, prompt_len: int) -> float:
    """Seconds of a prompt by itself."""
    began = time.perf_counter()
    engine.add(Add(id, _random_ids(engine, draw, prompt_len), SamplingParams(max_tokens=1), seed=0))
    while engine.step() is not None:
        pass
    return time.perf_counter() - began


def _step(engine: Engine, times: dict[str, list[float]]) -> float:
    """When it ended."""
    output = engine.step()
    if output is None:
        raise RuntimeError("a stream ended: the context is too short for this workload")
    now = time.perf_counter()
    for progress in output.progress:
        times.setdefault(progress.id, []).extend([now] * len(progress.token_ids))
    return now


def _random_ids(engine: Engine, draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(engine.bounds.vocab_size) for _ in range(count)]


def _gaps(times: Sequence[float]) -> list[float]:
    return [b - a for a, b in itertools.pairwise(times)]


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of all do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-int(share * 10_000) * len(ordered) // 10_000) - 1)]
