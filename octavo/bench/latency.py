"""One stream by itself: how fast tokens follow one another."""

from __future__ import annotations

import random
import time

from octavo.bench.report import Result, machine, result, track
from octavo.config import EngineConfig
from octavo.engine.core import Engine
from octavo.engine.messages import Add
from octavo.request import SamplingParams


def measure(config: EngineConfig, input_len: int, output_len: int, repeat: int) -> Result:
    """Output tokens per second from the first token to the last. One run to warm up, which is not counted."""
    engine = Engine(config)
    draw = random.Random(1)
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    runs, first_tokens = [], []
    for run in track(range(repeat + 1), "one stream"):
        ids = [draw.randrange(engine.bounds.vocab_size) for _ in range(input_len)]
        started = time.perf_counter()
        engine.add(Add(str(run), ids, params, seed=0))
        arrivals: list[float] = []
        while (step := engine.step()) is not None:
            now = time.perf_counter()
            arrivals += [now for progress in step.progress for _ in progress.token_ids]
        if len(arrivals) != output_len:
            raise RuntimeError(f"{len(arrivals)} tokens came out, {output_len} were asked for")
        if run:
            runs.append((output_len - 1) / (arrivals[-1] - arrivals[0]))
            first_tokens.append(arrivals[0] - started)
    ready = engine.loaded.ready(0, 0.0)
    return result(
        "one stream",
        f"one request, {input_len} random tokens in, {output_len} out, greedy; from the first token to the last",
        "tokens/s",
        runs,
        first_token_ms=round(1000 * sorted(first_tokens)[len(first_tokens) // 2], 1),
        **machine(config, ready.isa, ready.threads),
    )
