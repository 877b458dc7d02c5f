"""Streams over HTTP, from a server of our own or any with OpenAI's completions."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple
from urllib.request import urlopen

from octavo.bench.http import Sent, Target, run
from octavo.bench.report import Result, Runs, result
from octavo.bench.served import served
from octavo.bench.stall import percentile
from octavo.config import EngineConfig
from octavo.engine.client import EngineError

LOWEST_ID, NUM_IDS = 100, 200
"""Token ids of prompts: plain tokens of any vocabulary."""


class Workload(NamedTuple):
    """Prompts that begin with `shared_len` equal tokens, new ones in each run, and go on differently."""

    num_prompts: int
    shared_len: int
    input_len: int
    output_len: int
    rate: float | None = None  # requests per second at random times; None: all at once


class Server(NamedTuple):
    url: str | None = None  # None: one that is started for the measurement, and ended
    api_key: str | None = None
    model: str | None = None  # None: the first that it serves


@contextmanager
def target_of(server: Server, config: EngineConfig) -> Iterator[Target]:
    if server.url is not None:
        yield Target(server.url, server.api_key)
        return
    with served(config) as own:
        yield Target(own.url)


def measure(config: EngineConfig, server: Server, load: Workload, repeat: int) -> Result:
    """Output tokens per second, from the first request sent to the last token. One run to warm up, not counted."""
    runs = Runs(config, repeat + 1, "streams")
    with target_of(server, config) as target:
        sent = _measure(target, server, load, runs)
    speeds = [load.num_prompts * load.output_len / seconds for seconds, _ in sent]
    at = "all at once" if load.rate is None else f"at random times, {load.rate:g} a second"
    return result(
        "serve",
        f"{load.num_prompts} streams over HTTP, {at}: {load.input_len} distinct random tokens in and {load.output_len} "
        "out each, greedy, end token ignored",
        "tokens/s out",
        speeds,
        **_details(server, sent),
        **runs.beside(),
    )


def shared_prefix(config: EngineConfig, server: Server, load: Workload, repeat: int) -> Result:
    """Seconds from the first request sent to the last token, nothing of it in the cache before."""
    runs = Runs(config, repeat + 1, "streams")
    with target_of(server, config) as target:
        sent = _measure(target, server, load, runs)
        attention = _attention(target) if server.url is None else {}
    return result(
        "prefix",
        f"{load.num_prompts} streams over HTTP, all at once: {load.shared_len} random tokens in that all share and "
        f"{load.input_len} that differ, {load.output_len} out each, greedy; nothing cached before",
        "s",
        [seconds for seconds, _ in sent],
        **_details(server, sent),
        **attention,
        **runs.beside(),
    )


Run = tuple[float, list[Sent]]  # seconds in all


def _measure(target: Target, server: Server, load: Workload, runs: Runs) -> list[Run]:
    """Of all runs but the first."""
    draw = random.Random(5)

    async def each() -> list[Run]:
        model = await target.model() if server.model is None else server.model
        return [await one_run(target, model, load, draw) for _ in runs]

    return run(each())[1:]


async def one_run(target: Target, model: str, load: Workload, draw: random.Random) -> Run:
    shared = _random_ids(draw, load.shared_len)
    started = due = time.perf_counter()
    tasks = []
    for _ in range(load.num_prompts):
        prompt = shared + _random_ids(draw, load.input_len)
        if load.rate is not None:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            due += draw.expovariate(load.rate)
        tasks.append(asyncio.create_task(target.complete(prompt, load.output_len, model=model)))
    sent = await asyncio.gather(*tasks)
    for one in sent:
        if one.status != 200 or one.num_tokens != load.output_len:
            raise EngineError(
                f"{target.url}: status {one.status} and {one.num_tokens} tokens where {load.output_len} were asked for"
                f"{': ' if one.error else ''}{one.error:.200}"
            )
    return max(one.times[-1] for one in sent) - started, sent


def _details(server: Server, runs: list[Run]) -> dict[str, object]:
    firsts = [one.first for _, sent in runs for one in sent]
    gaps = [gap for _, sent in runs for one in sent for gap in one.gaps]
    return {
        "server": server.url or "octavo serve",
        "first_token_ms": [round(1000 * statistics.median(firsts)), round(1000 * percentile(firsts, 0.99))],
        "gap_ms": [round(1000 * statistics.median(gaps), 1), round(1000 * percentile(gaps, 0.99), 1)],
    }


def _attention(target: Target) -> dict[str, object]:
    """Tiles of 128 keys and values, of one layer and head, that attention read in a step: [as it was, had it shared none]."""
    with urlopen(f"{target.url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    names = ("octavo_attention_kv_tiles_total", "octavo_attention_kv_tiles_saved_total", "octavo_engine_steps_total")
    read, saved, steps = (sum(float(line.split()[1]) for line in lines if line.startswith(f"{n} ")) for n in names)
    return {"kv_tiles_per_step": [round(read / steps), round((read + saved) / steps)]} if steps else {}


def _random_ids(draw: random.Random, count: int) -> list[int]:
    return [LOWEST_ID + draw.randrange(NUM_IDS) for _ in range(count)]
