"""The base operations: their meaning against plain float64 definitions, their rules, and the native kernels of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from octavo import _native
from octavo.backends import reference_ops as meaning
from octavo.backends.base import Limits
from octavo.backends.cpu import CpuBackend
from octavo.backends.diff import Checked, diff, greedy, make_step
from octavo.graph import ops
from octavo.graph.build import Builder
from octavo.graph.fuse import count, fuse
from octavo.graph.ir import DType, Graph, KvGroup
from octavo.graph.plan import overlays, plan
from octavo.graph.rounding import round_inputs
from octavo.graph.verify import FUSED, GraphError, verify
from tests.random_model import InMemory

F32 = NDArray[np.float32]

VALUES = np.array([-30, -9, -3, -1, -0.5, -1e-3, 0, 1e-3, 0.5, 1, 3, 9, 30], np.float32)


def phi(x: float) -> float:
    return 0.5 * (1 + math.erf(x / math.sqrt(2)))


def logistic(x: float) -> float:
    return 1 / (1 + math.exp(-x))


ACTS: dict[str, Callable[[float], float]] = {
    "silu": lambda x: x * logistic(x),
    "gelu": lambda x: x * phi(x),
    "gelu_tanh": lambda x: 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "gelu_quick": lambda x: x * logistic(1.702 * x),
    "relu": lambda x: max(0.0, x),
    "relu2": lambda x: max(0.0, x) ** 2,
    "sigmoid": logistic,
    "tanh": math.tanh,
}


@pytest.mark.parametrize("kind", ops.ACTS)
def test_activations(kind: str) -> None:
    want = [ACTS[kind](float(x)) for x in VALUES]
    np.testing.assert_allclose(meaning.act(VALUES, kind), want, rtol=1e-6, atol=1e-15)
    np.testing.assert_allclose(meaning.act_mul(VALUES, VALUES, kind), want * VALUES, rtol=1e-6, atol=1e-15)


def test_clamped_swiglu() -> None:
    """out = (min(g, 7) s(1.702 min(g, 7))) (clip(u, -7, 7) + 1), as gpt-oss defines it."""
    up = VALUES[::-1]
    want = [min(g, 7) * logistic(1.702 * min(g, 7)) * (min(max(u, -7), 7) + 1) for g, u in zip(VALUES, up, strict=True)]
    np.testing.assert_allclose(meaning.act_mul(VALUES, up, "swiglu_oai"), want, rtol=1e-6, atol=1e-15)


@pytest.mark.parametrize("head_dim", [None, 4])
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("vectors", [0, 1, 2])
def test_norms(head_dim: int | None, per_head: bool, vectors: int) -> None:
    rng = np.random.default_rng(vectors)
    x = (rng.standard_normal((3, 12)) + 2).astype(np.float32)
    size = head_dim if head_dim and not per_head else 12
    weight, bias = (rng.standard_normal((1, size)).astype(np.float32) if vectors > i else None for i in range(2))
    d = head_dim or 12
    layer, rms = np.empty((3, 12)), np.empty((3, 12))
    for row in range(3):
        for start in range(0, 12, d):
            part = x[row, start : start + d].astype(np.float64)
            at = slice(start, start + d) if size == 12 else slice(0, d)
            scale = 1 if weight is None else weight[0, at]
            shift = 0 if bias is None else bias[0, at]
            layer[row, start : start + d] = (part - part.mean()) / np.sqrt(part.var() + 1e-3) * scale + shift
            rms[row, start : start + d] = part / np.sqrt(np.mean(part * part) + 1e-3) * scale
    np.testing.assert_allclose(meaning.layer_norm(x, weight, bias, 1e-3, head_dim), layer, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(meaning.rms_norm(x, weight, 1e-3, head_dim), rms, rtol=1e-5, atol=1e-6)


# ---- graphs of them


class Shapes:
    def __init__(self, **shapes: tuple[int, int]) -> None:
        self.shapes = shapes

    def order(self, name: str) -> str:
        return ""

    def rows_cols_format(self, name: str) -> tuple[int, int, str]:
        return *self.shapes[name], "f32"


def builder(bounded: bool = True) -> Builder:
    shapes = {
        "table": (50, 32),
        "positions": (12, 32),
        "row": (1, 32),
        "other": (1, 32),
        "head": (1, 16),
        "heads": (2, 16),
    }
    return Builder("g", 50, 10, Shapes(**shapes), bounded)


def whole(b: Builder) -> Graph:
    """Every base operation that is elementwise or a norm, once or more."""
    table = b.matrix({"table": 50}, 32)
    x = b.add(b.embed(table), b.embed(b.matrix({"positions": 12}, 32), "positions", offset=2))
    x = b.layer_norm(x, "row", "row", 1e-5)
    x = b.layer_norm(b.layer_norm(x, None, None, 1e-5), "other", None, 1e-5, plus=1)
    x = b.rms_norm(b.rms_norm(b.rms_norm(x, None, 1e-5), "head", 1e-5, 16), "heads", 1e-5, 16)
    x = b.mul(b.mul(b.scale(x, 0.5), b.vector({"row": 32})), b.act(x, "gelu"))
    x = b.act_mul(b.clamp(x, -1, 1), x, "swiglu_oai")
    x = b.final_layer_norm(b.gather_rows(x), "row", "row", 1e-5)
    b.sample(b.logits(x, table, scale=0.25, softcap=30.0))
    return verify(b.graph)


def test_builder_and_verify() -> None:
    graph = whole(builder())
    assert graph.output("hidden").cols == 32 and graph.output("logits").cols == 50
    assert {p.name for w in graph.weights() for p in w.parts if p.plus == 1} == {"other"}
    b = builder()
    b.rms_norm(b.rms_norm(b.embed(b.matrix({"table": 50}, 32)), "row", 1e-5), "row", 1e-5, plus=1)
    with pytest.raises(GraphError, match="row is used with and without an addend"):
        verify(b.graph)


def change(op: str, **fields: object) -> Graph:
    graph = whole(builder())
    i = next(i for i, n in enumerate(graph.nodes) if n.op == op)
    graph.nodes[i] = replace(graph.nodes[i], **fields)  # type: ignore[arg-type]
    return graph


@pytest.mark.parametrize(
    ("op", "attrs", "message"),
    [
        ("embed", ops.Embed(1), "shapes disagree"),
        ("layer_norm", ops.LayerNorm(0.0), "eps must be positive"),
        ("layer_norm", ops.LayerNorm(1e-5, 5), "heads disagree"),
        ("layer_norm", ops.RmsNorm(1e-5), "shapes disagree"),
        ("act", ops.Act("swiglu_oai"), "unknown activation"),
        ("act_mul", ops.ActMul("mish"), "unknown activation"),
        ("scale", ops.Scale(math.inf), "factor is not finite"),
        ("softcap", ops.Softcap(0.0), "cap must be positive"),
        ("clamp", ops.Clamp(1.0, -1.0), "low is above high"),
        ("mul", ops.Act("relu"), "number of ins"),
    ],
)
def test_verify_names_what_is_broken(op: str, attrs: ops.Attrs, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        verify(change(op, attrs=attrs))


def test_learned_positions_end_with_their_table() -> None:
    """A model with a table of positions is bounded, and the table has a row for its last position."""
    b = builder()
    b.embed(b.matrix({"positions": 12}, 32), "positions", offset=3)
    with pytest.raises(GraphError, match="the table has no row 12 for the last position"):
        verify(b.graph)
    b = builder(bounded=False)
    b.embed(b.matrix({"positions": 12}, 32), "positions", offset=2)
    with pytest.raises(GraphError, match="last position"):
        verify(b.graph)


def test_what_lies_between_a_linear_and_attention_does_not_change_its_rounding() -> None:
    b = Builder(
        "g", 50, 10, Shapes(table=(50, 32), **{"q.weight": (16, 32), "k.weight": (16, 32), "v.weight": (16, 32)})
    )
    group = b.kv_group(KvGroup("full", (0,), 1, 16, DType.BF16))
    x = b.embed(b.matrix({"table": 50}, 32))
    b.layer = 0
    q, k, v = (b.linear(x, {name: 16}, name=name) for name in "qkv")
    b.attention(b.rms_norm(q, None, 1e-5, 16), b.clamp(k, -1, 1), b.scale(v, 2.0), group, 0.25)
    graph = verify(round_inputs(verify(b.graph), lambda _, attends: DType.BF16 if attends else DType.A8))
    assert [n.ins[0].dtype for n in graph.nodes if n.op == "linear"] == [DType.BF16] * 3


# ---- the native backend


def model(bounded: bool = True) -> tuple[Graph, InMemory]:
    """A decoder of one layer that takes every operation of this file, and its random weights."""
    rng = np.random.default_rng(5)
    shapes = {"table": (50, 32), "positions": (80, 32), "row": (32,), "other": (32,), "bias": (32,), "head": (16,), "heads": (2, 16),
              "q.weight": (32, 32), "k.weight": (16, 32), "v.weight": (16, 32), "gate.weight": (32, 32),
              "one.weight": (1, 32)}  # fmt: skip
    weights = InMemory({}, {name: rng.standard_normal(shape).astype(np.float32) / 2 for name, shape in shapes.items()})
    sizes = {name: (1, *shape)[-2:] for name, shape in shapes.items()}
    b = Builder("g", 50, 75, Shapes(**sizes), bounded)
    group = b.kv_group(KvGroup("full", (0,), 1, 16, DType.BF16))
    table = b.matrix({"table": 50}, 32)
    x = b.add(b.embed(table), b.embed(b.matrix({"positions": 80}, 32), "positions", offset=2))
    x = b.layer_norm(x, "row", "bias", 1e-5)
    b.layer = 0
    h = b.layer_norm(x, "other", "bias", 1e-5, plus=1)
    q, k, v = b.split(b.linear(h, {"q": 32, "k": 16, "v": 16}, name="qkv"), 32, 16, 16)
    q = b.rms_norm(b.layer_norm(q, "heads", None, 1e-5, 16), "head", 1e-5, 16)
    y = b.attention(q, b.layer_norm(k, "head", "head", 1e-5, 16), b.clamp(v, -1, 1), group, 0.25)
    x = b.add(x, b.scale(b.rms_norm(y, None, 1e-5), 0.5))
    h = b.layer_norm(x, "row", None, 1e-5)
    for kind in ops.GATED_ACTS:
        gate = b.linear(h, {"gate": 32}, name="gate")
        y = b.act(gate, kind) if kind in ops.ACTS else gate
        x = b.add(x, b.mul(b.act_mul(y, gate, kind), b.vector({"row": 32})))
    x = b.add(x, b.mul(b.softcap(x, 2.0), b.act(x.slice(3, 4), "sigmoid")))
    b.layer = -1
    x = b.final_layer_norm(b.gather_rows(b.layer_norm(x, None, None, 1e-5)), "row", "bias", 1e-5)
    b.sample(b.logits(x, table, scale=0.25, softcap=3.0))
    return verify(b.graph), weights


@pytest.mark.parametrize("isa", _native.isa_levels())
@pytest.mark.parametrize("act", DType)
def test_each_operation_on_the_native_backend(isa: str, act: DType) -> None:
    if act in (DType.I8, DType.I32):
        return
    graph, weights = model()
    graph = verify(round_inputs(graph, lambda *_: act))
    seen: list[Checked] = []
    assert diff(graph, weights, CpuBackend(isa, 2, fuse=False, reuse=False), report=seen.append) is None
    assert {c.node.op for c in seen} >= {"layer_norm", "rms_norm", "act", "act_mul", "scale", "softcap", "clamp", "mul"}


def test_passes_chunks_and_threads_change_no_bit() -> None:
    graph, weights = model()
    graph = verify(round_inputs(graph, lambda _, attends: DType.A16 if attends else DType.A8))
    assert "norm_round" in count(fuse(graph, FUSED))
    ids = np.random.default_rng(1).integers(50, size=69).astype(np.int32)
    limits = Limits(max_tokens=70, max_rows=70, max_seqs=2, max_model_len=75)
    expected = None
    for chunks, options in (
        ([69], {}), ([69], {"fuse": False}), ([1, 64, 4], {"num_threads": 2, "poison": True}),
        ([7, 62], {"num_threads": 3, "reuse": False}), ([5] * 13 + [4], {"num_threads": 2, "fuse": False}),
    ):  # fmt: skip
        backend = CpuBackend(**{"num_threads": 1, **options})  # type: ignore[arg-type]
        program = backend.compile(graph, backend.pack(graph, weights), backend.make_state(graph, [8]), limits)
        start, found = 0, []
        for n in chunks:
            step = make_step([(ids[start : start + n], start, [5, 2, 7, 1, 4])])
            rows = np.arange(n, dtype=np.int32)
            program.run(step._replace(logit_rows=rows, sampling=greedy(step.positions + np.int32(1))))
            found.append(program.logits().copy())
            start += n
        got = np.concatenate(found)
        assert np.isfinite(got).all()
        expected = got if expected is None else expected
        np.testing.assert_array_equal(expected.view(np.uint32), got.view(np.uint32))


def test_what_is_computed_in_place_takes_no_memory() -> None:
    graph, _ = model()
    logits, made = graph.output("logits"), plan(graph, 64, 64)
    over = overlays(graph)
    assert over[logits].name == "logits.2" and made.offsets[logits] == made.offsets[over[logits]]
    assert plan(graph, 64, 64, reuse=False).offsets[logits] != plan(graph, 64, 64, reuse=False).offsets[over[logits]]
