"""Samplers in chains, masks, DRY and banned words: what each keeps, and that the native ones do what the numpy ones say."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from octavo.backends.base import Limits, StepBatch
from octavo.backends.cpu import CpuBackend, CpuProgram
from octavo.backends.diff import make_step
from octavo.models import build_graph
from octavo.request import ParameterError, Request, SamplingParams
from octavo.sampling.chain import DEFAULT_ORDER, NAMES, Op, chain
from octavo.sampling.definition import Row, by_chain, coin, draw, gumbel, noise_key, rows_of, sample, sample_row
from octavo.sampling.params import SamplingTable, mask_of
from octavo.sampling.repetition import Bans, Dry, RecentHistory
from octavo.sched.batch import BatchBuilder
from octavo.sched.step import Step, Work
from tests.random_model import random_model

VOCAB = 500
F32 = NDArray[np.float32]


def logits(n: int, seed: int = 0, sigma: float = 3.0) -> F32:
    return np.random.default_rng(seed).normal(0, sigma, n).astype(np.float32)


def probabilities(x: F32, temperature: float = 1.0) -> NDArray[np.float64]:
    p = np.exp((x - x.max()).astype(np.float64) / temperature)
    return np.asarray(p / p.sum())


def kept(x: F32, *steps: tuple[Op, float, float], **fields: Any) -> list[int]:
    ids: list[int] = by_chain(x, Row(chain=tuple(steps), **fields))[0].tolist()
    return ids


# ---------------------------------------------------------------- what each keeps


def test_typical_keeps_the_tokens_of_usual_surprise() -> None:
    x = logits(200)
    p = probabilities(x)
    entropy = -(p * np.log(p)).sum()
    by_distance = np.argsort(np.abs(-np.log(p) - entropy), kind="stable")
    count = int((np.cumsum(p[by_distance]) < 0.6).sum()) + 1
    assert set(kept(x, (Op.TYPICAL, 0.6, 0))) == set(by_distance[:count].tolist())
    assert int(x.argmax()) not in kept(np.log(np.array([0.6] + [0.4 / 40] * 40, np.float32)), (Op.TYPICAL, 0.2, 0))


def test_top_n_sigma_keeps_what_is_near_the_greatest_whatever_the_temperature() -> None:
    x = logits(500)
    near = set(np.flatnonzero(x >= x.max() - 1.5 * x.std()).tolist())
    assert set(kept(x, (Op.TOP_N_SIGMA, 1.5, 0))) == near
    for temperature in (0.5, 3.0):
        steps = ((Op.TEMPERATURE, 0.0, 1.0), (Op.TOP_N_SIGMA, 1.5, 0.0))
        assert set(kept(x, *steps, temperature=temperature)) == near


def test_xtc_leaves_of_the_likely_the_least_likely() -> None:
    x = np.log(np.array([0.4, 0.3, 0.2, 0.06, 0.04], np.float32))
    step = (Op.XTC, 1.0, 0.1)
    assert kept(x, step) == [2, 3, 4]
    assert kept(x, (Op.XTC, 1.0, 0.35)) == [0, 1, 2, 3, 4]  # one alone is likely
    hit = [kept(x, (Op.XTC, 0.25, 0.1), noise_key=noise_key(1, 0), position=p) == [2, 3, 4] for p in range(2000)]
    assert abs(sum(hit) - 500) < 5 * np.sqrt(2000 * 0.25 * 0.75)
    assert hit == [coin(noise_key(1, 0), p) < 0.25 for p in range(2000)]


def test_dynamic_temperature_is_low_for_sure_draws_and_high_for_open_ones() -> None:
    row = Row(temperature=1.0, chain=((Op.TEMPERATURE, 0.5, 1.0),))
    flat = by_chain(np.zeros(50, np.float32), row)[1]
    assert flat.tolist() == [0] * 50
    x = np.array([0, -1, -2, -3], np.float32)
    p = probabilities(x)
    share = -(p * np.log(p)).sum() / np.log(4)
    np.testing.assert_allclose(by_chain(x, row)[1], x / (0.5 + share), rtol=1e-6)
    sure = np.array([0, -30, -30, -30], np.float32)
    np.testing.assert_allclose(by_chain(sure, row)[1], sure / 0.5, rtol=1e-5)
    assert by_chain(x, Row(temperature=0.5, chain=((Op.TEMPERATURE, 0.5, 2.0),)))[1][1] == pytest.approx(-1 / share**2)


def test_order_matters_and_greedy_takes_the_best_of_what_is_left() -> None:
    x = logits(300)
    p = probabilities(x, 2)
    warm = ((Op.TEMPERATURE, 0.0, 1.0), (Op.MIN_P, 0.0, 0.0))
    fields: dict[str, Any] = {"temperature": 2.0, "min_p": 0.1}
    assert set(kept(x, *warm, **fields)) == set(np.flatnonzero(p >= 0.1 * p.max()).tolist())
    p = probabilities(x)
    assert set(kept(x, *warm[::-1], **fields)) == set(np.flatnonzero(p >= 0.1 * p.max()).tolist())
    after = ((Op.XTC, 1.0, 0.01), (Op.TEMPERATURE, 0.0, 1.0))
    likely = np.flatnonzero(p >= 0.01)
    assert kept(x, *after, temperature=0.0) == [int(likely[np.argmin(x[likely])])]


def test_a_chain_of_the_usual_order_is_the_usual_path() -> None:
    for seed in range(200):
        rng = np.random.default_rng(seed)
        x = logits(VOCAB, seed)
        row = Row(
            temperature=float(rng.choice([0.5, 1, 1.7])), top_k=int(rng.choice([0, 5, 50])),
            top_p=float(rng.choice([1.0, 0.9, 0.4])), min_p=float(rng.choice([0, 0.05])), noise_key=seed,
            repetition=1.2, frequency=0.3, history=((3, 2), (77, 0)), dry=((9, 1.5),),
        )  # fmt: skip
        plain = draw(sample_row_input(x, row), row)
        assert plain == draw(x, row._replace(chain=tuple((op, 0.0, 1.0) for op in sorted(Op) if op not in SPECIAL)))


SPECIAL = {Op.TOP_N_SIGMA, Op.TYPICAL, Op.XTC}


def sample_row_input(x: F32, row: Row) -> F32:
    from octavo.sampling.definition import penalized

    return penalized(x, row)


def test_masks_leave_what_they_allow_and_scores_as_they_were() -> None:
    x = logits(100)
    words = tuple(mask_of([5, 31, 32, 70]).tolist())
    assert len(words) == 3  # tokens from 96 on have no word and are not allowed
    best = max([5, 31, 32, 70], key=lambda token: x[token])
    drawn = sample_row(x, Row(temperature=0, mask=words, num_top=2))
    assert drawn.token_id == best
    assert drawn.top_ids == np.argsort(-x, kind="stable")[:2].tolist()
    assert {draw_masked(x, words, p) for p in range(300)} <= {5, 31, 32, 70}
    assert sample_row(x, Row(mask=())).invalid


def draw_masked(x: F32, words: tuple[int, ...], position: int) -> int:
    return sample_row(x, Row(temperature=5, mask=words, position=position)).token_id


# ---------------------------------------------------------------- what depends on the tokens before


def request(prompt: list[int], output: list[int], **fields: Any) -> Request:
    made = Request("a", 0, prompt, SamplingParams(max_tokens=None, **fields), 11)
    made.output_ids = output
    return made


def dry_by_words(tokens: list[int], params: SamplingParams) -> dict[int, float]:
    """Every suffix against every place before it."""
    if params.dry_penalty_last_n >= 0:
        tokens = tokens[max(0, len(tokens) - params.dry_penalty_last_n) :]
    for end, breaker in itertools.product(range(len(tokens), 0, -1), params.dry_breaker_ids):
        if len(breaker) <= end and tokens[end - len(breaker) : end] == breaker:
            limit = len(tokens) - end
            break
    else:
        limit = len(tokens)
    penalties: dict[int, float] = {}
    for length in range(1, limit + 1):
        for end in range(length - 1, len(tokens) - 1):
            if tokens[end - length + 1 : end + 1] == tokens[-length:] and length >= params.dry_allowed_length:
                found = params.dry_multiplier * params.dry_base ** (length - params.dry_allowed_length)
                penalties[tokens[end + 1]] = max(found, penalties.get(tokens[end + 1], 0))
    return penalties


@pytest.mark.parametrize("seed", range(30))
def test_dry_makes_repetitions_unlikely(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 4, 60).tolist()
    made = request(
        tokens[:20], [], dry_multiplier=0.8, dry_allowed_length=int(rng.integers(1, 4)),
        dry_penalty_last_n=int(rng.choice([-1, 10, 25])), dry_breaker_ids=[[3, 3, 1], [2, 2, 2]][: seed % 3],
    )  # fmt: skip
    dry = Dry(made)
    for token in tokens[20:]:
        ids, values = dry.arrays()
        expected = dry_by_words(made.token_ids(0, made.num_tokens), made.params)
        assert dict(zip(ids.tolist(), values.tolist(), strict=True)) == pytest.approx(expected, rel=1e-6)
        again = Dry(made).arrays()  # as after a preemption or a restart
        assert again[0].tolist() == ids.tolist() and again[1].tolist() == values.tolist()
        made.output_ids.append(token)


def test_recent_history_forgets() -> None:
    made = request([1, 2, 3], [4, 1, 4], frequency_penalty=1, repeat_last_n=4)
    ids, counts = RecentHistory(made).arrays()
    assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == {3: 0, 4: 2, 1: 1}
    made.output_ids += [9, 9, 9]
    ids, counts = RecentHistory(made).arrays()
    assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == {4: 1, 9: 3}


def test_bans_look_at_the_output_alone() -> None:
    made = request([7, 8], [], bad_word_ids=[[5], [7, 8, 9]])
    bans = Bans(made)
    assert bans.next() == {5}
    made.output_ids += [8, 7, 8]
    assert bans.next() == {5, 9}
    made.output_ids.append(7)
    assert bans.next() == {5}


def test_a_table_row_has_what_the_parameters_say() -> None:
    table = SamplingTable(2)
    table.fill(0, request([1], [], allowed_token_ids=[40, 3], typical_p=0.5, xtc_probability=0.3, top_k=4))
    mask, steps = table.masks[0], table.chains[0]
    words = mask.words() if mask else None
    assert words is not None and words.tolist() == [8, 256]
    assert steps is not None and steps[0].tolist() == [Op.TOP_K, Op.TYPICAL, Op.XTC]
    assert steps[1].tolist() == np.array([[0, 0], [0.5, 0], [0.3, 0.1]], np.float32).tolist()
    table.fill(0, request([1], []))
    assert table.masks[0] is None and table.chains[0] is None and table.dries[0] is None


# ---------------------------------------------------------------- parameters


def test_plain_parameters_have_no_chain() -> None:
    for fields in (
        {}, {"temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.1}, {"dry_multiplier": 1, "presence_penalty": 1},
        {"temperature": 0, "typical_p": 0.5}, {"samplers": ["temperature", "top_k", "top_p"], "top_k": 4, "top_p": 0.5},
        {"samplers": [], "temperature": 1},
    ):  # fmt: skip
        assert chain(SamplingParams(**fields)) == []
    swapped = SamplingParams(temperature=0.5, top_k=4, samplers=["top_k", "temperature"])
    assert [op for op, _, _ in chain(swapped)] == [Op.TOP_K, Op.TEMPERATURE]
    assert set(NAMES.values()) == set(DEFAULT_ORDER) == set(Op)


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("samplers", {"samplers": ["top_q"]}), ("samplers", {"samplers": ["top_k", "top_k"]}), ("samplers", {"samplers": "kp"}),
    ("top_p", {"samplers": ["top_k"], "top_p": 0.5}), ("temperature", {"samplers": [], "temperature": 0.5}),
    ("typical_p", {"typical_p": 0}), ("typical_p", {"typical_p": 1.1}), ("xtc_probability", {"xtc_probability": -0.1}),
    ("dry_base", {"dry_base": float("nan")}), ("dynatemp_range", {"dynatemp_range": -1}), ("bad_words", {"bad_words": [" "]}),
    ("bad_words", {"bad_words": ["a"] * 65}), ("bad_word_ids", {"bad_word_ids": [[]]}), ("repeat_last_n", {"repeat_last_n": -2}),
    ("allowed_token_ids", {"allowed_token_ids": []}), ("allowed_token_ids", {"allowed_token_ids": [0.5]}),
    ("dry_sequence_breakers", {"dry_sequence_breakers": [5]}), ("top_n_sigma", {"top_n_sigma": 1e9}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "fields"), REFUSED)
def test_bad_values_are_refused_by_name(name: str, fields: dict[str, Any]) -> None:
    with pytest.raises(ParameterError, match=name) as caught:
        SamplingParams(**fields)
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("allowed_token_ids", [1, 500]),
        ("bad_word_ids", [[1, -1]]),
        ("dry_breaker_ids", [[500]]),
        ("stop_token_ids", [500]),
    ],
)
def test_ids_outside_of_the_vocabulary_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ParameterError, match=f"^{name} names token") as caught:
        SamplingParams(**{name: value}).check_vocabulary(VOCAB)
    assert caught.value.param == name


def test_something_must_be_left_to_draw() -> None:
    for name, fields in (
        ("bad_words", {"allowed_token_ids": [3, 4], "bad_word_ids": [[3], [9, 4]]}),
        ("bad_words", {"bad_word_ids": [[token] for token in range(VOCAB)]}),
        ("min_tokens", {"allowed_token_ids": [2, 4], "bad_word_ids": [[4]], "min_tokens": 1}),
    ):
        with pytest.raises(ParameterError, match=name):
            SamplingParams(**fields).check_vocabulary(VOCAB, frozenset({2}))
    SamplingParams(allowed_token_ids=[2, 4], min_tokens=1).check_vocabulary(VOCAB, frozenset({2}))


# ---------------------------------------------------------------- native = numpy


@pytest.fixture(scope="module")
def program() -> CpuProgram:
    model = random_model(vocab_size=VOCAB, tie_word_embeddings=False)
    model.tensors["lm_head.weight"] *= 6
    graph = build_graph(model, "f32")
    backend = CpuBackend(num_threads=2)
    return backend.compile(graph, backend.pack(graph, model), backend.make_state(graph, [8]), Limits(64, 64, 8, 64))


def random_row(rng: np.random.Generator) -> dict[str, Any]:
    """Sampling parameters of which every one has its say in some row."""

    def maybe(neutral: Any, *values: Any) -> Any:
        return neutral if rng.random() < 0.6 else values[int(rng.integers(len(values)))]

    fields = {
        "temperature": maybe(1.0, 0.0, 0.3, 1.8), "top_k": maybe(0, 1, 3, 40), "top_p": maybe(1.0, 0.2, 0.8, 0.99),
        "min_p": maybe(0.0, 0.02, 0.3), "typical_p": maybe(1.0, 0.1, 0.5, 0.9), "top_n_sigma": maybe(-1.0, 0.5, 2.0),
        "xtc_probability": maybe(0.0, 0.5, 1.0), "xtc_threshold": float(rng.choice([0.02, 0.1])),
        "dynatemp_range": maybe(0.0, 0.4, 2.0), "dynatemp_exponent": float(rng.choice([0.5, 1, 2])),
        "dry_multiplier": maybe(0.0, 0.8), "repetition_penalty": maybe(1.0, 0.7, 1.6),
        "frequency_penalty": maybe(0.0, -1.0, 0.7), "repeat_last_n": int(rng.choice([-1, 0, 5])),
        "bad_word_ids": maybe([], [[3], [1, 2]]), "logit_bias": maybe(None, {4: 3.0, 9: -5.0}),
        "allowed_token_ids": maybe(None, sorted(rng.choice(VOCAB, 60, replace=False).tolist())),
        "seed": int(rng.integers(1000)), "max_tokens": None, "logprobs": maybe(None, 3),
    }  # fmt: skip
    if rng.random() < 0.5:
        fields["samplers"] = rng.permutation(list(NAMES)).tolist()
    return fields


def test_native_samplers_draw_what_the_definition_draws(program: CpuProgram) -> None:
    rng = np.random.default_rng(0)
    used: set[int] = set()
    for _ in range(60):
        batch = eight_rows(rng)
        result = program.run(batch).result()
        scored = np.maximum(batch.sampling.num_top, 0)  # so that the logits of all rows are stored
        program.run(batch._replace(sampling=batch.sampling._replace(num_top=scored)))
        x = program.logits().copy()
        expected = sample(x, batch.sampling)
        used |= set(batch.sampling.chain_ops.tolist())
        assert not result.invalid.any() and not expected.invalid.any()
        np.testing.assert_array_equal(result.ranks[result.logprobs != 0], expected.ranks[result.logprobs != 0])
        for r, row in enumerate(rows_of(batch.sampling)):
            if result.token_ids[r] != expected.token_ids[r]:
                assert_nearly_tied(x[r], row, int(result.token_ids[r]), int(expected.token_ids[r]))
    assert used == set(Op)


def assert_nearly_tied(x: F32, row: Row, native: int, numpy: int) -> None:
    assert row.chain, "the usual path is held to its own test"
    ids, y = by_chain(x, row)
    places = [ids.tolist().index(token) for token in (native, numpy)]
    sums = (y - y.max()).astype(np.float64)[places] + gumbel(row.noise_key, row.position, ids[places])
    assert abs(sums[0] - sums[1]) < 1e-4


def eight_rows(rng: np.random.Generator) -> StepBatch:
    builder = BatchBuilder(Limits(64, 64, 8, 64), 1)
    works = []
    for slot in range(8):
        made = Request(
            str(slot), 0, rng.integers(0, 6, 8).tolist(), SamplingParams(**random_row(rng)), int(rng.integers(99))
        )
        made.tables = [[slot]]
        works.append(Work(made, slot, 0, 8, 8, 0, True))
    return builder.build(Step(works, [[]]))


def test_a_mask_may_be_narrower_than_the_vocabulary_but_not_wider(program: CpuProgram) -> None:
    batch = make_step([([1, 2, 3], 0, [0])])
    words = np.zeros((2, 2), np.uint32)
    words[1, 1] = 1 << 5  # token 37
    sampling = batch.sampling._replace(masks=words, mask_rows=np.array([1], np.int32))
    assert program.run(batch._replace(sampling=sampling)).result().token_ids.tolist() == [37]
    nothing = sampling._replace(mask_rows=np.array([0], np.int32))
    assert program.run(batch._replace(sampling=nothing)).result().invalid.all()
    wrong: tuple[tuple[str, Any, str], ...] = (
        ("mask_rows", np.array([2], np.int32), r"mask_rows\[0\] is 2"),
        ("masks", np.zeros((2, 17), np.uint32), r"masks: columns\[0\] is 17"),
        ("chain_starts", np.array([0, 1], np.int32), r"chain_starts\[1\] is 1"),
        ("dry_starts", np.array([0, 1], np.int32), r"dry_starts\[1\] is 1"),
    )
    for field, value, message in wrong:
        with pytest.raises(ValueError, match=message):
            program.run(batch._replace(sampling=sampling._replace(**{field: value})))
    one: dict[str, Any] = {"chain_starts": np.array([0, 1], np.int32), "chain_values": np.zeros((1, 2), np.float32)}
    bad = sampling._replace(chain_ops=np.array([9], np.int32), **one)
    with pytest.raises(ValueError, match=r"chain_ops\[0\] is 9"):
        program.run(batch._replace(sampling=bad))
