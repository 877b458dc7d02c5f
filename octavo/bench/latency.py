"""One stream by itself: how fast tokens follow one another."""

from __future__ import annotations

import statistics
import time

from octavo.bench.offline import Offline, check
from octavo.bench.report import Result, Runs, result
from octavo.config import EngineConfig


def measure(config: EngineConfig, input_len: int, output_len: int, repeat: int) -> Result:
    """Output tokens per second from the first token to the last. One run to warm up, which is not counted."""
    work = Offline(config)
    runs = Runs(config, repeat + 1, "one stream")
    speeds, first_tokens = [], []
    for run in runs:
        prompt = work.prompt(input_len)
        started = time.perf_counter()
        work.add(prompt, output_len)
        arrivals = [time.perf_counter() for count in work.steps() for _ in range(count)]
        check(len(arrivals), output_len, work.num_cached)
        if run:
            speeds.append((output_len - 1) / (arrivals[-1] - arrivals[0]))
            first_tokens.append(arrivals[0] - started)
    token_bytes = work.weight_bytes + work.kv_bytes(input_len + output_len / 2)
    return result(
        "one stream",
        f"one request, {input_len} random tokens in, {output_len} out, greedy; from the first token to the last",
        "tokens/s",
        speeds,
        first_token_ms=round(1000 * statistics.median(first_tokens), 1),
        **runs.memory_bound(token_bytes, 1 / statistics.median(speeds)),
        **runs.beside(work.engine),
    )
