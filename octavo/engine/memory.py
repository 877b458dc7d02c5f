"""Memory that is really free, and the size of the KV cache that follows from it.

A container may have far less than the machine: the smallest of MemAvailable and of what every cgroup above this
process leaves counts (Linux kernel documentation: cgroup-v2.rst "memory.max", cgroup-v1/memory.rst).
"""

from __future__ import annotations

import bisect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from octavo.cache.blocks import BLOCK_SIZE, blocks_for
from octavo.cache.window import most_blocks
from octavo.config import ConfigError

KV_SHARE = 0.8
"""Of the memory free after loading, the most the KV cache takes by default; the rest is for others on the machine."""


class KvSize(NamedTuple):
    """Blocks per KV group and the bytes of all groups together."""

    num_blocks: list[int]
    total_bytes: int
    block_bytes: int  # of one block in every group
    longest: list[int]  # blocks that one sequence of the longest context holds at most, per group

    def describe(self, max_model_len: int) -> str:
        """The line printed at start."""
        blocks = " and ".join(map(str, self.num_blocks))
        num_seqs = min(blocks / most for blocks, most in zip(self.num_blocks, self.longest, strict=True))
        return (
            f"KV cache {format_bytes(self.total_bytes)}: {blocks} blocks of {BLOCK_SIZE} tokens, "
            f"{round(num_seqs, 1):g} sequences of {max_model_len} tokens at once"
        )


class KvNeeds(NamedTuple):
    """What sequences take of a KV group: a block every 16 tokens, of which a window keeps the last ones."""

    block_bytes: int
    window: int | None = None  # tokens


def size_kv(
    groups: Sequence[KvNeeds], *, max_model_len: int, max_num_seqs: int, max_step_tokens: int,
    wanted_bytes: int | None, free_bytes: int,
) -> KvSize:  # fmt: skip
    """Divide the budget over the KV groups.

    Groups without a window get as many blocks each. One with a window, beside such, needs no more than what
    max_num_seqs sequences keep, a step of max_step_tokens, and as much again for prefixes that may be reused; where the
    budget is small, it gives way down to what one sequence needs.
    wanted_bytes: None takes the smaller of KV_SHARE of free_bytes and what max_num_seqs sequences of max_model_len
    tokens could ever use. Raises ConfigError with the values that would work where not even one sequence fits.
    """
    step, mixed = blocks_for(max_step_tokens), any(group.window is None for group in groups)

    def longest(group: KvNeeds, length: int) -> int:
        spare = 0 if group.window is None else step  # blocks leave a window when the step is done
        return min(blocks_for(length), most_blocks(length, group.window) + spare)

    def divide(blocks: int, length: int, in_window: int = sys.maxsize) -> list[int]:
        return [
            max(longest(group, length), min(blocks, in_window, _useful(group, max_num_seqs, step) if mixed else blocks))
            if group.window is not None
            else blocks
            for group in groups
        ]

    def cost(num_blocks: Sequence[int]) -> int:
        return sum(n * group.block_bytes for n, group in zip(num_blocks, groups, strict=True))

    least, most = blocks_for(max_model_len), max_num_seqs * blocks_for(max_model_len)
    if wanted_bytes is None:
        budget = min(int(KV_SHARE * free_bytes), cost(divide(most, max_model_len)))
        source = f"{KV_SHARE:.0%} of the {format_bytes(free_bytes)} of free memory is {format_bytes(budget)}"
    else:
        budget = wanted_bytes
        source = f"kv_cache_memory is {format_bytes(budget)}"
        if budget > free_bytes:
            raise ConfigError(
                f"kv_cache_memory is {format_bytes(budget)}, but {format_bytes(free_bytes)} of memory are free: "
                f"kv_cache_memory={int(KV_SHARE * free_bytes)} would work"
            )
    needed = cost(divide(least if mixed else 0, max_model_len, in_window=0))
    if budget < needed:
        fits = _most(max_model_len, lambda n: cost(divide(blocks_for(n) if mixed else 0, n, in_window=0)) <= budget)
        fits -= fits % BLOCK_SIZE
        advice = f"max_model_len={fits} fits, or " if fits else ""
        raise ConfigError(
            f"the KV cache cannot hold one sequence of max_model_len={max_model_len} tokens, which takes "
            f"{format_bytes(needed)}: {source}. {advice}kv_cache_memory={needed} would work"
            + ("" if needed <= free_bytes else " on a machine with that much free memory")
        )
    bound = budget // min(group.block_bytes for group in groups)
    blocks = _most(bound, lambda n: cost(divide(n, max_model_len)) <= budget)
    num_blocks = divide(blocks, max_model_len)
    if mixed and blocks < least:  # windows give way
        in_window = _most(bound, lambda n: cost(divide(least, max_model_len, n)) <= budget)
        num_blocks = divide(least, max_model_len, in_window)
    return KvSize(
        num_blocks,
        cost(num_blocks),
        sum(group.block_bytes for group in groups),
        [most_blocks(max_model_len, group.window) for group in groups],
    )


def _useful(group: KvNeeds, max_num_seqs: int, step: int) -> int:
    """Blocks of a window group beyond which more are of little use."""
    return 2 * max_num_seqs * most_blocks(sys.maxsize, group.window) + step


def _most(bound: int, works: Callable[[int], bool]) -> int:
    """The largest number up to `bound` that works, where all below it do; 0 if none."""
    return bisect.bisect_left(range(1, bound + 1), True, key=lambda n: not works(n))


def check_weights(weight_bytes: int, free_bytes: int) -> None:
    """Raise ConfigError where the weights alone do not fit: the kernel would kill the process while they are packed."""
    if weight_bytes > free_bytes:
        raise ConfigError(
            f"the weights of this model take {format_bytes(weight_bytes)}, "
            f"but {format_bytes(free_bytes)} of memory are free"
        )


def format_bytes(n: int) -> str:
    """'1.50 GiB', for messages."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if n >= size:
            return f"{n / size:.2f} {unit}"
    return f"{n} B"


def free_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes this process may still take before the kernel or its cgroups stop it."""
    free = [_mem_available(proc / "meminfo")]
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            for root in (cgroup, cgroup / "unified"):
                free += _headroom(root, path, "memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            free += _headroom(cgroup / "memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
    return max(0, min(free))


def _mem_available(path: Path) -> int:
    for line in path.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ConfigError(f"{path} has no MemAvailable line: name kv_cache_memory")


def _headroom(root: Path, path: str, limit: str, usage: str, prefix: str) -> list[int]:
    """Limit - usage + page cache of a cgroup and of each of its ancestors that has a limit.

    Pages of files, also those used often (a model read twice), are dropped before anything is refused.
    Inside a container the path may be the host's and not exist below `root`; the root then stands for the own group.
    """
    parts = [p for p in path.split("/") if p not in ("", "..")]
    found = []
    for depth in range(len(parts), -1, -1):
        group = root.joinpath(*parts[:depth])
        try:
            bound = (group / limit).read_text().strip()
            used = int((group / usage).read_text())
            stat = dict(s.split(" ", 1) for s in (group / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue
        if bound != "max" and int(bound) < 2**60:  # v1 spells "no limit" as a huge number
            files = sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("inactive", "active"))
            found.append(int(bound) - used + files)
    return found
