"""diff: what another backend computes, node by node, against the reference on the same inputs.

The other program runs a whole step without fusion and without reuse, so that every value can be read afterwards. The
reference computes each node from the inputs that the other program computed, and its outs are compared.

Tolerances are computed (DESIGN section 11): a sum of K products of vectors a, w in arithmetic of unit roundoff u is
held to C * u * sqrt(K) * |a| * |w|; what is not a sum is held to a few roundings of the result. Rounding, addition
and the gathering of rows must be equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.backends import reference_experts as experts
from octavo.backends import reference_ops as meaning
from octavo.backends.base import BLOCK_SIZE, Backend, Limits, Program, SamplingArrays, StepBatch
from octavo.backends.reference import (
    NO_DELTAS,
    Deltas,
    Interpreter,
    PagedState,
    ReferenceBackend,
    Weights,
    deltas,
    first_seen,
)
from octavo.graph import ops
from octavo.graph.ir import DType, Graph, Kind, Node, Value
from octavo.weights.spec import Checkpoint

F64 = NDArray[np.float64]

C = 4.0
U32 = 2.0**-24
U_KV = {DType.BF16: 2.0**-8, DType.F32: U32, DType.I8: U32}  # of probabilities; bf16 has 8 significant bits
EXP_ERROR = 4e-7
"""Relative error of a kernel's exponential (native/math.inl: 2e-7), twice."""


class Readable(Program, Protocol):
    """A program that shows what it computed."""

    def read(self, value: Value) -> NDArray[Any]:
        """[rows, cols] of a root value after a run, rounded values decoded."""
        ...


class Checked(NamedTuple):
    """One node compared. Values are those of the element that is worst against its tolerance."""

    step: int
    node: Node
    worst: float  # greatest |got - expected| / tolerance; above 1 (or NaN) is out of tolerance
    row: int
    col: int
    got: float
    expected: float
    tolerance: float

    @property
    def ok(self) -> bool:
        return self.worst <= 1

    def __str__(self) -> str:
        where = f"layer {self.node.layer}" if self.node.layer >= 0 else "outside of the layers"
        return (
            f"step {self.step}, {where}: {self.node!r}: row {self.row}, column {self.col} is {self.got:.9g}, "
            f"the reference has {self.expected:.9g}, tolerance {self.tolerance:.3g}"
        )


def diff(
    graph: Graph,
    checkpoint: Checkpoint,
    backend: Backend,
    steps: Sequence[StepBatch] | None = None,
    report: Callable[[Checked], None] | None = None,
) -> Checked | None:
    """The first node of `graph` whose result on `backend` is out of tolerance, or None.

    `backend` must not fuse or reuse memory; its program must be Readable. `report` is told of every node.
    """
    steps = example_steps(graph.vocab_size, len(graph.groups), causal=graph.causal) if steps is None else steps
    num_blocks = [1 + max(int(table.max()) for b in steps for table in b.block_tables)] * len(graph.groups)
    limits = Limits(
        max_tokens=max(len(b.token_ids) for b in steps),
        max_rows=max(len(b.logit_rows) for b in steps),
        max_seqs=max(len(b.context_lens) for b in steps),
        max_model_len=max(int(b.context_lens.max()) for b in steps),
    )
    weights = ReferenceBackend().pack(graph, checkpoint)
    program: Any = backend.compile(
        graph, backend.pack(graph, checkpoint), backend.make_state(graph, num_blocks), limits
    )
    state = PagedState(graph, num_blocks)
    for index, batch in enumerate(steps):
        for checked in compare(graph, program, weights, state, batch, index):
            if report:
                report(checked)
            if not checked.ok:
                return checked
    return None


def compare(
    graph: Graph,
    program: Readable,
    weights: Weights,
    state: PagedState,
    batch: StepBatch,
    index: int = 0,
    adapters: Mapping[int, Deltas] = NO_DELTAS,
) -> list[Checked]:
    """Run one step on `program` and check every node of it up to the first that is out of tolerance.

    adapters: those that the program has, by slot.
    """
    result = program.run(batch).result()
    state.copy_blocks(batch)
    reference = Interpreter(graph, weights, state, batch, adapters)
    found: list[Checked] = []
    for node in graph.nodes:
        for v in node.ins:
            if v.kind in (Kind.TEMP, Kind.OUTPUT):
                reference.values[v.root] = program.read(v.root)
        reference.run(node)
        if isinstance(node.attrs, ops.Sample):
            assert reference.result is not None
            expected = reference.result.token_ids[:, None].astype(np.float64)
            found.append(_check(index, node, result.token_ids[:, None].astype(np.float64), expected, 0 * expected))
        for v in node.outs:
            expected = reference.get(v).astype(np.float64)
            tolerance = np.broadcast_to(_TOLERANCES[node.op](reference, node, node.attrs), expected.shape)
            found.append(_check(index, node, program.read(v).astype(np.float64), expected, tolerance))
        if found and not found[-1].ok:
            break
    return found


def _check(step: int, node: Node, got: F64, expected: F64, tolerance: F64) -> Checked:
    error = np.abs(got - expected)
    ratio = np.where(error <= tolerance, 0.0, np.inf)
    np.divide(error, tolerance, out=ratio, where=tolerance > 0)
    ratio = np.where(np.isnan(ratio), np.inf, ratio)
    if ratio.size == 0:
        return Checked(step, node, 0.0, 0, 0, 0.0, 0.0, 0.0)
    row, col = np.unravel_index(int(ratio.argmax()), ratio.shape)
    values = (float(a[row, col]) for a in (ratio, got, expected, tolerance))
    worst, got_value, expected_value, limit = values
    return Checked(step, node, worst, int(row), int(col), got_value, expected_value, limit)


# ---- tolerances: absolute, [rows, cols] or what broadcasts to it


def _norms(x: NDArray[Any]) -> F64:
    return np.asarray(np.linalg.norm(x.astype(np.float64), axis=1))


def _exact(run: Interpreter, node: Node, _: Any) -> F64:
    return np.zeros((1, 1))


def _embed(run: Interpreter, node: Node, _: Any) -> F64:
    y = np.abs(run.get(node.outs[0]).astype(np.float64))
    return np.asarray(4 * U32 * y.max(axis=1, keepdims=True))  # scale * q + minimum, in one or two roundings


def _rms_norm(run: Interpreter, node: Node, a: ops.RmsNorm) -> F64:
    y = np.abs(run.get(node.outs[0]).astype(np.float64))
    return np.asarray((C * U32 * np.sqrt(a.head_dim or y.shape[1]) / 2 + 4 * U32) * y)


def _layer_norm(run: Interpreter, node: Node, a: ops.LayerNorm) -> F64:
    """The mean of n numbers is off by C u sqrt(n) |x| / n at most, which the factor and the weight carry on."""
    x, *vectors = (np.abs(run.get(v).astype(np.float64)) for v in node.ins)
    d = a.head_dim or x.shape[1]
    heads = run.get(node.ins[0]).astype(np.float64).reshape(len(x), -1, d)
    deviation = np.sqrt(heads.var(axis=2, keepdims=True) + a.eps)
    moved = C * U32 * np.linalg.norm(heads, axis=2, keepdims=True) / np.sqrt(d) / deviation
    weight = vectors[0].reshape(-1, d) if vectors else np.ones((1, d))
    y = np.abs(run.get(node.outs[0]).astype(np.float64)).reshape(heads.shape)
    bias = vectors[1].reshape(-1, d) if len(vectors) > 1 else np.zeros((1, d))
    tolerance = (C * U32 * np.sqrt(d) / 2 + 6 * U32) * (y + 2 * bias) + moved * weight
    return np.asarray(tolerance.reshape(x.shape))


def _linear(run: Interpreter, node: Node, _: Any) -> F64:
    x, weight = (run.get(v) for v in node.ins[:2])
    bias = np.abs(run.get(node.ins[2])).astype(np.float64) if len(node.ins) > 2 else np.zeros((1, 1))
    return np.asarray(C * U32 * (np.sqrt(x.shape[1]) * np.outer(_norms(x), _norms(weight)) + bias))


def _rope(run: Interpreter, node: Node, a: ops.Rope) -> F64:
    x = np.abs(run.get(node.ins[0]).astype(np.float64)).reshape(-1, a.head_dim)
    most = np.repeat(x.max(axis=1), a.head_dim)
    return np.asarray(C * U32 * a.scale * most.reshape(len(run.get(node.ins[0])), -1))


def _attention(run: Interpreter, node: Node, a: ops.Attention) -> F64:
    """Score error e moves a probability by e * ln 2; each probability is rounded once to the KV type.

    int8: what a probability weighs is rounded to half a step of at most max|v| / 32767.
    """
    dtype = run.graph.groups[a.group].dtype
    layer = run.graph.groups[a.group].layers.index(node.layer)
    q = run.get(node.ins[0]).reshape(-1, a.heads, a.head_dim)
    sinks = run.get(node.ins[2]) if len(node.ins) > 2 else None
    tolerance = np.empty((len(q), a.heads, a.v_dim), np.float64)
    for s, (row0, row1) in enumerate(zip(run.batch.seq_starts[:-1], run.batch.seq_starts[1:], strict=True)):
        start = int(run.batch.context_lens[s] - (row1 - row0))
        first = first_seen(a, start)
        k, v = run.state.read(a.group, layer, run.batch, s, first)
        mean_abs = meaning.attention(q[row0:row1], k, np.abs(v), first, start, a, dtype, sinks)
        for head in range(a.heads):
            keys, values = (x[:, head // (a.heads // a.kv_heads)] for x in (k, v))
            scaled = _norms(q[row0:row1, head]) * a.scale * meaning.LOG2_E
            score_error = C * U32 * np.sqrt(a.head_dim) * scaled * _norms(keys).max()
            score_error += 8 * U32 * meaning.LOG2_E * (a.softcap + max(a.slopes, default=0) * len(keys))
            relative = 2 * np.log(2) * score_error + EXP_ERROR + C * U32 * np.sqrt(len(keys))
            relative += 2 * U_KV[dtype]  # both sides round, where they differ by a step at most
            steps = np.abs(values).max() / 2 / 32767 if dtype is DType.I8 else 0.0
            tolerance[row0:row1, head] = relative[:, None] * mean_abs[:, head] + C * np.sqrt(len(keys)) * steps
    return np.asarray(tolerance.reshape(len(q), -1))


def _act(run: Interpreter, node: Node, a: ops.Act) -> F64:
    x = np.abs(run.get(node.ins[0]).astype(np.float64))
    y = np.abs(run.get(node.outs[0]).astype(np.float64))
    return np.asarray(_act_error(a.act, x) * y + 2.0**-120)


def _act_mul(run: Interpreter, node: Node, a: ops.ActMul) -> F64:
    gate, up = (np.abs(run.get(v).astype(np.float64)) for v in node.ins)
    y = np.abs(run.get(node.outs[0]).astype(np.float64))
    return np.asarray(_act_error(a.act, gate) * y + 2.0**-120 * (1 + up))


def _act_error(act: str, x: F64) -> F64:
    """Relative: the exponential's argument is rounded, which weighs as much as the argument is large."""
    argument = {"gelu": x * x, "gelu_tanh": 2 * x + x**3 / 4, "gelu_quick": 2 * x, "swiglu_oai": 2 * x}.get(act, x)
    return np.asarray(2 * EXP_ERROR + 10 * U32 + 3 * U32 * argument)


def _scale(run: Interpreter, node: Node, a: Any) -> F64:
    return np.asarray(U32 * np.abs(run.get(node.outs[0]).astype(np.float64)))


def _softcap(run: Interpreter, node: Node, a: ops.Softcap) -> F64:
    return np.asarray((EXP_ERROR + 8 * U32) * np.abs(run.get(node.outs[0]).astype(np.float64)))


def _lora_shrink(run: Interpreter, node: Node, a: ops.LoraShrink) -> F64:
    x = run.get(node.ins[0])
    tolerance = np.zeros((len(x), len(a.targets) * a.rank))
    for i, rows, delta in deltas(run, run.get(node.ins[1]), a.targets):
        sums = np.sqrt(x.shape[1]) * np.outer(_norms(x[rows]), _norms(delta.a))
        tolerance[rows, i * a.rank : i * a.rank + len(delta.a)] = C * U32 * abs(delta.scale) * sums
    return tolerance


def _lora_expand(run: Interpreter, node: Node, a: ops.LoraExpand) -> F64:
    h = run.get(node.ins[0])
    rank = h.shape[1] // len(a.targets)
    z = np.abs(run.get(node.outs[0]).astype(np.float64))
    tolerance = np.zeros(z.shape)
    for i, rows, delta in deltas(run, run.get(node.ins[2]), a.targets):
        start, stop = sum(a.sizes[:i]), sum(a.sizes[: i + 1])
        low = h[rows, i * rank : i * rank + len(delta.a)]
        sums = np.sqrt(low.shape[1]) * np.outer(_norms(low), _norms(delta.b))
        tolerance[rows, start:stop] = C * U32 * (sums + z[rows, start:stop])
    return tolerance


def _route(run: Interpreter, node: Node, a: ops.Route) -> F64:
    """The same experts; of weights, an exponential of a score and sums of at most E of them."""
    scores, weights = run.get(node.ins[0]), np.abs(run.get(node.outs[0])[:, a.top_k :].astype(np.float64))
    relative = 2 * EXP_ERROR + U32 * (C * np.sqrt(scores.shape[1]) + 8 + 4 * np.abs(scores).max(axis=1, keepdims=True))
    return np.concatenate([np.zeros_like(weights), relative * weights], axis=1)


def _expert_linear(run: Interpreter, node: Node, a: ops.ExpertLinear) -> F64:
    x, routing, weight = (run.get(v) for v in node.ins[:3])
    expert = experts.of_rows(routing)
    sizes = _norms(weight).reshape(a.experts, -1)[expert]
    bias = np.abs(run.get(node.ins[3])).reshape(a.experts, -1)[expert] if len(node.ins) > 3 else np.zeros((1, 1))
    return np.asarray(C * U32 * (np.sqrt(x.shape[1]) * _norms(x)[:, None] * sizes + bias))


def _head_linear(run: Interpreter, node: Node, a: ops.HeadLinear) -> F64:
    x, weight = (run.get(v) for v in node.ins)
    sizes = _norms(x).reshape(a.heads, -1, 1) * _norms(weight).reshape(a.heads, 1, -1)  # [heads, n, N]
    return np.asarray(C * U32 * np.sqrt(x.shape[1]) * sizes.swapaxes(0, 1).reshape(sizes.shape[1], -1))


def _combine(run: Interpreter, node: Node, _: Any) -> F64:
    x, routing = (np.abs(run.get(v)) for v in node.ins)
    return np.asarray(C * U32 * np.sqrt(routing.shape[1] / 2) * experts.combine(x, routing).astype(np.float64))


_TOLERANCES: dict[str, Callable[[Interpreter, Node, Any], F64]] = {
    "embed": _embed, "rms_norm": _rms_norm, "layer_norm": _layer_norm, "round": _exact, "linear": _linear,
    "rope": _rope, "attention": _attention, "act_mul": _act_mul, "act": _act, "scale": _scale, "softcap": _softcap,
    "clamp": _exact, "mul": _scale, "add": _exact, "gather_rows": _exact, "gather_cols": _exact,
    "gather_expert_cols": _exact,
    "lora_shrink": _lora_shrink, "lora_expand": _lora_expand,
    "concat": _exact, "split_heads": _exact, "head_linear": _head_linear, "route": _route, "dispatch": _exact, "expert_linear": _expert_linear, "combine": _combine,
}  # fmt: skip


# ---- steps to compare on


def example_steps(vocab_size: int, num_groups: int = 1, seed: int = 0, causal: bool = True) -> list[StepBatch]:
    """Two sequences of random ids: one prompt that fills the large plan, then its next token beside a short prompt.

    Not causal, a step has whole sequences."""
    rng = np.random.default_rng(seed)
    first, second = rng.integers(vocab_size, size=70), rng.integers(vocab_size, size=19)
    tables = {0: [1, 3, 5, 7, 9], 1: [8, 2]}
    return [
        make_step([(first[:69], 0, tables[0])], num_groups),
        make_step([(first[69 if causal else 0 :], 69 if causal else 0, tables[0]), (second, 0, tables[1])], num_groups),
    ]


def make_step(
    work: Sequence[tuple[Sequence[int] | NDArray[Any], int, Sequence[int]]], num_groups: int = 1
) -> StepBatch:
    """A step of (token ids, position of the first, block table) per sequence; greedy logits of each last token.

    All KV groups have the same tables.
    """
    lengths = [len(ids) for ids, _, _ in work]
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    contexts = [start + n for (_, start, _), n in zip(work, lengths, strict=True)]
    table = np.zeros((len(work), max(-(-n // BLOCK_SIZE) for n in contexts)), np.int32)
    for row, (n, (_, _, blocks)) in enumerate(zip(contexts, work, strict=True)):
        used = -(-n // BLOCK_SIZE)
        table[row, :used] = blocks[:used]
    return StepBatch(
        token_ids=np.concatenate([np.asarray(ids, np.int32) for ids, _, _ in work]),
        positions=np.concatenate([np.arange(s, s + len(ids), dtype=np.int32) for ids, s, _ in work]),
        seq_starts=starts,
        context_lens=np.array(contexts, np.int32),
        block_tables=(table,) * num_groups,
        copies=(np.zeros((0, 2), np.int32),) * num_groups,
        logit_rows=starts[1:] - 1,
        sampling=greedy(np.array(contexts, np.int32)),
    )


def greedy(positions: NDArray[np.int32]) -> SamplingArrays:
    """Greedy draws of the tokens at `positions` [R], with scores of the chosen token alone."""
    n = len(positions)
    zeros, ones = np.zeros(n, np.float32), np.ones(n, np.float32)
    ints, starts = np.zeros(n, np.int32), np.zeros(n + 1, np.int32)
    nothing, none = np.zeros(0, np.int32), np.full(n, -1, np.int32)
    return SamplingArrays(
        temperature=zeros, top_k=ints, top_p=ones, min_p=zeros, repetition=ones, presence=zeros, frequency=zeros,
        noise_key=np.zeros(n, np.uint64), position=positions, num_top=ints, target=none, bias_starts=starts,
        bias_ids=nothing, bias_values=np.zeros(0, np.float32), history_starts=starts, history_ids=nothing,
        history_counts=nothing, **SamplingArrays.extras(n),
    )  # fmt: skip
