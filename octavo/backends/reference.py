"""The numpy oracle: interprets a graph, a fused node by its expansion. It is the meaning of every operation.

`ReferenceBackend` runs on the same pages as the backend beside it; `forward_logits` recomputes a whole sequence
without a cache. Slow on purpose: no batch, no threads but numpy's own, weights in float32.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.backends import reference_experts as experts
from octavo.backends import reference_ops as meaning
from octavo.backends.base import BLOCK_SIZE, NO_TYPES, KvTiles, Limits, StepBatch, StepHandle, StepResult, TraceSpan
from octavo.graph import ops
from octavo.graph.ir import Graph, Kind, KvGroup, Node, Value
from octavo.graph.plan import lifetimes
from octavo.graph.verify import FUSED, verify
from octavo.sampling.definition import sample
from octavo.weights.adapter import Adapter
from octavo.weights.formats import dequantise
from octavo.weights.spec import Checkpoint

F32 = NDArray[np.float32]
Weights = dict[str, F32]
"""By tensor name: [rows, cols], vectors [1, n]; the values of the packed format."""


# ---- the KV cache


class State(Protocol):
    """k and v are [tokens, kv_heads, D], already rounded to the KV type."""

    def write(self, group: int, layer: int, batch: StepBatch, k: F32, v: F32) -> None: ...

    def read(self, group: int, layer: int, batch: StepBatch, sequence: int, first: int) -> tuple[F32, F32]:
        """The sequence's tokens from position `first` on, those of this step included."""
        ...


class PagedState:
    """Per group two arrays [layers, blocks, 16, kv_heads, D]. Pages are touched when written."""

    def __init__(self, graph: Graph, num_blocks: Sequence[int]) -> None:
        sizes = [(len(g.layers), n, BLOCK_SIZE, g.kv_heads) for g, n in zip(graph.groups, num_blocks, strict=True)]
        self.k = [np.zeros((*s, g.head_dim), np.float32) for s, g in zip(sizes, graph.groups, strict=True)]
        self.v = [np.zeros((*s, g.v_dim), np.float32) for s, g in zip(sizes, graph.groups, strict=True)]

    def copy_blocks(self, batch: StepBatch) -> None:
        for group, copies in enumerate(batch.copies):
            for arena in (self.k[group], self.v[group]):
                arena[:, copies[:, 1]] = arena[:, copies[:, 0]]

    def write(self, group: int, layer: int, batch: StepBatch, k: F32, v: F32) -> None:
        sequence = np.repeat(np.arange(len(batch.context_lens)), np.diff(batch.seq_starts))
        blocks = batch.block_tables[group][sequence, batch.positions // BLOCK_SIZE]
        slots = batch.positions % BLOCK_SIZE
        self.k[group][layer, blocks, slots] = k
        self.v[group][layer, blocks, slots] = v

    def read(self, group: int, layer: int, batch: StepBatch, sequence: int, first: int) -> tuple[F32, F32]:
        n = int(batch.context_lens[sequence])
        skipped = first // BLOCK_SIZE
        blocks = batch.block_tables[group][sequence, skipped : -(-n // BLOCK_SIZE)]
        tokens = slice(first - skipped * BLOCK_SIZE, n - skipped * BLOCK_SIZE)
        k, v = (a[group][layer, blocks].reshape(-1, *a[group].shape[3:])[tokens] for a in (self.k, self.v))
        return k, v


class WholeSequence:
    """One sequence computed in one step: nothing is paged or kept."""

    def __init__(self) -> None:
        self._kv: dict[tuple[int, int], tuple[F32, F32]] = {}

    def write(self, group: int, layer: int, batch: StepBatch, k: F32, v: F32) -> None:
        self._kv[group, layer] = (k, v)

    def read(self, group: int, layer: int, batch: StepBatch, sequence: int, first: int) -> tuple[F32, F32]:
        k, v = self._kv[group, layer]
        return k[first:], v[first:]


# ---- adapters


class Delta(NamedTuple):
    """What an adapter adds to the output of a module: scale * B (A x)."""

    a: F32  # [r, K]
    b: F32  # [N, r]
    scale: float


Deltas = dict[str, Delta]
"""Of one adapter, by module."""

NO_DELTAS: Mapping[int, Deltas] = MappingProxyType({})


# ---- the interpreter


class Interpreter:
    """One step: `values` holds what has been computed, decoded (see reference_ops), by root value.

    adapters: by slot, as batch.adapters names them.
    """

    def __init__(
        self, graph: Graph, weights: Weights, state: State, batch: StepBatch, adapters: Mapping[int, Deltas] = NO_DELTAS
    ) -> None:
        self.graph = graph
        self.weights = weights
        self.state = state
        self.batch = batch
        self.adapters = adapters
        self.values: dict[Value, NDArray[Any]] = {}
        self.result: StepResult | None = None

    def run_all(self, nodes: Sequence[Node], keep: bool = False) -> Iterator[tuple[Node, float]]:
        """Compute `nodes`, yielding each with its seconds; values are dropped after their last use unless `keep`."""
        dying: dict[int, list[Value]] = {}
        for v, (_, last) in lifetimes(self.graph).items():
            dying.setdefault(last - 1, []).extend([v] if v.kind is Kind.TEMP else [])
        for i, node in enumerate(nodes):
            started = time.perf_counter()
            self.run(node)
            for v in dying.get(i, ()) if not keep else ():
                del self.values[v]
            yield node, time.perf_counter() - started

    def get(self, v: Value) -> NDArray[Any]:
        """[rows, cols] of a value or a view; an input of the batch as [rows]."""
        if v.kind is Kind.INPUT:
            array: NDArray[Any] = getattr(self.batch, v.name)
            plain = v.name == "token_types" and not len(array)
            return np.zeros_like(self.batch.token_ids) if plain else array
        if v.kind is Kind.WEIGHT:
            return np.concatenate([self.weights[p.name] for p in v.parts], axis=1 if v.vector else 0)
        view: NDArray[Any] = self.values[v.root][:, v.start : v.start + v.cols]
        return view

    def run(self, node: Node) -> None:
        """Compute one node; a fused one by its expansion."""
        for base in node.expansion or (node,):
            out = _OPS[base.op](self, base, base.attrs)
            for v in base.outs:
                assert out is not None
                self.values[v] = out
        for base in node.expansion:
            for v in set(base.outs) - set(node.outs):
                del self.values[v]


def _embed(run: Interpreter, node: Node, a: ops.Embed) -> F32:
    (part,) = node.ins[1].parts
    y: F32 = run.weights[part.name][run.get(node.ins[0]) + a.offset]
    return y


def _rms_norm(run: Interpreter, node: Node, a: ops.RmsNorm) -> F32:
    x, weight, *_ = (*map(run.get, node.ins), None)
    return meaning.rms_norm(x, weight, a.eps, a.head_dim)


def _layer_norm(run: Interpreter, node: Node, a: ops.LayerNorm) -> F32:
    x, weight, bias, *_ = (*map(run.get, node.ins), None, None)
    return meaning.layer_norm(x, weight, bias, a.eps, a.head_dim)


def _round(run: Interpreter, node: Node, _: ops.Round) -> NDArray[Any]:
    return meaning.round_to(run.get(node.ins[0]), node.outs[0].dtype)


def _linear(run: Interpreter, node: Node, _: ops.Linear) -> F32:
    x, weight, *bias = node.ins
    stacked = [run.weights[p.name] for p in weight.parts]
    return meaning.linear(run.get(x), stacked, run.get(bias[0]) if bias else None)


def _rope(run: Interpreter, node: Node, a: ops.Rope) -> F32:
    return meaning.rope(run.get(node.ins[0]), run.get(node.ins[1]), a.head_dim, a.inv_freq, a.neox, a.scale)


def _group(run: Interpreter, node: Node, index: int) -> tuple[KvGroup, int]:
    group = run.graph.groups[index]
    return group, group.layers.index(node.layer)


def _kv_write(run: Interpreter, node: Node, a: ops.KvWrite) -> None:
    group, layer = _group(run, node, a.group)
    k, v = (run.get(x).reshape(len(run.get(x)), a.kv_heads, -1) for x in node.ins[:2])
    run.state.write(a.group, layer, run.batch, *meaning.round_kv(k, v, group.dtype))


def _attention(run: Interpreter, node: Node, a: ops.Attention) -> F32:
    group, layer = _group(run, node, a.group)
    q = run.get(node.ins[0]).reshape(-1, a.heads, a.head_dim)
    sinks = run.get(node.ins[2]) if len(node.ins) > 2 else None
    y = np.empty((len(q), a.heads, a.v_dim), np.float32)
    for s, (row0, row1) in enumerate(zip(run.batch.seq_starts[:-1], run.batch.seq_starts[1:], strict=True)):
        start = int(run.batch.context_lens[s] - (row1 - row0))
        first = first_seen(a, start)
        k, v = run.state.read(a.group, layer, run.batch, s, first)
        y[row0:row1] = meaning.attention(q[row0:row1], k, v, first, start, a, group.dtype, sinks)
    return y.reshape(len(q), -1)


def first_seen(a: ops.Attention, position: int) -> int:
    """The first position that a token sees."""
    return max(0, position + 1 - a.window) if a.window else 0


def _act_mul(run: Interpreter, node: Node, a: ops.ActMul) -> F32:
    gate, up = map(run.get, node.ins)
    return meaning.act_mul(gate, up, a.act)


def _act(run: Interpreter, node: Node, a: ops.Act) -> F32:
    return meaning.act(run.get(node.ins[0]), a.act)


def _scale(run: Interpreter, node: Node, a: ops.Scale) -> F32:
    y: F32 = run.get(node.ins[0]) * np.float32(a.factor)
    return y


def _softcap(run: Interpreter, node: Node, a: ops.Softcap) -> F32:
    return meaning.softcap(run.get(node.ins[0]), a.cap)


def _clamp(run: Interpreter, node: Node, a: ops.Clamp) -> F32:
    y: F32 = np.clip(run.get(node.ins[0]), np.float32(a.low), np.float32(a.high))
    return y


def _mul(run: Interpreter, node: Node, _: ops.Mul) -> F32:
    a, b = map(run.get, node.ins)
    y: F32 = a * b
    return y


def _add(run: Interpreter, node: Node, _: ops.Add) -> F32:
    a, b = map(run.get, node.ins)
    y: F32 = a + b
    return y


def _gather_cols(run: Interpreter, node: Node, _: ops.GatherCols) -> F32:
    x, order = map(run.get, node.ins)
    y: F32 = x[:, order.ravel().astype(np.int64)]
    return y


def _concat(run: Interpreter, node: Node, a: ops.Concat) -> F32:
    return meaning.concat([run.get(v) for v in node.ins], a.heads)


def _split_heads(run: Interpreter, node: Node, a: ops.SplitHeads) -> F32:
    return meaning.split_heads(run.get(node.ins[0]), a.heads)


def _head_linear(run: Interpreter, node: Node, a: ops.HeadLinear) -> F32:
    x, weight = node.ins
    return meaning.head_linear(run.get(x), run.weights[weight.parts[0].name], a.heads)


def _route(run: Interpreter, node: Node, a: ops.Route) -> F32:
    scores, *bias = map(run.get, node.ins)
    return experts.route(scores, bias[0] if bias else None, a)


def _dispatch(run: Interpreter, node: Node, _: ops.Dispatch) -> NDArray[Any]:
    x, routing = map(run.get, node.ins)
    return np.asarray(x[experts.order(routing) // (routing.shape[1] // 2)])


def _expert_linear(run: Interpreter, node: Node, a: ops.ExpertLinear) -> F32:
    x, routing, weight, *bias = node.ins
    each = len(weight.parts) // a.experts
    stacked = [[run.weights[p.name] for p in weight.parts[i * each : (i + 1) * each]] for i in range(a.experts)]
    return experts.linear(run.get(x), run.get(routing), stacked, run.get(bias[0]) if bias else None)


def _combine(run: Interpreter, node: Node, _: ops.Combine) -> F32:
    return experts.combine(*map(run.get, node.ins))


def _gather_rows(run: Interpreter, node: Node, _: ops.GatherRows) -> F32:
    x, rows = map(run.get, node.ins)
    y: F32 = x[rows]
    return y


def _lora_shrink(run: Interpreter, node: Node, a: ops.LoraShrink) -> F32:
    x, adapters = map(run.get, node.ins)
    h = np.zeros((len(x), len(a.targets) * a.rank), np.float32)
    for i, rows, delta in deltas(run, adapters, a.targets):
        start = i * a.rank
        h[rows, start : start + len(delta.a)] = meaning.lora_shrink(x[rows], delta.a, delta.scale)
    return h


def _lora_expand(run: Interpreter, node: Node, a: ops.LoraExpand) -> F32:
    h, y, adapters = map(run.get, node.ins)
    z: F32 = y.copy()
    rank = h.shape[1] // len(a.targets)
    for i, rows, delta in deltas(run, adapters, a.targets):
        low, start = h[rows, i * rank : i * rank + len(delta.a)], sum(a.sizes[:i])
        z[rows, start : start + a.sizes[i]] += meaning.linear(low, [delta.b], None)
    return z


def deltas(
    run: Interpreter, adapters: NDArray[Any], targets: Sequence[str]
) -> Iterator[tuple[int, NDArray[np.intp], Delta]]:
    """(index of the target, rows, delta) of all adapters of the step."""
    for slot in np.unique(adapters[adapters >= 0]):
        for i, target in enumerate(targets):
            if target in run.adapters[slot]:
                yield i, np.flatnonzero(adapters == slot), run.adapters[slot][target]


def _sample(run: Interpreter, node: Node, _: ops.Sample) -> None:
    run.result = StepResult(*sample(run.get(node.ins[0]), run.batch.sampling))


_OPS: dict[str, Callable[[Interpreter, Node, Any], NDArray[Any] | None]] = {
    "embed": _embed, "rms_norm": _rms_norm, "layer_norm": _layer_norm, "round": _round, "linear": _linear, "rope": _rope, "kv_write": _kv_write,
    "attention": _attention, "act_mul": _act_mul, "act": _act, "scale": _scale, "softcap": _softcap,
    "clamp": _clamp, "mul": _mul, "add": _add, "gather_rows": _gather_rows, "sample": _sample,
    "concat": _concat, "route": _route, "dispatch": _dispatch, "expert_linear": _expert_linear, "combine": _combine,
    "gather_cols": _gather_cols, "gather_expert_cols": lambda run, node, _: experts.gather_cols(*map(run.get, node.ins)), "lora_shrink": _lora_shrink, "lora_expand": _lora_expand,
    "split_heads": _split_heads, "head_linear": _head_linear,
}  # fmt: skip


# ---- the backend


class Done(NamedTuple):
    """A step that was computed at once."""

    value: StepResult

    def result(self) -> StepResult:
        return self.value


class ReferenceProgram:
    """Runs steps on paged state; the arrays of a result belong to the caller."""

    def __init__(self, graph: Graph, weights: Weights, state: PagedState, limits: Limits, reuse: bool) -> None:
        self._graph = graph
        self._weights = weights
        self._state = state
        self._limits = limits
        self._reuse = reuse
        self._adapters: dict[int, Deltas] = {}
        self._values: dict[Value, NDArray[Any]] = {}

    @property
    def kv_tiles(self) -> KvTiles:
        """None: sequences are read whole, one by one."""
        return KvTiles(0, 0)

    def set_adapter(self, slot: int, packed: Deltas | None) -> None:
        self._adapters[slot] = packed or {}

    def run(self, batch: StepBatch) -> StepHandle:
        done, _ = self._run(batch)
        return done

    def logits(self) -> F32:
        return self.read(self._graph.output("logits"))

    def output(self, name: str) -> F32:
        return self.read(self._graph.output(name))

    def read(self, value: Value) -> NDArray[Any]:
        """What the last run computed for a root value, decoded; of temps only without `reuse`."""
        return self._values[value]

    def trace(self, batch: StepBatch) -> list[TraceSpan]:
        return self._run(batch)[1]

    def _run(self, batch: StepBatch) -> tuple[Done, list[TraceSpan]]:
        sizes = (len(batch.token_ids), len(batch.logit_rows), len(batch.context_lens))
        for name, size, most in zip(("tokens", "logit rows", "sequences"), sizes, self._limits[:3], strict=True):
            if size > most:
                raise ValueError(f"a step of {size} {name}; the program was compiled for {most}")
        self._state.copy_blocks(batch)
        step = Interpreter(self._graph, self._weights, self._state, batch, self._adapters)
        with np.errstate(all="ignore"):  # NaN and infinity make rows invalid, not warnings
            run = step.run_all(self._graph.nodes, keep=not self._reuse)
            spans = [TraceSpan(node.op, node.layer, seconds, 0.0) for node, seconds in run]
        self._values = step.values
        return Done(step.result or StepResult.nothing(len(batch.logit_rows))), spans


class ReferenceBackend:
    """Without `reuse`, every value of a step can be read until the next."""

    name = "reference"
    fusions = FUSED  # by their expansions
    num_threads = 1
    bf16_dots = True

    def __init__(self, reuse: bool = True) -> None:
        self._reuse = reuse

    def fingerprint(self) -> str:
        return f"numpy {np.__version__} {platform.machine()}"

    def pack(self, graph: Graph, checkpoint: Checkpoint, progress: Callable[[int, int], None] | None = None) -> Weights:
        """Every tensor that the graph reads, as float32."""
        parts = {part.name: part for value in graph.weights() for part in value.parts}.values()
        weights, done, total = {}, 0, self.weight_bytes(graph)
        for part in parts:
            info, data, factor = checkpoint.read(part.name)
            data = data.reshape(1, -1) if len(info.shape) == 1 else data
            values = dequantise(info.source, data, info.shape[-1], factor)
            if part.rows == 1:
                values = values.reshape(1, -1) + np.float32(part.plus)
            weights[part.name] = meaning.round_bf16(values) if part.format == "bf16" else values
            done += values.nbytes
            checkpoint.release(part.name)
            if progress:
                progress(done, total)
        return weights

    def pack_adapter(self, adapter: Adapter) -> Deltas:
        return {
            name: Delta(dequantise(m.source, m.a, m.cols), dequantise(m.source, m.b, m.rank), m.scale)
            for name, m in adapter.modules.items()
        }

    def adapter_bytes(self, adapter: Adapter) -> int:
        return sum(4 * m.rank * (m.rows + m.cols) for m in adapter.modules.values())

    def packing(self, graph: Graph) -> None:
        """Float32 is several times what it is made of."""

    def weight_bytes(self, graph: Graph) -> int:
        """Float32, a weight used twice once."""
        sizes = {p.name: 4 * p.rows * v.cols for v in graph.weights() for p in v.parts if not v.vector}
        return sum(sizes.values()) + sum(4 * v.cols for v in graph.weights() if v.vector)

    def block_bytes(self, graph: Graph) -> list[int]:
        return [len(g.layers) * BLOCK_SIZE * g.kv_heads * (g.head_dim + g.v_dim) * 4 for g in graph.groups]

    def make_state(self, graph: Graph, num_blocks: Sequence[int]) -> PagedState:
        return PagedState(graph, num_blocks)

    def compile(self, graph: Graph, weights: Weights, state: PagedState, limits: Limits) -> ReferenceProgram:
        return ReferenceProgram(verify(graph), weights, state, limits, self._reuse)


def forward_logits(graph: Graph, weights: Weights, token_ids: Sequence[int] | NDArray[np.integer[Any]]) -> F32:
    """Logits [n, vocab] at every position of one sequence, recomputed from nothing: the oracle of a request."""
    return forward(graph, weights, token_ids, "logits")


def forward(
    graph: Graph, weights: Weights, token_ids: Sequence[int] | NDArray[np.integer[Any]], output: str,
    token_types: NDArray[Any] = NO_TYPES,
) -> F32:  # fmt: skip
    """An output of the graph at every position of one sequence, [n, cols]."""
    n = len(token_ids)
    rows = np.arange(n, dtype=np.int32)
    batch = StepBatch(
        token_ids=np.asarray(token_ids, np.int32),
        positions=rows,
        seq_starts=np.array([0, n], np.int32),
        context_lens=np.array([n], np.int32),
        block_tables=(),
        copies=(),
        logit_rows=rows,
        sampling=None,  # type: ignore[arg-type]  # no sample node is run
        token_types=token_types.astype(np.int32),
    )
    step = Interpreter(graph, weights, WholeSequence(), batch)
    for _ in step.run_all([base for node in graph.nodes for base in _without_draw(node)]):
        pass
    return step.values[graph.output(output)]


def _without_draw(node: Node) -> list[Node]:
    nodes = node.expansion if isinstance(node.attrs, ops.LinearSample) else (node,)
    return [base for base in nodes if not isinstance(base.attrs, ops.Sample)]
