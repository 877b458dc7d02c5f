"""The native backend as a whole: same bits whatever the batch, chunks, threads and passes; wrong batches are refused."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from octavo import _native
from octavo.backends import cpu_weights
from octavo.backends.base import BLOCK_SIZE, KV_SPLIT, SMALL_T, Limits, StepBatch
from octavo.backends.cpu import HUGE_PAGE, CpuBackend, CpuProgram, CpuState
from octavo.backends.diff import greedy, make_step
from octavo.graph.fuse import count, fuse
from octavo.models import build_graph
from octavo.weights.checkpoint import open_checkpoint
from tests.small_fixtures import ALL

DATA = Path(__file__).parent / "data"
LIMITS = Limits(max_tokens=160, max_rows=160, max_seqs=8, max_model_len=1200)
NUM_BLOCKS = 100
_LINUX = tuple(map(int, platform.release().split(".")[:2]))
MODELS = {
    "q4_1": (DATA / "gguf/tiny-llama-q4_1.gguf", "auto"),
    "without bf16 dots": (DATA / "gguf/tiny-llama-q4_1.gguf", "auto", False),
    "q8_0": (DATA / "gguf/tiny-llama-q8_0.gguf", "auto"),
    "q4_0": (DATA / "gguf/tiny-llama-q4_0.gguf", "bf16"),
    "f16": (DATA / "gguf/tiny-llama-f16_bf16.gguf", "auto"),
    "f32": (DATA / "arch/llama", "f32"),
    "bf16": (DATA / "arch/llama", "auto"),
    "without positions": (DATA / "arch/smollm3", "auto"),
    "joined": (DATA / "arch/phi3", "auto"),
    "neighbours": (DATA / "arch/ernie4_5", "auto"),
}
Loaded = tuple[CpuProgram, CpuState]


@cache
def checkpoint_and_graph(model: str) -> Any:
    path, activations, *dots = MODELS[model]
    checkpoint = open_checkpoint(path)
    return checkpoint, build_graph(checkpoint, activations, bf16_dots=not dots)


def load(model: str, **options: Any) -> Loaded:
    checkpoint, graph = checkpoint_and_graph(model)
    backend = CpuBackend(**options)
    state = backend.make_state(graph, [NUM_BLOCKS])
    return backend.compile(graph, backend.pack(graph, checkpoint), state, LIMITS), state


def token_ids(n: int, seed: int = 1) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(3, 300, n).astype(np.int32)


def shuffled_blocks(seed: int) -> list[int]:
    return [int(b) for b in np.random.default_rng(seed).permutation(NUM_BLOCKS)]


def table(length: int) -> list[int]:
    """Blocks of one sequence, in no order."""
    return shuffled_blocks(0)[: -(-length // BLOCK_SIZE)]


def with_rows(batch: StepBatch, rows: NDArray[np.int32]) -> StepBatch:
    """All `rows` give logits, not only the last tokens."""
    return batch._replace(logit_rows=rows, sampling=greedy(batch.positions[rows] + np.int32(1)))


def logits_of(program: CpuProgram, ids: NDArray[np.int32], chunks: list[int], blocks: list[int]) -> NDArray[np.float32]:
    """Logits of every position of one sequence, computed in these chunks."""
    found, start = [], 0
    for n in chunks:
        batch = make_step([(ids[start : start + n], start, blocks)], len(program.graph.groups))
        program.run(with_rows(batch, np.arange(n, dtype=np.int32)))
        found.append(program.logits().copy())
        start += n
    assert start == len(ids)
    return np.concatenate(found)


def same_bits(a: NDArray[np.float32], b: NDArray[np.float32]) -> None:
    assert not np.isnan(a).any()
    np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))


@pytest.mark.parametrize("model", MODELS)
def test_chunks_threads_passes_and_poison_change_no_bit(model: str) -> None:
    ids = token_ids(150)
    blocks = table(len(ids))
    expected = logits_of(load(model, num_threads=1)[0], ids, [150], blocks)
    variants: list[tuple[dict[str, Any], list[int]]] = [
        ({"num_threads": 2}, [1] * 20 + [130]),
        ({"num_threads": 3, "poison": True}, [64, 1, 16, 17, 52]),
        ({"num_threads": 2, "fuse": False}, [65, 85]),
        ({"num_threads": 2, "fuse": False, "reuse": False}, [7, 143]),
        ({"num_threads": 1, "reuse": False, "poison": True}, [150]),
    ]
    for options, chunks in variants:
        same_bits(expected, logits_of(load(model, **options)[0], ids, chunks, blocks))


@pytest.mark.parametrize("isa", _native.isa_levels())
def test_every_level_runs_and_agrees_with_itself(isa: str) -> None:
    ids = token_ids(70)
    blocks = table(len(ids))
    program, _ = load("q4_1", isa=isa, num_threads=2)
    whole = logits_of(program, ids, [70], blocks)
    same_bits(whole, logits_of(program, ids, [33, 1, 36], blocks))
    best, _ = load("q4_1", num_threads=2)
    np.testing.assert_allclose(whole, logits_of(best, ids, [70], blocks), atol=0.5)  # int8 steps may differ by one


@pytest.mark.parametrize("isa", _native.isa_levels())
@pytest.mark.parametrize("name", ALL)
def test_float32_logits_of_the_fixtures(name: str, isa: str) -> None:
    """Within 2e-3 of transformers' float32 values, in chunks of 1, small and full steps."""
    path = DATA / name
    values = np.load(path.with_suffix(".expected.npz") if path.suffix == ".gguf" else path / "expected.npz")
    checkpoint = open_checkpoint(path)
    graph = build_graph(checkpoint, "f32")
    backend = CpuBackend(isa=isa, num_threads=2)
    weights = backend.pack(graph, checkpoint)
    program = backend.compile(graph, weights, backend.make_state(graph, [NUM_BLOCKS]), LIMITS)
    for i in range(3):
        ids = values[f"ids_{i}"].astype(np.int32)
        chunks = [1, len(ids) - 1] if i == 1 else [len(ids)]
        logits = logits_of(program, ids, chunks, table(len(ids)))[values[f"pos_{i}"]]
        np.testing.assert_allclose(logits, values[f"logits_{i}"], rtol=0, atol=2e-3)


@pytest.mark.parametrize("model", MODELS)
def test_packing_in_pieces_changes_no_byte(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, graph = checkpoint_and_graph(model)
    backend = CpuBackend(num_threads=2)
    whole = backend.pack(graph, checkpoint)
    monkeypatch.setattr(cpu_weights, "VALUES_AT_ONCE", 1)  # 32 rows at once
    pieces = backend.pack(graph, checkpoint)
    assert whole.num_bytes == pieces.num_bytes == backend.weight_bytes(graph)
    a, b = (w.memory.view(0, w.num_bytes) for w in (whole, pieces))
    np.testing.assert_array_equal(a, b)


def test_neighbours_in_the_step_change_no_bit() -> None:
    program, _ = load("q4_1", num_threads=2, poison=True)
    blocks = shuffled_blocks(3)
    tables = [blocks[10 * i : 10 * i + 10] for i in range(5)]
    sequences = [token_ids(n, seed=n) for n in (40, 3, 97, 16, 31)]
    alone = []
    for ids, own in zip(sequences, tables, strict=True):
        program.run(make_step([(ids, 0, own)]))
        first = program.logits()[0].copy()
        program.run(make_step([([7], len(ids), own)]))
        alone.append((first, program.logits()[0].copy()))
    for step, order in enumerate(([0, 2], [4, 1, 3])):  # more and fewer tokens than the small plan takes
        batch = make_step([(sequences[i], 0, tables[i]) for i in order])
        assert (len(batch.token_ids) > SMALL_T) == (step == 0)
        program.run(batch)
        for row, i in enumerate(order):
            same_bits(alone[i][0], program.logits()[row])
    program.run(make_step([([7], len(ids), own) for ids, own in zip(sequences, tables, strict=True)]))
    for row in range(5):
        same_bits(alone[row][1], program.logits()[row])


@pytest.mark.parametrize("model", ["q8_0", "f32"])
def test_split_contexts_give_the_bits_of_whole_ones(model: str) -> None:
    """A token over three splits: where there are threads to spare, each split is work of its own, and merged."""
    length = 2 * KV_SPLIT + 60
    ids, blocks = token_ids(length), table(length)
    alone, _ = load(model, num_threads=1)
    expected = logits_of(alone, ids, [160] * 6 + [length - 960], blocks)
    many, _ = load(model, num_threads=8)
    assert many.graph.groups[0].kv_heads < 8
    same_bits(expected, logits_of(many, ids, [160] * 6 + [length - 964, 1, 1, 1, 1], blocks))


def test_copied_blocks_hold_what_their_source_held() -> None:
    program, _ = load("q4_1", num_threads=2)
    ids = token_ids(40)
    program.run(make_step([(ids, 0, [5, 6, 7])]))
    step = make_step([([9], 40, [5, 6, 7])])
    program.run(step)
    expected = program.logits()[0].copy()
    forked = make_step([([9], 40, [5, 6, 8])])
    program.run(forked._replace(copies=(np.array([[7, 8]], np.int32),)))
    same_bits(expected, program.logits()[0])
    program.run(make_step([([11], 41, [5, 6, 8])]))  # the fork's own token is not in its source
    different = program.logits()[0].copy()
    program.run(make_step([([12], 40, [5, 6, 7])]))
    program.run(make_step([([11], 41, [5, 6, 8])]))
    same_bits(different, program.logits()[0])


def test_greedy_results_and_scores() -> None:
    program, _ = load("q4_1", num_threads=2)
    batch = make_step([(token_ids(20), 0, [1, 2]), (token_ids(9, 4), 0, [3])])
    sampling = batch.sampling._replace(num_top=np.array([-1, 3], np.int32))
    result = program.run(batch._replace(sampling=sampling)).result()
    program.run(batch)
    logits = program.logits().astype(np.float64)
    np.testing.assert_array_equal(result.token_ids, logits.argmax(axis=1))
    scores = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    best = np.argsort(-logits[1], kind="stable")[:3]
    np.testing.assert_array_equal(result.top_ids[1], best)
    np.testing.assert_allclose(result.top_logprobs[1], scores[1][best], rtol=1e-5)
    assert result.logprobs[0] == 0 and result.ranks[1] == 1 and not result.invalid.any()


def test_a_step_without_logits() -> None:
    program, _ = load("q4_1", num_threads=2)
    batch = with_rows(make_step([(token_ids(20), 0, [1, 2])]), np.zeros(0, np.int32))
    assert program.run(batch).result().token_ids.shape == (0,)


def test_trace_names_every_node() -> None:
    program, _ = load("q4_1", num_threads=2)
    spans = program.trace(make_step([(token_ids(20), 0, [1, 2])]))
    assert [s.name for s in spans] == ["prepare", *(n.op for n in program.graph.nodes)]
    assert all(0 <= s.wait <= s.seconds for s in spans)


def test_all_kinds_fuse(data: Path) -> None:
    """In a model with gates, or in one without."""
    _, gated = checkpoint_and_graph("q4_1")
    plain = build_graph(open_checkpoint(data / "arch" / "arcee"))
    found = [count(fuse(graph, CpuBackend.fusions)).keys() for graph in (gated, plain)]
    assert CpuBackend.fusions <= found[0] | found[1]


def test_the_cache_is_touched_on_use() -> None:
    """A block of this model takes less than a page, so a page per layer, head and few blocks is the most there is."""
    program, state = load("q4_1", num_threads=1)
    assert state.touched_bytes == 0
    program.run(make_step([(token_ids(16), 0, [3])]))
    one = state.touched_bytes
    program.run(make_step([([5], 16, [3, 4])]))
    group = program.graph.groups[0]
    arenas = len(group.layers) * group.kv_heads
    assert 0 < one <= arenas * 2 * 4096 and state.touched_bytes <= 2 * one
    assert state.arenas[0].num_bytes == CpuBackend().block_bytes(program.graph)[0] * NUM_BLOCKS


@pytest.mark.skipif(_LINUX < (6, 1), reason="this kernel does not make huge pages of small ones when asked to")
def test_blocks_that_are_used_get_huge_pages() -> None:
    """When a huge page of each layer and head is full of blocks that were used, in one step after the other; what is in
    them stays."""
    backend = CpuBackend(num_threads=1)
    checkpoint, graph = checkpoint_and_graph("q4_1")
    group = graph.groups[0]
    heads = len(group.layers) * group.kv_heads
    num_blocks = HUGE_PAGE // (backend.block_bytes(graph)[0] // heads)
    state = backend.make_state(graph, [num_blocks])
    program = backend.compile(graph, backend.pack(graph, checkpoint), state, LIMITS)
    program.run(make_step([(token_ids(20), 0, [7, num_blocks - 2])]))
    before = state.blocks[0][:, [7, num_blocks - 2]]
    for _ in range(2 * heads):
        program.run(make_step([([5], 0, [9])]))
    assert state.touched_bytes < HUGE_PAGE / 2  # not all blocks have been used
    for _ in range(heads):
        program.run(make_step([([5], 0, [num_blocks - 1])]))
    assert state.touched_bytes == heads * HUGE_PAGE
    np.testing.assert_array_equal(state.blocks[0][:, [7, num_blocks - 2]], before)


def wrong_batches() -> Iterator[tuple[str, Callable[[StepBatch], StepBatch], str]]:
    def changed(field: str, value: Any) -> Callable[[StepBatch], StepBatch]:
        return lambda b: b._replace(**{field: value})

    def sampling(field: str, value: Any) -> Callable[[StepBatch], StepBatch]:
        return lambda b: b._replace(sampling=b.sampling._replace(**{field: value}))

    def i32(*values: int) -> NDArray[np.int32]:
        return np.array(values, np.int32)

    yield "id", changed("token_ids", i32(3, 4, 320)), r"token_ids\[2\] is 320, must be in \[0, 320\)"
    yield "id below", changed("token_ids", i32(3, -1, 4)), r"token_ids\[1\] is -1"
    yield "position", changed("positions", i32(0, 2, 2)), r"positions\[1\] is 2"
    yield "starts", changed("seq_starts", i32(0, 4)), r"seq_starts\[1\] is 4, must be in \[1, 4\)"
    yield "context", changed("context_lens", i32(1201)), r"context_lens\[0\] is 1201, must be in \[3, 1201\)"
    yield "block", changed("block_tables", (i32(100)[None],)), r"block_tables\[0\] is 100, must be in \[0, 100\)"
    yield "no tables", changed("block_tables", ()), r"0 block tables"
    yield "narrow table", changed("block_tables", (np.zeros((1, 0), np.int32),)), r"has 0 columns, sequence 0 needs 1"
    yield "copy", changed("copies", (i32(1, 100)[None],)), r"copies\[0\] is 100"
    yield "row", changed("logit_rows", i32(3)), r"logit_rows\[0\] is 3"
    yield "type", changed("token_ids", np.zeros(3, np.int64)), r"token_ids must be a contiguous array"
    yield "strides", changed("token_ids", np.zeros(6, np.int32)[::2]), r"token_ids must be a contiguous array"
    yield "type of table", changed("block_tables", (np.zeros((1, 1)),)), r"block_tables must be a contiguous array"
    yield "no array", changed("copies", ([[1, 2]],)), r"copies must be a contiguous array"
    yield "length", changed("positions", i32(0, 1)), r"positions has 2 entries, expected 3"
    yield "target", sampling("target", i32(320)), r"sampling.target\[0\] is 320"
    yield "top", sampling("num_top", i32(321)), r"num_top is larger than the vocabulary"
    yield "bias starts", sampling("bias_starts", i32(0, 1)), r"bias_starts\[1\] is 1"


@pytest.mark.parametrize(("change", "message"), [pytest.param(c, m, id=n) for n, c, m in wrong_batches()])
def test_a_wrong_batch_is_refused_by_name(change: Callable[[StepBatch], StepBatch], message: str) -> None:
    program = refusing_program()
    with pytest.raises(ValueError, match=message):
        program.run(change(make_step([([3, 4, 5], 0, [1])])))


@cache
def refusing_program() -> CpuProgram:
    return load("q4_1", num_threads=1)[0]


def test_too_many_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="a step with 161 tokens; this program takes 1 to 160"):
        refusing_program().run(make_step([(token_ids(161), 0, table(161))]))


def test_bad_options_are_refused() -> None:
    with pytest.raises(ValueError, match="isa 'sse9' cannot run here; this machine has: generic"):
        CpuBackend(isa="sse9")
    with pytest.raises(ValueError, match=r"num_threads must be in 1\.\.256; got 257"):
        CpuBackend(num_threads=257)
