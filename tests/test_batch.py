"""Steps as flat arrays: ragged rows, sampling parameters, block tables that follow their requests."""

from __future__ import annotations

import itertools
import random

import numpy as np

from octavo.backends.base import Limits, StepBatch
from octavo.cache.groups import Copy
from octavo.request import Request, SamplingParams
from octavo.sampling.definition import noise_key
from octavo.sched.batch import BatchBuilder
from octavo.sched.step import Step, Work

LIMITS = Limits(max_tokens=64, max_rows=64, max_seqs=4, max_model_len=256)


def make(id: str, prompt: list[int], output: list[int] | None = None, choice: int = 0, **params: object) -> Request:
    request = Request(id, choice, prompt, SamplingParams(**params), seed=11, eos_ids=frozenset({2}))  # type: ignore[arg-type]
    request.output_ids = output or []
    request.tables = [[]]
    return request


def whole(request: Request, slot: int, start: int = 0) -> Work:
    return Work(request, slot, start, request.num_tokens - start, request.num_tokens, 0, True)


def test_chunks_and_decodes_in_one_step() -> None:
    decode, chunk, prompt = make("a", [5, 6, 7], [8]), make("b", list(range(40))), make("c", [9, 10])
    decode.tables, chunk.tables, prompt.tables = [[3]], [[0, 1, 2]], [[7]]
    step = Step([whole(decode, 2, 3), Work(chunk, 0, 16, 20, 36, 0, False), whole(prompt, 1)], [[Copy(4, 7)]])
    batch = BatchBuilder(LIMITS, 1).build(step)
    assert batch.token_ids.tolist() == [8, *range(16, 36), 9, 10]
    assert batch.positions.tolist() == [3, *range(16, 36), 0, 1]
    assert batch.seq_starts.tolist() == [0, 1, 21, 23]
    assert batch.context_lens.tolist() == [4, 36, 2]
    assert batch.block_tables[0].tolist() == [[3, 0, 0], [0, 1, 2], [7, 0, 0]]
    assert batch.block_tables[0].flags.c_contiguous
    assert batch.copies[0].tolist() == [[4, 7]]
    assert batch.logit_rows.tolist() == [0, 22]
    assert batch.sampling.position.tolist() == [4, 2]
    assert batch.sampling.target.tolist() == [-1, -1]
    for array in (batch.token_ids, batch.positions, batch.seq_starts, batch.context_lens, batch.logit_rows):
        assert array.dtype == np.int32


def test_a_step_without_logit_rows() -> None:
    request = make("a", list(range(40)))
    request.tables = [[0, 1]]
    batch = BatchBuilder(LIMITS, 1).build(Step([Work(request, 0, 0, 20, 20, 0, False)], [[]]))
    assert batch.logit_rows.tolist() == [] and batch.copies[0].shape == (0, 2)
    assert batch.sampling.bias_starts.tolist() == batch.sampling.history_starts.tolist() == [0]


def test_prompt_positions_score_the_token_after_them() -> None:
    plain = make("a", [1], logprobs=4)
    scored = make("b", [10, 11, 12, 13], prompt_logprobs=2, logit_bias={3: 1.0}, presence_penalty=1.0)
    step = Step([whole(plain, 0), Work(scored, 1, 0, 4, 0, 3, True)], [[]])
    batch = BatchBuilder(LIMITS, 1).build(step)
    a = batch.sampling
    assert batch.logit_rows.tolist() == [0, 1, 2, 3, 4]
    assert a.target.tolist() == [-1, 11, 12, 13, -1]
    assert a.position.tolist() == [1, 1, 2, 3, 4]
    assert a.num_top.tolist() == [4, 2, 2, 2, -1]
    assert a.bias_starts.tolist() == [0, 0, 0, 0, 0, 1]
    assert a.history_starts.tolist() == [0, 0, 0, 0, 0, 4]


def test_sampling_parameters_by_row() -> None:
    plain = make("a", [1], temperature=0)
    rich = make(
        "b", [4, 5, 4], choice=3, temperature=0.5, top_k=7, top_p=0.25, min_p=0.125, repetition_penalty=1.5,
        presence_penalty=0.5, frequency_penalty=-0.5, logprobs=2, logit_bias={9: -3.0, 2: 5.0}, min_tokens=2,
    )  # fmt: skip
    step = Step([whole(plain, 3), whole(rich, 0)], [[]])
    builder = BatchBuilder(LIMITS, 1)
    a = builder.build(step).sampling
    assert a.temperature.tolist() == [0, 0.5]
    assert a.top_k.tolist() == [0, 7]
    assert a.top_p.tolist() == [1, 0.25]
    assert a.min_p.tolist() == [0, 0.125]
    assert (a.repetition.tolist(), a.presence.tolist(), a.frequency.tolist()) == ([1, 1.5], [0, 0.5], [0, -0.5])
    assert a.noise_key.tolist() == [noise_key(11, 0), noise_key(11, 3)]
    assert a.num_top.tolist() == [-1, 2]
    assert a.bias_starts.tolist() == [0, 0, 2]
    assert dict(zip(a.bias_ids.tolist(), a.bias_values.tolist(), strict=True)) == {9: -3.0, 2: -np.inf}
    assert a.history_starts.tolist() == [0, 0, 2]
    assert dict(zip(a.history_ids.tolist(), a.history_counts.tolist(), strict=True)) == {4: 0, 5: 0}
    rich.output_ids = [5, 6]
    a = builder.build(Step([whole(rich, 0, 4)], [[]])).sampling
    assert dict(zip(a.bias_ids.tolist(), a.bias_values.tolist(), strict=True)) == {9: -3.0, 2: 5.0}
    assert dict(zip(a.history_ids.tolist(), a.history_counts.tolist(), strict=True)) == {4: 0, 5: 1, 6: 1}


def test_the_history_grows_with_the_output() -> None:
    request = make("a", [1], frequency_penalty=1.0)
    builder = BatchBuilder(LIMITS, 1)
    for token in [*range(100), *range(100)]:
        request.output_ids.append(token)
        a = builder.build(Step([whole(request, 0, request.num_tokens - 1)], [[]])).sampling
        counts = dict(zip(a.history_ids.tolist(), a.history_counts.tolist(), strict=True))
        assert counts == {1: request.output_ids.count(1)} | {t: request.output_ids.count(t) for t in request.output_ids}


def test_block_tables_follow_growth_replacement_and_new_occupants() -> None:
    builder = BatchBuilder(LIMITS, 1)
    request = make("a", list(range(60)))

    def table(request: Request, num_tokens: int) -> list[int]:
        batch = builder.build(Step([Work(request, 1, 0, num_tokens, num_tokens, 0, False)], [[]]))
        row: list[int] = batch.block_tables[0][0].tolist()
        return row

    request.tables = [[4, 5]]
    assert table(request, 32) == [4, 5]
    request.tables[0].append(6)
    assert table(request, 40) == [4, 5, 6]
    request.tables[0] = [4, 9, 6, 7]
    assert table(request, 60) == [4, 9, 6, 7]
    other = make("b", list(range(60)))
    other.tables = [[8]]
    assert table(other, 10) == [8]
    assert builder._blocks[0][1].tolist() == [8] + [0] * 15


def test_decodes_that_go_on_are_what_a_new_builder_makes() -> None:
    """Steps of the same decodes share arrays: after any other step, and whatever a sequence wants, they have what
    arrays made anew have."""
    rng = random.Random(0)
    builder = BatchBuilder(LIMITS, 2)
    next_block = itertools.count()
    running: dict[int, Request] = {}
    num_shared, before = 0, None
    for number in range(600):
        if number % 40 == 0 or not running:
            slot, params = (
                rng.randrange(4),
                rng.choice([{}, {}, {"logprobs": 2}, {"presence_penalty": 0.5}, {"top_k": 3}]),
            )
            running[slot] = make(f"r{number}", [1] * rng.randint(1, 30), temperature=rng.random(), **params)
            running[slot].tables = [[], []]
        if rng.random() < 0.02:
            del running[rng.choice(list(running))]
        works = []
        for slot, request in running.items():
            stop = (
                request.num_tokens if rng.random() < 0.98 else rng.randint(request.num_computed + 1, request.num_tokens)
            )
            for table in request.tables:
                table += [next(next_block) % 90 for _ in range(-(-stop // 16) - len(table))]
            if rng.random() < 0.02:
                request.tables[1] = [block + 100 for block in request.tables[1]]
            draws = stop == request.num_tokens
            works.append(Work(request, slot, request.num_computed, stop - request.num_computed, stop, 0, draws))
        step = Step(works, [[Copy(1, 2)], []] if rng.random() < 0.02 else [[], []])
        if not works:
            continue
        batch, fresh = builder.build(step), BatchBuilder(LIMITS, 2).build(step)
        num_shared += batch is before
        before = batch
        for name, got, want in zip(StepBatch._fields, batch, fresh, strict=True):
            if name == "block_tables":
                for work, g in itertools.product(range(len(works)), range(2)):
                    table = works[work].request.tables[g]
                    assert got[g][work, : len(table)].tolist() == table
            elif name == "copies":
                assert [c.tolist() for c in got] == [c.tolist() for c in want]
            elif name == "sampling":
                for field, a, b in zip(got._fields, got, want, strict=True):
                    np.testing.assert_array_equal(a, b, field)
            else:
                np.testing.assert_array_equal(got, want, name)
                assert got.dtype == want.dtype
        for work in works:
            work.request.num_computed = work.stop
            if work.draws:
                work.request.output_ids.append(rng.randrange(50))
            if work.request.num_tokens > 250:
                running.pop(work.slot)
    assert num_shared > 150
