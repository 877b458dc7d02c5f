"""Adapters on both backends: what they compute, and that they change no bit of anybody else."""

from __future__ import annotations

import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from octavo import _native
from octavo.backends.adapted import AdaptedProgram
from octavo.backends.base import Limits, StepBatch
from octavo.backends.cpu import CpuBackend
from octavo.backends.diff import compare, greedy, make_step
from octavo.backends.reference import PagedState, ReferenceBackend, forward_logits
from octavo.graph.adapt import adapt, targets
from octavo.graph.fuse import fuse
from octavo.graph.ir import Graph
from octavo.graph.plan import plan
from octavo.graph.verify import FUSED, verify
from octavo.models import build_graph
from octavo.weights.adapter import read_adapter
from octavo.weights.checkpoint import open_checkpoint
from octavo.weights.formats import dequantise
from octavo.weights.spec import Checkpoint
from tests.quant_writers import Rng, Written, gptq
from tests.quantised_model import ACT_ORDER, GPTQ, save_quantised
from tests.random_adapter import random_adapter
from tests.random_model import random_model

DATA = Path(__file__).parent / "data"
FAMILIES = [
    "arch/llama",
    "arch/qwen2",
    "arch/phi3",
    "arch/smollm3",
    "gguf/tiny-llama-q4_1.gguf",
    "gguf/tiny-llama-q8_0.gguf",
]
MAX_RANK = 40
LIMITS = Limits(max_tokens=160, max_rows=160, max_seqs=8, max_model_len=400, max_adapters=3)
NUM_BLOCKS = 60

F32 = NDArray[np.float32]


@cache
def opened(name: str, activations: str) -> tuple[Checkpoint, Graph]:
    if name == "random":
        checkpoint: Checkpoint = random_model(tie_word_embeddings=True)
    elif name == "act-order":  # inputs are sorted before they are rounded
        path = Path(tempfile.mkdtemp())
        checkpoint = open_checkpoint(save_quantised(path, GPTQ, sorted_alike, **ACT_ORDER))
        shutil.rmtree(path)  # it stays mapped
    else:
        checkpoint = open_checkpoint(DATA / name)
    return checkpoint, build_graph(checkpoint, activations)


def sorted_alike(module: str, rng: Rng, rows: int, cols: int) -> Written:
    return gptq(rng, rows, cols, 4, 32, symmetric=True, act_order=np.random.default_rng(0))


def adapters_of(path: Path, graph: Graph) -> list[Any]:
    """Three: of all modules, of attention alone, of a larger rank and other modules."""
    found = targets(graph)
    attention = ("q_proj", "v_proj", "qkv_proj")
    paths = [
        random_adapter(path / "all", found, seed=1, rank=8),
        random_adapter(path / "attention", found, seed=2, rank=3, only=attention, stored="BF16"),
        random_adapter(path / "others", found, seed=3, rank=33, only=("o_proj", "down_proj", "up_proj"), stored="F16"),
    ]
    return [read_adapter(each, found, MAX_RANK) for each in paths]


def compiled(name: str, activations: str, adapters: list[Any], **options: Any) -> AdaptedProgram:
    checkpoint, graph = opened(name, activations)
    backend = CpuBackend(**options)
    weights, state = backend.pack(graph, checkpoint), backend.make_state(graph, [NUM_BLOCKS] * len(graph.groups))
    both = (backend.compile(each, weights, state, LIMITS) for each in (graph, verify(adapt(graph, MAX_RANK))))
    program = AdaptedProgram(*both)
    for slot, adapter in enumerate(adapters):
        program.set_adapter(slot, backend.pack_adapter(adapter))
    return program


def step(work: list[tuple[Any, int, list[int], int]]) -> StepBatch:
    """A step of (ids, first position, blocks, slot) per sequence, with logits of every row."""
    batch = make_step([each[:3] for each in work])
    rows = np.arange(len(batch.token_ids), dtype=np.int32)
    slots = np.repeat(np.array([slot for *_, slot in work], np.int32), np.diff(batch.seq_starts))
    batch = batch._replace(logit_rows=rows, sampling=greedy(batch.positions + np.int32(1)))
    return batch._replace(adapters=slots) if (slots >= 0).any() else batch


def token_ids(n: int, seed: int, vocab: int = 50) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(3, vocab, n).astype(np.int32)


def same_bits(a: F32, b: F32) -> None:
    assert not np.isnan(a).any()
    np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))


@pytest.mark.parametrize("name", [*FAMILIES, "random", "act-order"])
def test_an_adapter_is_a_merged_model(name: str, tmp_path: Path) -> None:
    """Logits with an adapter are those of weights W + scale B A, with float32 activations, on both backends."""
    checkpoint, graph = opened(name, "f32")
    adapters = adapters_of(tmp_path, graph)
    backend = ReferenceBackend()
    weights = backend.pack(graph, checkpoint)
    program = compiled(name, "f32", adapters, num_threads=2)
    reference = backend.compile(adapt(graph, MAX_RANK), weights, backend.make_state(graph, [NUM_BLOCKS]), LIMITS)
    orders = {part.name: part.order for value in graph.weights() for part in value.parts}
    ids = token_ids(33, 5)
    plain = forward_logits(graph, weights, ids)
    for slot, adapter in enumerate(adapters):
        reference.set_adapter(slot, backend.pack_adapter(adapter))
        merged = dict(weights)
        for module, m in adapter.modules.items():
            a, b = dequantise(m.source, m.a, m.cols), dequantise(m.source, m.b, m.rank)
            delta = np.float32(m.scale) * (b @ a)
            order = orders[f"{module}.weight"]
            sorted_delta = delta[:, weights[order][0].astype(int)] if order else delta
            merged[f"{module}.weight"] = weights[f"{module}.weight"] + sorted_delta
        expected = forward_logits(graph, merged, ids)
        tolerance = 2e-3  # as of the fixtures' own logits
        assert np.abs(expected - plain).max() > 100 * tolerance
        for backend_program in (reference, program):
            backend_program.run(step([(ids, 0, [5, 1, 3], slot)]))
            np.testing.assert_allclose(backend_program.logits(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", ["some", "all", "layer"])
def test_adapters_that_peft_wrote(name: str) -> None:
    """scripts/peft-adapters wrote them, and the float32 logits that PEFT computes with them."""
    _, graph = opened("arch/llama", "f32")
    adapter = read_adapter(DATA / "lora" / name, targets(graph), MAX_RANK)
    expected = np.load(DATA / "lora" / name / "expected.npz")
    program = compiled("arch/llama", "f32", [adapter], num_threads=2)
    batch = step([(expected["ids"], 0, [1, 2], 0)])
    program.run(batch)
    found = program.logits()[-len(expected["logits"]) :].copy()
    np.testing.assert_allclose(found, expected["logits"], rtol=0, atol=2e-3)
    program.run(batch._replace(adapters=np.zeros(0, np.int32)))
    assert np.abs(program.logits()[-len(found) :] - found).max() > 0.1


@pytest.mark.parametrize(("name", "activations"), [(name, "auto") for name in FAMILIES] + [("arch/llama", "bf16")])
def test_rows_do_not_notice_their_neighbours(name: str, activations: str, tmp_path: Path) -> None:
    """Each of five sequences has in one step, in chunks, the bits that it has alone: without an adapter those of the
    plain program, whatever the threads, the fusions and the slot."""
    _, graph = opened(name, activations)
    adapters = adapters_of(tmp_path, graph)
    program = compiled(name, activations, adapters, num_threads=1)
    slots = [-1, 0, 2, -1, 1]
    prompts = [token_ids(n, i, 300) for i, n in enumerate((40, 33, 17, 1, 65))]
    tables = [[0, 1, 2], [3, 4, 5], [6, 7], [8], [9, 10, 11, 12, 13]]
    alone = []
    for ids, blocks, slot in zip(prompts, tables, slots, strict=True):
        program.run(step([(ids, 0, blocks, slot)]))
        alone.append(program.logits().copy())
    assert not np.array_equal(alone[0], alone[1][: len(alone[0])])
    order = [2, 0, 1]  # slot of each adapter
    moved = [adapters[i] for i in (1, 2, 0)]
    for options in (
        {"num_threads": 2}, {"num_threads": 3, "fuse": False, "poison": True}, {"num_threads": 2, "reuse": False},
    ):  # fmt: skip
        crowd = compiled(name, activations, moved, **options)  # type: ignore[arg-type]
        places = [order[slot] if slot >= 0 else -1 for slot in slots]
        for first, last in ((0, 1), (1, 20), (20, 70)):
            work = [
                (ids[first:last], first, blocks, slot)
                for ids, blocks, slot in zip(prompts, tables, places, strict=True) if len(ids) > first
            ]  # fmt: skip
            crowd.run(step(work))
            found = np.split(crowd.logits(), np.cumsum([len(ids) for ids, *_ in work])[:-1])
            wanted = [each[first:last] for each in alone if len(each) > first]
            for got, want in zip(found, wanted, strict=True):
                same_bits(got, want)


@pytest.mark.parametrize("isa", _native.isa_levels())
@pytest.mark.parametrize("stored", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("rank", [1, 7, 33])
def test_operations_agree_with_the_reference(isa: str, stored: str, rank: int, tmp_path: Path) -> None:
    checkpoint, plain = opened("random", "auto")
    graph, found = verify(adapt(plain, 33)), targets(plain)
    adapter = read_adapter(random_adapter(tmp_path, found, rank=rank, stored=stored), found, 33)
    backend, reference = CpuBackend(isa=isa, fuse=False, reuse=False, poison=True, num_threads=2), ReferenceBackend()
    program = backend.compile(graph, backend.pack(graph, checkpoint), backend.make_state(graph, [10]), LIMITS)
    program.set_adapter(1, backend.pack_adapter(adapter))
    weights, state = reference.pack(graph, checkpoint), PagedState(graph, [10])
    work = [(token_ids(70, 0), 0, [1, 2, 3, 4, 5], 1), (token_ids(3, 1), 0, [6], -1), (token_ids(5, 2), 0, [7], 1)]
    adapters = {1: reference.pack_adapter(adapter)}
    checked = compare(graph, program, weights, state, step(work), adapters=adapters)
    assert {"lora_shrink", "lora_expand"} <= {c.node.op for c in checked}
    bad = [str(c) for c in checked if not c.ok]
    assert not bad, bad[0]


def test_without_its_adapter_a_slot_adds_nothing(tmp_path: Path) -> None:
    _, graph = opened("random", "auto")
    program = compiled("random", "auto", adapters_of(tmp_path, graph))
    ids = token_ids(20, 0)
    program.run(step([(ids, 0, [0, 1], -1)]))
    plain = program.logits().copy()
    program.run(step([(ids, 0, [2, 3], 0)]))
    assert not np.array_equal(plain, program.logits())
    program.set_adapter(0, None)
    program.run(step([(ids, 0, [2, 3], 0)]))
    same_bits(program.logits(), plain)


def test_the_adapted_graph_keeps_the_rules() -> None:
    for name in FAMILIES:
        _, plain = opened(name, "auto")
        graph = verify(adapt(plain, 16))
        linears = sum(n.op == "linear" and n.layer >= 0 for n in plain.nodes)
        assert sum(n.op == "lora_expand" for n in graph.nodes) == linears > 0
        for reuse in (True, False):
            plan(verify(fuse(graph, FUSED)), 64, 8, reuse)
        assert graph.weights() == plain.weights()
        assert all("lora" not in n.op for n in plain.nodes)


def test_wrong_adapters_and_slots_are_refused(tmp_path: Path) -> None:
    checkpoint, graph = opened("random", "auto")
    backend = CpuBackend(num_threads=1)
    weights, state = backend.pack(graph, checkpoint), backend.make_state(graph, [NUM_BLOCKS])
    program = backend.compile(adapt(graph, 4), weights, state, LIMITS)
    found = targets(graph)
    packed = backend.pack_adapter(read_adapter(random_adapter(tmp_path, found, rank=8), found, 8))
    with pytest.raises(ValueError, match="rank 8 is above 4"):
        program.set_adapter(0, packed)
    with pytest.raises(ValueError, match="no adapter slot 3"):
        program.set_adapter(3, None)
    batch = step([(token_ids(20, 0), 0, [0, 1], 0)])
    with pytest.raises(ValueError, match=r"adapters\[0\] is 3, must be in \[-1, 3\)"):
        program.run(batch._replace(adapters=batch.adapters + np.int32(3)))
    with pytest.raises(ValueError, match="adapters has 19 entries, expected 20"):
        program.run(batch._replace(adapters=batch.adapters[1:].copy()))
