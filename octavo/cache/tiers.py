"""DiskTier: which blocks are kept on disk, and when they are fetched.

The tier holds no block of the pool, ever. What is kept is copied out between steps while the prefix index still has
it; what is fetched goes into the prefix index between steps, and the request that waited matches it there like any
other prefix. Each takes a bounded part of a step's time. So nothing in a request's life depends on the tier: where it
fails, the tokens are computed.
"""

from __future__ import annotations

import atexit
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.cache.blocks import BLOCK_SIZE, blocks_for
from octavo.cache.kv import KvCache
from octavo.cache.match import Match
from octavo.cache.prefix import Key, chain_key, root_key
from octavo.cache.rates import Rates
from octavo.cache.store import BlockId, BlockStore, Counters
from octavo.cache.transfers import DiskLoad, Piece, Staged, Transfers
from octavo.cache.window import first_block
from octavo.request import Request

LONG_PREFIX = 512
"""A prompt of so many tokens is kept the first time it is seen: its prefill takes as long as some hundred tokens of
output. Of shorter ones the blocks that a second request reused are kept."""

MAX_CANDIDATES = 8192
"""Blocks that wait to be copied out: 131,072 tokens. Beyond that new ones are left out."""

MAX_NAMED = 64
"""Requests of which the names of blocks are remembered."""

TOUCH_SECONDS = 60.0
"""A chain that is used again within this time is as recent as before."""

SHARE = 0.1
"""Of the last step's time, what copying may take before the next."""

MIN_SECONDS = 0.002

STOP_SECONDS = 2.0
"""To keep what is still to be kept when the engine ends, unless its parent says how long it waits."""

BATCH = 16
"""Blocks that are put into the cache at once."""

PATIENCE = 2.0
"""A load may take this many times as long as computing would; it was chosen because it should take less."""

UNMEASURED_SECONDS = 5.0
"""What a load may take where nobody knows what computing costs."""


class BlockMemory(Protocol):
    """Where the blocks of the pool are: the state of a backend."""

    def block_bytes(self, group: int) -> int: ...

    def read_block(self, group: int, block: int, out: NDArray[np.uint8]) -> None:
        """Copy a block's bytes to `out`, which has its size."""
        ...

    def write_block(self, group: int, block: int, data: NDArray[np.uint8]) -> None: ...


class _Candidate(NamedTuple):
    stored: BlockId
    depth: int
    key: Key  # in memory
    used_ns: int


class DiskTier:
    """For the engine's thread, between steps."""

    def __init__(self, cache: KvCache, memory: BlockMemory, open_store: Callable[[], BlockStore],
                 notify: Callable[[str], None]) -> None:  # fmt: skip
        """open_store is called in a thread, may take long, and raises OSError where the tier has to stay closed.
        notify is told in a line, once, why the tier closed."""
        self.rates = Rates()
        self._cache = cache
        self._memory = memory
        self._block_bytes = [memory.block_bytes(g) for g in range(len(cache.groups))]
        self._open_store = open_store
        self._notify = notify
        self._transfers: Transfers | None = None
        self._candidates: deque[_Candidate] = deque()
        self._pending: set[Key] = set()  # of candidates, on disk
        self._loads: list[DiskLoad] = []
        self._coming: dict[Key, DiskLoad] = {}
        self._touched: dict[Key, float] = {}
        self._named: dict[tuple[str, int], tuple[Request, list[BlockId]]] = {}
        self._num_loaded = self._num_skipped = 0
        self._seconds = MIN_SECONDS

    def start(self, wakeup: int, prefill_seconds: Callable[[int, int], float]) -> None:
        """Open the store in the background. wakeup: an event descriptor, written to when `work` has something to do;
        the tier closes it. prefill_seconds(start, stop): what computing these tokens costs, 0 where that is not known.
        """
        self.rates.prefill_seconds = prefill_seconds
        self._transfers = Transfers(self._open_store, self._block_bytes, self.rates, wakeup, self._notify)
        atexit.register(self.stop)

    def stop(self, seconds: float = STOP_SECONDS) -> None:
        """Keep what is still to be kept, within `seconds`, and end the threads. May be called again."""
        if self._transfers is None or self._transfers.stopped:
            return
        atexit.unregister(self.stop)
        end = time.monotonic() + seconds
        self._transfers.hurry()
        while self._candidates and self._store is not None and time.monotonic() < end:
            self._copy_out(self._transfers, math.inf)
            time.sleep(0.001)  # for a buffer
        self._transfers.stop(max(0.0, end - time.monotonic()))

    @property
    def _store(self) -> BlockStore | None:
        return self._transfers.store if self._transfers else None

    # Keeping

    def offer(self, request: Request, num_cached: int) -> None:
        """The prompt of `request` is about to be indexed, `num_cached` tokens of it by reuse: keep what is worth it."""
        store = self._store
        num_tokens = len(request.prompt_ids) if len(request.prompt_ids) >= LONG_PREFIX else num_cached
        end = num_tokens // BLOCK_SIZE
        if store is None or not end:
            return
        now = time.time_ns()
        stored, keys = self._names(store, request, end), self._cache.keys(request, end)
        self._touch([block for block in stored if block in store], now)
        for i, block in enumerate(stored):
            if block.key in self._pending:
                continue
            for g, first in enumerate(self._first_blocks(end)):
                block = block._replace(group=g)
                if i < first or block in store:
                    continue
                if len(self._candidates) == MAX_CANDIDATES:
                    self._num_skipped += 1
                    continue
                self._candidates.append(_Candidate(block, i, keys[i + 1], now))
                self._pending.add(block.key)

    def _first_blocks(self, end: int) -> list[int]:
        """Per group, the first block that a token behind `end` blocks sees."""
        return [first_block(end * BLOCK_SIZE, group.window) for group in self._cache.groups]

    def _touch(self, chain: list[BlockId], now: int) -> None:
        if not chain or self._transfers is None:
            return
        last, seconds = chain[-1].key, time.monotonic()
        if seconds > self._touched.get(last, -TOUCH_SECONDS) + TOUCH_SECONDS:
            if len(self._touched) == MAX_CANDIDATES:
                self._touched.clear()
            self._touched[last] = seconds
            groups = range(len(self._block_bytes))
            self._transfers.touch([block._replace(group=g) for block in chain for g in groups], now)

    def _copy_out(self, transfers: Transfers, end: float) -> None:
        if transfers.store is None:
            self._candidates.clear()
            self._pending.clear()
            return
        while self._candidates:
            candidate = self._candidates[0]
            group = candidate.stored.group
            block = self._cache.groups[group].prefixes.get(candidate.key)
            buffer = None
            if block is not None:
                if time.perf_counter() > end:
                    transfers.wake()
                    return
                buffer = transfers.save_buffers.take()
                if buffer is None:
                    transfers.wants_buffer = True
                    return
                num_bytes = self._block_bytes[group]
                self._memory.read_block(group, block, buffer[:num_bytes])
                start = candidate.depth * BLOCK_SIZE
                seconds = self.rates.compute_seconds(start, start + LONG_PREFIX) * BLOCK_SIZE / LONG_PREFIX
                transfers.save(candidate.stored, buffer, num_bytes, seconds, candidate.used_ns - candidate.depth)
            self._num_skipped += block is None
            self._pending.discard(candidate.stored.key)
            self._candidates.popleft()

    # Fetching

    def fetch(self, request: Request, match: Match, limit: int) -> DiskLoad | None:
        """The gate to wait for where more of the first `limit` tokens is on disk than the match in memory.

        None: there is no more, or computing it is faster. A request starts one load at most.
        """
        store = self._store
        first, end = len(match.shared[0]), min(blocks_for(limit), request.num_tokens // BLOCK_SIZE)
        if store is None or first >= end:
            return None
        stored = self._names(store, request, end)
        coming = self._coming.get(stored[first].key)
        if coming is not None:
            coming.requests.append(request)
            return coming
        if stored[first] not in store or request.from_disk is not None:
            return None
        pieces, stop = self._pieces(store, stored, self._cache.keys(request, end), first)
        num_bytes = sum(piece.num_bytes for piece in pieces)
        compute = self.rates.compute_seconds(first * BLOCK_SIZE, stop * BLOCK_SIZE)
        if not pieces or not self.rates.worth_loading(num_bytes, compute):
            return None
        load = DiskLoad(request, pieces, time.monotonic() + (PATIENCE * compute or UNMEASURED_SECONDS))
        self._loads.append(load)
        self._coming.update({piece.stored.key: load for piece in pieces})
        assert self._transfers is not None
        self._transfers.load(load)
        return load

    def _pieces(
        self, store: BlockStore, stored: Sequence[BlockId], keys: Sequence[Key], first: int
    ) -> tuple[list[Piece], int]:
        """What to load so that more than `first` blocks match, in order, and how many blocks will."""
        groups = self._cache.groups
        in_memory = [[group.prefixes.get(key) is not None for key in keys[1:]] for group in groups]
        there = [
            [known[i] or block._replace(group=g) in store for i, block in enumerate(stored)]
            for g, known in enumerate(in_memory)
        ]
        for stop in range(len(stored), first, -1):
            starts = self._first_blocks(stop)
            if all(all(row[start:stop]) for row, start in zip(there, starts, strict=True)):
                break
        else:
            return [], first
        pieces = []
        for i in range(stop):
            for g, start in enumerate(starts):
                if i >= start and not in_memory[g][i]:
                    pieces.append(Piece(i, stored[i]._replace(group=g), keys[i + 1], keys[i], self._block_bytes[g]))
        return pieces, stop

    def stepped(self, seconds: float) -> None:
        """A step took so long."""
        self._seconds = max(MIN_SECONDS, SHARE * seconds)
        if self._candidates and self._transfers is not None:
            self._transfers.wake()  # where no step follows

    def work(self) -> None:
        """Copy what was fetched into the cache, and what is kept out of it, as far as a part of a step's time goes.

        Between steps, and when `wakeup` was written to.
        """
        if self._transfers is None:
            return
        end = time.perf_counter() + self._seconds
        for load in list(self._loads):
            self._install(load, self._transfers, end)
        self._copy_out(self._transfers, end)

    def _install(self, load: DiskLoad, transfers: Transfers, end: float) -> None:
        """Blocks that were read become cached blocks of the pool, a few at a time; the gate opens with the last."""
        if not load.is_wanted:
            self._close(load, transfers)
            return
        was_read = load.was_read  # before the queue is looked at: nothing comes after it
        while load.ready:
            if time.perf_counter() > end:
                transfers.wake()
                return
            batch = [load.ready.popleft() for _ in range(min(BATCH, len(load.ready)))]
            started = time.perf_counter()
            whole = self._adopt(load, batch)
            self.rates.copied(sum(piece.num_bytes for piece, _ in batch), time.perf_counter() - started)
            for _, buffer in batch:
                transfers.load_buffers.give(buffer)
            if not whole:  # no room, or what it continues was evicted
                self._close(load, transfers)
                return
        if was_read:
            self._close(load, transfers)
        elif time.monotonic() > load.expires:  # the disk hangs, or is far slower than it was
            self.rates.read(load.pieces[0].num_bytes, PATIENCE * UNMEASURED_SECONDS)
            self._close(load, transfers)

    def _adopt(self, load: DiskLoad, batch: list[Staged]) -> bool:
        """False: a block found no room, or what it continues is not there any more."""
        for g in range(len(self._block_bytes)):
            for run in _runs([staged for staged in batch if staged.piece.stored.group == g]):

                def write(block: int, i: int, g: int = g, run: list[Staged] = run) -> None:
                    self._memory.write_block(g, block, run[i].buffer[: self._block_bytes[g]])

                first = run[0].piece
                chain = [(staged.piece.key, staged.piece.stored.token_ids) for staged in run]
                if self._cache.install(g, first.parent, first.depth, chain, write) < len(run):
                    return False
        self._num_loaded += len(batch)
        load.stop = batch[-1].piece.depth + 1
        return True

    def _close(self, load: DiskLoad, transfers: Transfers) -> None:
        """Open the gate. What is still being read is dropped."""
        load.cancelled.set()
        load.closed = True
        transfers.drain(load)
        start = load.pieces[0].depth
        load.starter.from_disk = (start * BLOCK_SIZE, max(start, load.stop) * BLOCK_SIZE)
        self._loads.remove(load)
        for piece in load.pieces:
            self._coming.pop(piece.stored.key, None)

    def flush(self) -> None:
        """Forget what is kept, on disk too, of this model."""
        self._candidates.clear()
        self._pending.clear()
        self._touched.clear()
        if self._transfers is not None:
            for load in list(self._loads):
                self._close(load, self._transfers)
            self._transfers.flush()

    # Numbers

    def stats(self) -> dict[str, int]:
        """Fields of `engine.messages.Stats`, by name."""
        counters = self._transfers.counters if self._transfers else Counters()
        return {
            "disk_open": int(self._store is not None),
            "disk_bytes": self._store.num_bytes if self._store is not None else 0,
            "disk_blocks_written": counters.written,
            "disk_blocks_loaded": self._num_loaded,
            "disk_blocks_refused": counters.refused,
            "disk_blocks_removed": counters.removed,
            "disk_blocks_skipped": self._num_skipped,
        }

    def _names(self, store: BlockStore, request: Request, num_blocks: int) -> list[BlockId]:
        """Of the first blocks of a prefix, on disk, in group 0. Remembered: a request may be looked at in many steps."""
        known = self._named.get(request.key)
        if known is None or known[0] is not request:
            if len(self._named) == MAX_NAMED:
                self._named.clear()
            known = self._named[request.key] = (request, [])
        names = known[1]
        for i in range(len(names), num_blocks):
            parent = names[-1].key if names else root_key(store.space, request.terms.cache_salt, request.adapter)
            token_ids = tuple(request.token_ids(i * BLOCK_SIZE, (i + 1) * BLOCK_SIZE))
            names.append(BlockId(chain_key(parent, token_ids), 0, parent, token_ids))
        return names[:num_blocks]


def _runs(staged: list[Staged]) -> list[list[Staged]]:
    """Blocks of one group as chains without a gap."""
    runs: list[list[Staged]] = []
    for each in staged:
        if runs and runs[-1][-1].piece.depth + 1 == each.piece.depth:
            runs[-1].append(each)
        else:
            runs.append([each])
    return runs
