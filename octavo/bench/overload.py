"""What those who are served notice of three times as many requests as the machine can serve."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import random
import time
from pathlib import Path
from typing import NamedTuple

from octavo.bench.http import Sent, Target
from octavo.bench.report import Result, Runs, result
from octavo.bench.served import served
from octavo.bench.stall import percentile
from octavo.config import EngineConfig

NUM_SEQS = 16
INPUT_LEN = 128
OUTPUT_LEN = 64
BOUNDS = ("--max-queued-requests=0", f"--max-queued-tokens={2 * INPUT_LEN}")
"""Nobody waits for a slot, which is what binds where prompts are quick; two prompts at most come before one's own."""

LOAD, OVERLOAD = 0.8, 3.0
BOUND = 1.5

KV_MEMORY = 2**27
"""Bytes of KV cache: room for all at once, and full of what was served before memory is looked at."""

FLAT = 2**24
"""Bytes that memory may grow by at overload: 1.2 MB were measured, and a leak of 6 kB for each of 50 requests a second
shows within a minute."""


class Phase(NamedTuple):
    """Requests at random times."""

    served: list[Sent]
    refused: list[Sent]
    num_lost: int
    seconds: float  # in which they were sent
    num_tokens: int  # that came in this time

    def and_(self, other: Phase) -> Phase:
        """Both as one."""
        return Phase(
            self.served + other.served,
            self.refused + other.refused,
            self.num_lost + other.num_lost,
            self.seconds + other.seconds,
            self.num_tokens + other.num_tokens,
        )

    @property
    def per_second(self) -> float:
        """Requests served, by their tokens. Raises RuntimeError where there were none."""
        if not self.num_tokens:
            raise RuntimeError(f"no token was served within {self.seconds:g} s")
        return self.num_tokens / OUTPUT_LEN / self.seconds

    @property
    def first_p99(self) -> float:
        return percentile([sent.first for sent in self.served], 0.99)

    @property
    def gap_p99(self) -> float:
        return percentile([gap for sent in self.served for gap in sent.gaps], 0.99)


class Round(NamedTuple):
    """Overload, with the lower rate before and after it: machines change meanwhile, and both shall notice."""

    usual: Phase
    over: Phase

    @property
    def first_ratio(self) -> float:
        return self.over.first_p99 / self.usual.first_p99

    @property
    def gap_ratio(self) -> float:
        return self.over.gap_p99 / self.usual.gap_p99


def measure(config: EngineConfig, seconds: float, repeat: int) -> Result:
    """The 99th percentile of the time to the first token at overload, in times of that at 0.8 of capacity."""
    config = dataclasses.replace(config, max_num_seqs=NUM_SEQS, max_model_len=256, kv_cache_memory=KV_MEMORY)
    with served(config, *BOUNDS) as server:
        return asyncio.run(_measure(Target(server.url), server.pid, seconds, Runs(config, repeat, "overload")))


async def _measure(target: Target, pid: int, seconds: float, runs: Runs) -> Result:
    draw = random.Random(4)
    capacity = await _capacity(target, draw, min(seconds, 40.0))
    rounds, grown = [], []
    for _ in runs:
        earlier = await _open(target, draw, LOAD * capacity, seconds / 2)
        before = _resident(pid)
        over = await _open(target, draw, OVERLOAD * capacity, seconds)
        grown.append(_resident(pid) - before)
        capacity = over.per_second
        rounds.append(Round(earlier.and_(await _open(target, draw, LOAD * capacity, seconds / 2)), over))
    usual = functools.reduce(Phase.and_, (one.usual for one in rounds))
    over = functools.reduce(Phase.and_, (one.over for one in rounds))
    whole = Round(usual, over)
    refusal = percentile([sent.answered for sent in over.refused] or [0.0], 0.99)
    is_paced = max(whole.first_ratio, whole.gap_ratio) <= BOUND
    is_prompt = 0 < refusal <= usual.gap_p99  # who is refused knows within a step
    num_lost = usual.num_lost + over.num_lost
    return result(
        "overload",
        f"octavo serve, {INPUT_LEN} random tokens in, {OUTPUT_LEN} out, at most {NUM_SEQS} at once, {' '.join(BOUNDS)}; "
        f"requests at random times for {seconds:g} s at {OVERLOAD} times what it can serve, and "
        f"for half of that at {LOAD} before and after it; the 99th percentile of the time to the first token of those "
        "accepted, in times of that at the lower rate, in each round. The bound is for all rounds together",
        "x",
        [one.first_ratio for one in rounds],
        held=is_paced and is_prompt and max(grown) <= FLAT and not num_lost,
        first_token_ratio=round(whole.first_ratio, 2),
        gap_ratio=round(whole.gap_ratio, 2),
        first_token_p99_ms=[round(1000 * phase.first_p99) for phase in whole],
        gap_p99_ms=[round(1000 * phase.gap_p99, 1) for phase in whole],
        served=[len(phase.served) for phase in whole],
        refused=[len(phase.refused) for phase in whole],
        lost=num_lost,
        refusal_p99_ms=round(1000 * refusal, 1),
        served_per_s=[round(one.over.per_second, 2) for one in rounds],
        grown_mib=[round(one / 2**20, 1) for one in grown],
        **runs.beside(),
    )


async def _capacity(target: Target, draw: random.Random, seconds: float) -> float:
    """Requests served per second at overload. It begins with as many requests as run at once."""
    first = time.perf_counter()
    await asyncio.gather(*(_send(target, draw, OUTPUT_LEN) for _ in range(NUM_SEQS)))
    rate = OVERLOAD * NUM_SEQS / (time.perf_counter() - first)
    await _open(target, draw, rate, seconds / 2)  # requests begin and end in waves
    return (await _open(target, draw, rate, seconds)).per_second


async def _open(target: Target, draw: random.Random, rate: float, seconds: float) -> Phase:
    """Requests at random times, whatever becomes of the others."""
    tasks = []
    due = begins = time.perf_counter()
    ends = begins + seconds
    while (due := due + draw.expovariate(rate)) < ends:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.create_task(_send(target, draw, OUTPUT_LEN)))
    found = await asyncio.gather(*tasks, return_exceptions=True)
    sent = [item for item in found if isinstance(item, Sent)]
    whole = [item for item in sent if item.status == 200 and item.num_tokens == OUTPUT_LEN]
    refused = [item for item in sent if item.status == 429]
    if not whole:
        raise RuntimeError(f"no request was served of {len(found)}: {found[:1]}")
    num_tokens = sum(at < ends for one in whole for at in one.times)
    return Phase(whole, refused, len(found) - len(whole) - len(refused), seconds, num_tokens)


async def _send(target: Target, draw: random.Random, output_len: int) -> Sent:
    prompt = [draw.randrange(3, 300) for _ in range(INPUT_LEN)]
    return await target.complete(prompt, output_len, return_token_ids=True)


def _resident(pid: int) -> int:
    """Bytes in memory of a process and its children."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    total = 0
    for process in (str(pid), *children):
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                total += 1024 * int(line.split()[1])
    return total
