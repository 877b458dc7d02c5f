"""Whether two files hold the same model, as their graphs say: what was written is read back and compared."""

from __future__ import annotations

import math
from typing import Any

from msgspec.structs import asdict

from octavo.graph.ir import Graph


def same_model(first: Graph, second: Graph) -> str:
    """What two graphs compute differently, whatever formats their weights have: "" where it is nothing."""
    if len(first.nodes) != len(second.nodes):
        return f"{len(first.nodes)} and {len(second.nodes)} operations"
    if first.max_positions != second.max_positions:
        return f"{first.max_positions} and {second.max_positions} positions"
    for a, b in zip(first.nodes, second.nodes, strict=True):
        weights = [[(p.name, p.rows) for v in node.ins for p in v.parts] for node in (a, b)]
        if (
            a.op != b.op
            or a.layer != b.layer
            or not _alike(asdict(a.attrs), asdict(b.attrs))
            or weights[0] != weights[1]
        ):
            return f"{a!r} and {b!r}"
    groups = [[(g.layers, g.kv_heads, g.head_dim, g.window) for g in graph.groups] for graph in (first, second)]
    return "" if groups[0] == groups[1] else f"KV groups {groups[0]} and {groups[1]}"


def _alike(a: Any, b: Any) -> bool:
    """Numbers of a file are float32."""
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-6)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_alike(a[key], b[key]) for key in a)
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_alike, a, b))
    return bool(a == b)
