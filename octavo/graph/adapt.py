"""adapt: the graph that steps with adapters run, with a low-rank delta behind every linear of the layers (Hu et al. 2021).

Rows without an adapter have the bits of the plain graph: their values pass the new operations unchanged, and what can no
longer be fused around them is bit-equal to the fused. Deltas are made of the unrounded input, in float32.
"""

from __future__ import annotations

import re
from dataclasses import replace

from octavo.graph import ops
from octavo.graph.ir import DType, Graph, Kind, Node, T, Value, WeightPart

_PASSES = (ops.Round, ops.GatherCols)
"""Operations behind which a linear's input is still that of its module."""


def adapt(graph: Graph, rank: int) -> Graph:
    """A copy of `graph`, whose inputs are rounded already, for adapters of at most `rank`."""
    adapters = Value("adapters", T, 1, Kind.INPUT, DType.I32)
    source: dict[Value, Value] = {}  # of what was made of it for a linear
    nodes: list[Node] = []
    for node in graph.nodes:
        if isinstance(node.attrs, _PASSES):
            source[node.outs[0]] = source.get(node.ins[0], node.ins[0])
        if not _takes_deltas(node):
            nodes.append(node)
            continue
        x, (y,) = source.get(node.ins[0], node.ins[0]), node.outs
        modules = tuple(_module(part) for part in node.ins[1].parts)
        sizes = tuple(part.rows for part in node.ins[1].parts)
        low = Value(f"{y.name}.low", T, len(modules) * rank, Kind.TEMP)
        plain = Value(f"{y.name}.plain", T, y.cols, Kind.TEMP)
        nodes += [
            Node(ops.LoraShrink(modules, rank), (x, adapters), (low,), node.layer),
            replace(node, outs=(plain,)),
            Node(ops.LoraExpand(modules, sizes), (low, plain, adapters), (y,), node.layer),
        ]
    return replace(graph, nodes=nodes)


def targets(graph: Graph) -> dict[str, tuple[int, int]]:
    """The modules that can have a delta, and their sizes (output features, input features).

    Where a linear reads some rows of a module, these are a target of their own: `name[0:64%96]`, as in weights.address.
    """
    found: dict[str, tuple[int, int]] = {}
    for node in graph.nodes:
        if _takes_deltas(node):
            weight = node.ins[1]
            found |= {_module(part): (part.rows, weight.cols) for part in weight.parts}
    return found


def _takes_deltas(node: Node) -> bool:
    return isinstance(node.attrs, ops.Linear) and node.layer >= 0 and node.outs[0].rows == T


def _module(part: WeightPart) -> str:
    return re.sub(r"\.weight(?=$|\[|\.T)", "", part.name, count=1)
