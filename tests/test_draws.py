"""Draws whose logits are not stored are those of stored logits, whatever is asked of the rows beside them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from octavo import _native
from octavo.backends.base import Limits, SamplingArrays, StepBatch, StepResult
from octavo.backends.cpu import CpuBackend, CpuProgram
from octavo.backends.diff import greedy, make_step
from octavo.graph.build import Builder
from octavo.graph.fuse import fuse
from octavo.graph.ir import DType, Graph
from octavo.graph.rounding import round_inputs
from octavo.graph.verify import verify
from octavo.sampling.definition import sample
from tests.random_model import InMemory
from tests.test_ops import Shapes

HIDDEN, TOKENS = 64, 96
WIDTH = 3  # of alternatives
ODD = {1: np.nan, 2: np.inf, 3: 1e38}  # what the embeddings of some tokens hold


def model(vocab: int, act: DType, scale: float = 1.0, softcap: float = 0.0, bias: str | None = None) -> Any:
    """An embedding and the logits. Every third output feature repeats the one before: ties."""
    rng = np.random.default_rng(vocab)
    head = rng.standard_normal((vocab, HIDDEN)).astype(np.float32) / 3
    head[1::3] = head[: len(head[1::3]) * 3 : 3]
    table = rng.standard_normal((vocab, HIDDEN)).astype(np.float32)
    for token, value in ODD.items():
        table[token, 5] = value
    tensors = {"table": table, "head": head, "some": rng.standard_normal(vocab).astype(np.float32)}
    tensors["few"] = np.where(rng.random(vocab) < 0.03, tensors["some"], -np.inf).astype(np.float32)
    tensors["none"] = np.full(vocab, -np.inf, np.float32)
    b = Builder("head", vocab, 4096, Shapes(**{name: (1, *t.shape)[-2:] for name, t in tensors.items()}))
    x = b.gather_rows(b.embed(b.matrix({"table": vocab}, HIDDEN)))
    b.sample(b.logits(x, b.matrix({"head": vocab}, HIDDEN), bias, scale, softcap))
    return verify(round_inputs(verify(b.graph), lambda *_: act)), InMemory({}, tensors)


def compiled(graph: Graph, weights: InMemory, **options: Any) -> CpuProgram:
    backend = CpuBackend(**options)
    limits = Limits(TOKENS, TOKENS, TOKENS, 4096)
    return backend.compile(graph, backend.pack(graph, weights), backend.make_state(graph, []), limits)


def random_step(rng: np.random.Generator, vocab: int, rows: int) -> StepBatch:
    """Rows of every kind: those that need logits, those that do not, and some that cannot be drawn."""
    ids = rng.integers(0, vocab, rows)
    ids[rng.random(rows) < 0.1] = rng.integers(1, 4)
    step = make_step([(ids, 0, [0] * 8)], 0)
    masks = rng.integers(0, 2**32, (4, (vocab + 31) // 32), dtype=np.uint32)
    masks[1] &= rng.integers(0, 2**32, masks.shape[1], dtype=np.uint32)
    masks[2], masks[3] = 0, 2**32 - 1
    masks = np.ascontiguousarray(masks[:, : rng.integers(1, masks.shape[1] + 1)])

    def some(neutral: float, *values: float) -> NDArray[np.float32]:
        return np.where(rng.random(rows) < 0.7, neutral, rng.choice(values, rows)).astype(np.float32)

    counts = rng.integers(0, 3, rows) * (rng.random(rows) < 0.2)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    sampling = greedy(step.positions + np.int32(1))._replace(
        temperature=rng.choice([0, 1, 1, 0.5, 3, 1e-6, 1e-35], rows).astype(np.float32),
        top_k=some(0, 1, 5, vocab).astype(np.int32),
        top_p=some(1, 0.9, 0.3),
        min_p=some(0, 0.05),
        repetition=some(1, 1.3),
        noise_key=rng.integers(0, 2**63, rows).astype(np.uint64),
        position=rng.integers(0, 2**31 - 1, rows).astype(np.int32),
        target=np.where(rng.random(rows) < 0.1, rng.integers(0, vocab, rows), -1).astype(np.int32),
        mask_rows=np.where(rng.random(rows) < 0.3, rng.integers(0, 4, rows), -1).astype(np.int32),
        masks=masks,
        bias_starts=starts,
        bias_ids=rng.integers(0, vocab, starts[-1]).astype(np.int32),
        bias_values=rng.choice([-np.inf, 2.5, -4], starts[-1]).astype(np.float32),
        history_starts=starts,
        history_ids=rng.integers(0, vocab, starts[-1]).astype(np.int32),
        history_counts=rng.integers(0, 3, starts[-1]).astype(np.int32),
    )
    return step._replace(logit_rows=np.arange(rows, dtype=np.int32), sampling=sampling)


def run(program: CpuProgram, step: StepBatch, num_top: NDArray[np.int32]) -> StepResult:
    return program.run(step._replace(sampling=step.sampling._replace(num_top=num_top))).result()


def same_draws(a: StepResult, b: StepResult) -> None:
    np.testing.assert_array_equal(a.token_ids, b.token_ids)
    np.testing.assert_array_equal(a.invalid, b.invalid)


@pytest.mark.parametrize(
    ("vocab", "act", "fields"),
    [
        (517, DType.F32, {}),
        (517, DType.A8, {"bias": "some"}),
        (32, DType.BF16, {"scale": 0.25, "softcap": 2.0}),
        (2048, DType.F32, {"softcap": 3.0, "bias": "few"}),
        (31, DType.A8, {"scale": 0.5}),
        (70, DType.F32, {"bias": "none"}),
    ],
)
def test_the_same_tokens_whether_logits_are_stored_or_not(vocab: int, act: DType, fields: dict[str, Any]) -> None:
    rng = np.random.default_rng(vocab)
    graph, weights = model(vocab, act, **fields)
    assert "linear_sample" in [node.op for node in fuse(graph, CpuBackend.fusions).nodes]
    plain = compiled(graph, weights, num_threads=1, fuse=False)
    programs = [compiled(graph, weights, num_threads=n, poison=True) for n in (1, 2, 3)]
    kinds = set()
    for rows in (1, 2, 7, 33, TOKENS):
        step = random_step(rng, vocab, rows)
        everywhere = np.full(rows, WIDTH, np.int32)
        expected = run(plain, step, everywhere)
        kinds |= set(expected.invalid.tolist())
        mixed = np.where(rng.random(rows) < 0.4, rng.integers(0, WIDTH + 1, rows), -1).astype(np.int32)
        for program in programs:
            found = run(program, step, everywhere)
            assert all(map(np.array_equal, found, expected))
            np.testing.assert_array_equal(program.logits().view(np.uint32), plain.logits().view(np.uint32))
            same_draws(run(program, step, np.full(rows, -1, np.int32)), expected)
            beside = run(program, step, mixed)
            same_draws(beside, expected)
            np.testing.assert_array_equal(beside.logprobs[mixed >= 0], expected.logprobs[mixed >= 0])
            np.testing.assert_array_equal(beside.ranks, np.where(mixed >= 0, expected.ranks, 0))
    assert kinds == ({True} if fields.get("bias") == "none" else {False, True})


def test_unseen_draws_are_those_of_the_definition() -> None:
    """Of logits that are far enough apart: the definition's noise is float64."""
    graph, weights = model(2048, DType.F32)
    program = compiled(graph, weights, num_threads=2)
    rng = np.random.default_rng(1)
    equal = total = 0
    for _ in range(4):
        step = random_step(rng, 2048, TOKENS)
        none = np.full(TOKENS, -1, np.int32)
        drawn = run(program, step, none)
        scored = run(program, step, none + 1)
        sampling: SamplingArrays = step.sampling._replace(num_top=none)
        with np.errstate(over="ignore"):  # logits of 1e38 at a temperature of 1e-35
            expected = sample(program.logits().copy(), sampling)
        np.testing.assert_array_equal(drawn.invalid, expected.invalid)
        np.testing.assert_array_equal(drawn.token_ids, scored.token_ids)
        equal += int((drawn.token_ids == expected.token_ids).sum())
        total += TOKENS
    assert equal >= total - 2


def test_logits_that_nobody_asks_for_take_no_memory() -> None:
    vocab = 65536  # packed in two pieces, with nothing behind
    graph, weights = model(vocab, DType.A8)
    program = compiled(graph, weights, num_threads=1)
    step = make_step([(np.arange(8, 8 + TOKENS), 0, [0] * 8)], 0)
    step = step._replace(logit_rows=np.arange(TOKENS, dtype=np.int32), sampling=greedy(step.positions + np.int32(1)))
    logit_bytes = 4 * TOKENS * vocab
    assert program.arena_bytes >= logit_bytes
    unseen = run(program, step, np.full(TOKENS, -1, np.int32))
    assert program.touched_bytes < logit_bytes / 4
    with pytest.raises(ValueError, match="stored no logits"):
        program.logits()
    same_draws(unseen, run(program, step, np.zeros(TOKENS, np.int32)))
    assert program.touched_bytes >= logit_bytes and program.logits().shape == (TOKENS, vocab)


@pytest.mark.parametrize("isa", _native.isa_levels())
def test_every_level_draws_the_same(isa: str) -> None:
    graph, weights = model(517, DType.F32)
    step = random_step(np.random.default_rng(9), 517, TOKENS)
    none = np.full(TOKENS, -1, np.int32)
    same_draws(
        run(compiled(graph, weights, num_threads=2, isa=isa), step, none),
        run(compiled(graph, weights, num_threads=1, isa=isa, fuse=False), step, none),
    )
