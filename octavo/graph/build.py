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

    def order(self, name: str, always: bool = False) -> str:
        """The vector [in] of the inputs to which the columns of a matrix belong, "" where they are not sorted, unless
        it is wanted `always`.

        Matrices that are sorted in the same way have the same.
        """
        ...


class Builder:
    """Builds one graph. `layer` is stamped on every node; set it to -1 outside of the layers.

    A weight asked for twice is one value (tied embeddings), as is an input of the batch.
    """

    def __init__(self, name: str, vocab_size: int, max_positions: int, source: Source, bounded: bool = False) -> None:
        self.graph = Graph(name, vocab_size, max_positions, bounded)
        self.layer = -1
        self._source = source
        self._shared: dict[object, Value] = {}
        self._names: set[str] = set()
        self._gathered: dict[object, Value] = {}

    # ---- values

    def input(self, name: str, rows: Dim) -> Value:
        """A column of int32 from the batch."""
        return self._once(name, Value(name, rows, 1, Kind.INPUT, DType.I32))

    def matrix(self, names: Mapping[str, int], cols: int) -> Value:
        """Matrices {name: rows} with `cols` input features each, stacked along the rows."""
        parts = []
        for name, rows in names.items():
            packed = self.check(name, rows, cols)
            parts.append(WeightPart(name, rows, packed, order=self._source.order(name)))
        return self._weight(Dim(sum(names.values())), cols, tuple(parts))

    def check(self, name: str, rows: int, cols: int) -> str:
        """The packed format of a matrix. GraphError where it has another shape; parts of it are then there, too."""
        got_rows, got_cols, packed = self._source.rows_cols_format(name)
        if (got_rows, got_cols) != (rows, cols):
            raise GraphError(f"{name} has shape ({got_rows}, {got_cols}), the config asks for ({rows}, {cols})")
        return packed

    def vector(self, names: Mapping[str, int], plus: float = 0.0) -> Value:
        """Vectors {name: length} as one float32 row, `plus` added to each value. One set per head may be a matrix."""
        parts = []
        for name, size in names.items():
            got_rows, got, _ = self._source.rows_cols_format(name)
            if got_rows * got != size:
                raise GraphError(f"{name} has shape ({got_rows}, {got}), the config asks for ({size},)")
            parts.append(WeightPart(name, 1, "f32", plus))
        return self._weight(Dim(1), sum(names.values()), tuple(parts), vector=True)

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

    def embed(self, weight: Value, ids: str = "token_ids", offset: int = 0) -> Value:
        """Rows of a table; of "positions" too, from row `offset` on, or of "token_types"."""
        return self._out(ops.Embed(offset), (self.input(ids, T), weight), T, weight.cols, "x")

    def rms_norm(self, x: Value, weight: str | None, eps: float, head_dim: int | None = None, plus: float = 0) -> Value:
        """`weight` may hold `head_dim` values for all heads, or one set per head. `plus` is added to it (Gemma: 1)."""
        vectors = () if weight is None else (self._norm_vector(weight, x.cols, head_dim, plus),)
        return self._out(ops.RmsNorm(eps, head_dim), (x, *vectors), x.rows, x.cols, "norm")

    def layer_norm(
        self,
        x: Value,
        weight: str | Sequence[str] | None,
        bias: str | None,
        eps: float,
        head_dim: int | None = None,
        plus: float = 0,
    ) -> Value:
        """As rms_norm; a bias comes with a weight, which may be a tensor for each head."""
        vectors = [self._norm_vector(weight, x.cols, head_dim, plus)] if weight else []
        vectors += [self._norm_vector(bias, x.cols, head_dim)] if bias else []
        return self._out(ops.LayerNorm(eps, head_dim), (x, *vectors), x.rows, x.cols, "norm")

    def final_norm(self, x: Value, weight: str | None, eps: float, plus: float = 0) -> Value:
        """The states that logits are made of: an output, for who pools them."""
        return self.states(self.rms_norm(x, weight, eps, plus=plus))

    def final_layer_norm(self, x: Value, weight: str | None, bias: str | None, eps: float, plus: float = 0) -> Value:
        """As final_norm."""
        return self.states(self.layer_norm(x, weight, bias, eps, plus=plus))

    def states(self, x: Value) -> Value:
        """As final_norm, where nothing is left to be done: x is what the last call gave."""
        return self._output(x, "hidden")

    def head(self, x: Value, name: str) -> Value:
        """What the model's own head makes of each row of states, an output: "pooler", a vector, or "scores" of labels."""
        return self._output(x, name)

    def linear(
        self, x: Value, modules: Mapping[str, int], bias: bool = False, name: str = "linear", transposed: bool = False
    ) -> Value:
        """x through the stacked modules {name: output features}; their tensors are name.weight, name.bias.

        A module may be some rows of its tensors: name[a:b%p]. transposed: the file holds the weight as [in, out].
        """
        end = ".T" if transposed else ""
        weight = self.matrix({_tensor(m, "weight") + end: n for m, n in modules.items()}, x.cols)
        if len({part.order for part in weight.parts}) > 1:  # each reads the inputs in an order of its own
            each = [self.linear(x, {m: n}, bias, name, transposed) for m, n in modules.items()]
            return self.concat(*each, name=name)
        biases = (self.vector({_tensor(m, "bias"): n for m, n in modules.items()}),) if bias else ()
        x = self._sorted(x, weight)
        return self._out(ops.Linear(), (x, weight, *biases), x.rows, sum(modules.values()), name)

    def logits(
        self, x: Value, weight: Value, bias: str | None = None, scale: float = 1.0, softcap: float = 0.0
    ) -> Value:
        """Of each row, an output: scale * (x weight^T + bias), then capped where softcap > 0."""
        biases = (self.vector({bias: weight.rows.coef}),) if bias else ()
        x = self._sorted(x, weight)
        y = self._out(ops.Linear(), (x, weight, *biases), x.rows, weight.rows.coef, "logits")
        y = y if scale == 1 else self.scale(y, scale, "logits")
        y = self.softcap(y, softcap, "logits") if softcap else y
        return self._output(y, "logits")

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
        causal: bool = True,
        window: int | None = None,
    ) -> Value:
        """Writes k and v to this layer's cache and attends over it, within the window of its group.

        Not causal, the whole sequence is seen, or `window` to either side; the graph is an encoder's then.
        """
        g = self.graph.groups[group]
        state = Value(f"{self.layer}.kv", Dim(1), g.kv_heads * (g.head_dim + g.v_dim), Kind.STATE, g.dtype)
        self._node(ops.KvWrite(group, g.kv_heads, g.head_dim, g.value_dim), (k, v, state), ())
        heads = q.cols // g.head_dim
        assert window is None or not causal, "the group says it"
        self.graph.causal = self.graph.causal and causal
        window = g.window if causal else window
        dims = g.kv_heads, g.head_dim
        attrs = ops.Attention(group, heads, *dims, scale, window, causal, softcap, slopes, g.value_dim)
        sink = (self.vector({sinks: heads}),) if sinks else ()
        return self._out(attrs, (q, state, *sink), q.rows, heads * g.v_dim, "attention")

    def act_mul(self, gate: Value, up: Value, act: str) -> Value:
        return self._out(ops.ActMul(act), (gate, up), gate.rows, gate.cols, "act_mul")

    def act(self, x: Value, act: str) -> Value:
        return self._out(ops.Act(act), (x,), x.rows, x.cols, "act")

    def scale(self, x: Value, factor: float, name: str = "scaled") -> Value:
        return self._out(ops.Scale(factor), (x,), x.rows, x.cols, name)

    def softcap(self, x: Value, cap: float, name: str = "capped") -> Value:
        return self._out(ops.Softcap(cap), (x,), x.rows, x.cols, name)

    def clamp(self, x: Value, low: float, high: float) -> Value:
        return self._out(ops.Clamp(low, high), (x,), x.rows, x.cols, "clamped")

    def mul(self, a: Value, b: Value) -> Value:
        """b: as a, a scalar per row [n,1], or a vector of weights."""
        return self._out(ops.Mul(), (a, b), a.rows, a.cols, "product")

    def add(self, a: Value, b: Value) -> Value:
        return self._out(ops.Add(), (a, b), a.rows, a.cols, "x")

    def concat(self, *values: Value, heads: int = 1, name: str = "concat") -> Value:
        """Side by side within each of `heads` equal runs of columns."""
        return self._out(ops.Concat(heads), values, values[0].rows, sum(v.cols for v in values), name)

    def head_linear(self, x: Value, weight: str, heads: int, cols: int, name: str) -> Value:
        """Each head of x through its `cols` rows of the matrix `weight`."""
        split = self._out(ops.SplitHeads(heads), (x,), Dim(heads * x.rows.coef, x.rows.sym), x.cols // heads, "heads")
        matrix = self.matrix({weight: heads * cols}, split.cols)
        return self._out(ops.HeadLinear(heads), (self._sorted(split, matrix), matrix), x.rows, heads * cols, name)

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
        each = len(weight.parts) // len(experts)
        if any(len({part.order for part in weight.parts[i : i + each]}) > 1 for i in range(0, len(weight.parts), each)):
            alone = [[_only(i, of) for of in (experts, biases)] for i in range(each)]
            return self.concat(*(self.expert_linear(x, routing, *parts, name=name) for parts in alone), name=name)
        x = self._sorted_by_expert(x, routing, weight, len(experts))
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

    def _sorted(self, x: Value, weight: Value) -> Value:
        """The columns of x as those of the weight are sorted; made once for all weights of that order."""
        order = weight.parts[0].order
        if not order:
            return x
        key = (x.root, x.start, x.cols, order)
        if key not in self._gathered:
            vector = self.vector({order: x.cols})
            self._gathered[key] = self._out(ops.GatherCols(), (x, vector), x.rows, x.cols, "sorted")
        return self._gathered[key]

    def _sorted_by_expert(self, x: Value, routing: Value, weight: Value, experts: int) -> Value:
        """As _sorted, each row as the columns of its expert are, whose parts are sorted alike."""
        if not any(part.order for part in weight.parts):
            return x
        firsts = weight.parts[:: len(weight.parts) // experts]
        orders = tuple(WeightPart(self._source.order(part.name, always=True), 1, "f32") for part in firsts)
        key = (x.root, x.start, x.cols, orders)
        if key not in self._gathered:
            vector = self._weight(Dim(1), experts * x.cols, orders, vector=True)
            attrs = ops.GatherExpertCols(experts)
            self._gathered[key] = self._out(attrs, (x, routing, vector), x.rows, x.cols, "sorted")
        return self._gathered[key]

    def _once(self, key: object, value: Value) -> Value:
        return self._shared.setdefault(key, value)

    def _weight(self, rows: Dim, cols: int, parts: tuple[WeightPart, ...], vector: bool = False) -> Value:
        name = "+".join(p.name if not p.plus else f"({p.name}+{p.plus:g})" for p in parts)
        return self._once((parts, vector), Value(name, rows, cols, Kind.WEIGHT, parts=parts, vector=vector))

    def _norm_vector(self, name: str | Sequence[str], cols: int, head_dim: int | None, plus: float = 0) -> Value:
        if not isinstance(name, str):
            return self.vector(dict.fromkeys(name, cols // len(name)), plus)
        rows, n, _ = self._source.rows_cols_format(name)
        return self.vector({name: head_dim if head_dim and rows * n == head_dim else cols}, plus)

    def _output(self, x: Value, name: str) -> Value:
        """The value of the last node, made an output of that name."""
        (last,) = self.graph.nodes[-1].outs
        assert x is last and x.kind is Kind.TEMP
        x.kind, x.name = Kind.OUTPUT, name
        return x

    def _node(self, attrs: ops.Attrs, ins: tuple[Value, ...], outs: tuple[Value, ...]) -> None:
        self.graph.nodes.append(Node(attrs, ins, outs, self.layer))

    def _out(self, attrs: ops.Attrs, ins: tuple[Value, ...], rows: Dim, cols: int, name: str) -> Value:
        stem = name if self.layer < 0 else f"{self.layer}.{name}"
        unique, i = stem, 2
        while unique in self._names:
            unique, i = f"{stem}.{i}", i + 1
        self._names.add(unique)
        value = Value(unique, rows, cols, Kind.TEMP)
        self._node(attrs, ins, (value,))
        return value


def _only(i: int, modules: Sequence[Mapping[str, int]]) -> list[dict[str, int]]:
    """Of each expert its module i alone."""
    return [dict([list(of.items())[i]]) for of in modules]


def _tensor(module: str, kind: str) -> str:
    """name.weight of name, name.weight[a:b%p] of name[a:b%p]."""
    stem, bracket, rows = module.partition("[")
    return f"{stem}.{kind}{bracket}{rows}"
