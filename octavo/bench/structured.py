"""What grammars cost: the streams that have one, and those beside them."""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Iterator

from octavo.bench.report import Result, Runs, result
from octavo.config import EngineConfig
from octavo.engine.core import Engine
from octavo.engine.messages import Add
from octavo.request import SamplingParams, Structured

ENDLESS = Structured.json_schema({
    "type": "array",
    "minItems": 10_000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 30},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "tags": {"type": "array", "items": {"enum": ["new", "old", "borrowed", "blue"]}, "maxItems": 3},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    },
})  # fmt: skip
"""No answer ends before its last token."""

LEAST_THROUGHPUT = 90
MOST_GAP = 120
"""Percent, at which `--check` passes."""

NUM_STREAMS = 16
STEPS_PER_ARRIVAL = 16


def cost(config: EngineConfig, num_prompts: int, input_len: int, output_len: int, repeat: int) -> Result:
    """Throughput with a schema in percent of that without, in pairs of runs. One pair to warm up, which is not counted."""
    engine = Engine(config)
    draw = random.Random(0)
    firsts = iter(draw.sample(range(engine.bounds.vocab_size), 2 * num_prompts * (repeat + 1)))
    speeds: dict[bool, list[float]] = {False: [], True: []}
    runs = Runs(config, repeat + 1, "structured output")
    for run in runs:
        for has_schema in (False, True):
            params = SamplingParams(
                temperature=0, max_tokens=output_len, ignore_eos=True, structured=ENDLESS if has_schema else None
            )
            prompts = [
                [next(firsts), *draw.choices(range(engine.bounds.vocab_size), k=input_len - 1)]
                for _ in range(num_prompts)
            ]
            started = time.perf_counter()
            for p, ids in enumerate(prompts):
                engine.add(Add(f"{run}-{has_schema}-{p}", ids, params, seed=0))
            num_output = 0
            for progress_ids in _steps(engine):
                num_output += len(progress_ids)
            if num_output != num_prompts * output_len:
                raise RuntimeError(f"{num_output} tokens came out, {num_prompts * output_len} were asked for")
            if run:
                speeds[has_schema].append(num_prompts * (input_len + output_len) / (time.perf_counter() - started))
    num_forced = engine.stats().forced_tokens
    engine.close()
    percents = [100 * with_schema / plain for plain, with_schema in zip(speeds[False], speeds[True], strict=True)]
    return result(
        "structured output",
        f"offline, {num_prompts} random prompts at once, {input_len} tokens in and {output_len} out each, greedy, "
        "with a JSON schema and without",
        "% of plain throughput",
        percents,
        held=statistics.median(percents) >= LEAST_THROUGHPUT,
        bound=f"at least {LEAST_THROUGHPUT} %",
        forced=f"{100 * num_forced / (num_prompts * output_len * (repeat + 1)):.0f} % of the tokens",
        plain=f"{statistics.median(speeds[False]):.0f} tokens/s",
        structured=f"{statistics.median(speeds[True]):.0f} tokens/s",
        **runs.beside(engine),
    )


def slow_grammars(config: EngineConfig, output_len: int, repeat: int) -> Result:
    """The slowest percent of gaps between tokens of plain streams: beside requests with slow grammars, in percent of
    what it is beside the same requests without."""
    engine = Engine(config)
    slow = _slow()
    gaps: dict[bool, list[float]] = {False: [], True: []}
    runs = Runs(config, repeat + 1, "slow grammars")
    for run in runs:
        for has_grammars in (False, True):
            p99 = 1000 * _p99_gap(engine, f"{run}-{has_grammars}", output_len, slow if has_grammars else None)
            if run:
                gaps[has_grammars].append(p99)
    engine.close()
    percents = [100 * with_grammar / plain for plain, with_grammar in zip(gaps[False], gaps[True], strict=True)]
    return result(
        "slow grammars",
        f"{NUM_STREAMS} streams of {output_len} tokens; every {STEPS_PER_ARRIVAL} steps another request, with a grammar "
        "that takes long to compile or cannot be, and without; p99 of the gaps of the streams",
        "% of the gap without",
        percents,
        held=statistics.median(percents) <= MOST_GAP,
        bound=f"at most {MOST_GAP} %",
        without=f"{statistics.median(gaps[False]):.1f} ms",
        beside=f"{statistics.median(gaps[True]):.1f} ms",
        **runs.beside(engine),
    )


def _p99_gap(engine: Engine, name: str, output_len: int, slow: Iterator[Structured] | None) -> float:
    draw = random.Random(name)
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    for stream in range(NUM_STREAMS):
        engine.add(Add(f"stream-{name}-{stream}", draw.sample(range(engine.bounds.vocab_size), 32), params, seed=0))
    seen: dict[str, float] = {}
    gaps = []
    num_open = NUM_STREAMS
    num_steps = 0
    while num_open:
        if num_steps % STEPS_PER_ARRIVAL == 0:
            beside = SamplingParams(temperature=0, max_tokens=16, structured=next(slow) if slow else None)
            ids = draw.sample(range(engine.bounds.vocab_size), 16)
            engine.add(Add(f"other-{name}-{num_steps}", ids, beside, seed=0))
        num_steps += 1
        output = engine.step()
        now = time.perf_counter()
        for progress in output.progress if output is not None else ():
            if progress.id.startswith("stream"):
                if progress.id in seen:
                    gaps.append(now - seen[progress.id])
                seen[progress.id] = now
                num_open -= progress.finish_reason is not None
    for _ in _steps(engine):
        pass
    return statistics.quantiles(gaps, n=100)[98]


def _slow() -> Iterator[Structured]:
    """All different, so that each is compiled: wide objects, long lists of choices, automata of great size, and one in
    four that is refused at a limit."""
    number = 0
    while True:
        number += 1
        wide = {f"property_{number}_{i}": {"type": "string"} for i in range(400)}
        yield Structured.json_schema({"type": "object", "properties": wide, "required": list(wide)})
        yield Structured("regex", f"({number}|(.*a.{{11}})|(.*b.{{12}})|(.*c.{{13}}))x")
        yield Structured("choice", json.dumps([f"choice {number} {i}" for i in range(5000)]))
        yield Structured.json_schema({"type": "integer", "multipleOf": 100_000_007 + 2 * number})


def _steps(engine: Engine) -> Iterator[list[int]]:
    """Tokens as they come, until nothing is open."""
    while engine.has_work:
        output = engine.step()
        if output is None:
            engine.wait(1)
            continue
        for progress in output.progress:
            if progress.error is not None and not progress.id.startswith("other"):
                raise RuntimeError(progress.error)
            yield progress.token_ids
