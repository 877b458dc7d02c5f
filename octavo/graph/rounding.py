"""The rounding pass: the input of every linear is rounded as the format of its weight asks (DESIGN section 4)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from octavo.graph import ops
from octavo.graph.ir import DType, Graph, Kind, Node, Value

_PRECISION = (DType.A8, DType.BF16, DType.F32)
_OF_ATTENTION = (ops.Rope, ops.KvWrite, ops.Attention)
_BETWEEN = (ops.RmsNorm, ops.LayerNorm, ops.Scale, ops.Clamp)
"""What may stand between a linear and them."""


def round_inputs(graph: Graph, act_of: Callable[[str], DType]) -> Graph:
    """A copy of `graph` with a Round node in front of linears whose weight format asks for one.

    `act_of(format)` is F32 (no rounding), BF16 or A8. A weight of several parts takes the most precise of its parts.
    Linears that make queries, keys and values take BF16 where the format would take A8: int8 there causes over a
    third of all loss by rounding, in a sixth of the work (docs/DECISIONS.md).
    Linears that read the same value in the same rounding share one Round.
    """
    rounded: dict[tuple[int, int, int, DType], Value] = {}
    nodes: list[Node] = []
    attended: set[Value] = set()
    for node in reversed(graph.nodes):
        between = isinstance(node.attrs, _BETWEEN) and node.outs[0] in attended
        if between or isinstance(node.attrs, _OF_ATTENTION):
            attended.update(v.root for v in node.ins)
    for node in graph.nodes:
        if isinstance(node.attrs, ops.Linear):
            x, weight, *bias = node.ins
            act = max((act_of(part.format) for part in weight.parts), key=_PRECISION.index)
            if act is DType.A8 and node.outs[0] in attended:
                act = DType.BF16
            if x.dtype is DType.F32 and act is not DType.F32:
                key = (id(x.root), x.start, x.cols, act)
                if key not in rounded:
                    y = Value(f"{x.name}.{act.value}", x.rows, x.cols, Kind.TEMP, act)
                    rounded[key] = y
                    nodes.append(Node(ops.Round(), (x,), (y,), node.layer))
                node = Node(node.attrs, (rounded[key], weight, *bias), node.outs, node.layer)
        nodes.append(node)
    return replace(graph, nodes=nodes)
