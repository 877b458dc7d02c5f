"""Overhead: what a step costs beside the program, and what streams over HTTP cost beside the engine.

Processor time of single threads and processes, which other programs of the machine do not change as they change wall
clocks; only the ratio of speeds over HTTP is of wall clocks.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec

from octavo.bench.http import Sent, Target, run
from octavo.bench.report import Result, Runs, result
from octavo.bench.served import served
from octavo.config import EngineConfig, offline
from octavo.engine.client import EngineError
from octavo.engine.core import Engine
from octavo.engine.messages import Add
from octavo.engine.phases import Phase, StepClock
from octavo.request import SamplingParams

MOST = {1: 0.10}
"""Share of a step that is not the program's, by streams: where one is alone, its steps are short."""
MOST_OF_MANY = 0.05
LEAST_OF_OFFLINE = 0.90
"""Of the speed without HTTP, that streams keep."""
ROUNDS = 3


def measure(config: EngineConfig, num_streams: int, input_len: int, output_len: int) -> Iterator[Result]:
    """Of decoding steps with many streams and with one, then of many streams over HTTP."""
    engine, runs = Engine(offline(config)), Runs(config, 1, "overhead")
    runs.look()
    for count in sorted({num_streams, 1}, reverse=True):
        yield _steps(engine, runs, count, input_len, output_len)
    yield _over_http(config, engine, num_streams, input_len, output_len)
    engine.close()


def _steps(engine: Engine, runs: Runs, num_streams: int, input_len: int, output_len: int) -> Result:
    """The share of Python in the median step that decodes all streams and nothing else."""
    _submit(engine, num_streams, input_len, output_len, temperature=1.0)
    engine.clock = StepClock(time.thread_time)
    encoder = msgspec.msgpack.Encoder()
    steps: list[dict[Phase, float]] = []
    ops: Counter[str] = Counter()
    before = dict(engine.clock.seconds)
    while (output := engine.step()) is not None:
        encoder.encode(output)
        engine.clock.end(Phase.EMIT)
        seconds = {phase: total - before[phase] for phase, total in engine.clock.seconds.items()}
        before = dict(engine.clock.seconds)
        if len(output.progress) == num_streams and all(p.token_ids and p.index for p in output.progress):
            steps.append(seconds)
            if len(steps) == output_len // 2:
                ops = _traced(engine)
                before = dict(engine.clock.seconds)
    shares = [1 - seconds[Phase.RUN] / sum(seconds.values()) for seconds in steps]
    share = statistics.median(shares)
    return result(
        "overhead",
        f"share of a step that is not the program's: {num_streams} streams decode, {input_len} random tokens before them; "
        "processor time of the engine's thread, medians of all steps",
        "%",
        [100 * share],
        step_ms={str(p): round(1000 * statistics.median(s[p] for s in steps), 3) for p in Phase},
        operations_percent={op: round(100 * part / sum(ops.values()), 1) for op, part in ops.most_common()},
        most=100 * MOST.get(num_streams, MOST_OF_MANY),
        held=share <= MOST.get(num_streams, MOST_OF_MANY),
        **runs.beside(engine),
    )


def _traced(engine: Engine) -> Counter[str]:
    """Seconds of each native operation in the next step, all layers together; "wait": of the first thread at barriers."""
    loaded = engine.loaded
    step = loaded.scheduler.schedule()
    assert step is not None
    batch = loaded.batches.build(step)
    found: Counter[str] = Counter()
    for span in loaded.program.trace(batch):
        found[span.name] += span.seconds - span.wait  # type: ignore[assignment]
        found["wait"] += span.wait  # type: ignore[assignment]
    loaded.scheduler.commit(step, loaded.program.run(batch).result())  # the same again, with its result
    return found


def _submit(engine: Engine, num_streams: int, input_len: int, output_len: int, temperature: float = 0.0) -> None:
    draw = random.Random()  # prompts that nothing of is cached
    params = SamplingParams(temperature=temperature, max_tokens=output_len, ignore_eos=True)
    for i in range(num_streams):
        ids = draw.choices(range(engine.bounds.vocab_size), k=input_len)
        engine.add(Add(f"{num_streams}-{i}-{draw.random()}", ids, params, seed=i))


def _offline(engine: Engine, num_streams: int, input_len: int, output_len: int) -> float:
    """Seconds."""
    _submit(engine, num_streams, input_len, output_len)
    started = time.perf_counter()
    while engine.step() is not None:
        pass
    return time.perf_counter() - started


def _over_http(config: EngineConfig, engine: Engine, num_streams: int, input_len: int, output_len: int) -> Result:
    """Speed of streams over HTTP as a share of what `engine` does with the same, in turn: machines drift."""
    offline_seconds, http_seconds, api, client = [], [], 0.0, 0.0
    with served(config) as server:
        target = Target(server.url)
        run(_stream(target, num_streams, input_len, output_len))  # to warm up
        for _ in range(ROUNDS):
            offline_seconds.append(_offline(engine, num_streams, input_len, output_len))
            before, own = _process_seconds(server.pid), time.process_time()
            started = time.perf_counter()
            found = run(_stream(target, num_streams, input_len, output_len))
            http_seconds.append(max(sent.times[-1] for sent in found) - started)
            api += _process_seconds(server.pid) - before
            client += time.process_time() - own
    num_tokens = num_streams * output_len
    shares = [a / b for a, b in zip(offline_seconds, http_seconds, strict=True)]
    share = statistics.median(shares)
    return result(
        "http",
        f"speed of {num_streams} streams over HTTP, {input_len} random tokens in and {output_len} out each, as a share of "
        f"the same without HTTP, {ROUNDS} times in turn; the client is on the same machine",
        "%",
        [100 * each for each in shares],
        api_us_per_token=round(1e6 * api / num_tokens / ROUNDS, 1),
        client_us_per_token=round(1e6 * client / num_tokens / ROUNDS, 1),
        tokens_per_second={
            "offline": round(num_tokens / statistics.median(offline_seconds)),
            "http": round(num_tokens / statistics.median(http_seconds)),
        },
        least=100 * LEAST_OF_OFFLINE,
        held=share >= LEAST_OF_OFFLINE,
    )


async def _stream(target: Target, num_streams: int, input_len: int, output_len: int) -> list[Sent]:
    draw, model = random.Random(), await target.model()
    prompts = [[100 + draw.randrange(200) for _ in range(input_len)] for _ in range(num_streams)]  # plain tokens
    found: list[Sent] = await asyncio.gather(*(target.complete(p, output_len, model=model) for p in prompts))
    for sent in found:
        if sent.status != 200 or sent.num_tokens != output_len:
            raise EngineError(f"{target.url}: status {sent.status}, {sent.num_tokens} tokens; {sent.error:.200}")
    return found


def _process_seconds(pid: int) -> float:
    """Processor time of a process, its children not included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
