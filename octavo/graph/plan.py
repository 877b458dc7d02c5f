"""plan: places every temp in the arena and puts barriers where one thread could touch bytes of another.

Liveness of a value: half-open [index of the node that defines it, index after its last reader); outputs live to the
end. Values that live together never share bytes, except that an out may overlay an in which dies there (`overlays`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from octavo.graph import ops
from octavo.graph.ir import DType, Graph, Kind, Node, Value
from octavo.graph.verify import GraphError

ALIGN = 64  # bytes: a cache line, and one vector of AVX-512


@dataclass(frozen=True)
class Plan:
    """Where values lie for steps of up to `tokens` tokens and `rows` logit rows."""

    tokens: int
    rows: int
    offsets: dict[Value, int]  # bytes from the start of the arena, by root value
    size: int  # bytes of the arena
    barriers: frozenset[int]  # all threads wait before these nodes

    @property
    def sizes(self) -> dict[str, int]:
        return {"T": self.tokens, "R": self.rows}


def align(n: int) -> int:
    return (n + ALIGN - 1) // ALIGN * ALIGN


def value_bytes(value: Value, sizes: dict[str, int]) -> int:
    """Arena bytes of a value (layouts of native/kernels.h), a multiple of 64.

    F32: [rows][cols]. BF16: [rows][ld], ld = columns padded to 64, and 32 more at multiples of 1024 (L1 sets), then
    a row of 4 bytes per group of 32 columns.
    A8: int8 columns padded to 64, then the four rows of 4 bytes per group of 32 columns, each part aligned. A16: twice as
    many rows.
    """
    rows = value.rows.at(sizes)
    padded = align(value.cols)  # columns, to 64
    match value.dtype:
        case DType.F32 | DType.I32:
            return align(rows * value.cols * 4)
        case DType.BF16:
            return align(rows * (padded + 32 * (padded % 1024 == 0)) * 2) + align(rows * padded // 32 * 4)
        case DType.A8 | DType.A16:
            rows *= 2 if value.dtype is DType.A16 else 1
            return align(rows * padded) + 4 * align(rows * padded // 32 * 4)
        case DType.I8:
            raise GraphError(f"%{value.name}: {value.dtype.value} is a type of the KV cache alone")


def plan(graph: Graph, tokens: int, rows: int, reuse: bool = True) -> Plan:
    """Place all values, greedily by size; without `reuse` each has a place of its own."""
    sizes = {"T": tokens, "R": rows}
    places = _places(graph, sizes, reuse)
    offsets: dict[Value, int] = {}
    placed: list[tuple[int, int, _Place]] = []  # start, stop
    for place in sorted(places, key=lambda p: (-p.size, p.first)):
        start = 0
        for a, b, other in sorted(placed, key=lambda p: p[:2]):
            together = not reuse or (place.first < other.last and other.first < place.last)
            if together and a < start + place.size and start < b:
                start = b
        placed.append((start, start + place.size, place))
        offsets.update(dict.fromkeys(place.values, start))
    size = max((stop for _, stop, _ in placed), default=0)
    return verify_plan(graph, Plan(tokens, rows, offsets, size, _barriers(graph, offsets, sizes)))


class _Place(NamedTuple):
    """Bytes shared by values that follow one another exactly (the residual stream)."""

    values: list[Value]
    size: int
    first: int
    last: int


def lifetimes(graph: Graph) -> dict[Value, tuple[int, int]]:
    """[first, last) of every temp and output, in node indices."""
    lives: dict[Value, tuple[int, int]] = {}
    for i, node in enumerate(graph.nodes):
        for v in node.outs:
            lives[v] = (i, len(graph.nodes) if v.kind is Kind.OUTPUT else i + 1)
        for v in node.ins:
            if v.root in lives:
                first, last = lives[v.root]
                lives[v.root] = (first, max(last, i + 1))
    return lives


_MAPS = (ops.Act, ops.Scale, ops.Softcap, ops.Clamp)
"""Element by element, out of one value of the same shape."""

_WRITES_OVER: dict[type[ops.Attrs], int] = {ops.LinearAdd: 2, ops.LoraExpand: 1, **dict.fromkeys(_MAPS, 0)}
"""Which of its ins an operation may overlay by its out."""


def overlays(graph: Graph) -> dict[Value, Value]:
    """{out: in} where the out may take the place of an in that is read for the last time there."""
    lives = lifetimes(graph)
    found = {}
    for i, node in enumerate(graph.nodes):
        if type(node.attrs) in _WRITES_OVER:
            x, (y,) = node.ins[_WRITES_OVER[type(node.attrs)]], node.outs
            alone = [v.root for v in node.ins].count(x) == 1
            if x.base is None and x.kind is Kind.TEMP and alone and lives[x][1] == i + 1:
                found[y] = x
    return found


def _places(graph: Graph, sizes: dict[str, int], reuse: bool) -> list[_Place]:
    over = overlays(graph) if reuse else {}
    places: dict[Value, _Place] = {}
    for v, (first, last) in lifetimes(graph).items():
        old = places.get(over[v]) if v in over else None
        values = [*old.values, v] if old else [v]
        places[v] = _Place(values, value_bytes(v, sizes), old.first if old else first, last)
        for u in values:
            places[u] = places[v]
    return list({id(p): p for p in places.values()}.values())


# ---- barriers


class _Access(NamedTuple):
    space: int  # 0: the arena; otherwise the id of a state
    start: int
    stop: int
    write: bool
    split: str  # how the threads share it: equal tags over one span touch equal bytes; "" is any way at all


_BY_ROWS = (ops.RmsNorm, ops.LayerNorm, ops.Add, ops.ActMul, ops.Mul, ops.GatherCols, ops.Concat, ops.Route, *_MAPS)
"""Each thread takes the same rows of ins and outs: equal parts of n rows, by one rule for all of these."""

_OUT_BY_ROWS = (ops.Embed, ops.GatherRows, ops.Combine)
"""The same of outs alone."""


def _accesses(node: Node, offsets: dict[Value, int], sizes: dict[str, int]) -> list[_Access]:
    found = []
    writes_state = isinstance(node.attrs, ops.KvWrite | ops.RopeKvWrite)
    for values, out in ((node.ins, False), (node.outs, True)):
        for v in values:
            if v.kind is Kind.STATE:
                found.append(_Access(id(v), 0, 1, writes_state, ""))
            elif v.root in offsets:
                by_rows = isinstance(node.attrs, _BY_ROWS) or (out and isinstance(node.attrs, _OUT_BY_ROWS))
                split = f"{v.rows} x {v.root.cols} {v.dtype.value}" if by_rows else ""
                rotates = isinstance(node.attrs, ops.RopeKvWrite) and v is node.ins[1]  # k, where it lies
                start = offsets[v.root]
                found.append(_Access(0, start, start + value_bytes(v.root, sizes), out or rotates, split))
    return found


def _conflict(a: _Access, b: _Access) -> bool:
    bytes_shared = a.space == b.space and a.start < b.stop and b.start < a.stop
    same_thread = a.split != "" and (a.split, a.start) == (b.split, b.start)
    return bytes_shared and (a.write or b.write) and not same_thread


def _barriers(graph: Graph, offsets: dict[Value, int], sizes: dict[str, int]) -> frozenset[int]:
    barriers = set()
    since: list[_Access] = []
    for i, node in enumerate(graph.nodes):
        new = _accesses(node, offsets, sizes)
        if any(_conflict(a, b) for a in since for b in new):
            barriers.add(i)
            since = []
        since += new
    return frozenset(barriers)


def verify_plan(graph: Graph, plan: Plan) -> Plan:
    """Check placement and barriers pair by pair, apart from how they were made. Raise GraphError."""
    lives, over = lifetimes(graph), overlays(graph)
    values = list(lives)
    spans = {v: (plan.offsets[v], plan.offsets[v] + value_bytes(v, plan.sizes)) for v in values}
    for v in values:
        if spans[v][0] % ALIGN or not 0 <= spans[v][0] <= spans[v][1] <= plan.size:
            raise GraphError(f"{graph.name}: %{v.name} lies at {spans[v]}, outside of the arena of {plan.size} bytes")
    for i, u in enumerate(values):
        for v in values[i + 1 :]:
            together = lives[u][0] < lives[v][1] and lives[v][0] < lives[u][1]
            overlay = over.get(v) is u and spans[u] == spans[v]
            if together and not overlay and spans[u][0] < spans[v][1] and spans[v][0] < spans[u][1]:
                raise GraphError(f"{graph.name}: %{u.name} and %{v.name} live together and share bytes")
    touched = [_accesses(node, plan.offsets, plan.sizes) for node in graph.nodes]
    for j in range(len(graph.nodes)):
        for i in range(j - 1, -1, -1):
            if i + 1 in plan.barriers or j in plan.barriers:
                break
            for a in touched[i]:
                if any(_conflict(a, b) for b in touched[j]):
                    raise GraphError(f"{graph.name}: no barrier between {graph.nodes[i]!r} and {graph.nodes[j]!r}")
    return plan
