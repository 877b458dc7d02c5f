"""Quantised checkpoints made by the field's own tools, against their dequantised weights in float32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from octavo.backends.cpu import CpuBackend
from octavo.backends.diff import diff, make_step
from octavo.backends.reference import ReferenceBackend, forward_logits
from octavo.graph.fuse import count
from octavo.graph.ir import Graph
from octavo.models import build_graph
from octavo.weights.address import Addressed
from octavo.weights.checkpoint import open_checkpoint
from tests.quantised_model import (
    ACT_ORDER,
    GPTQ,
    save_latent_experts,
    save_quantised,
    sorted_apart,
    sorted_experts,
    with_act_order,
)
from tests.random_model import InMemory
from tests.test_cpu_backend import logits_of, same_bits, table, with_rows
from tests.test_fixtures import LIMITS, Case, native
from tests.test_quant_layouts import values

FIXTURES = [
    "awq/awq_g128", "awq/awq_g64", "bitsandbytes/nf4_double", "compressed-tensors/fp8_block",
    "compressed-tensors/fp8_dynamic", "compressed-tensors/fp8_static", "compressed-tensors/mxfp4a16",
    "compressed-tensors/w4a16_g128_sym", "compressed-tensors/w4a16_g64_asym", "compressed-tensors/w8a16_channel",
    "compressed-tensors/w8a8_int8_dynamic", "fp8-block/deepseek_v3_fp8_block", "fp8-block/llama_fp8_block",
    "gptq/gptq_4b_g-1_sym_act0", "gptq/gptq_4b_g128_sym_act0", "gptq/gptq_4b_g32_asym_act0",
    "gptq/gptq_4b_g64_asym_act0_v2", "gptq/gptq_4b_g64_sym_act1", "gptq/gptq_8b_g128_sym_act0", "mxfp4/gpt_oss_mxfp4",
]  # fmt: skip


@pytest.fixture(params=FIXTURES)
def case(fixtures: Path, request: pytest.FixtureRequest) -> Case:
    return Case(fixtures / "quant" / request.param)


def test_the_list_of_fixtures_is_whole(fixtures: Path) -> None:
    found = {str(path.parent.relative_to(fixtures / "quant")) for path in fixtures.glob("quant/*/*/config.json")}
    assert found == set(FIXTURES)


def test_native_in_float32(case: Case) -> None:
    """Whole and in chunks, with the same bits."""
    program = native(build_graph(case.checkpoint, "f32"), case)
    for i in range(3):
        ids = case.whole(i)
        logits = logits_of(program, ids, [len(ids)], table(len(ids)))
        case.check(i, logits)
        case.check_greedy(i, logits)
        same_bits(logits, logits_of(program, ids, [1, len(ids) - 20, *[1] * 3, 16], table(len(ids))))


def test_reference_in_float32(case: Case, request: pytest.FixtureRequest) -> None:
    """The shortest prompt; in a long run also the next, in chunks."""
    graph = build_graph(case.checkpoint, "f32")
    weights = ReferenceBackend().pack(graph, case.checkpoint)
    logits = forward_logits(graph, weights, case.whole(0))
    case.check(0, logits)
    case.check_greedy(0, logits)
    if request.config.getoption("long"):
        backend, ids = ReferenceBackend(), case.whole(1)
        program = backend.compile(graph, weights, backend.make_state(graph, [20] * len(graph.groups)), LIMITS)
        found = []
        for start, stop in ((0, 1), (1, 30), (30, len(ids))):
            step = make_step([(ids[start:stop], start, list(range(20)))], len(graph.groups))
            program.run(with_rows(step, np.arange(stop - start, dtype=np.int32)))
            found.append(program.logits())
        case.check(1, np.concatenate(found))
        case.check_greedy(1, np.concatenate(found))


def test_native_in_the_own_format(case: Case) -> None:
    """Rounded activations as on this machine, bf16 cache: against the tool's own rounded activations, where it has some."""
    program = native(build_graph(case.checkpoint, "auto", bf16_dots=CpuBackend(num_threads=1).bf16_dots), case)
    for i in range(3):
        if f"logits_actq_{i}" in case.expected:
            case.expected = {**case.expected, f"logits_{i}": case.expected[f"logits_actq_{i}"]}
        ids = case.whole(i)
        logits = logits_of(program, ids, [len(ids)], table(len(ids)))
        case.check(i, logits, max(0.5, 3 * case.meta.get("activation_quantisation_max_abs", 0.0)), 0.998)
        case.check_greedy(i, logits, 0.5)


def test_act_order_sorts_the_input_once_for_a_fused_weight(fixtures: Path) -> None:
    graph = build_graph(open_checkpoint(fixtures / "quant/gptq/gptq_4b_g64_sym_act1"))
    assert count(graph)["gather_cols"] == 4 * 2  # qkv, o, gate_up, down of two layers
    assert count(graph)["linear"] == 4 * 2 + 1


def assert_same_as_plain(path: Path) -> Graph:
    """Against the same model without quantisation, and native operations against the reference."""
    checkpoint = open_checkpoint(path)
    graph = build_graph(checkpoint, "f32")
    tensors = {name: values(checkpoint, name) for name in checkpoint.names()}
    plain = InMemory(checkpoint.config, {n: v.reshape(checkpoint.info(n).shape) for n, v in tensors.items()})
    ids = np.random.default_rng(0).integers(50, size=40).astype(np.int32)
    want_graph, want_model = build_graph(Addressed(plain), "f32"), Addressed(plain)
    want = forward_logits(want_graph, ReferenceBackend().pack(want_graph, want_model), ids)
    got = forward_logits(graph, ReferenceBackend().pack(graph, checkpoint), ids)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
    for activations in ("f32", "auto"):
        assert diff(build_graph(checkpoint, activations), checkpoint, CpuBackend(fuse=False, reuse=False)) is None
    return graph


def test_weights_sorted_in_different_ways_are_not_one(tmp_path: Path) -> None:
    nodes = count(assert_same_as_plain(save_quantised(tmp_path / "model", GPTQ, with_act_order, **ACT_ORDER)))
    assert (nodes["gather_cols"], nodes["concat"], nodes["linear"]) == (5 * 2, 2, 5 * 2 + 1)


def test_experts_and_latent_attention_are_sorted(tmp_path: Path) -> None:
    """Each expert in its own way, one not at all; the rows of a head's matrix into the latent space become columns."""
    nodes = count(assert_same_as_plain(save_latent_experts(tmp_path / "model", sorted_experts)))
    assert (nodes["gather_expert_cols"], nodes["expert_linear"]) == (2, 2)  # gate_up and down of one layer
    assert nodes["gather_cols"] == 2 * 7  # q_a, kv_a, q_b, values, o, gate_up and down of shared or dense


def test_gate_and_up_of_experts_sorted_in_different_ways_are_not_one(tmp_path: Path) -> None:
    nodes = count(assert_same_as_plain(save_latent_experts(tmp_path / "model", sorted_apart)))
    assert (nodes["gather_expert_cols"], nodes["expert_linear"]) == (3, 3)
