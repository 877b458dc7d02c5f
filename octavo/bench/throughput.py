"""Offline throughput: many prompts at once, in this process."""

from __future__ import annotations

import time

from octavo.bench.offline import Offline, check
from octavo.bench.report import Result, Runs, result
from octavo.config import EngineConfig


def measure(config: EngineConfig, num_prompts: int, input_len: int, output_len: int, repeat: int) -> Result:
    """Total tokens per second, prompt and output. One run to warm up, which is not counted.

    Raises RuntimeError when a run did not compute what it says: a token taken from the cache, or one too few.
    """
    work = Offline(config)
    runs = Runs(config, repeat + 1, "throughput")
    speeds = []
    for run in runs:
        prompts = [work.prompt(input_len) for _ in range(num_prompts)]
        started = time.perf_counter()
        for prompt in prompts:
            work.add(prompt, output_len)
        num_output = sum(work.steps())
        seconds = time.perf_counter() - started
        check(num_output, num_prompts * output_len, work.num_cached)
        if run:
            speeds.append(num_prompts * (input_len + output_len) / seconds)
    return result(
        "throughput",
        f"offline, {num_prompts} distinct random prompts at once, {input_len} tokens in and {output_len} out each, "
        "greedy, end token ignored, nothing cached; all tokens counted",
        "tokens/s",
        speeds,
        **runs.beside(work.engine),
    )
