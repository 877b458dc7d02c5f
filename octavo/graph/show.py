"""show: a graph and its memory as text."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import groupby

import msgspec

from octavo.graph import ops
from octavo.graph.ir import DType, Graph, Kind, Node, Value
from octavo.graph.plan import Plan

PackedBytes = Callable[[str, int, int], int]
"""(packed format, rows, cols) -> bytes: `weights.formats.packed_bytes`."""


_KV_BYTES: dict[DType, Callable[[int], int]] = {
    DType.F32: lambda d: 4 * d,
    DType.BF16: lambda d: 2 * d,
    DType.I8: lambda d: d + 4,
}
"""Of one head's key or value of d dimensions."""


def render(graph: Graph, plan: Plan, packed_bytes: PackedBytes, all_layers: bool = False) -> str:
    """A listing of `graph` as `plan` runs it, one node a line; consecutive layers that are alike are shown once.

    '|' marks a barrier before the node. Inside a layer, x is the residual stream as it stands.
    """
    return "\n".join([*_header(graph, plan, packed_bytes), "", *_body(graph, plan, all_layers)]) + "\n"


def _header(graph: Graph, plan: Plan, packed_bytes: PackedBytes) -> list[str]:
    lines = [f"{graph.name}: vocabulary {graph.vocab_size:,}, made for {graph.max_positions:,} positions"]
    for g in graph.groups:
        per_token = len(g.layers) * g.kv_heads * sum(_KV_BYTES[g.dtype](d) for d in (g.head_dim, g.v_dim))
        window = f", window {g.window:,} tokens" if g.window else ""
        lines.append(
            f"KV group {g.name}: layers {len(g.layers)}, heads {g.kv_heads}, head size {g.head_dim}, {g.dtype.value}, "
            f"{per_token:,} bytes per token{window}"
        )
    formats: dict[str, list[int]] = {}
    for value in graph.weights():
        vector = value.rows.coef == 1
        for part in value.parts:
            cols = value.cols // len(value.parts) if vector else value.cols
            size = cols * 4 if vector else packed_bytes(part.format, part.rows, cols)
            formats.setdefault("f32 vectors" if vector else part.format, []).append(size)
    packed = sum(map(sum, formats.values()))
    listed = ", ".join(f"{len(sizes)} x {name} ({sum(sizes):,})" for name, sizes in sorted(formats.items()))
    lines.append(f"weights: {packed:,} bytes packed: {listed}")
    lines.append(
        f"plan for {plan.tokens} tokens and {plan.rows} logit rows: {len(graph.nodes)} nodes, "
        f"{len(plan.barriers)} barriers, arena {plan.size:,} bytes"
    )
    return lines


def _body(graph: Graph, plan: Plan, all_layers: bool) -> list[str]:
    numbered = list(enumerate(graph.nodes))
    layers: list[tuple[int, list[str]]] = []
    for layer, nodes in groupby(numbered, key=lambda pair: pair[1].layer):
        layers.append((layer, [_line(node, i in plan.barriers, layer) for i, node in nodes]))
    lines: list[str] = []
    first = 0
    while first < len(layers):
        layer, text = layers[first]
        last = first
        while not all_layers and layer >= 0 and last + 1 < len(layers) and layers[last + 1][1] == text:
            last += 1
        if layer >= 0:
            count = last - first + 1
            lines.append(f"layer {layer}:" if count == 1 else f"layers {layer} to {layers[last][0]} ({count} alike):")
        lines += ["  " + line if layer >= 0 else line for line in text]
        first = last + 1
    return lines


def _line(node: Node, barrier: bool, layer: int) -> str:
    operands = ", ".join(_operand(v, layer) for v in node.ins)
    results = ", ".join(f"{_name(v.name)} {v.dtype.value}[{v.rows} x {v.cols}]" for v in node.outs)
    call = f"{node.op}({operands}){_attrs(node.attrs)}"
    return f"{'|' if barrier else ' '} {results} = {call}" if results else f"{'|' if barrier else ' '} {call}"


def _operand(v: Value, layer: int) -> str:
    if v.kind is Kind.WEIGHT:
        parts = [f"{_short(p.name)} {p.format}" for p in v.parts]
        return f"{' + '.join(parts)} [{v.rows} x {v.cols}]"
    return _name(v.name)


def _name(name: str) -> str:
    """Without the layer, and x for every state of the residual stream."""
    return re.sub(r"^x\.\d+$", "x", re.sub(r"^\d+\.", "", name))


def _short(name: str) -> str:
    return re.sub(r"^model\.(layers\.\d+\.)?", "", name).removesuffix(".weight")


def _attrs(attrs: ops.Attrs) -> str:
    items = []
    for key, value in msgspec.structs.asdict(attrs).items():
        if isinstance(value, ops.Attrs):
            items.append(_attrs(value).strip(" {}"))
        elif value is None or value == ():
            continue
        elif isinstance(value, tuple):
            items.append(f"{key}={len(value)} from {value[0]:g} to {value[-1]:.3g}")
        else:
            items.append(f"{key}={value:.6g}" if isinstance(value, float) else f"{key}={value}")
    return f" {{{', '.join(items)}}}" if items else ""
