"""Offline throughput: many prompts at once, in this process."""

from __future__ import annotations

import random
import time

from octavo.bench.report import Result, machine, result, track
from octavo.config import ConfigError, EngineConfig, offline
from octavo.engine.core import Engine
from octavo.engine.messages import Add
from octavo.request import SamplingParams


def measure(config: EngineConfig, num_prompts: int, input_len: int, output_len: int, repeat: int) -> Result:
    """Total tokens per second, prompt and output. One run to warm up, which is not counted.

    No two prompts begin with the same token, so that nothing can be taken from the prefix cache.

    Raises RuntimeError when a run did not compute what it says: a token taken from the cache, or one too few.
    """
    engine = Engine(offline(config))
    draw = random.Random(0)
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    vocabulary = range(engine.bounds.vocab_size)
    if num_prompts * (repeat + 1) > len(vocabulary):
        raise ConfigError(f"the vocabulary has {len(vocabulary)} tokens: too few for so many prompts that all differ")
    firsts = iter(draw.sample(vocabulary, num_prompts * (repeat + 1)))
    runs = []
    for run in track(range(repeat + 1), "throughput"):
        prompts = [[next(firsts), *draw.choices(vocabulary, k=input_len - 1)] for _ in range(num_prompts)]
        started = time.perf_counter()
        for p, ids in enumerate(prompts):
            engine.add(Add(f"{run}-{p}", ids, params, seed=0))
        num_output = num_cached = 0
        while (step := engine.step()) is not None:
            for progress in step.progress:
                num_output += len(progress.token_ids)
                if progress.finish_reason is not None:
                    num_cached += progress.num_cached
        seconds = time.perf_counter() - started
        if num_cached or num_output != num_prompts * output_len:
            raise RuntimeError(f"{num_output} tokens came out and {num_cached} were cached: this run measures nothing")
        if run:
            runs.append(num_prompts * (input_len + output_len) / seconds)
    return result(
        "throughput",
        f"offline, {num_prompts} distinct random prompts at once, {input_len} tokens in and {output_len} out each, "
        "greedy, end token ignored, nothing cached; all tokens counted",
        "tokens/s",
        runs,
        **machine(config, *_level(engine)),
    )


def _level(engine: Engine) -> tuple[str, int]:
    ready = engine.loaded.ready(0, 0.0)
    return ready.isa, ready.threads
