"""Lowering: the nodes of a graph as instructions of the native program. What they mean is checked there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from octavo import _native
from octavo.backends.base import SMALL_T, Limits
from octavo.graph import ops
from octavo.graph.ir import Dim, DType, Graph, Kind, Node, Value, WeightPart
from octavo.graph.plan import Plan
from octavo.graph.verify import GraphError


class Lowered(NamedTuple):
    spec: _native.ProgramSpec
    values: dict[Value, int]  # root values of the arena, by index in the program
    names: list[tuple[str, int]]  # (op, layer) of each node
    targets: dict[str, int]  # modules that adapters may have a delta for, by index in the program


def lower(
    graph: Graph,
    plans: tuple[Plan, Plan],
    memory: _native.Memory,
    parts: Mapping[WeightPart, int],
    vectors: Mapping[str, int],
    arenas: Sequence[_native.Memory],
    num_blocks: Sequence[int],
    limits: Limits,
    share: bool,
    poison: bool,
) -> Lowered:
    """`plans`: small and full, of the same nodes. `parts`, `vectors`: byte offsets in `memory`."""
    spec = _native.ProgramSpec(
        limits.max_tokens,
        limits.max_rows,
        limits.max_seqs,
        limits.max_model_len,
        graph.vocab_size,
        SMALL_T,
        poison,
        share,
    )
    spec.set_arena(*(p.size for p in plans))
    spec.set_max_adapters(limits.max_adapters)
    for group, arena, blocks in zip(graph.groups, arenas, num_blocks, strict=True):
        spec.add_group(arena, group.dtype.value, len(group.layers), group.kv_heads, group.head_dim, group.v_dim, blocks)
    low = _Lowering(graph, spec, plans, memory, parts, vectors)
    for index, node in enumerate(graph.nodes):
        native = _native.Node(_NATIVE_NAMES.get(node.op, node.op), node.layer)
        native.set_barriers(*(index in p.barriers for p in plans))
        _FILL[type(node.attrs)](low, native, node, node.attrs)
        spec.add_node(native)
    return Lowered(spec, low.values, [(node.op, node.layer) for node in graph.nodes], low.targets)


_NATIVE_NAMES = {"attention_round": "attention"}  # rounds when its output is of a rounded type


class _Lowering:
    """Values and weights that were already told to the program."""

    def __init__(
        self,
        graph: Graph,
        spec: _native.ProgramSpec,
        plans: tuple[Plan, Plan],
        memory: _native.Memory,
        parts: Mapping[WeightPart, int],
        vectors: Mapping[str, int],
    ) -> None:
        self.graph = graph
        self.values: dict[Value, int] = {}
        self.targets: dict[str, int] = {}
        self._spec = spec
        self._plans = plans
        self._memory = memory
        self._parts = parts
        self._vectors = vectors
        self._weights: dict[object, int] = {}
        expands = [node.attrs for node in graph.nodes if isinstance(node.attrs, ops.LoraExpand)]
        self._sizes = {name: size for a in expands for name, size in zip(a.targets, a.sizes, strict=True)}
        self._ropes: dict[tuple[tuple[float, ...], float], int] = {}

    def operand(self, v: Value) -> _native.Operand:
        root = v.root
        if root not in self.values:
            offsets = [p.offsets[root] for p in self._plans]
            self.values[root] = self._spec.add_value(
                root.name, root.dtype.value, root.rows.sym == "R", root.rows.coef, root.cols, *offsets
            )
        return _native.Operand(self.values[root], v.start, v.cols)

    def matrices(self, weight: Value) -> list[int]:
        return [self._matrix(part, weight.cols) for part in weight.parts]

    def _matrix(self, part: WeightPart, cols: int) -> int:
        if part not in self._weights:
            offset = self._parts[part]
            self._weights[part] = self._spec.add_weight(part.name, self._memory, offset, part.format, part.rows, cols)
        return self._weights[part]

    def target(self, name: str, cols: int) -> int:
        if name not in self.targets:
            self.targets[name] = self._spec.add_target(name, self._sizes[name], cols)
        return self.targets[name]

    def vector(self, weight: Value) -> int:
        if weight.name not in self._weights:
            offset = self._vectors[weight.name]
            self._weights[weight.name] = self._spec.add_vector(weight.name, self._memory, offset, weight.cols)
        return self._weights[weight.name]

    def rope(self, a: ops.Rope) -> int:
        key = (a.inv_freq, a.scale)
        if key not in self._ropes:
            self._ropes[key] = self._spec.add_rope(list(a.inv_freq), a.scale)
        return self._ropes[key]

    def put_group(self, native: _native.Node, node: Node, group: int, head_dim: int) -> None:
        native.group, native.head_dim = group, head_dim
        native.group_layer = self.graph.groups[group].layers.index(node.layer)


# ---- one function per operation: operands by the order written in graph.ops


def _embed(low: _Lowering, native: _native.Node, node: Node, a: ops.Embed) -> None:
    ids, weight = node.ins
    _need_input(node, ids)
    if len(weight.parts) != 1:
        raise GraphError(f"{node!r}: an embedding of several parts is not supported")
    native.weights, native.out = low.matrices(weight), low.operand(node.outs[0])
    native.ids, native.offset = ids.name, a.offset


def _norm(low: _Lowering, native: _native.Node, node: Node, a: ops.RmsNorm | ops.LayerNorm) -> None:
    x, *vectors = node.ins
    native.a, native.out = low.operand(x), low.operand(node.outs[0])
    native.eps, native.head_dim, native.centred = a.eps, a.head_dim or x.cols, isinstance(a, ops.LayerNorm)
    if vectors:
        native.vector = low.vector(vectors[0])
    if len(vectors) > 1:
        native.bias = low.vector(vectors[1])


def _norm_round(low: _Lowering, native: _native.Node, node: Node, a: ops.NormRound) -> None:
    _norm(low, native, node, a.norm)


def _round(low: _Lowering, native: _native.Node, node: Node, _: ops.Round) -> None:
    native.a, native.out = low.operand(node.ins[0]), low.operand(node.outs[0])


def _linear(low: _Lowering, native: _native.Node, node: Node, _: ops.Linear) -> None:
    x, weight, *bias = node.ins
    native.a, native.weights, native.out = low.operand(x), low.matrices(weight), low.operand(node.outs[0])
    if bias:
        native.vector = low.vector(bias[0])


def _linear_add(low: _Lowering, native: _native.Node, node: Node, _: ops.LinearAdd) -> None:
    x, weight, residual, *bias = node.ins
    native.a, native.weights, native.out = low.operand(x), low.matrices(weight), low.operand(node.outs[0])
    native.b = low.operand(residual)
    if bias:
        native.vector = low.vector(bias[0])


def _linear_act(
    low: _Lowering, native: _native.Node, node: Node, a: ops.LinearActRound | ops.LinearActMulRound
) -> None:
    native.act = a.act
    _linear(low, native, node, ops.Linear())


def _linear_sample(low: _Lowering, native: _native.Node, node: Node, a: ops.LinearSample) -> None:
    native.scale, native.softcap = a.scale, a.softcap
    _linear(low, native, node, ops.Linear())


def _rope(low: _Lowering, native: _native.Node, node: Node, a: ops.Rope) -> None:
    x, positions = node.ins
    _need_input(node, positions)
    native.a, native.out = low.operand(x), low.operand(node.outs[0])
    native.rope, native.neox, native.head_dim = low.rope(a), a.neox, a.head_dim


def _kv_write(low: _Lowering, native: _native.Node, node: Node, a: ops.KvWrite) -> None:
    k, v, _ = node.ins
    native.b, native.c = low.operand(k), low.operand(v)
    low.put_group(native, node, a.group, a.head_dim)


def _rope_kv_write(low: _Lowering, native: _native.Node, node: Node, a: ops.RopeKvWrite) -> None:
    q, k, v, positions, _ = node.ins
    _need_input(node, positions)
    native.a, native.b, native.c, native.out = low.operand(q), low.operand(k), low.operand(v), low.operand(node.outs[0])
    native.rope, native.neox = low.rope(a.rope), a.rope.neox
    low.put_group(native, node, a.kv_write.group, a.kv_write.head_dim)


def _attention(low: _Lowering, native: _native.Node, node: Node, a: ops.Attention) -> None:
    q, _, *sinks = node.ins
    native.a, native.out = low.operand(q), low.operand(node.outs[0])
    native.heads, native.scale, native.window = a.heads, a.scale, a.window or 0
    native.softcap, native.slopes, native.causal = a.softcap, list(a.slopes), a.causal
    if sinks:
        native.vector = low.vector(sinks[0])
    low.put_group(native, node, a.group, a.head_dim)


def _attention_round(low: _Lowering, native: _native.Node, node: Node, a: ops.AttentionRound) -> None:
    _attention(low, native, node, a.attention)


def _act_mul(low: _Lowering, native: _native.Node, node: Node, a: ops.ActMul) -> None:
    native.act = a.act
    _two(low, native, node, a)


def _two(low: _Lowering, native: _native.Node, node: Node, _: ops.Attrs) -> None:
    native.a, native.b, native.out = low.operand(node.ins[0]), low.operand(node.ins[1]), low.operand(node.outs[0])


def _mul(low: _Lowering, native: _native.Node, node: Node, _: ops.Mul) -> None:
    a, b = node.ins
    native.a, native.out = low.operand(a), low.operand(node.outs[0])
    if b.kind is Kind.WEIGHT:
        native.vector = low.vector(b)
    else:
        native.b = low.operand(b)


def _act(low: _Lowering, native: _native.Node, node: Node, a: ops.Act) -> None:
    native.act = a.act
    _one(low, native, node)


def _scale(low: _Lowering, native: _native.Node, node: Node, a: ops.Scale) -> None:
    native.scale = a.factor
    _one(low, native, node)


def _softcap(low: _Lowering, native: _native.Node, node: Node, a: ops.Softcap) -> None:
    native.softcap = a.cap
    _one(low, native, node)


def _clamp(low: _Lowering, native: _native.Node, node: Node, a: ops.Clamp) -> None:
    native.low, native.high = a.low, a.high
    _one(low, native, node)


def _one(low: _Lowering, native: _native.Node, node: Node) -> None:
    native.a, native.out = low.operand(node.ins[0]), low.operand(node.outs[0])


def _concat(low: _Lowering, native: _native.Node, node: Node, a: ops.Concat) -> None:
    native.ins, native.out, native.heads = [low.operand(v) for v in node.ins], low.operand(node.outs[0]), a.heads


def _split_heads(low: _Lowering, native: _native.Node, node: Node, a: ops.SplitHeads) -> None:
    native.a, native.out, native.heads = low.operand(node.ins[0]), low.operand(node.outs[0]), a.heads


def _head_linear(low: _Lowering, native: _native.Node, node: Node, a: ops.HeadLinear) -> None:
    x, weight = node.ins
    native.a, native.out, native.heads = low.operand(x), low.operand(node.outs[0]), a.heads
    native.weights = low.matrices(weight)


def _route(low: _Lowering, native: _native.Node, node: Node, a: ops.Route) -> None:
    scores, *bias = node.ins
    native.a, native.out = low.operand(scores), low.operand(node.outs[0])
    native.set_route(
        scores.cols, a.top_k, a.scoring, a.normalise, a.scale, a.jitter, a.groups, a.top_groups, a.group_best
    )
    if bias:
        native.vector = low.vector(bias[0])


def _dispatch(low: _Lowering, native: _native.Node, node: Node, a: ops.Dispatch | ops.Combine) -> None:
    native.a, native.b, native.out = low.operand(node.ins[0]), low.operand(node.ins[1]), low.operand(node.outs[0])
    native.experts = a.experts


def _expert_linear(low: _Lowering, native: _native.Node, node: Node, a: ops.ExpertLinear) -> None:
    x, routing, weight, *bias = node.ins
    native.a, native.b, native.out = low.operand(x), low.operand(routing), low.operand(node.outs[0])
    native.experts, native.weights = a.experts, low.matrices(weight)
    if bias:
        native.vector = low.vector(bias[0])


def _gather_expert_cols(low: _Lowering, native: _native.Node, node: Node, a: ops.GatherExpertCols) -> None:
    x, routing, order = node.ins
    native.a, native.b, native.out = low.operand(x), low.operand(routing), low.operand(node.outs[0])
    native.experts, native.vector = a.experts, low.vector(order)


def _gather_rows(low: _Lowering, native: _native.Node, node: Node, _: ops.GatherRows) -> None:
    x, rows = node.ins
    _need_input(node, rows)
    native.a, native.out = low.operand(x), low.operand(node.outs[0])


def _lora_shrink(low: _Lowering, native: _native.Node, node: Node, a: ops.LoraShrink) -> None:
    x, adapters = node.ins
    _need_input(node, adapters)
    native.a, native.out = low.operand(x), low.operand(node.outs[0])
    native.targets = [low.target(name, x.cols) for name in a.targets]


def _lora_expand(low: _Lowering, native: _native.Node, node: Node, a: ops.LoraExpand) -> None:
    h, y, adapters = node.ins
    _need_input(node, adapters)
    native.a, native.b, native.out = low.operand(h), low.operand(y), low.operand(node.outs[0])
    native.targets = [low.targets[name] for name in a.targets]


def _gather_cols(low: _Lowering, native: _native.Node, node: Node, _: ops.GatherCols) -> None:
    x, order = node.ins
    native.a, native.vector, native.out = low.operand(x), low.vector(order), low.operand(node.outs[0])


def _sample(low: _Lowering, native: _native.Node, node: Node, _: ops.Sample) -> None:
    native.a = low.operand(node.ins[0])


def _need_input(node: Node, v: Value) -> None:
    if v.kind is not Kind.INPUT or v.dtype is not DType.I32 or v.rows not in (Dim(1, "T"), Dim(1, "R")):
        raise GraphError(f"{node!r}: %{v.name} must be an array of the batch")


_FILL: dict[type[ops.Attrs], Callable[[_Lowering, _native.Node, Node, Any], None]] = {
    ops.Embed: _embed,
    ops.RmsNorm: _norm,
    ops.LayerNorm: _norm,
    ops.NormRound: _norm_round,
    ops.Round: _round,
    ops.Linear: _linear,
    ops.LinearAdd: _linear_add,
    ops.LinearActRound: _linear_act,
    ops.LinearActMulRound: _linear_act,
    ops.LinearSample: _linear_sample,
    ops.Rope: _rope,
    ops.KvWrite: _kv_write,
    ops.RopeKvWrite: _rope_kv_write,
    ops.Attention: _attention,
    ops.AttentionRound: _attention_round,
    ops.ActMul: _act_mul,
    ops.Act: _act,
    ops.Scale: _scale,
    ops.Softcap: _softcap,
    ops.Clamp: _clamp,
    ops.Mul: _mul,
    ops.Add: _two,
    ops.GatherRows: _gather_rows,
    ops.LoraShrink: _lora_shrink,
    ops.LoraExpand: _lora_expand,
    ops.GatherCols: _gather_cols,
    ops.Sample: _sample,
    ops.Concat: _concat,
    ops.SplitHeads: _split_heads,
    ops.HeadLinear: _head_linear,
    ops.Route: _route,
    ops.Dispatch: _dispatch,
    ops.ExpertLinear: _expert_linear,
    ops.GatherExpertCols: _gather_expert_cols,
    ops.Combine: _dispatch,
}
