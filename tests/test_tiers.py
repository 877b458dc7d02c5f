"""The disk tier without a model: random lives of requests over a cache, a directory, damage and restarts.

A slot of a block holds a digest of its salt and whole prefix, so a block that came from the wrong place shows.
"""

from __future__ import annotations

import contextlib
import os
import random
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from octavo.cache.blocks import BLOCK_SIZE, GroupSpec, blocks_for
from octavo.cache.kv import KvCache
from octavo.cache.store import BlockStore
from octavo.cache.tiers import LONG_PREFIX, DiskTier
from octavo.cache.transfers import DiskLoad
from octavo.request import FinishReason, Request, SamplingParams, Terms
from tests.waiting import SECONDS, until

NUM_BLOCKS = 90
SPACE = b"0123456789abcdef"


class Memory:
    """[group][block][slot]"""

    def __init__(self, num_groups: int) -> None:
        self.slots = np.zeros((num_groups, NUM_BLOCKS, BLOCK_SIZE), np.int64)

    def block_bytes(self, group: int) -> int:
        return self.slots[group, 0].nbytes

    def read_block(self, group: int, block: int, out: NDArray[np.uint8]) -> None:
        out.view(np.int64)[:] = self.slots[group, block]

    def write_block(self, group: int, block: int, data: NDArray[np.uint8]) -> None:
        self.slots[group, block] = data.view(np.int64)


def digests(request: Request) -> list[int]:
    """What the slots of a request's tokens hold."""
    value, values = hash(request.terms.cache_salt), []
    for token in request.prompt_ids:
        value = hash((value, token))
        values.append(value)
    return values


class World:
    """A cache and its tier, the requests that hold blocks and those that wait for a load."""

    def __init__(self, directory: Path, specs: list[GroupSpec], rng: random.Random) -> None:
        self.directory, self.specs, self.rng = directory, specs, rng
        self.count = 0
        self.loaded = self.refused = self.aborted_loads = self.hits = 0
        self.start()

    def start(self) -> None:
        self.cache = KvCache(self.specs, seed=os.urandom(16))
        self.memory = Memory(len(self.specs))
        self.tier = DiskTier(
            self.cache, self.memory, lambda: BlockStore(self.directory, SPACE, 10**6), lambda line: pytest.fail(line)
        )
        self.tier.start(os.eventfd(0, os.EFD_NONBLOCK), lambda start, stop: 60.0)
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        until(lambda: self.tier.stats()["disk_open"])

    def stop(self) -> None:
        """With everything written."""
        self.tier.stop(SECONDS)
        self.loaded, self.refused = self.totals()

    def totals(self) -> tuple[int, int]:
        """Blocks loaded and refused so far."""
        stats = self.tier.stats()
        return self.loaded + stats["disk_blocks_loaded"], self.refused + stats["disk_blocks_refused"]

    def add(self, ids: list[int], salt: str) -> None:
        request = Request(str(self.count), 0, ids, SamplingParams(), 0, terms=Terms(cache_salt=salt))
        self.count += 1
        self.waiting.append(request)

    def admit(self, request: Request) -> None:
        """What scheduler and model do: match, perhaps wait for a load, else compute the prompt in one step."""
        request.gates.clear()  # they are open
        match = self.cache.match(request)
        gate = self.tier.fetch(request, match, match.limit)
        if gate is not None:
            request.gates.append(gate)
            return
        nothing = [0] * len(self.specs)
        if self.cache.admit(request, match, len(request.prompt_ids), nothing) is None:
            return
        self.waiting.remove(request)
        self.running.append(request)
        self.hits += request.num_cached
        expected, num_tokens = digests(request), len(request.prompt_ids)
        for stop in [*range(request.num_cached + 1, num_tokens, 90), num_tokens]:
            start = request.num_computed
            assert self.cache.grow(request, stop)
            for g, copies in enumerate(self.cache.copies()):
                for source, destination in copies:
                    self.memory.slots[g, destination] = self.memory.slots[g, source]
            self.cache.end_step()
            for g, table in enumerate(request.tables):
                for i in range(blocks_for(stop)):
                    if table[i] >= 0:
                        own = np.array(expected[i * BLOCK_SIZE : min(stop, (i + 1) * BLOCK_SIZE)])
                        slots = self.memory.slots[g, table[i], : len(own)]
                        num_known = max(0, start - i * BLOCK_SIZE)
                        assert (slots[:num_known] == own[:num_known]).all()
                        slots[num_known:] = own[num_known:]
            if stop == num_tokens:
                self.tier.offer(request, request.num_cached)
            self.cache.advance(request, stop)

    def end(self, request: Request) -> None:
        request.finish_reason = FinishReason.STOP
        self.running.remove(request)
        self.cache.free(request)
        self.cache.forget(request)

    def abort(self, request: Request) -> None:
        self.aborted_loads += any(isinstance(gate, DiskLoad) and not gate.is_open() for gate in request.gates)
        request.finish_reason = FinishReason.ABORT
        self.waiting.remove(request)
        self.cache.forget(request)

    def damage(self) -> None:
        """Of a file, by somebody else: a byte, its end, all of it, or its place. Threads of the disk may be before us."""
        files = list(self.directory.rglob("*.kv"))
        if not files:
            return
        path, other, way = self.rng.choice(files), self.rng.choice(files), self.rng.randrange(4)
        with contextlib.suppress(FileNotFoundError):
            content = bytearray(path.read_bytes())
            match way:
                case 0:
                    content[self.rng.randrange(len(content))] ^= 1 << self.rng.randrange(8)
                case 1:
                    del content[self.rng.randrange(len(content)) :]
                case 2:
                    content = bytearray(other.read_bytes())
                case 3:
                    path.unlink()
                    return
            path.write_bytes(content)

    def act(self, trunks: list[list[int]]) -> None:
        rng = self.rng
        action = rng.random()
        if action < 0.25:
            trunk = rng.choice(trunks)
            length = rng.choice([20, 48, 100, LONG_PREFIX, 600, 700])
            self.add([*trunk[:length], *(rng.randrange(99) for _ in range(rng.choice([1, 5, 40])))], rng.choice("aab"))
        elif action < 0.6 and self.waiting:
            request = rng.choice(self.waiting)
            if all(gate.is_open() for gate in request.gates):
                self.admit(request)
        elif action < 0.75 and self.running:
            self.end(rng.choice(self.running))
        elif action < 0.78 and self.waiting:
            self.abort(rng.choice(self.waiting))
        elif action < 0.8:
            self.damage()
        elif action < 0.805:
            self.tier.flush() if rng.random() < 0.3 else self.cache.flush()
        elif action < 0.81:
            self.stop()
            self.start()
        else:
            self.tier.stepped(rng.choice([0.0, 0.1]))
            self.tier.work()
        self.cache.check(self.running)


GROUPS = {
    "full": [GroupSpec(NUM_BLOCKS)],
    "full and window": [GroupSpec(NUM_BLOCKS), GroupSpec(NUM_BLOCKS, window=100)],
    "two windows": [GroupSpec(NUM_BLOCKS, window=33), GroupSpec(NUM_BLOCKS, window=300)],
}


@pytest.mark.parametrize("groups", GROUPS)
def test_random_lives(tmp_path: Path, groups: str) -> None:
    world = World(tmp_path, GROUPS[groups], random.Random(groups))
    trunks = [[world.rng.randrange(99) for _ in range(800)] for _ in range(3)]

    def live(num_actions: int) -> None:
        for _ in range(num_actions):
            world.act(trunks)
            if len(world.running) > 3:
                world.end(world.running[0])

    live(1150)  # and until all was seen: the threads of the disk take their turns as they like
    until(lambda: live(50) or (all(world.totals()) and world.aborted_loads), every=0)
    for request in list(world.running):
        world.end(request)
    assert world.cache.usage().num_held == 0
    world.stop()
    print(f"{world.count} requests, {world.hits} tokens reused, {world.loaded} blocks loaded, {world.refused} refused")


def test_a_load_that_finds_no_room_is_not_tried_again(tmp_path: Path) -> None:
    """Nor one that the disk does not answer: whoever waited computes what is missing."""
    world = World(tmp_path, GROUPS["full"], random.Random(0))
    prompt, other = ([world.rng.randrange(99) for _ in range(n)] for n in (640, 1280))
    world.add(prompt, "")
    world.admit(world.waiting[0])
    world.stop()
    world.start()
    world.add(other, "other")
    world.admit(world.waiting[0])  # 80 of 90 blocks are held
    world.add([*prompt, 1], "")
    (request,) = world.waiting
    world.admit(request)
    until(lambda: world.tier.work() or all(gate.is_open() for gate in request.gates))
    assert world.cache.match(request).num_tokens == 160
    world.admit(request)
    assert not request.gates and request in world.waiting  # there is no room for computing it, either
    world.stop()


def test_a_prefix_that_cannot_be_had_in_all_groups_is_computed(tmp_path: Path) -> None:
    """Of a window group only the blocks behind a boundary are kept; a prompt that leaves before it has no use for them."""
    world = World(tmp_path, GROUPS["full and window"], random.Random(0))
    prompt = [world.rng.randrange(99) for _ in range(640)]
    world.add(prompt, "")
    world.admit(world.waiting[0])
    world.stop()
    names = [path.name for path in tmp_path.rglob("*.kv")]
    assert sum(name.endswith(".0.kv") for name in names) == 40
    assert sum(name.endswith(".1.kv") for name in names) == 7  # 99 tokens before the next one
    world.start()
    world.add([*prompt, 1], "")
    world.add([*prompt[:320], 1], "")
    for request, num_cached in zip(list(world.waiting), (640, 0), strict=True):
        world.admit(request)
        until(lambda request=request: world.tier.work() or all(gate.is_open() for gate in request.gates))
        if request in world.waiting:
            world.admit(request)
        assert request.num_cached == num_cached
    world.stop()
