"""One prompt by itself: how fast it is read."""

from __future__ import annotations

import time

from octavo.bench.offline import Offline, check
from octavo.bench.report import Result, Runs, result
from octavo.config import EngineConfig


def measure(config: EngineConfig, input_len: int, repeat: int) -> Result:
    """Prompt tokens per second until the first token is drawn. One run to warm up, which is not counted."""
    work = Offline(config)
    runs = Runs(config, repeat + 1, "prefill")
    speeds = []
    for run in runs:
        prompt = work.prompt(input_len)
        started = time.perf_counter()
        work.add(prompt, 1)
        check(sum(work.steps()), 1, work.num_cached)
        if run:
            speeds.append(input_len / (time.perf_counter() - started))
    return result(
        "prefill",
        f"one request of {input_len} random tokens, nothing cached, {config.max_num_batched_tokens} at a time; until its "
        "first token is drawn",
        "tokens/s",
        speeds,
        **runs.beside(work.engine),
    )
