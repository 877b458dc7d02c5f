"""The reference backend: roundings, paged against whole sequences, and diff, which must find what it looks for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from octavo.backends import reference_ops as meaning
from octavo.backends.base import Limits, StepBatch
from octavo.backends.diff import Checked, diff, example_steps, greedy, make_step
from octavo.backends.reference import PagedState, ReferenceBackend, ReferenceProgram, Weights, forward_logits
from octavo.graph import ops
from octavo.graph.fuse import fuse
from octavo.graph.ir import DType, Graph
from octavo.graph.verify import FUSED, verify
from octavo.models import build_graph
from octavo.weights.checkpoint import open_checkpoint

LIMITS = Limits(max_tokens=256, max_rows=256, max_seqs=8, max_model_len=512)
MODELS = ["arch/llama", "gguf/tiny-llama-q8_0.gguf", "gguf/tiny-llama-q4_1.gguf"]


def load(data: Path, name: str, activations: str = "auto") -> tuple[Graph, Weights]:
    checkpoint = open_checkpoint(data / name)
    graph = build_graph(checkpoint, activations)
    return graph, ReferenceBackend().pack(graph, checkpoint)


def program(graph: Graph, weights: Weights, num_blocks: int = 40) -> tuple[ReferenceProgram, PagedState]:
    backend = ReferenceBackend()
    state = backend.make_state(graph, [num_blocks])
    return backend.compile(graph, weights, state, LIMITS), state


def with_all_rows(batch: StepBatch) -> StepBatch:
    rows = np.arange(len(batch.token_ids), dtype=np.int32)
    return batch._replace(logit_rows=rows, sampling=greedy(batch.positions + 1))


# ---- roundings


def test_bf16_ties_to_even() -> None:
    x = np.array([1.0, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-8 + 2.0**-20, -1 - 2.0**-8, np.inf, np.nan], np.float32)
    want = [1.0, 1.0, 1 + 2.0**-6, 1 + 2.0**-7, -1.0, np.inf, np.nan]
    np.testing.assert_array_equal(meaning.round_bf16(x), np.array(want, np.float32))


@pytest.mark.parametrize(("dtype", "most"), [(DType.A8, 127), (DType.A16, 127 * 128)])
@pytest.mark.parametrize("cols", [1, 7, 31, 32, 33, 4099])
def test_integers_are_within_half_a_step(cols: int, dtype: DType, most: int) -> None:
    x = (np.random.default_rng(cols).standard_normal((3, cols)) * 10.0 ** np.arange(-3, 6, 3)[:, None]).astype(
        np.float32
    )
    q, scale = meaning.quantise(x, most)
    assert q.shape == (3, -(-cols // 32), 32) and scale.shape == q.shape[:2]
    decoded = meaning.round_to(x, dtype)
    assert decoded.shape == x.shape
    step = np.repeat(scale, 32, axis=1)[:, :cols].astype(np.float64)
    assert (np.abs(decoded - x) <= (0.5 + 3 * most * 2.0**-24) * step).all()  # three roundings of float32
    assert (np.abs(q).max(axis=2) == most).all()  # the greatest of a group is exact


@pytest.mark.parametrize(("dtype", "most", "tiny"), [(DType.A8, 127, 2.0**-121), (DType.A16, 127 * 128, 2.0**-113)])
def test_integers_of_zeros_tiny_values_ties_and_nan(dtype: DType, most: int, tiny: float) -> None:
    x = np.zeros((1, 128), np.float32)
    x[0, 32:64] = tiny
    x[0, 64], x[0, 65], x[0, 66] = most, 0.5, 1.5  # scale 1: ties
    x[0, 96], x[0, 97] = np.nan, 1
    decoded = meaning.round_to(x, dtype)
    assert (decoded[0, :64] == 0).all()
    assert decoded[0, 64:67].tolist() == [most, 0, 2]
    assert np.isnan(decoded[0, 96:]).all()


def test_linear_of_stacked_parts() -> None:
    rng = np.random.default_rng(0)
    x, a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((3, 9), (5, 9), (2, 9)))
    bias = rng.standard_normal((1, 7)).astype(np.float32)
    got = meaning.linear(x, [a, b], bias)
    want = (x.astype(np.float64) @ np.concatenate([a, b]).T).astype(np.float32) + bias
    np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("neox", [True, False])
def test_rope_turns_pairs_and_passes_the_rest(neox: bool) -> None:
    x = np.arange(1, 17, dtype=np.float32).reshape(1, 16)  # two heads of 8, 4 dimensions of each turn
    y = meaning.rope(x, np.array([3]), 8, (1.0, 0.25), neox, 1.0)
    pairs = [(0, 2), (1, 3)] if neox else [(0, 1), (2, 3)]
    for head in (0, 8):
        for (i, j), f in zip(pairs, (1.0, 0.25), strict=True):
            z = complex(x[0, head + i], x[0, head + j]) * np.exp(1j * 3 * f)
            assert [y[0, head + i], y[0, head + j]] == pytest.approx([z.real, z.imag], abs=1e-5)
        np.testing.assert_array_equal(y[0, head + 4 : head + 8], x[0, head + 4 : head + 8])


# ---- steps


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("chunks", [[50], [1, 16, 15, 17, 1], [31, 19]])
def test_pages_and_chunks_equal_a_whole_sequence(data: Path, name: str, chunks: list[int]) -> None:
    """In strict float32, where nothing is rounded coarsely: only the order of float64 sums differs."""
    graph, weights = load(data, name, "f32")
    ids = np.random.default_rng(3).integers(graph.vocab_size, size=50)
    want = forward_logits(graph, weights, ids)
    run, _ = program(graph, weights)
    start, got = 0, []
    for n in chunks:
        run.run(with_all_rows(make_step([(ids[start : start + n], start, [9, 4, 30, 2])])))
        got.append(run.logits())
        start += n
    np.testing.assert_allclose(np.concatenate(got), want, atol=2e-5)


@pytest.mark.parametrize("name", MODELS)
def test_neighbours_and_copied_blocks(data: Path, name: str) -> None:
    graph, weights = load(data, name, "f32")
    ids = np.random.default_rng(4).integers(graph.vocab_size, size=40)
    run, _ = program(graph, weights)
    run.run(make_step([(ids[:33], 0, [1, 2, 3]), (ids[5:12], 0, [7])]))
    branch = make_step([(ids[33:], 33, [1, 2, 11]), (ids[12:13], 7, [7])])
    result = run.run(branch._replace(copies=(np.array([[3, 11]], np.int32),))).result()
    np.testing.assert_allclose(run.logits()[0], forward_logits(graph, weights, ids)[-1], atol=2e-5)
    np.testing.assert_allclose(run.logits()[1], forward_logits(graph, weights, ids[5:13])[-1], atol=2e-5)
    assert result.token_ids.tolist() == run.logits().argmax(axis=1).tolist()


def test_fused_graph_has_the_same_bits(data: Path) -> None:
    graph, weights = load(data, MODELS[2])
    ids = np.arange(37)
    fused = verify(fuse(graph, FUSED))
    np.testing.assert_array_equal(forward_logits(fused, weights, ids), forward_logits(graph, weights, ids))


def test_steps_without_logits_and_traces(data: Path) -> None:
    graph, weights = load(data, MODELS[1])
    run, _ = program(graph, weights)
    batch = make_step([(np.arange(20), 0, [1, 2])])
    nothing = batch._replace(logit_rows=np.zeros(0, np.int32), sampling=greedy(np.zeros(0, np.int32)))
    assert run.run(nothing).result().token_ids.shape == (0,)
    spans = run.trace(batch)
    assert [(s.name, s.layer) for s in spans] == [(n.op, n.layer) for n in graph.nodes]
    assert all(s.seconds >= 0 for s in spans)


def test_nan_stays_in_its_row(data: Path) -> None:
    graph, weights = load(data, MODELS[1])
    table = next(n for n in weights if "embed" in n)
    spoiled = {**weights, table: weights[table].copy()}
    spoiled[table][5] = np.nan
    run, _ = program(graph, spoiled)
    result = run.run(make_step([([5, 6], 0, [1]), ([7, 8], 0, [2])])).result()
    assert result.invalid.tolist() == [True, False]
    clean, _ = program(graph, weights)
    clean.run(make_step([([7, 8], 0, [2])]))
    np.testing.assert_allclose(run.logits()[1], clean.logits()[0], atol=1e-5)


def test_a_step_beyond_the_limits_is_refused(data: Path) -> None:
    graph, weights = load(data, MODELS[0])
    run, _ = program(graph, weights)
    with pytest.raises(ValueError, match="a step of 300 tokens; the program was compiled for 256"):
        run.run(make_step([(np.zeros(300, np.int32), 0, list(range(1, 20)))]))


def test_block_bytes(data: Path) -> None:
    graph, _ = load(data, MODELS[0])
    state = PagedState(graph, [3])
    assert ReferenceBackend().block_bytes(graph) == [(state.k[0].nbytes + state.v[0].nbytes) // 3]


# ---- diff


class Altered(ReferenceBackend):
    """The reference with one node's attributes or one weight changed: a backend with a fault."""

    def __init__(self, op: str = "", layer: int = -1, attrs: ops.Attrs | None = None, weight: str = "") -> None:
        super().__init__(reuse=False)
        self.op, self.layer, self.attrs, self.weight = op, layer, attrs, weight

    def compile(self, graph: Graph, weights: Weights, state: PagedState, limits: Limits) -> ReferenceProgram:
        nodes = [
            replace(n, attrs=self.attrs) if self.attrs and (n.op, n.layer) == (self.op, self.layer) else n
            for n in graph.nodes
        ]
        if self.weight:
            weights = {**weights, self.weight: np.roll(weights[self.weight], 1, axis=0)}
        return super().compile(replace(graph, nodes=nodes), weights, state, limits)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("activations", ["auto", "f32"])
def test_diff_agrees_with_itself(data: Path, name: str, activations: str) -> None:
    checkpoint = open_checkpoint(data / name)
    graph = build_graph(checkpoint, activations)
    seen: list[Checked] = []
    assert diff(graph, checkpoint, ReferenceBackend(reuse=False), report=seen.append) is None
    assert len(seen) == 2 * sum(n.op != "kv_write" for n in graph.nodes)


def scaled(graph: Graph, scale: float) -> ops.Attrs:
    return msgspec.structs.replace(
        next(n.attrs for n in graph.nodes if isinstance(n.attrs, ops.Attention)), scale=scale
    )


@pytest.mark.parametrize("activations", ["auto", "f32"])
def test_diff_finds_the_first_fault(data: Path, activations: str) -> None:
    checkpoint = open_checkpoint(data / MODELS[0])
    graph = build_graph(checkpoint, activations)
    rope = next(n.attrs for n in graph.nodes if isinstance(n.attrs, ops.Rope))
    faults: list[tuple[Altered, str, int]] = [
        (Altered("rms_norm", 1, ops.RmsNorm(1e-3)), "rms_norm", 1),
        (Altered("attention", 1, scaled(graph, 0.26)), "attention", 1),
        (
            Altered("rope", 0, msgspec.structs.replace(rope, inv_freq=tuple(1.001 * f for f in rope.inv_freq))),
            "rope",
            0,
        ),
        (Altered(weight="model.layers.1.self_attn.o_proj.weight"), "linear", 1),
        (Altered(weight="model.embed_tokens.weight"), "embed", -1),
        (Altered(weight="lm_head.weight"), "linear", -1),
    ]
    for backend, op, layer in faults:
        found = diff(graph, checkpoint, backend)
        assert found is not None and (found.node.op, found.node.layer) == (op, layer), (backend.op, found)
        assert "the reference has" in str(found) and not found.ok


def test_example_steps_reach_both_plans_and_a_decode() -> None:
    steps = example_steps(100)
    assert len(steps[0].token_ids) > 64 >= len(steps[1].token_ids)
    assert 1 in np.diff(steps[1].seq_starts)
    written: set[tuple[int, int]] = set()
    for step in steps:
        for s, (first, last) in enumerate(zip(step.seq_starts[:-1], step.seq_starts[1:], strict=True)):
            slots = slots_of(step, s)[step.context_lens[s] - (last - first) :]
            assert not written & set(slots)
            written |= set(slots)


def slots_of(step: StepBatch, sequence: int) -> list[tuple[int, int]]:
    table: NDArray[np.int32] = step.block_tables[0][sequence]
    return [(int(table[p // 16]), p % 16) for p in range(step.context_lens[sequence])]
