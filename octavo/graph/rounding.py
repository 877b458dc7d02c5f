"""The rounding pass: the input of every linear is rounded as the format of its weight asks (DESIGN section 4)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from octavo.graph import ops
from octavo.graph.ir import DType, Graph, Kind, Node, Value

_PRECISION = (DType.A8, DType.A16, DType.BF16, DType.F32)
_PRODUCTS = (ops.Linear, ops.ExpertLinear, ops.HeadLinear)
_OF_ATTENTION = (ops.Rope, ops.KvWrite, ops.Attention)
_BETWEEN = (ops.RmsNorm, ops.LayerNorm, ops.Scale, ops.Clamp, ops.Concat)
"""What may stand between a linear and them."""


ActOf = Callable[[str, bool], DType]
"""(packed format, whether queries, keys or values are made) -> how inputs are rounded: `weights.spec.act_of`"""


def round_inputs(graph: Graph, act_of: ActOf) -> Graph:
    """A copy of `graph` with a Round node in front of linears whose weight format asks for one.

    A weight of several parts takes the most precise of its parts. Scores of experts are made of the unrounded states:
    they are little work, and another choice of expert is a large error.
    Linears that read the same value in the same rounding share one Round; what is dispatched is rounded before.
    """
    pass_ = _Rounding(graph, act_of)
    for node in graph.nodes:
        pass_.put(node)
    return replace(graph, nodes=pass_.nodes)


class _Rounding:
    def __init__(self, graph: Graph, act_of: ActOf) -> None:
        self.nodes: list[Node] = []
        self._act_of = act_of
        self._rounded: dict[tuple[int, int, int, DType], Value] = {}
        self._dispatched: dict[Value, Value] = {}  # float32 -> rounded
        self._attended: set[Value] = set()
        for node in reversed(graph.nodes):
            between = isinstance(node.attrs, _BETWEEN) and node.outs[0] in self._attended
            if between or isinstance(node.attrs, _OF_ATTENTION):
                self._attended.update(v.root for v in node.ins)
        self._scores = {v.root for node in graph.nodes if isinstance(node.attrs, ops.Route) for v in node.ins}
        self._readers: dict[Value, list[Node]] = {}
        for node in graph.nodes:
            for v in node.ins:
                self._readers.setdefault(v.root, []).append(node)

    def put(self, node: Node) -> None:
        """Append `node`, after the Round of its input where it asks for one."""
        x = node.ins[0] if node.ins else None
        if isinstance(node.attrs, ops.Dispatch) and x is not None:
            acts = {self._act(reader) for reader in self._readers.get(node.outs[0], [])}
            if len(acts) == 1 and DType.F32 not in acts:
                (y,), source = node.outs, self._round(x, acts.pop(), node.layer)
                self._dispatched[y] = Value(f"{y.name}.{source.dtype.value}", y.rows, y.cols, Kind.TEMP, source.dtype)
                node = Node(node.attrs, (source, *node.ins[1:]), (self._dispatched[y],), node.layer)
        elif isinstance(node.attrs, _PRODUCTS) and x is not None:
            rounded = self._dispatched.get(x) or self._round(x, self._act(node), node.layer)
            node = Node(node.attrs, (rounded, *node.ins[1:]), node.outs, node.layer)
        self.nodes.append(node)

    def _act(self, node: Node) -> DType:
        """How the input of a node is rounded."""
        if not isinstance(node.attrs, _PRODUCTS) or node.outs[0] in self._scores:
            return DType.F32
        weight = next(v for v in node.ins if v.kind is Kind.WEIGHT)
        attends = node.outs[0] in self._attended or isinstance(node.attrs, ops.HeadLinear)
        return max((self._act_of(part.format, attends) for part in weight.parts), key=_PRECISION.index)

    def _round(self, x: Value, act: DType, layer: int) -> Value:
        if x.dtype is not DType.F32 or act is DType.F32:
            return x
        key = (id(x.root), x.start, x.cols, act)
        if key not in self._rounded:
            self._rounded[key] = y = Value(f"{x.name}.{act.value}", x.rows, x.cols, Kind.TEMP, act)
            self.nodes.append(Node(ops.Round(), (x,), (y,), layer))
        return self._rounded[key]
