"""The op graph and its passes: rules, rounding, fusion, memory plan, barriers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from octavo.graph import ops
from octavo.graph.build import Builder
from octavo.graph.fuse import count, fuse
from octavo.graph.ir import Dim, DType, Graph, Kind, KvGroup, Node, R, T, Value, WeightPart
from octavo.graph.plan import ALIGN, Plan, lifetimes, overlays, plan, value_bytes, verify_plan
from octavo.graph.rounding import round_inputs
from octavo.graph.show import render
from octavo.graph.verify import FUSED, GraphError, verify
from octavo.models import build_graph
from octavo.weights.checkpoint import open_checkpoint
from octavo.weights.formats import packed_bytes
from tests.small_fixtures import ALL

GOLDEN = Path(__file__).parent / "golden" / "fusions.json"


class Shapes:
    """A `build.Source` of tensors that exist only by shape and format."""

    def __init__(self, default: str = "w4", **formats: str) -> None:
        self.shapes: dict[str, tuple[int, int]] = {}
        self.default, self.formats = default, formats

    def order(self, name: str) -> str:
        return ""

    def rows_cols_format(self, name: str) -> tuple[int, int, str]:
        rows, cols = self.shapes[name]
        return rows, cols, self.formats.get(name.split(".")[0], self.default)


def chain(
    bias: bool = False,
    extra_reader: bool = False,
    inner: int = 64,
    default: str = "w4",
    formats: dict[str, str] | None = None,
    gated: bool = True,
) -> Graph:
    """A one-layer model of 2 heads of 16 over 1 kv head, hidden 32."""
    source = Shapes(default, **(formats or {}))
    b = Builder("chain", 40, 100, source)
    group = b.kv_group(KvGroup("full", (0,), 1, 16, DType.BF16))
    for name, shape in {
        "embed.weight": (40, 32), "norm.weight": (1, 32), "q.weight": (32, 32), "k.weight": (16, 32),
        "v.weight": (16, 32), "o.weight": (32, 32), "gate.weight": (inner, 32), "up.weight": (inner, 32),
        "down.weight": (32, inner), "q.bias": (1, 32), "k.bias": (1, 16), "v.bias": (1, 16), "o.bias": (1, 32),
        "gate.bias": (1, inner), "up.bias": (1, inner), "down.bias": (1, 32),
    }.items():  # fmt: skip
        source.shapes[name] = shape
    table = b.matrix({"embed.weight": 40}, 32)
    x = b.embed(table)
    b.layer = 0
    qkv = b.linear(b.rms_norm(x, "norm.weight", 1e-5), {"q": 32, "k": 16, "v": 16}, bias)
    q, k, v = b.split(qkv, 32, 16, 16)
    inv_freq = tuple(0.5**i for i in range(8))
    y = b.attention(b.rope(q, 16, inv_freq, name="q"), b.rope(k, 16, inv_freq, name="k"), v, group, 0.25)
    o = b.linear(y, {"o": 32}, bias)
    x = b.add(x, o)
    if extra_reader:
        x = b.add(x, o)
    h = b.rms_norm(x, "norm.weight", 1e-5)
    if gated:
        gate, up = b.split(b.linear(h, {"gate": inner, "up": inner}, bias), inner, inner)
        y = b.act_mul(gate, up, "silu")
    else:
        y = b.act(b.linear(h, {"up": inner}, bias), "gelu")
    x = b.add(x, b.linear(y, {"down": 32}, bias))
    b.layer = -1
    b.sample(b.logits(b.rms_norm(b.gather_rows(x), "norm.weight", 1e-5), table))
    return verify(b.graph)


def act(packed: str, attends: bool) -> DType:
    return {"f32": DType.F32, "bf16": DType.BF16}.get(packed, DType.A16 if attends else DType.A8)


def rounded(default: str = "w4", **formats: str) -> Graph:
    return verify(round_inputs(chain(default=default, formats=formats), act))


# ---- verify


def change(op: str, **fields: object) -> Callable[[Graph], Graph]:
    """Replace fields of the first node of kind `op`."""

    def apply(graph: Graph) -> Graph:
        i = next(i for i, n in enumerate(graph.nodes) if n.op == op)
        nodes = list(graph.nodes)
        nodes[i] = replace(nodes[i], **fields)  # type: ignore[arg-type]
        return replace(graph, nodes=nodes)

    return apply


def drop(op: str) -> Callable[[Graph], Graph]:
    def apply(graph: Graph) -> Graph:
        i = next(i for i, n in enumerate(graph.nodes) if n.op == op)
        return replace(graph, nodes=graph.nodes[:i] + graph.nodes[i + 1 :])

    return apply


def twice(op: str) -> Callable[[Graph], Graph]:
    def apply(graph: Graph) -> Graph:
        i = next(i for i, n in enumerate(graph.nodes) if n.op == op)
        return replace(graph, nodes=graph.nodes[: i + 1] + graph.nodes[i:])

    return apply


STRANGER = Value("stranger", T, 32, Kind.TEMP)


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (drop("embed"), "read before it is defined"),
        (drop("kv_write"), "read before it is written"),
        (twice("rms_norm"), "defined twice"),
        (change("rms_norm", ins=(STRANGER,)), "read before it is defined|number of ins"),
        (change("rms_norm", attrs=ops.Attention(0, 2, 1, 16, 0.25)), "disagree"),
        (change("attention", attrs=ops.Attention(1, 2, 1, 16, 0.25)), "no such KV group"),
        (change("attention", attrs=ops.Attention(0, 1, 2, 16, 0.25)), "disagree"),
        (change("attention", layer=3), "disagrees with its KV group"),
        (change("act_mul", attrs=ops.ActMul("mish")), "unknown activation"),
        (change("linear", outs=(Value("y", T, 65, Kind.TEMP),)), "shapes disagree"),
        (change("linear", outs=(Value("y", R, 64, Kind.TEMP),)), "shapes disagree"),
        (change("linear", outs=()), "number of ins or outs"),
        (change("add", outs=(Value("y", T, 32, Kind.TEMP, DType.BF16),)), "float32"),
        (change("round", outs=(Value("y", T, 32, Kind.TEMP, DType.F32),)), "rounds to"),
        (change("sample", ins=(Value("l", R, 40, Kind.INPUT),)), "logits are an output"),
        (change("rope", attrs=ops.Rope(16, ())), "heads disagree"),
        (change("add", expansion=(Node(ops.Add(), (), ()),)), "only a fused operation"),
        (change("add", attrs=ops.LinearAdd()), "number of ins"),
    ],
)
def test_verify_names_what_is_broken(break_it: Callable[[Graph], Graph], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        verify(break_it(rounded()))


def test_verify_checks_expansions() -> None:
    fused = fuse(rounded(), FUSED)
    verify(fused)
    node = next(n for n in fused.nodes if n.op == "linear_add")
    for expansion, message in [
        ((), "carries its expansion"),
        (node.expansion[:1], "the expansion is"),
        ((node.expansion[0], replace(node.expansion[1], layer=5)), "stays in its layer"),
        ((replace(node.expansion[0], ins=(STRANGER, node.ins[1])), node.expansion[1]), "which is no input"),
    ]:
        with pytest.raises(GraphError, match=message):
            verify(change("linear_add", expansion=expansion)(fused))


def test_builder_names_both_shapes() -> None:
    source = Shapes()
    source.shapes = {"a.weight": (3, 5), "n.weight": (1, 4)}
    b = Builder("g", 10, 10, source)
    with pytest.raises(GraphError, match=r"a\.weight has shape \(3, 5\), the config asks for \(4, 5\)"):
        b.matrix({"a.weight": 4}, 5)
    with pytest.raises(GraphError, match=r"n\.weight has shape \(1, 4\), the config asks for \(5,\)"):
        b.vector({"n.weight": 5})


# ---- rounding


def test_rounding_follows_the_most_precise_part() -> None:
    rounds = {n.outs[0].name: n.outs[0].dtype for n in rounded(k="bf16", down="f32").nodes if n.op == "round"}
    assert list(rounds.values()) == [DType.BF16, DType.A8, DType.A8, DType.A8]  # qkv, o, gate_up, logits; none for down
    assert count(rounded(default="f32")).get("round") is None


def test_rounding_is_shared_and_done_once() -> None:
    graph = chain()
    at, node = next((i, n) for i, n in enumerate(graph.nodes) if n.op == "linear" and n.outs[0].cols == 128)
    graph.nodes.insert(at + 1, Node(ops.Linear(), node.ins, (Value("again", T, 128, Kind.TEMP),), 0))
    once = verify(round_inputs(graph, act))
    assert count(once)["round"] == count(rounded())["round"]
    first, second = [
        n for n in once.nodes if n.op == "linear" and n.outs[0] in (node.outs[0], graph.nodes[at + 1].outs[0])
    ]
    assert first.ins[0] is second.ins[0]
    assert count(round_inputs(once, act)) == count(once)


def test_what_attention_reads_is_made_from_more_than_int8() -> None:
    made = {n.outs[0].name: n.ins[0].dtype for n in rounded().nodes if n.op == "linear"}
    qkv = {v.root.name for n in rounded().nodes if n.op in ("rope", "kv_write") for v in n.ins} & set(made)
    assert qkv and all((name in qkv) == (dtype is DType.A16) for name, dtype in made.items())


# ---- fusion


def test_all_fusions_fire() -> None:
    assert count(fuse(rounded(), FUSED)) == {
        "attention_round": 1, "embed": 1, "gather_rows": 1, "linear": 1, "linear_act_mul_round": 1, "linear_add": 2,
        "linear_sample": 1, "norm_round": 3, "rope_kv_write": 1,
    }  # fmt: skip


@pytest.mark.parametrize("kind", sorted(FUSED))
def test_one_fusion_alone(kind: str) -> None:
    graph = verify(round_inputs(chain(bias=True, gated=kind != "linear_act_round"), act))
    fused = verify(fuse(graph, {kind}))
    assert [n.op for n in fused.nodes if n.op in FUSED] == [kind] * count(fuse(graph, FUSED))[kind]
    assert [n for f in fused.nodes for n in (f.expansion or (f,))] == graph.nodes
    assert verify(fuse(fuse(graph, {kind}), FUSED - {kind})) is not None


def test_no_fusion_where_something_else_reads_the_value() -> None:
    graph = verify(round_inputs(chain(extra_reader=True), act))
    assert count(fuse(graph, FUSED))["linear_add"] == 1


def test_biases_are_fused_odd_widths_and_float_inputs_are_not() -> None:
    biased = count(verify(fuse(verify(round_inputs(chain(bias=True), act)), FUSED)))
    assert biased["linear_add"] == 2 and biased["linear_act_mul_round"] == 1
    assert "linear_act_mul_round" not in count(fuse(verify(round_inputs(chain(inner=48), act)), FUSED))
    assert "linear_act_mul_round" not in count(fuse(rounded(up="w8"), FUSED))
    assert set(count(fuse(rounded(default="f32"), FUSED))) & FUSED == {"linear_add", "linear_sample", "rope_kv_write"}


@pytest.mark.parametrize("activations", ["auto", "f32"])
def test_golden_counts(data: Path, activations: str) -> None:
    """Operations and barriers of every model of the suite, fused and as planned for 64 tokens."""
    golden = json.loads(GOLDEN.read_text())[activations]
    found = {}
    for model in ALL:
        fused = verify(fuse(build_graph(open_checkpoint(data / model), activations), FUSED))
        found[model] = {**count(fused), "barriers": len(plan(fused, 64, 64).barriers)}
    assert found == golden


# ---- plan


@pytest.mark.parametrize(
    ("cols", "dtype", "rows", "expected"),
    [
        (1, DType.F32, 1, 64),
        (33, DType.F32, 7, 960),  # 924 bytes
        (33, DType.BF16, 7, 896 + 64),  # 64 columns, 2 sums a row
        (1024, DType.BF16, 1, 2112 + 128),  # 1056 columns, 32 sums
        (4099, DType.BF16, 2, 16640 + 1088),  # 4160 columns, 130 sums a row
        (31, DType.A8, 1, 64 + 4 * 64),
        (31, DType.A16, 3, 384 + 4 * 64),  # 6 rows of 64, 12 floats
        (576, DType.A8, 31, 31 * 576 + 4 * 2240),  # 18 groups of 31 floats: 2232 bytes
    ],
)
def test_value_bytes(cols: int, dtype: DType, rows: int, expected: int) -> None:
    assert value_bytes(Value("v", T, cols, Kind.TEMP, dtype), {"T": rows, "R": 1}) == expected
    assert value_bytes(Value("v", R, cols, Kind.TEMP, dtype), {"T": 99, "R": rows}) == expected


def simulate(graph: Graph, made: Plan) -> None:
    """Run the plan on bytes that say whose they are: every read must find its value whole."""
    arena: list[Value | None] = [None] * (made.size // ALIGN)
    over = overlays(graph)
    for node in graph.nodes:
        for v in node.ins:
            if v.root in made.offsets:
                assert set(lines(arena, made, v.root)) == {v.root}
        for v in node.outs:
            start = made.offsets[v] // ALIGN
            before = {x for x in lines(arena, made, v) if x is not None and lives(graph, x, node)}
            assert before <= {over.get(v)}
            arena[start : start + value_bytes(v, made.sizes) // ALIGN] = [v] * (value_bytes(v, made.sizes) // ALIGN)


def lines(arena: list[Value | None], made: Plan, v: Value) -> list[Value | None]:
    start = made.offsets[v] // ALIGN
    return arena[start : start + value_bytes(v, made.sizes) // ALIGN]


def lives(graph: Graph, v: Value, node: Node) -> bool:
    first, last = lifetimes(graph)[v]
    return first <= graph.nodes.index(node) < last


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize(("tokens", "rows"), [(1, 1), (7, 3), (64, 64), (512, 64)])
def test_plan_keeps_values_apart(fused: bool, reuse: bool, tokens: int, rows: int) -> None:
    graph = verify(fuse(rounded(k="bf16"), FUSED if fused else ()))
    made = plan(graph, tokens, rows, reuse)
    simulate(graph, made)
    total = sum(value_bytes(v, made.sizes) for v in made.offsets)
    assert made.size == total if not reuse else made.size < total


def test_verify_plan_finds_every_missing_barrier_and_overlap() -> None:
    for kinds in (FUSED, frozenset()):
        graph = verify(fuse(rounded(), kinds))
        made = plan(graph, 33, 7)
        assert made.barriers
        for barrier in made.barriers:
            with pytest.raises(GraphError, match="no barrier between"):
                verify_plan(graph, replace(made, barriers=made.barriers - {barrier}))
        values = list(made.offsets)
        with pytest.raises(GraphError, match="live together"):
            verify_plan(graph, replace(made, offsets=dict.fromkeys(values, 0)))
        with pytest.raises(GraphError, match="outside of the arena"):
            verify_plan(graph, replace(made, offsets={v: made.offsets[v] + 1 for v in values}))
        with pytest.raises(GraphError, match="outside of the arena"):
            verify_plan(graph, replace(made, size=made.size - ALIGN))


def test_residual_is_overlaid_and_row_passes_need_no_barrier() -> None:
    graph = verify(fuse(rounded(), {"linear_add"}))
    made = plan(graph, 64, 64)
    assert overlays(graph) and all(made.offsets[y] == made.offsets[x] for y, x in overlays(graph).items())
    unfused = rounded()
    made = plan(unfused, 64, 64, reuse=False)
    free = {(unfused.nodes[i - 1].op, n.op) for i, n in enumerate(unfused.nodes) if i and i not in made.barriers}
    assert ("embed", "rms_norm") in free and ("gather_rows", "rms_norm") in free


def test_writing_k_in_place_needs_a_barrier_before_its_readers() -> None:
    """rope_kv_write may rotate k where it lies, so a later reader of qkv must wait, and the plan knows."""
    graph = verify(fuse(rounded(), FUSED))
    i = next(i for i, n in enumerate(graph.nodes) if n.op == "rope_kv_write")
    qkv = graph.nodes[i].ins[0].root
    reader = Node(ops.Add(), (qkv, qkv), (Value("late", T, qkv.cols, Kind.TEMP),), 0)
    nodes = [*graph.nodes[: i + 1], reader, *graph.nodes[i + 1 :]]
    made = plan(verify(replace(graph, nodes=nodes)), 8, 8)
    assert i + 1 in made.barriers


# ---- show


def test_show_folds_layers(data: Path) -> None:
    graph = build_graph(open_checkpoint(data / "gguf/tiny-llama-q4_1.gguf"))
    fused = verify(fuse(graph, FUSED))
    made = plan(fused, 64, 64)
    short, whole = (render(fused, made, packed_bytes, all_layers=every) for every in (False, True))
    assert "layers 0 to 1 (2 alike):" in short and "layer 0:" in whole and "layer 1:" in whole
    for text in (short, whole):
        assert f"arena {made.size:,} bytes" in text and f"{len(made.barriers)} barriers" in text
        assert "linear_act_mul_round" in text and "w4f" in text and "KV group full: layers 2" in text


def test_show_counts_packed_bytes() -> None:
    graph = rounded()
    text = render(graph, plan(graph, 1, 1), packed_bytes)
    parts = [p for v in graph.weights() if v.rows != Dim(1) for p in v.parts]
    assert {p.format for p in parts} == {"w4"} and WeightPart("q.weight", 32, "w4") in parts
    size = sum(packed_bytes("w4", p.rows, 64 if p.name == "down.weight" else 32) for p in parts)
    assert f"{len(parts)} x w4 ({size:,})" in text
