"""The native CPU backend: packs weights, lowers the graph to a flat plan, and runs it without Python."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo import _native
from octavo.backends import threads
from octavo.backends.base import F32, SMALL_T, KvTiles, Limits, StepBatch, StepHandle, StepResult, TraceSpan
from octavo.backends.cpu_lower import Lowered, lower
from octavo.backends.cpu_weights import CpuWeights, WeightLayout
from octavo.backends.fingerprint import fingerprint
from octavo.graph.fuse import fuse
from octavo.graph.ir import DType, Graph, Value
from octavo.graph.plan import align, plan
from octavo.graph.verify import verify
from octavo.weights.adapter import Adapter, LowRank
from octavo.weights.spec import Checkpoint

HUGE_PAGE = 2 << 20
"""Bytes, as in native/memory.h."""


@dataclass(frozen=True)
class CpuAdapter:
    """The matrices of a LoRA adapter, packed like weights, in the types of its file."""

    memory: _native.Memory
    modules: dict[str, tuple[LowRank, int, int]]  # with the byte offsets of A and B


@dataclass(frozen=True)
class CpuState:
    """One arena per KV group: [layer][kv head][block]. Touched on use."""

    arenas: list[_native.Memory]
    num_blocks: list[int]  # of a head: those that `make_state` was asked for and more
    blocks: list[NDArray[np.uint8]]  # the same memory, per group [layers * kv heads, blocks, bytes]

    @property
    def touched_bytes(self) -> int:
        return sum(arena.touched_bytes for arena in self.arenas)

    def block_bytes(self, group: int) -> int:
        """Bytes of one block, all layers and heads of the group."""
        return self.blocks[group][:, 0].nbytes

    def read_block(self, group: int, block: int, out: NDArray[np.uint8]) -> None:
        """Copy a block's bytes to `out` [block_bytes]. Not while a step runs that may write the block."""
        blocks = self.blocks[group]
        out.reshape(len(blocks), -1)[:] = blocks[:, block]

    def write_block(self, group: int, block: int, data: NDArray[np.uint8]) -> None:
        """Put back what `read_block` gave. Not while a step runs that may read or write the block."""
        blocks = self.blocks[group]
        blocks[:, block] = data.reshape(len(blocks), -1)


class Done(NamedTuple):
    value: StepResult

    def result(self) -> StepResult:
        return self.value


class CpuBackend:
    """isa, num_threads, fuse, reuse, share and poison as in config.EngineConfig. Raises ValueError naming a bad option."""

    name = "cpu"
    fusions = frozenset(
        {
            "norm_round",
            "linear_add",
            "linear_act_round",
            "linear_act_mul_round",
            "linear_sample",
            "rope_kv_write",
            "attention_round",
        }
    )

    def __init__(
        self, isa: str = "auto", num_threads: int = 0, fuse: bool = True, reuse: bool = True, share: bool = True,
        poison: bool = False,
    ) -> None:  # fmt: skip
        levels = _native.isa_levels()
        if isa != "auto" and isa not in levels:
            raise ValueError(f"isa {isa!r} cannot run here; this machine has: {', '.join(levels)}")
        self.isa = levels[-1] if isa == "auto" else isa
        self.bf16_dots = self.isa in ("avx512", "amx")
        self.num_threads = num_threads or threads.default_threads()
        self._pool = _native.Pool(self.num_threads, threads.pinning(self.num_threads))
        self._fuse = fuse
        self._reuse = reuse
        self._share = share
        self._poison = poison

    def fingerprint(self) -> str:
        return fingerprint(self.isa)

    def pack(
        self, graph: Graph, checkpoint: Checkpoint, progress: Callable[[int, int], None] | None = None
    ) -> CpuWeights:
        return WeightLayout(graph).pack(self._pool, checkpoint, progress)

    def packing(self, graph: Graph) -> WeightLayout:
        return WeightLayout(graph)

    def pack_adapter(self, adapter: Adapter) -> CpuAdapter:
        layout = _adapter_layout(adapter)
        memory = _native.Memory(layout.num_bytes, huge_pages=False)
        for module, a, b in layout.modules.values():
            _native.pack(self._pool, memory, a, module.source.lower(), module.a, module.cols)
            _native.pack(self._pool, memory, b, module.source.lower(), module.b, module.rank)
        return CpuAdapter(memory, layout.modules)

    def adapter_bytes(self, adapter: Adapter) -> int:
        return _adapter_layout(adapter).num_bytes

    def weight_bytes(self, graph: Graph) -> int:
        return WeightLayout(graph).num_bytes

    def block_bytes(self, graph: Graph) -> list[int]:
        return [
            len(g.layers) * g.kv_heads * _native.kv_block_bytes(g.dtype.value, g.head_dim, g.v_dim)
            for g in graph.groups
        ]

    def make_state(self, graph: Graph, num_blocks: Sequence[int]) -> CpuState:
        arenas, rooms, views = [], [], []
        for group, blocks in zip(graph.groups, num_blocks, strict=True):
            heads = len(group.layers) * group.kv_heads
            size = _native.kv_block_bytes(group.dtype.value, group.head_dim, group.v_dim)
            per = HUGE_PAGE // math.gcd(HUGE_PAGE, size)  # those of a head that fill whole huge pages
            room = blocks if blocks < per else -(-blocks // per) * per  # what is added is never touched
            # Small pages at first: with huge ones the first block of each layer and head would take two megabytes.
            arena = _native.Memory(heads * room * size, huge_pages=False)
            view = arena.view(0, heads * room * size)
            if self._poison:
                view[:] = 0xFF
            arenas.append(arena)
            rooms.append(room)
            views.append(view.reshape(heads, room, -1)[:, :blocks])
        return CpuState(arenas, rooms, views)

    def compile(self, graph: Graph, weights: CpuWeights, state: CpuState, limits: Limits) -> CpuProgram:
        graph = verify(fuse(verify(graph), self.fusions if self._fuse else ()))
        small_tokens = min(SMALL_T, limits.max_tokens)
        plans = (
            plan(graph, small_tokens, min(small_tokens, limits.max_rows), self._reuse),
            plan(graph, limits.max_tokens, limits.max_rows, self._reuse),
        )
        lowered = lower(graph, plans, weights.memory, weights.parts, weights.vectors, state.arenas, state.num_blocks,
                        limits, self._share, self._poison)  # fmt: skip
        return CpuProgram(graph, _native.Program(self._pool, self.isa, lowered.spec), lowered)


class CpuProgram:
    """Runs steps one at a time; the arrays of a result belong to the caller."""

    def __init__(self, graph: Graph, program: _native.Program, lowered: Lowered) -> None:
        self.graph = graph
        self._program = program
        self._lowered = lowered
        self._batch: StepBatch | None = None  # the last one
        self._arrays: _native.StepArrays | None = None  # of it

    @property
    def arena_bytes(self) -> int:
        return self._program.arena_bytes

    @property
    def touched_bytes(self) -> int:
        """Of the arena: what has memory behind it."""
        return self._program.touched_bytes

    @property
    def kv_tiles(self) -> KvTiles:
        return KvTiles(*self._program.kv_tiles)

    def run(self, batch: StepBatch) -> StepHandle:
        """Raises ValueError naming the array, index, value and limit where the batch is wrong; nothing is run then."""
        return Done(self._run(batch, timed=False)[0])

    def set_adapter(self, slot: int, packed: CpuAdapter | None) -> None:
        """Raises ValueError naming what does not fit this program."""
        parts = [
            (self._lowered.targets[name], module.source.lower(), module.rank, a, b, module.scale)
            for name, (module, a, b) in (packed.modules if packed else {}).items()
        ]
        self._program.set_adapter(slot, packed.memory if packed else None, parts)

    def logits(self) -> F32:
        return self._program.logits()

    def output(self, name: str) -> F32:
        return self.read(self.graph.output(name))

    def trace(self, batch: StepBatch) -> list[TraceSpan]:
        spans = []
        for index, seconds, wait in self._run(batch, timed=True)[1]:
            name, layer = ("prepare", -1) if index < 0 else self._lowered.names[index]
            spans.append(TraceSpan(name, layer, seconds, wait))
        return spans

    def read(self, value: Value) -> NDArray[Any]:
        """[rows, cols] of a root value after a run: float32, A8 and A16 decoded to float64. Valid where nothing overlaid it."""
        out = np.empty((self._program.value_rows(self._lowered.values[value]), value.cols), np.float64)
        self._program.read(self._lowered.values[value], out)
        return out if value.dtype in (DType.A8, DType.A16) else out.astype(np.float32)

    def _run(self, batch: StepBatch, timed: bool) -> tuple[StepResult, list[tuple[int, float, float]]]:
        if self._arrays is None or self._batch is not batch:
            self._arrays, self._batch = _native.StepArrays(batch), batch
        result = StepResult.nothing(self._arrays.rows, self._arrays.most_top)
        return result, self._program.run(self._arrays, *result, timed=timed)


class _AdapterLayout(NamedTuple):
    modules: dict[str, tuple[LowRank, int, int]]
    num_bytes: int


def _adapter_layout(adapter: Adapter) -> _AdapterLayout:
    modules, end = {}, 0
    for name, module in adapter.modules.items():
        a = end
        b = align(a + _native.packed_bytes(module.source.lower(), module.rank, module.cols))
        end = align(b + _native.packed_bytes(module.source.lower(), module.rows, module.rank))
        modules[name] = module, a, b
    return _AdapterLayout(modules, end)
