"""Builder: appends nodes to a graph, one call per operation, and checks every weight against its file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from octavo.graph import ops
from octavo.graph.ir import Dim, DType, Graph, Kind, KvGroup, Node, R, T, Value, WeightPart
from octavo.graph.verify import GraphError


class Source(Protocol):
    """What the builder must know of a checkpoint."""

    def rows_cols_format(self, name: str) -> tuple[int, int, str]:
        """(out, in, packed format) of a matrix; (1, n, "f32") of a vector. Raises where the tensor is missing."""
        ...


class Builder:
    """Builds one graph. `layer` is stamped on every node; set it to -1 outside of the layers.

    A weight asked for twice is one value (tied embeddings), as is an input of the batch.
    """

    def __init__(self, name: str, vocab_size: int, max_positions: int, source: Source, bounded: bool = False) -> None:
        self.graph = Graph(name, vocab_size, max_positions, bounded)
        self.layer = -1
        self._source = source
        self._shared: dict[tuple[str, ...], Value] = {}
        self._names: set[str] = set()

    # ---- values

    def input(self, name: str, rows: Dim) -> Value:
        """A column of int32 from the batch."""
        return self._once((name,), Value(name, rows, 1, Kind.INPUT, DType.I32))

    def matrix(self, names: Mapping[str, int], cols: int) -> Value:
        """Matrices {name: rows} with `cols` input features each, stacked along the rows."""
        parts = []
        for name, rows in names.items():
            got_rows, got_cols, packed = self._source.rows_cols_format(name)
            if (got_rows, got_cols) != (rows, cols):
                raise GraphError(f"{name} has shape ({got_rows}, {got_cols}), the config asks for ({rows}, {cols})")
            parts.append(WeightPart(name, rows, packed))
        value = Value("+".join(names), Dim(sum(names.values())), cols, Kind.WEIGHT, parts=tuple(parts))
        return self._once(tuple(names), value)

    def vector(self, names: Mapping[str, int]) -> Value:
        """Vectors {name: length} as one float32 row."""
        for name, size in names.items():
            got_rows, got, _ = self._source.rows_cols_format(name)
            if (got_rows, got) != (1, size):
                raise GraphError(f"{name} has shape ({got_rows}, {got}), the config asks for ({size},)")
        parts = tuple(WeightPart(name, 1, "f32") for name in names)
        value = Value("+".join(names), Dim(1), sum(names.values()), Kind.WEIGHT, parts=parts)
        return self._once(tuple(names), value)

    def kv_group(self, group: KvGroup) -> int:
        """Index of the new group."""
        self.graph.groups.append(group)
        return len(self.graph.groups) - 1

    def split(self, x: Value, *sizes: int) -> list[Value]:
        """Columns of x as consecutive views."""
        if sum(sizes) != x.cols:
            raise GraphError(f"cannot split {x!r} into {sizes}")
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        return [x.slice(a, a + n) for a, n in zip(starts, sizes, strict=True)]

    # ---- operations, in the order of graph.ops

    def embed(self, weight: Value) -> Value:
        return self._out(ops.Embed(), (self.input("token_ids", T), weight), T, weight.cols, "x")

    def rms_norm(self, x: Value, weight: str, eps: float) -> Value:
        return self._out(ops.RmsNorm(eps), (x, self.vector({weight: x.cols})), x.rows, x.cols, "norm")

    def final_norm(self, x: Value, weight: str, eps: float) -> Value:
        """The states that logits are made of: an output, for who pools them."""
        ins = (x, self.vector({weight: x.cols}))
        return self._out(ops.RmsNorm(eps), ins, x.rows, x.cols, "hidden", Kind.OUTPUT)

    def linear(self, x: Value, modules: Mapping[str, int], bias: bool = False, name: str = "linear") -> Value:
        """x through the stacked modules {name: output features}; their tensors are name.weight, name.bias."""
        weight = self.matrix({f"{m}.weight": n for m, n in modules.items()}, x.cols)
        biases = (self.vector({f"{m}.bias": n for m, n in modules.items()}),) if bias else ()
        return self._out(ops.Linear(), (x, weight, *biases), x.rows, sum(modules.values()), name)

    def logits(self, x: Value, weight: Value) -> Value:
        return self._out(ops.Linear(), (x, weight), x.rows, weight.rows.coef, "logits", Kind.OUTPUT)

    def rope(
        self,
        x: Value,
        head_dim: int,
        inv_freq: tuple[float, ...],
        neox: bool = True,
        scale: float = 1.0,
        *,
        name: str,
    ) -> Value:
        attrs = ops.Rope(head_dim, inv_freq, neox, scale)
        return self._out(attrs, (x, self.input("positions", T)), x.rows, x.cols, name)

    def attention(
        self,
        q: Value,
        k: Value,
        v: Value,
        group: int,
        scale: float,
        softcap: float = 0.0,
        slopes: tuple[float, ...] = (),
        sinks: str | None = None,
    ) -> Value:
        """Writes k and v to this layer's cache and attends over it, within the window of its group."""
        g = self.graph.groups[group]
        state = Value(f"{self.layer}.kv", Dim(1), 2 * g.kv_heads * g.head_dim, Kind.STATE, g.dtype)
        self._node(ops.KvWrite(group, g.kv_heads, g.head_dim), (k, v, state), ())
        heads = q.cols // g.head_dim
        attrs = ops.Attention(group, heads, g.kv_heads, g.head_dim, scale, g.window, softcap, slopes)
        sink = (self.vector({sinks: heads}),) if sinks else ()
        return self._out(attrs, (q, state, *sink), q.rows, q.cols, "attention")

    def act_mul(self, gate: Value, up: Value, act: str) -> Value:
        return self._out(ops.ActMul(act), (gate, up), gate.rows, gate.cols, "act_mul")

    def add(self, a: Value, b: Value) -> Value:
        return self._out(ops.Add(), (a, b), a.rows, a.cols, "x")

    def concat(self, *values: Value, heads: int = 1, name: str = "concat") -> Value:
        """Side by side within each of `heads` equal runs of columns."""
        return self._out(ops.Concat(heads), values, values[0].rows, sum(v.cols for v in values), name)

    def route(self, scores: Value, attrs: ops.Route, bias: str | None = None) -> Value:
        correction = (self.vector({bias: scores.cols}),) if bias else ()
        return self._out(attrs, (scores, *correction), scores.rows, 2 * attrs.top_k, "routing")

    def dispatch(self, x: Value, routing: Value, experts: int) -> Value:
        rows = Dim(x.rows.coef * (routing.cols // 2), x.rows.sym)
        return self._out(ops.Dispatch(experts), (x, routing), rows, x.cols, "dispatched")

    def expert_linear(
        self,
        x: Value,
        routing: Value,
        experts: Sequence[Mapping[str, int]],
        biases: Sequence[Mapping[str, int]] = (),
        *,
        name: str,
    ) -> Value:
        """x through the stacked matrices {name: output features} of each row's expert; `biases` likewise."""
        weight = self.matrix({m: n for modules in experts for m, n in modules.items()}, x.cols)
        bias = (self.vector({m: n for modules in biases for m, n in modules.items()}),) if biases else ()
        cols = sum(experts[0].values())
        return self._out(ops.ExpertLinear(len(experts)), (x, routing, weight, *bias), x.rows, cols, name)

    def combine(self, x: Value, routing: Value, experts: int) -> Value:
        return self._out(ops.Combine(experts), (x, routing), routing.rows, x.cols, "combined")

    def gather_rows(self, x: Value) -> Value:
        return self._out(ops.GatherRows(), (x, self.input("logit_rows", R)), R, x.cols, "rows")

    def sample(self, logits: Value) -> None:
        self._node(ops.Sample(), (logits,), ())

    # ---- internals

    def _once(self, key: tuple[str, ...], value: Value) -> Value:
        return self._shared.setdefault(key, value)

    def _node(self, attrs: ops.Attrs, ins: tuple[Value, ...], outs: tuple[Value, ...]) -> None:
        self.graph.nodes.append(Node(attrs, ins, outs, self.layer))

    def _out(
        self, attrs: ops.Attrs, ins: tuple[Value, ...], rows: Dim, cols: int, name: str, kind: Kind = Kind.TEMP
    ) -> Value:
        stem = name if self.layer < 0 else f"{self.layer}.{name}"
        unique, i = stem, 2
        while unique in self._names:
            unique, i = f"{stem}.{i}", i + 1
        self._names.add(unique)
        value = Value(unique, rows, cols, kind)
        self._node(attrs, ins, (value,))
        return value
