"""Many streams that all decode, at one length of context."""

from __future__ import annotations

import statistics
import time

from octavo.bench.offline import Offline, check
from octavo.bench.report import Result, Runs, result
from octavo.config import ConfigError, EngineConfig

NUM_STEPS = 32


def measure(config: EngineConfig, num_streams: int, context: int, repeat: int) -> Result:
    """Output tokens per second of NUM_STEPS steps, in the middle of which every stream has `context` tokens.

    The prompts are computed once; in each run they come from the prefix cache, so that all streams begin together.
    One run to warm up, which is not counted.
    """
    if context < NUM_STEPS:
        raise ConfigError(f"the context of the streams must be at least {NUM_STEPS} tokens; got {context}")
    if not config.prefix_caching or num_streams > config.max_num_seqs:
        raise ConfigError(f"{num_streams} streams that begin together need prefix_caching and as many max_num_seqs")
    work = Offline(config)
    prompts = [work.prompt(context - NUM_STEPS // 2) for _ in range(num_streams)]
    for prompt in prompts:
        work.add(prompt, 1)
    check(sum(work.steps()), num_streams)
    runs = Runs(config, repeat + 1, "decode")
    seconds = []
    for run in runs:
        for prompt in prompts:
            work.add(prompt, NUM_STEPS + 1)
        moments = []
        for count in work.steps():
            moments.append(time.perf_counter())
            if count != num_streams:
                raise RuntimeError(f"{count} tokens came out of a step of {num_streams} streams: the KV cache is small")
        if len(moments) != NUM_STEPS + 1:
            raise RuntimeError(f"{len(moments)} steps were made of {NUM_STEPS + 1}: this run measures nothing")
        if run:
            seconds.append((moments[-1] - moments[0]) / NUM_STEPS)
    step_bytes = work.weight_bytes + num_streams * work.kv_bytes(context)
    return result(
        "decode",
        f"{num_streams} streams of random tokens, each with a context of {context} in the middle of {NUM_STEPS} steps, "
        "greedy",
        "tokens/s",
        [num_streams / each for each in seconds],
        step_ms=round(1000 * statistics.median(seconds), 2),
        **runs.memory_bound(step_bytes, statistics.median(seconds)),
        **runs.beside(work.engine),
    )
