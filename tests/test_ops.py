"""The base operations: their meaning against plain float64 definitions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from octavo.backends import reference_ops as meaning
from octavo.graph import ops
from octavo.graph.build import Builder
from octavo.graph.ir import DType, Graph, KvGroup
from octavo.graph.rounding import round_inputs
from octavo.graph.verify import GraphError, verify

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
    shapes = {"table": (50, 32), "positions": (12, 32), "row": (1, 32), "head": (1, 16), "heads": (2, 16)}
    return Builder("g", 50, 10, Shapes(**shapes), bounded)


def whole(b: Builder) -> Graph:
    """Every base operation that is elementwise or a norm, once or more."""
    table = b.matrix({"table": 50}, 32)
    x = b.add(b.embed(table), b.embed(b.matrix({"positions": 12}, 32), "positions", offset=2))
    x = b.layer_norm(x, "row", "row", 1e-5)
    x = b.layer_norm(b.layer_norm(x, None, None, 1e-5), "row", None, 1e-5, plus=1)
    x = b.rms_norm(b.rms_norm(b.rms_norm(x, None, 1e-5), "head", 1e-5, 16), "heads", 1e-5, 16)
    x = b.mul(b.mul(b.scale(x, 0.5), b.vector({"row": 32})), b.act(x, "gelu"))
    x = b.act_mul(b.clamp(x, -1, 1), x, "swiglu_oai")
    x = b.final_layer_norm(b.gather_rows(x), "row", "row", 1e-5)
    b.sample(b.logits(x, table, scale=0.25, softcap=30.0))
    return verify(b.graph)


def test_builder_and_verify() -> None:
    graph = whole(builder())
    assert graph.output("hidden").cols == 32 and graph.output("logits").cols == 50
    plus = [p.plus for w in graph.weights() for p in w.parts if p.name == "row"]
    assert plus == [0, 1] and len({w.name for w in graph.weights()}) == len(graph.weights())


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
    graph = verify(round_inputs(verify(b.graph), lambda _: DType.A8))
    assert [n.ins[0].dtype for n in graph.nodes if n.op == "linear"] == [DType.BF16] * 3
