"""The op graph: a recorded call list over matrices. Built once per model, lowered by each backend.

Everything is a matrix rows x cols. `rows` may depend on the step (T tokens, R rows that need logits); `cols` never
does. The only view is a column slice. List order is the schedule. What changes per step (positions, block tables,
sampling parameters) is in the batch (`backends.base.StepBatch`), never in the structure.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from octavo.graph.ops import Attrs


class Dim(NamedTuple):
    """`coef` x the step's size named by `sym`: "" (one), "T" (tokens in the step) or "R" (rows that need logits)."""

    coef: int
    sym: str = ""

    def at(self, sizes: dict[str, int]) -> int:
        return self.coef * (sizes[self.sym] if self.sym else 1)

    def __str__(self) -> str:
        return f"{self.coef}" if not self.sym else self.sym if self.coef == 1 else f"{self.coef}{self.sym}"


T = Dim(1, "T")
R = Dim(1, "R")


class Kind(enum.Enum):
    INPUT = "input"  # an array of the batch
    WEIGHT = "weight"
    STATE = "state"  # the KV cache of one layer
    TEMP = "temp"  # lives in the arena
    OUTPUT = "output"  # like TEMP, and readable until the next run


class DType(enum.Enum):
    """Element type of a value. A8: int8 in groups of 32 columns, each with its own float32 scale (KERNELS 2.3).
    A16: integers of up to 127 * 128 in such groups, which kernels keep as two of int8.

    I8, of KV caches alone: int8 with one float32 scale per token and head, for keys and values apart.
    """

    F32 = "f32"
    BF16 = "bf16"
    A8 = "a8"
    A16 = "a16"
    I8 = "i8"
    I32 = "i32"


class WeightPart(NamedTuple):
    """One tensor of the checkpoint inside a weight: `rows` output features in packed format `format`."""

    name: str
    rows: int
    format: str  # packed: f32, f16, bf16 or one of weights.formats.LAYOUTS
    plus: float = 0.0  # added to every value of a vector, in float32
    order: str = ""  # the vector that says which input each column belongs to, where they are sorted


@dataclass(eq=False)  # identity is the meaning
class Value:
    name: str
    rows: Dim
    cols: int
    kind: Kind
    dtype: DType = DType.F32
    parts: tuple[WeightPart, ...] = ()  # WEIGHT only: stacked along the output features (rows)
    vector: bool = False  # WEIGHT only: one float32 row, whose parts lie side by side
    base: Value | None = None  # a column slice [start, start + cols) of `base`
    start: int = 0

    def slice(self, start: int, stop: int) -> Value:
        """Columns [start, stop) as a view."""
        assert self.base is None and 0 <= start < stop <= self.cols, (self.name, start, stop, self.cols)
        return Value(
            f"{self.name}[{start}:{stop}]", self.rows, stop - start, self.kind, self.dtype, base=self, start=start
        )

    @property
    def root(self) -> Value:
        return self.base or self

    def __repr__(self) -> str:
        return f"%{self.name}:{self.dtype.value}[{self.rows}x{self.cols}]"


@dataclass(eq=False)
class Node:
    """One operation. `ins` and `outs` follow the order written at its attrs class in `ops`.

    A fused node also carries `expansion`: base nodes over the same ins and outs (plus values of their own) that
    give the same bits. A backend without the fused kind, and the reference always, runs the expansion.
    """

    attrs: Attrs
    ins: tuple[Value, ...]
    outs: tuple[Value, ...]
    layer: int = -1  # -1: outside of the layers
    expansion: tuple[Node, ...] = ()

    @property
    def op(self) -> str:
        return self.attrs.op

    def __repr__(self) -> str:
        outs = ", ".join(map(repr, self.outs))
        return f"{outs or '()'} = {self.op}({', '.join(f'%{v.name}' for v in self.ins)}) {self.attrs}"


@dataclass(frozen=True)
class KvGroup:
    """Layers with the same cache needs: one id space, arena and block table (DESIGN section 5)."""

    name: str
    layers: tuple[int, ...]  # graph layers, in order: index here = layer inside the group's arena
    kv_heads: int
    head_dim: int
    dtype: DType  # BF16, F32 or I8
    window: int | None = None  # tokens that a query sees, itself included: older blocks are not kept. None: all
    value_dim: int | None = None  # of a head's values. None: head_dim

    @property
    def v_dim(self) -> int:
        return self.value_dim or self.head_dim


@dataclass(eq=False)
class Graph:
    name: str
    vocab_size: int
    max_positions: int  # what the model was made for, in tokens
    bounded: bool = False  # it computes something else where a sequence is longer than that
    causal: bool = True  # False, of encoders: tokens see what follows them, so that a sequence is in one step
    nodes: list[Node] = field(default_factory=list)
    groups: list[KvGroup] = field(default_factory=list)

    def values(self) -> Iterator[Value]:
        """Every root value once, in order of first use."""
        seen: set[int] = set()
        for node in self.nodes:
            for v in (*node.ins, *node.outs):
                if id(v.root) not in seen:
                    seen.add(id(v.root))
                    yield v.root

    def output(self, name: str) -> Value:
        """The output of this name: "logits", "hidden", the states after the final norm, or what the model's own head makes of them: "pooler" or "scores"."""
        return next(v for v in self.values() if v.kind is Kind.OUTPUT and v.name == name)

    def weights(self) -> list[Value]:
        return [v for v in self.values() if v.kind is Kind.WEIGHT]
