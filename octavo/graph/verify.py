"""verify: the rules a graph must keep, checked after every pass. Errors carry the text of the node."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from octavo.graph import ops
from octavo.graph.ir import Dim, DType, Graph, Kind, Node, R, T, Value

_SORTED = (
    ops.Linear, ops.LinearAdd, ops.LinearActRound, ops.LinearActMulRound, ops.LinearSample, ops.HeadLinear, ops.ExpertLinear,
)  # fmt: skip
"""Operations whose inputs the builder sorts as the columns of the weight are."""

ROUNDED = (DType.BF16, DType.A8, DType.A16)
FLOATS = (DType.F32, *ROUNDED)


class GraphError(ValueError):
    """The graph breaks a rule, or a tensor has not the shape that the config asks for."""


def verify(graph: Graph) -> Graph:
    """Check `graph` and return it. Raise GraphError."""
    layers = [layer for group in graph.groups for layer in group.layers]
    if len(layers) != len(set(layers)):
        raise GraphError(f"{graph.name}: a layer is in two KV groups")
    for group in graph.groups:
        if group.window is not None and group.window < 1:
            raise GraphError(f"{graph.name}: KV group {group.name} has a window of {group.window} tokens")
    plus: dict[str, float] = {}
    for part in (part for value in graph.weights() for part in value.parts):
        if plus.setdefault(part.name, part.plus) != part.plus:
            raise GraphError(f"{graph.name}: {part.name} is used with and without an addend")
    defined: set[int] = set()
    written: set[int] = set()  # states
    for node in graph.nodes:
        _verify_node(graph, node, defined, written)
    return graph


def _verify_node(graph: Graph, node: Node, defined: set[int], written: set[int]) -> None:
    def need(ok: bool, what: str) -> None:
        if not ok:
            raise GraphError(f"{graph.name}, layer {node.layer}: {node!r}: {what}")

    for v in node.ins:
        root = v.root
        need(root.base is None and v.start >= 0 and v.start + v.cols <= root.cols, f"%{v.name} leaves its base")
        need(v.base is None or (v.rows, v.kind, v.dtype) == (root.rows, root.kind, root.dtype), f"%{v.name} is no view")
        if root.kind in (Kind.TEMP, Kind.OUTPUT):
            need(id(root) in defined, f"%{root.name} is read before it is defined")
        if root.kind is Kind.WEIGHT:
            _verify_weight(v, need)
            sorted_ = any(part.order for part in root.parts)
            need(
                not sorted_ or isinstance(node.attrs, _SORTED), f"reads %{v.name}, whose columns are sorted (act-order)"
            )
    for v in node.outs:
        need(v.base is None and v.kind in (Kind.TEMP, Kind.OUTPUT), f"%{v.name} cannot be written")
        need(id(v) not in defined, f"%{v.name} is defined twice")
        need(v.cols > 0 and v.rows.sym in ("T", "R"), f"%{v.name} is empty or has fixed rows")
    check = _CHECKS.get(node.op)
    need(check is not None, "unknown operation")
    assert check is not None
    try:
        problem = check(graph, node, node.attrs)
    except ValueError:
        problem = "wrong number of ins or outs"
    need(problem is None, str(problem))
    if isinstance(node.attrs, ops.Attention):
        need(id(node.ins[1]) in written, "the cache of this layer is read before it is written")
    if node.expansion:
        need(node.op in FUSED, "only a fused operation has an expansion")
        _verify_expansion(graph, node, defined, written, need)
    else:
        need(node.op not in FUSED, "a fused operation carries its expansion")
    if isinstance(node.attrs, ops.KvWrite):
        written.add(id(node.ins[2]))
    defined.update(id(v) for v in node.outs)


def _verify_weight(v: Value, need: Callable[[bool, str], None]) -> None:
    need(v.base is None and len(v.parts) > 0, f"weight %{v.name} is a view or has no parts")
    rows = {Dim(1), Dim(sum(p.rows for p in v.parts))}
    need(v.rows in rows, f"weight %{v.name} has {v.rows} rows, its parts {[p.rows for p in v.parts]}")


def _verify_expansion(
    graph: Graph, node: Node, defined: set[int], written: set[int], need: Callable[[bool, str], None]
) -> None:
    """The expansion reads the fused node's ins, or views of the same columns, and defines exactly its outs."""
    attrs = tuple(base.attrs for base in node.expansion)
    need(attrs == _EXPANDS[node.op](node.attrs), f"the expansion is {[b.op for b in node.expansion]}")
    allowed = {_span(v) for v in node.ins}
    inside: set[int] = set()
    used = set()
    for base in node.expansion:
        need(base.layer == node.layer, "an expansion stays in its layer")
        for v in base.ins:
            span = _span(v)
            view = any(root == span[0] and a <= span[1] and span[2] <= b for root, a, b in allowed)
            need(id(v.root) in inside or view, f"the expansion reads %{v.name}, which is no input")
            used |= {s for s in allowed if s[0] == span[0]}
        _verify_node(graph, base, defined | inside, written)
        inside.update(id(v) for v in base.outs)
    need(used == allowed, "the expansion does not read every input")
    outs = {id(v) for v in node.outs}
    need(outs <= inside, "the expansion does not define every output")
    results = {id(v) for b in node.expansion for v in b.outs if v.kind is Kind.OUTPUT}
    need(results <= outs, "the expansion defines another output")


def _span(v: Value) -> tuple[int, int, int]:
    return id(v.root), v.start, v.start + v.cols


# ---- one check per operation: the problem, or None. A wrong number of operands fails in the unpacking.


def _same(*values: Value) -> bool:
    return len({(v.rows, v.cols) for v in values}) == 1


def _first(problems: Iterable[tuple[bool, str]]) -> str | None:
    return next((text for ok, text in problems if not ok), None)


def _weights(*values: Value) -> tuple[bool, str]:
    return all(v.kind is Kind.WEIGHT for v in values), "takes vectors of weights"


def _f32(*values: Value) -> tuple[bool, str]:
    return all(v.dtype is DType.F32 for v in values), "works on float32"


def _embed(graph: Graph, node: Node, a: ops.Embed) -> str | None:
    (ids, weight), (y,) = node.ins, node.outs
    shapes = ids.rows == y.rows == T and ids.cols == 1 and weight.cols == y.cols
    tokens = ids.name != "token_ids" or (a.offset == 0 and weight.rows == Dim(graph.vocab_size))
    last = graph.max_positions - 1 + a.offset
    positions = ids.name != "positions" or (a.offset >= 0 and graph.bounded and weight.rows.coef > last)
    return _first([(shapes and tokens, "shapes disagree"), (ids.dtype is DType.I32, "ids are int32"), _f32(y),
                   (ids.name in ("token_ids", "positions", "token_types"), "ids are token_ids, positions or token_types"),
                   (positions, f"the table has no row {last} for the last position")])  # fmt: skip


def _norm(node: Node, a: ops.RmsNorm | ops.LayerNorm) -> list[tuple[bool, str]]:
    (x, *vectors), (y,) = node.ins, node.outs
    width = a.head_dim or x.cols
    sizes = {(v.rows, v.cols) for v in vectors}
    fits = len(sizes) <= 1 and sizes <= {(Dim(1), width), (Dim(1), x.cols)}
    most = 2 if isinstance(a, ops.LayerNorm) else 1
    return [(_same(x, y) and fits and len(vectors) <= most, "shapes disagree"), _f32(x), (a.eps > 0, "eps must be positive"),
            (width > 0 and x.cols % width == 0, "heads disagree"), _weights(*vectors)]  # fmt: skip


def _any_norm(graph: Graph, node: Node, a: ops.RmsNorm | ops.LayerNorm) -> str | None:
    return _first([*_norm(node, a), _f32(*node.outs)])


def _norm_round(graph: Graph, node: Node, a: ops.NormRound) -> str | None:
    return _first([*_norm(node, a.norm), (a.norm.head_dim is None, "rounds whole rows"),
                   (node.outs[0].dtype in ROUNDED, "rounds to bf16, a8 or a16")])  # fmt: skip


def _round(graph: Graph, node: Node, _: Any) -> str | None:
    (x,), (y,) = node.ins, node.outs
    return _first([(_same(x, y), "shapes disagree"), _f32(x), (y.dtype in ROUNDED, "rounds to bf16, a8 or a16")])


def _product(node: Node, w: Value, cols: int, bias: list[Value]) -> list[tuple[bool, str]]:
    """x[n, K] with `cols` output features, before an epilogue."""
    x, (y,) = node.ins[0], node.outs
    shapes = x.cols == w.cols and x.rows == y.rows and Dim(cols) == w.rows
    bias_ok = len(bias) <= 1 and all((b.rows, b.cols) == (Dim(1), cols) for b in bias)
    return [(shapes, "shapes disagree"), (bias_ok, "bias disagrees"), (w.kind is Kind.WEIGHT, "no weight"),
            (x.dtype in FLOATS, "input is no float")]  # fmt: skip


def _linear(graph: Graph, node: Node, _: Any) -> str | None:
    (_x, w, *bias), (y,) = node.ins, node.outs
    return _first([*_product(node, w, y.cols, bias), _f32(y)])


def _linear_add(graph: Graph, node: Node, _: Any) -> str | None:
    (_x, w, residual, *bias), (y,) = node.ins, node.outs
    return _first([*_product(node, w, y.cols, bias), (_same(residual, y), "shapes disagree"), _f32(residual, y)])


def _linear_act_round(graph: Graph, node: Node, a: ops.LinearActRound) -> str | None:
    (_x, w, *bias), (y,) = node.ins, node.outs
    whole = len(w.parts) == 1 and y.cols % 32 == 0
    return _first([*_product(node, w, y.cols, bias), (whole, "the weight is not one tensor of 32s"),
                   (a.act in ops.ACTS, "unknown activation"), (y.dtype in ROUNDED, "rounds to bf16, a8 or a16")])  # fmt: skip


def _linear_act_mul_round(graph: Graph, node: Node, a: ops.LinearActMulRound) -> str | None:
    (_x, w, *bias), (y,) = node.ins, node.outs
    halves = len(w.parts) == 2 and w.parts[0].rows == w.parts[1].rows == y.cols and y.cols % 32 == 0
    return _first([*_product(node, w, 2 * y.cols, bias), (halves, "the weight has not two equal halves of 32s"),
                   (a.act in ops.GATED_ACTS, "unknown activation"),
                   (y.dtype in ROUNDED, "rounds to bf16, a8 or a16")])  # fmt: skip


def _rope(graph: Graph, node: Node, a: ops.Rope) -> str | None:
    (x, positions), (y,) = node.ins, node.outs
    heads = x.cols % a.head_dim == 0 and 0 < 2 * len(a.inv_freq) <= a.head_dim
    return _first([(_same(x, y) and positions.rows == x.rows == T, "shapes disagree"), (heads, "heads disagree"),
                   (positions.dtype is DType.I32, "positions are int32"), _f32(x, y)])  # fmt: skip


def _state(graph: Graph, node: Node, a: ops.KvWrite | ops.Attention, state: Value) -> list[tuple[bool, str]]:
    if not 0 <= a.group < len(graph.groups):
        return [(False, "no such KV group")]
    g = graph.groups[a.group]
    same = (g.kv_heads, g.head_dim, g.v_dim) == (a.kv_heads, a.head_dim, a.v_dim) and node.layer in g.layers
    kind = state.kind is Kind.STATE and state.dtype is g.dtype and state.cols == g.kv_heads * (g.head_dim + g.v_dim)
    return [(same, "disagrees with its KV group"), (kind, "state disagrees with its KV group")]


def _kv_write(graph: Graph, node: Node, a: ops.KvWrite) -> str | None:
    k, v, state = node.ins
    () = node.outs
    shapes = k.rows == v.rows == T and (k.cols, v.cols) == (a.kv_heads * a.head_dim, a.kv_heads * a.v_dim)
    return _first([(shapes, "shapes disagree"), _f32(k, v), *_state(graph, node, a, state)])


def _rope_kv_write(graph: Graph, node: Node, a: ops.RopeKvWrite) -> str | None:
    (q, k, v, positions, state), (y,) = node.ins, node.outs
    shapes = _same(k, v) and _same(q, y) and positions.rows == k.rows == q.rows == T
    shapes = shapes and k.cols == a.kv_write.kv_heads * a.kv_write.head_dim and q.cols % a.rope.head_dim == 0
    same = a.rope.head_dim == a.kv_write.head_dim
    return _first([(shapes and same, "shapes disagree"), _f32(q, k, v, y), *_state(graph, node, a.kv_write, state)])


def _attend(graph: Graph, node: Node, a: ops.Attention) -> list[tuple[bool, str]]:
    (q, state, *sinks), (y,) = node.ins, node.outs
    shapes = q.rows == y.rows == T and a.heads % a.kv_heads == 0
    shapes = shapes and (q.cols, y.cols) == (a.heads * a.head_dim, a.heads * a.v_dim)
    per_head = len(sinks) <= 1 and all((x.rows, x.cols) == (Dim(1), a.heads) for x in sinks)
    state_checks = _state(graph, node, a, state)
    known = all(ok for ok, _ in state_checks)
    kept = graph.groups[a.group].window if known else None
    window = not known or (a.window == kept if a.causal else kept is None)
    return [(shapes, "shapes disagree"), _f32(q), *state_checks, (a.causal == graph.causal, "is causal where the graph is not, or the other way round"),
            (window, "the window is not its KV group's"),
            (a.window is None or a.window >= 1, "the window is empty"),
            (per_head and len(a.slopes) in (0, a.heads), "sinks and slopes are one per head"),
            (a.softcap >= 0, "softcap is negative")]  # fmt: skip


def _attention(graph: Graph, node: Node, a: ops.Attention) -> str | None:
    return _first([*_attend(graph, node, a), _f32(*node.outs)])


def _attention_round(graph: Graph, node: Node, a: ops.AttentionRound) -> str | None:
    at = a.attention
    groups = at.heads // at.kv_heads * at.v_dim % 32 == 0
    return _first([*_attend(graph, node, at), (groups, "the columns of a kv head are no multiple of 32"),
                   (node.outs[0].dtype in ROUNDED, "rounds to bf16, a8 or a16")])  # fmt: skip


def _act_mul(graph: Graph, node: Node, a: ops.ActMul) -> str | None:
    (gate, up), (y,) = node.ins, node.outs
    known = a.act in ops.GATED_ACTS
    return _first([(_same(gate, up, y), "shapes disagree"), _f32(gate, up, y), (known, "unknown activation")])


def _map(graph: Graph, node: Node, a: Any) -> str | None:
    """One value in, one of the same shape out: act, scale, softcap, clamp."""
    (x,), (y,) = node.ins, node.outs
    return _first([(_same(x, y), "shapes disagree"), _f32(x, y), *_PARAMETERS[node.op](a)])


_PARAMETERS: dict[str, Callable[[Any], list[tuple[bool, str]]]] = {
    "act": lambda a: [(a.act in ops.ACTS, "unknown activation")],
    "scale": lambda a: [(math.isfinite(a.factor), "factor is not finite")],
    "softcap": lambda a: [(0 < a.cap < math.inf, "cap must be positive")],
    "clamp": lambda a: [(a.low <= a.high, "low is above high")],
}


def _mul(graph: Graph, node: Node, _: Any) -> str | None:
    (a, b), (y,) = node.ins, node.outs
    row = b.kind is Kind.WEIGHT and (b.rows, b.cols) == (Dim(1), a.cols)
    fits = row or (b.rows == a.rows and b.cols in (1, a.cols))
    return _first([(_same(a, y) and fits, "shapes disagree"), _f32(a, b, y)])


def _add(graph: Graph, node: Node, _: Any) -> str | None:
    (a, b), (y,) = node.ins, node.outs
    return _first([(_same(a, b, y), "shapes disagree"), _f32(a, b, y)])


def _gather_cols(graph: Graph, node: Node, _: Any) -> str | None:
    (x, order), (y,) = node.ins, node.outs
    row = order.kind is Kind.WEIGHT and (order.rows, order.cols) == (Dim(1), x.cols)
    return _first([(_same(x, y) and row, "shapes disagree"), _f32(x, y), (x.cols < 2**24, "too many columns")])


def _concat(graph: Graph, node: Node, a: ops.Concat) -> str | None:
    (y,) = node.outs
    rows = all(x.rows == y.rows and x.cols % a.heads == 0 for x in node.ins) and len(node.ins) > 1
    shapes = a.heads > 0 and rows and sum(x.cols for x in node.ins) == y.cols
    return _first([(shapes, "shapes disagree"), _f32(*node.ins, y)])


def _split_heads(graph: Graph, node: Node, a: ops.SplitHeads) -> str | None:
    (x,), (y,) = node.ins, node.outs
    shapes = y.rows == Dim(a.heads * x.rows.coef, x.rows.sym) and x.cols == a.heads * y.cols
    return _first([(shapes, "shapes disagree"), _f32(x, y)])


def _head_linear(graph: Graph, node: Node, a: ops.HeadLinear) -> str | None:
    (x, w), (y,) = node.ins, node.outs
    shapes = x.rows == Dim(a.heads * y.rows.coef, y.rows.sym) and x.cols == w.cols and Dim(y.cols) == w.rows
    whole = len(w.parts) == 1 and y.cols % a.heads == 0
    return _first([(shapes, "shapes disagree"), (whole, "the weight is not one tensor of equal heads"),
                   (x.dtype in FLOATS, "input is no float"), _f32(y)])  # fmt: skip


def _route(graph: Graph, node: Node, a: ops.Route) -> str | None:
    (scores, *bias), (y,) = node.ins, node.outs
    experts = scores.cols
    shapes = scores.rows == y.rows and y.cols == 2 * a.top_k and len(bias) <= 1
    shapes = shapes and all((x.rows, x.cols) == (Dim(1), experts) for x in bias)
    groups = a.groups > 0 and experts % a.groups == 0 and 0 < a.top_groups <= a.groups
    groups = groups and 0 < a.group_best <= experts // a.groups and a.top_k <= a.top_groups * (experts // a.groups)
    mixer = a.scoring != "sparse_mixer" or (a.top_k == 2 and not bias and a.groups == 1 and not a.normalise)
    return _first([(shapes, "shapes disagree"), _f32(scores, y, *bias), (a.scoring in ops.SCORINGS, "unknown scoring"),
                   (0 < a.top_k <= experts and groups, "there are not so many experts"),
                   (mixer, "sparse_mixer takes two experts by their scores alone")])  # fmt: skip


def _routed(experts: int, rows: Dim, sorted_rows: Dim, routing: Value) -> list[tuple[bool, str]]:
    times = Dim(rows.coef * (routing.cols // 2), rows.sym)
    shapes = routing.rows == rows and sorted_rows == times and routing.cols % 2 == 0 and experts > 0
    return [(shapes, "rows disagree with the routing"), _f32(routing)]


def _dispatch(graph: Graph, node: Node, a: ops.Dispatch) -> str | None:
    (x, routing), (y,) = node.ins, node.outs
    same = x.cols == y.cols and x.dtype is y.dtype and (x.dtype is DType.F32 or x.base is None)
    return _first([(same, "input and output differ"), *_routed(a.experts, x.rows, y.rows, routing)])


def _expert_linear(graph: Graph, node: Node, a: ops.ExpertLinear) -> str | None:
    (x, routing, w, *bias), (y,) = node.ins, node.outs
    shapes = x.cols == w.cols and x.rows == y.rows and Dim(a.experts * y.cols) == w.rows
    each = len(w.parts) // a.experts
    parts = len(w.parts) == each * a.experts and all(
        sum(p.rows for p in w.parts[i * each : (i + 1) * each]) == y.cols for i in range(a.experts)
    )
    bias_ok = len(bias) <= 1 and all((b.rows, b.cols) == (Dim(1), a.experts * y.cols) for b in bias)
    return _first([(shapes, "shapes disagree"), (bias_ok, "bias disagrees"), (w.kind is Kind.WEIGHT, "no weight"),
                   (parts, "the parts of the weight are not those of equal experts"),
                   (x.dtype in FLOATS, "input is no float"), _f32(y),
                   *_routed(a.experts, routing.rows, x.rows, routing)])  # fmt: skip


def _gather_expert_cols(graph: Graph, node: Node, a: ops.GatherExpertCols) -> str | None:
    (x, routing, order), (y,) = node.ins, node.outs
    row = order.kind is Kind.WEIGHT and (order.rows, order.cols) == (Dim(1), a.experts * x.cols)
    return _first([(_same(x, y) and row, "shapes disagree"), _f32(x, y), (x.cols < 2**24, "too many columns"),
                   *_routed(a.experts, routing.rows, x.rows, routing)])  # fmt: skip


def _combine(graph: Graph, node: Node, a: ops.Combine) -> str | None:
    (x, routing), (y,) = node.ins, node.outs
    return _first([(x.cols == y.cols, "shapes disagree"), _f32(x, y), *_routed(a.experts, y.rows, x.rows, routing)])


def _gather_rows(graph: Graph, node: Node, _: Any) -> str | None:
    (x, rows), (y,) = node.ins, node.outs
    shapes = x.rows == T and rows.rows == y.rows == R and x.cols == y.cols
    return _first([(shapes, "shapes disagree"), (rows.dtype is DType.I32, "rows are int32"), _f32(x, y)])


def _lora_shrink(graph: Graph, node: Node, a: ops.LoraShrink) -> str | None:
    (x, adapters), (h,) = node.ins, node.outs
    shapes = x.rows == adapters.rows == h.rows == T and h.cols == len(a.targets) * a.rank
    return _first([(shapes, "shapes disagree"), (adapters.dtype is DType.I32, "adapters are int32"), _f32(x, h)])


def _lora_expand(graph: Graph, node: Node, a: ops.LoraExpand) -> str | None:
    (h, y, adapters), (z,) = node.ins, node.outs
    shapes = _same(y, z) and h.rows == adapters.rows == y.rows == T and y.cols == sum(a.sizes)
    split = len(a.targets) == len(a.sizes) and h.cols % len(a.targets) == 0
    return _first([(shapes and split, "shapes disagree"), (adapters.dtype is DType.I32, "adapters are int32"),
                   _f32(h, y, z)])  # fmt: skip


def _sample(graph: Graph, node: Node, _: Any) -> str | None:
    (logits,) = node.ins
    () = node.outs
    shape = (logits.rows, logits.cols) == (R, graph.vocab_size) and logits.kind is Kind.OUTPUT
    return _first([(shape, "logits are an output [R, vocab]"), _f32(logits)])


def _linear_sample(graph: Graph, node: Node, a: ops.LinearSample) -> str | None:
    (_x, w, *bias), (logits,) = node.ins, node.outs
    shape = (logits.rows, logits.cols) == (R, graph.vocab_size) and logits.kind is Kind.OUTPUT
    return _first([*_product(node, w, logits.cols, bias), (shape, "logits are an output [R, vocab]"), _f32(logits),
                   (len(w.parts) == 1, "the weight is not one tensor"), (a.softcap >= 0, "softcap is negative")])  # fmt: skip


_CHECKS: dict[str, Callable[[Graph, Node, Any], str | None]] = {
    "embed": _embed, "rms_norm": _any_norm, "layer_norm": _any_norm, "round": _round, "linear": _linear, "rope": _rope, "kv_write": _kv_write,
    "attention": _attention, "act_mul": _act_mul, "act": _map, "scale": _map, "softcap": _map, "clamp": _map,
    "mul": _mul, "add": _add, "gather_rows": _gather_rows, "sample": _sample,
    "concat": _concat, "route": _route, "dispatch": _dispatch, "expert_linear": _expert_linear, "combine": _combine,
    "gather_expert_cols": _gather_expert_cols,
    "gather_cols": _gather_cols, "lora_shrink": _lora_shrink, "lora_expand": _lora_expand,
    "norm_round": _norm_round, "linear_add": _linear_add, "linear_act_round": _linear_act_round,
    "linear_act_mul_round": _linear_act_mul_round, "linear_sample": _linear_sample,
    "split_heads": _split_heads, "head_linear": _head_linear,
    "rope_kv_write": _rope_kv_write, "attention_round": _attention_round,
}  # fmt: skip

_EXPANDS: dict[str, Callable[[Any], tuple[ops.Attrs, ...]]] = {
    "norm_round": lambda a: (a.norm, ops.Round()),
    "linear_add": lambda a: (ops.Linear(), ops.Add()),
    "linear_act_round": lambda a: (ops.Linear(), ops.Act(a.act), ops.Round()),
    "linear_act_mul_round": lambda a: (ops.Linear(), ops.ActMul(a.act), ops.Round()),
    "linear_sample": lambda a: (
        ops.Linear(),
        *((ops.Scale(a.scale),) if a.scale != 1 else ()),
        *((ops.Softcap(a.softcap),) if a.softcap else ()),
        ops.Sample(),
    ),
    "rope_kv_write": lambda a: (a.rope, a.rope, a.kv_write),
    "attention_round": lambda a: (a.attention, ops.Round()),
}

FUSED = frozenset(_EXPANDS)
"""The fused kinds; each carries its expansion."""
