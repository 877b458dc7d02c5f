"""fuse: replaces chains of base operations by fused ones, each carrying the chain as its expansion (same bits)."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import NamedTuple

from octavo.graph import ops
from octavo.graph.ir import DType, Graph, Kind, Node, Value


class _Match(NamedTuple):
    fused: Node
    last: Node  # of the chain; the fused node takes its place in the list


def fuse(graph: Graph, kinds: Collection[str]) -> Graph:
    """A copy of `graph` with the fused operations in `kinds`. A value that anything else reads is never fused away."""
    uses = _Uses(graph)
    fused: dict[int, Node] = {}  # id of the last node of a chain
    gone: set[int] = set()
    for node in graph.nodes:
        for kind, match in _MATCHERS.items():
            found = match(node, uses) if kind in kinds and id(node) not in gone else None
            if found and uses.can_move(found):
                fused[id(found.last)] = found.fused
                gone.update(id(n) for n in found.fused.expansion)
    nodes = [fused.get(id(n), n) for n in graph.nodes if id(n) in fused or id(n) not in gone]
    return replace(graph, nodes=nodes)


def count(graph: Graph) -> dict[str, int]:
    """How often each operation occurs."""
    counts: dict[str, int] = {}
    for node in graph.nodes:
        counts[node.op] = counts.get(node.op, 0) + 1
    return dict(sorted(counts.items()))


class _Uses:
    """Who reads and who defines a value."""

    def __init__(self, graph: Graph) -> None:
        self.order = {id(n): i for i, n in enumerate(graph.nodes)}
        self.readers: dict[int, list[tuple[Node, Value]]] = {}
        self.writer: dict[int, Node] = {}
        for node in graph.nodes:
            for v in node.ins:
                self.readers.setdefault(id(v.root), []).append((node, v))
            for v in node.outs:
                self.writer[id(v)] = node

    def sole(self, value: Value, op: type[ops.Attrs]) -> Node | None:
        """The only reader of `value`, when it is a node of kind `op`. Outputs are read by the caller, too."""
        if value.kind is Kind.OUTPUT:
            return None
        nodes = {id(n): n for n, _ in self.readers.get(id(value), [])}
        if len(nodes) != 1:
            return None
        (node,) = nodes.values()
        return node if isinstance(node.attrs, op) else None

    def columns_free(self, v: Value, reader: Node) -> bool:
        """No node but `reader` reads the columns of `v`: they may be overwritten there."""
        mine = range(v.start, v.start + v.cols)
        others = (u for n, u in self.readers[id(v.root)] if n is not reader)
        return not any(u.start < mine.stop and mine.start < u.start + u.cols for u in others)

    def can_move(self, match: _Match) -> bool:
        """Nothing between the chain's nodes and its last node reads what the chain defines."""
        last = self.order[id(match.last)]
        chain = {id(n) for n in match.fused.expansion}
        return all(
            id(n) in chain or self.order[id(n)] > last for v in match.fused.outs for n, _ in self.readers.get(id(v), [])
        )


def _norm_round(norm: Node, uses: _Uses) -> _Match | None:
    if not isinstance(norm.attrs, ops.RmsNorm | ops.LayerNorm) or norm.attrs.head_dim is not None:
        return None
    if not (rounded := uses.sole(norm.outs[0], ops.Round)):
        return None
    return _match(ops.NormRound(norm.attrs), norm.ins, rounded.outs, norm, rounded)


def _linear_add(linear: Node, uses: _Uses) -> _Match | None:
    if not isinstance(linear.attrs, ops.Linear):
        return None
    (y,) = linear.outs
    add = uses.sole(y, ops.Add)
    if not add or (add.ins[0] is y) == (add.ins[1] is y):
        return None
    residual = add.ins[1] if add.ins[0] is y else add.ins[0]
    x, weight, *bias = linear.ins
    return _match(ops.LinearAdd(), (x, weight, residual, *bias), add.outs, linear, add)


def _linear_act_round(linear: Node, uses: _Uses) -> _Match | None:
    if not isinstance(linear.attrs, ops.Linear) or len(linear.ins[1].parts) != 1 or linear.outs[0].cols % 32:
        return None
    act = uses.sole(linear.outs[0], ops.Act)
    rounded = uses.sole(act.outs[0], ops.Round) if act else None
    if not act or not rounded or not isinstance(act.attrs, ops.Act):
        return None
    return _match(ops.LinearActRound(act.attrs.act), linear.ins, rounded.outs, linear, act, rounded)


def _linear_act_mul_round(linear: Node, uses: _Uses) -> _Match | None:
    if not isinstance(linear.attrs, ops.Linear):
        return None
    (y,), parts = linear.outs, linear.ins[1].parts
    halves = len(parts) == 2 and parts[0][1:] == parts[1][1:] and parts[0].rows % 32 == 0
    act = uses.sole(y, ops.ActMul)
    if (
        not halves
        or not act
        or not isinstance(act.attrs, ops.ActMul)
        or [v.start for v in act.ins] != [0, parts[0].rows]
    ):
        return None
    rounded = uses.sole(act.outs[0], ops.Round)
    return (
        _match(ops.LinearActMulRound(act.attrs.act), linear.ins, rounded.outs, linear, act, rounded)
        if rounded
        else None
    )


def _linear_sample(linear: Node, uses: _Uses) -> _Match | None:
    if not isinstance(linear.attrs, ops.Linear) or len(linear.ins[1].parts) != 1:
        return None
    chain, scale, softcap = [linear], 1.0, 0.0
    if (node := uses.sole(chain[-1].outs[0], ops.Scale)) and isinstance(node.attrs, ops.Scale):
        chain, scale = [*chain, node], node.attrs.factor
    if (node := uses.sole(chain[-1].outs[0], ops.Softcap)) and isinstance(node.attrs, ops.Softcap):
        chain, softcap = [*chain, node], node.attrs.cap
    (logits,) = chain[-1].outs
    readers = [node for node, _ in uses.readers.get(id(logits), [])]
    if (
        len(readers) != 1
        or not isinstance(readers[0].attrs, ops.Sample)
        or (len(chain) > 1 and scale == 1 and not softcap)
    ):
        return None
    return _match(ops.LinearSample(scale, softcap), linear.ins, (logits,), *chain, readers[0])


def _rope_kv_write(write: Node, uses: _Uses) -> _Match | None:
    if not isinstance(write.attrs, ops.KvWrite):
        return None
    rotated, v, state = write.ins
    rope_k = uses.writer.get(id(rotated))
    if not rope_k or not isinstance(rope_k.attrs, ops.Rope) or uses.sole(rotated, ops.KvWrite) is not write:
        return None
    k, positions = rope_k.ins
    attends = [n for n, _ in uses.readers[id(state)] if isinstance(n.attrs, ops.Attention)]
    rope_q = uses.writer.get(id(attends[0].ins[0])) if len(attends) == 1 else None
    if not rope_q or rope_q.attrs != rope_k.attrs or rope_q.ins[1] is not positions:
        return None
    if not uses.columns_free(k, rope_k) or uses.order[id(rope_q)] > uses.order[id(write)]:
        return None
    attrs = ops.RopeKvWrite(rope_k.attrs, write.attrs)
    return _match(attrs, (rope_q.ins[0], k, v, positions, state), rope_q.outs, rope_q, rope_k, write)


def _attention_round(attention: Node, uses: _Uses) -> _Match | None:
    a = attention.attrs
    if not isinstance(a, ops.Attention) or a.heads // a.kv_heads * a.v_dim % 32:
        return None
    rounded = uses.sole(attention.outs[0], ops.Round)
    return _match(ops.AttentionRound(a), attention.ins, rounded.outs, attention, rounded) if rounded else None


def _match(attrs: ops.Attrs, ins: tuple[Value, ...], outs: tuple[Value, ...], *chain: Node) -> _Match | None:
    if any(v.dtype is DType.F32 for v in outs) and isinstance(chain[-1].attrs, ops.Round):
        return None
    return _Match(Node(attrs, ins, outs, chain[-1].layer, chain), chain[-1])


_MATCHERS: dict[str, Callable[[Node, _Uses], _Match | None]] = {
    "norm_round": _norm_round,
    "linear_add": _linear_add,
    "linear_act_round": _linear_act_round,
    "linear_act_mul_round": _linear_act_mul_round,
    "linear_sample": _linear_sample,
    "rope_kv_write": _rope_kv_write,
    "attention_round": _attention_round,
}
