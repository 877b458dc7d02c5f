"""What those who are served notice of three times as many requests as the machine can serve."""

from __future__ import annotations

import asyncio
import dataclasses
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
QUEUED_TOKENS = 2 * INPUT_LEN
"""Of prompts that are still to be computed when one more is accepted: what comes before its own first token."""

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

    def and_(self, other: Phase) -> Phase:
        """Both as one."""
        return Phase(self.served + other.served, self.refused + other.refused, self.num_lost + other.num_lost)

    @property
    def first_p99(self) -> float:
        return percentile([sent.first for sent in self.served], 0.99)

    @property
    def gap_p99(self) -> float:
        return percentile([gap for sent in self.served for gap in sent.gaps], 0.99)


def measure(config: EngineConfig, seconds: float) -> Result:
    """The 99th percentile of the time to the first token at overload, in times of that at 0.8 of capacity."""
    config = dataclasses.replace(config, max_num_seqs=NUM_SEQS, max_model_len=256, kv_cache_memory=KV_MEMORY)
    with served(config, f"--max-queued-tokens={QUEUED_TOKENS}") as server:
        return asyncio.run(_measure(Target(server.url), server.pid, seconds, Runs(config, 1, "overload")))


async def _measure(target: Target, pid: int, seconds: float, runs: Runs) -> Result:
    draw = random.Random(4)
    runs.look()
    capacity = await _capacity(target, draw, min(seconds, 40.0))
    earlier = await _open(target, draw, LOAD * capacity, seconds / 2)
    before = _resident(pid)
    over = await _open(target, draw, OVERLOAD * capacity, seconds)
    grown = _resident(pid) - before
    later = await _open(target, draw, LOAD * len(over.served) / seconds, seconds / 2)
    usual = earlier.and_(later)
    runs.look()
    first, gap = over.first_p99 / usual.first_p99, over.gap_p99 / usual.gap_p99
    refusal = percentile([sent.answered for sent in over.refused] or [0.0], 0.99)
    is_paced = first <= BOUND and gap <= BOUND and 0 < refusal <= usual.gap_p99  # who is refused knows within a step
    return result(
        "overload",
        f"octavo serve, {INPUT_LEN} random tokens in, {OUTPUT_LEN} out, at most {NUM_SEQS} at once, refused beyond "
        f"{QUEUED_TOKENS} tokens of prompts to be computed; "
        f"requests at random times for {seconds:g} s at {OVERLOAD} times what it can serve, and "
        f"for half of that at {LOAD} before and after it, since machines change meanwhile; the 99th percentile "
        "of the time to the first token of those accepted, in times of that at the lower rate",
        "x",
        [first],
        held=is_paced and grown <= FLAT and not usual.num_lost + over.num_lost,
        capacity_per_s=round(capacity, 2),
        first_token_p99_ms=[round(1000 * phase.first_p99) for phase in (usual, over)],
        first_token_p99_before_and_after_ms=[round(1000 * phase.first_p99) for phase in (earlier, later)],
        gap_p99_ms=[round(1000 * phase.gap_p99, 1) for phase in (usual, over)],
        gap_ratio=round(gap, 2),
        served=[len(phase.served) for phase in (usual, over)],
        refused=[len(phase.refused) for phase in (usual, over)],
        lost=usual.num_lost + over.num_lost,
        refusal_p99_ms=round(1000 * refusal, 1),
        served_per_s=round(len(over.served) / seconds, 2),
        grown_mib=round(grown / 2**20, 1),
        **runs.beside(),
    )


async def _capacity(target: Target, draw: random.Random, seconds: float) -> float:
    """Requests served per second at overload, by their tokens. It begins with as many requests as run at once."""
    first = time.perf_counter()
    await asyncio.gather(*(_send(target, draw, OUTPUT_LEN) for _ in range(NUM_SEQS)))
    rate = NUM_SEQS / (time.perf_counter() - first)
    begins = time.perf_counter() + seconds / 2  # until then requests begin and end in waves
    phase = await _open(target, draw, OVERLOAD * rate, 1.5 * seconds)
    ends = begins + seconds
    num_tokens = sum(begins <= at < ends for one in phase.served for at in one.times)
    if not num_tokens:
        raise RuntimeError(f"no token was served within {seconds:g} s")
    return num_tokens / OUTPUT_LEN / seconds


async def _open(target: Target, draw: random.Random, rate: float, seconds: float) -> Phase:
    """Requests at random times, whatever becomes of the others."""
    tasks = []
    ends = time.perf_counter() + seconds
    due = time.perf_counter()
    while (due := due + draw.expovariate(rate)) < ends:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.create_task(_send(target, draw, OUTPUT_LEN)))
    found = await asyncio.gather(*tasks, return_exceptions=True)
    sent = [item for item in found if isinstance(item, Sent)]
    whole = [item for item in sent if item.status == 200 and item.num_tokens == OUTPUT_LEN]
    refused = [item for item in sent if item.status == 429]
    if not whole:
        raise RuntimeError(f"no request was served of {len(found)}: {found[:1]}")
    return Phase(whole, refused, len(found) - len(whole) - len(refused))


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
