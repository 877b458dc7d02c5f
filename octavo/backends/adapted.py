"""A program that serves adapters: steps without them run the plain graph, the others the adapted one (graph.adapt)."""

from __future__ import annotations

from typing import Any

from octavo.backends.base import F32, KvTiles, Program, StepBatch, StepHandle, TraceSpan


class AdaptedProgram:
    """Both are of the same weights and the same KV cache, and equal in every bit of a row without an adapter."""

    def __init__(self, plain: Program, adapted: Program) -> None:
        self._plain = plain
        self._adapted = adapted
        self._last = plain

    @property
    def kv_tiles(self) -> KvTiles:
        plain, adapted = self._plain.kv_tiles, self._adapted.kv_tiles
        return KvTiles(plain.read + adapted.read, plain.saved + adapted.saved)

    def run(self, batch: StepBatch) -> StepHandle:
        self._last = self._adapted if len(batch.adapters) else self._plain
        return self._last.run(batch)

    def set_adapter(self, slot: int, packed: Any | None) -> None:
        self._adapted.set_adapter(slot, packed)

    def logits(self) -> F32:
        return self._last.logits()

    def output(self, name: str) -> F32:
        return self._last.output(name)

    def trace(self, batch: StepBatch) -> list[TraceSpan]:
        self._last = self._adapted if len(batch.adapters) else self._plain
        return self._last.trace(batch)
