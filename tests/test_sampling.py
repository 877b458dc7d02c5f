"""The definition of sampling: noise of good quality, exact truncation, and the order of the steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from octavo.backends.base import SamplingArrays
from octavo.request import ParameterError, SamplingParams
from octavo.sampling.definition import (
    Row,
    biased,
    draw,
    gumbel,
    kept,
    noise_bits,
    noise_key,
    penalized,
    sample,
    sample_row,
)

IDS = np.arange(4096)

GOLDEN_KEY = 12274428000360223401
GOLDEN_BITS: list[tuple[int, int, list[int], list[int]]] = [
    (0, 0, [0, 1, 49151], [2102044300, 299490486, 814782582]),
    (GOLDEN_KEY, 7, [0, 1, 49151], [1035484563, 1695044734, 2000135309]),
    (2**64 - 1, 2**31 - 1, [2**18], [933647129]),
]


def logits(n: int, seed: int = 0, sigma: float = 3.0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(0, sigma, n).astype(np.float32)


def chi_square_is_plausible(counts: NDArray[np.int64]) -> bool:
    """Within five standard deviations of its mean, k - 1, for equal probabilities."""
    expected = counts.sum() / counts.size
    chi = float(((counts - expected) ** 2 / expected).sum())
    return bool(abs(chi - (counts.size - 1)) < 5 * np.sqrt(2 * (counts.size - 1)))


def test_noise_is_the_one_the_kernels_make() -> None:
    """The same numbers are in native/tests/test_sampler.cpp: results of requests must never change by accident."""
    assert noise_key(42, 0) == GOLDEN_KEY
    assert noise_key(-1, 3) == noise_key(2**64 - 1, 3)
    for key, position, ids, bits in GOLDEN_BITS:
        assert noise_bits(key, position, np.array(ids)).tolist() == bits


def test_noise_is_uniform_over_tokens_positions_and_keys() -> None:
    by_token = noise_bits(noise_key(1, 0), 5, np.arange(1 << 16))
    by_position = np.array([noise_bits(noise_key(1, 0), p, IDS[:16]) for p in range(4096)])
    by_key = np.array([noise_bits(noise_key(s, c), 5, IDS[:16]) for s in range(1024) for c in range(4)])
    by_token_high = noise_bits(noise_key(1, 0), 5, np.arange(1 << 16) << 14)
    for bits in (by_token, by_position.ravel(), by_key.ravel(), by_token_high):
        for shift in (0, 8, 16, 23):
            assert chi_square_is_plausible(np.bincount((bits >> np.uint32(shift)) & 255, minlength=256))


@pytest.mark.parametrize("step", [1, 2, 3, 16, 64, 1000])
def test_noise_of_neighbours_is_independent(step: int) -> None:
    """Pairs of neighbouring tokens, positions, choices and seeds fill a 16 x 16 table evenly."""
    tokens = noise_bits(noise_key(3, 0), 9, np.arange(1 << 15))
    pairs = [(tokens[:-step], tokens[step:])]
    n = 512
    for other in (
        [noise_bits(noise_key(3, 0), 9 + p * step, IDS[:64]) for p in range(n + 1)],
        [noise_bits(noise_key(3, c * step), 9, IDS[:64]) for c in range(n + 1)],
        [noise_bits(noise_key(s * step, 0), 9, IDS[:64]) for s in range(n + 1)],
    ):
        rows = np.array(other)
        pairs.append((rows[:-1].ravel(), rows[1:].ravel()))
    for a, b in pairs:
        cells = (a >> np.uint32(27)).astype(np.int64) * 16 + (b >> np.uint32(27))
        assert chi_square_is_plausible(np.bincount(cells, minlength=256))


def test_gumbel_moments_and_tail() -> None:
    g = gumbel(noise_key(0, 0), 0, np.arange(1 << 17))
    deviation = np.pi / np.sqrt(6)
    assert abs(g.mean() - np.euler_gamma) < 5 * deviation / np.sqrt(g.size)
    assert abs(g.std() - deviation) < 0.02
    assert g.max() < 22.2 and np.isfinite(g).all()
    above = (g > 8).sum()  # P = 1 - exp(-exp(-8))
    expected = g.size * -np.expm1(-np.exp(-8.0))
    assert abs(above - expected) < 5 * np.sqrt(expected)


def test_draws_follow_the_distribution() -> None:
    x = np.log(np.array([0.5, 0.25, 0.125, 0.0625, 0.0625], np.float32))
    n = 6000
    counts = np.zeros(5)
    for i in range(n):
        counts[draw(x, Row(noise_key=noise_key(i // 100, 0), position=i % 100))] += 1
    p = np.exp(x.astype(np.float64))
    assert (np.abs(counts - n * p) < 5 * np.sqrt(n * p * (1 - p))).all()


def test_a_draw_depends_on_key_and_position_alone() -> None:
    x = logits(500)
    row = Row(noise_key=7, position=3)
    assert draw(x, row) == draw(x.copy(), row._replace(num_top=4))
    others = {draw(x, row._replace(position=p)) for p in range(20)}
    assert len(others) > 5
    assert len({draw(x, row._replace(noise_key=noise_key(1, c))) for c in range(20)}) > 5


def test_greedy_takes_the_lowest_id_of_the_best_and_equals_top_k_one() -> None:
    x = logits(100)
    x[[40, 60]] = x.max() + 1
    for row in (Row(temperature=0), Row(temperature=2, top_k=1), Row(temperature=0, top_p=0.1, top_k=3)):
        assert draw(x, row) == 40


@pytest.mark.parametrize("seed", range(20))
def test_truncation_keeps_what_its_words_say(seed: int) -> None:
    """Against sets made directly from probabilities, ties to the lowest id."""
    rng = np.random.default_rng(seed)
    x = (np.round(logits(200, seed) * 4) / 4).astype(np.float32)  # ties
    row = Row(
        temperature=float(rng.choice([0.5, 1, 2])),
        top_k=int(rng.choice([0, 1, 5, 50, 500])),
        top_p=float(rng.choice([1.0, 0.9, 0.3])),
        min_p=float(rng.choice([0, 0.05, 0.5])),
    )
    ids = sorted(range(200), key=lambda i: (-x[i], i))
    if row.top_k:
        ids = ids[: row.top_k]
    p = np.exp(x.astype(np.float64) / row.temperature)
    ids = [i for i in ids if p[i] >= row.min_p * p.max() * (1 - 1e-6)]
    if row.top_p < 1:
        share = np.cumsum(p[ids]) / p[ids].sum()
        ids = ids[: int((share < row.top_p - 1e-9).sum()) + 1]
    assert kept(x, row).tolist() == ids


def test_minus_infinity_is_never_drawn() -> None:
    x = np.full(50, -np.inf, np.float32)
    x[[3, 30]] = [0, -50]
    for row in (Row(temperature=100, position=p) for p in range(50)):
        assert draw(x, row) in (3, 30)
    assert kept(x, Row(top_k=10)).tolist() == [3, 30]


def test_tiny_temperature_is_greedy() -> None:
    x = logits(1000)
    for temperature in (1e-6, 1e-35):
        assert all(draw(x, Row(temperature=temperature, position=p)) == int(x.argmax()) for p in range(10))


def test_bias_and_penalties() -> None:
    x = np.array([2, -2, 1, 0.5], np.float32)
    row = Row(repetition=2, presence=0.25, frequency=0.5, bias=((3, 1.5), (3, 1.0)), history=((0, 0), (1, 3), (3, 1)))
    assert penalized(biased(x, row), row).tolist() == [1, -4 - 0.25 - 1.5, 1, 3 / 2 - 0.25 - 0.5]
    assert x.tolist() == [2, -2, 1, 0.5]


def test_scores_are_of_the_unmodified_logits() -> None:
    x = logits(300)
    best = int(x.argmax())
    drawn = sample_row(x, Row(temperature=0, num_top=3, bias=((best, -np.inf),)))
    probabilities = np.exp(x.astype(np.float64)) / np.exp(x.astype(np.float64)).sum()
    order = np.argsort(-x, kind="stable")
    assert drawn.token_id == order[1] and drawn.rank == 2
    assert drawn.top_ids == order[:3].tolist()
    np.testing.assert_allclose(drawn.top_logprobs, np.log(probabilities[order[:3]]), rtol=1e-6)
    assert drawn.logprob == drawn.top_logprobs[1]


def test_a_target_is_scored_and_nothing_drawn() -> None:
    x = logits(300)
    drawn = sample_row(x, Row(target=17, num_top=0, bias=((17, -np.inf),)))
    assert drawn.token_id == 17 and drawn.top_ids == []
    assert drawn.rank == 1 + int((x > x[17]).sum())


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_bad_row_is_invalid_and_its_neighbours_are_not(value: float) -> None:
    x = np.stack([logits(40, s) for s in range(3)])
    x[1, 5] = value
    out = sample(x, arrays(3))
    assert out.invalid.tolist() == [False, True, False]
    assert out.token_ids[0] == sample_row(x[0], Row(num_top=2)).token_id
    assert sample_row(np.full(4, -np.inf, np.float32), Row()).invalid
    assert sample_row(logits(2), Row(bias=((0, -np.inf), (1, -np.inf)))).invalid


def arrays(rows: int) -> SimpleNamespace:
    """Sampling arrays with default parameters, and lists for row 1."""
    return SimpleNamespace(
        temperature=np.ones(rows, np.float32),
        top_k=np.zeros(rows, np.int32),
        top_p=np.ones(rows, np.float32),
        min_p=np.zeros(rows, np.float32),
        repetition=np.ones(rows, np.float32),
        presence=np.full(rows, 0.5, np.float32),
        frequency=np.zeros(rows, np.float32),
        noise_key=np.zeros(rows, np.uint64),
        position=np.zeros(rows, np.int32),
        num_top=np.arange(2, 2 - rows, -1, dtype=np.int32),
        target=np.full(rows, -1, np.int32),
        bias_starts=np.array([0, 0] + [2] * (rows - 1), np.int32),
        bias_ids=np.array([3, 4], np.int32),
        bias_values=np.array([5, -5], np.float32),
        history_starts=np.array([0, 0] + [1] * (rows - 1), np.int32),
        history_ids=np.array([2], np.int32),
        history_counts=np.array([4], np.int32),
        **SamplingArrays.extras(rows),
    )


def test_arrays_give_each_row_its_own_parameters() -> None:
    x = np.stack([logits(40, s) for s in range(3)])
    out = sample(x, arrays(3))
    expected = [
        sample_row(x[0], Row(presence=0.5, num_top=2)),
        sample_row(x[1], Row(presence=0.5, num_top=1, bias=((3, 5.0), (4, -5.0)), history=((2, 4),))),
        sample_row(x[2], Row(presence=0.5, num_top=0)),
    ]
    assert out.token_ids.tolist() == [d.token_id for d in expected]
    assert out.ranks.tolist() == [d.rank for d in expected]
    assert out.top_ids.shape == (3, 2)
    assert out.top_ids[0].tolist() == expected[0].top_ids and out.top_ids[1, 0] == expected[1].top_ids[0]


WRONG: list[tuple[str, Any]] = [
    ("temperature", "x"), ("temperature", None), ("n", 1.5), ("n", True), ("n", None), ("max_tokens", 1.5), ("max_tokens", "5"),
    ("top_k", 1.5), ("seed", 1.5), ("logprobs", 1.5), ("min_tokens", None), ("stop", 5), ("stop", [5]),
    ("stop_token_ids", 5), ("stop_token_ids", ["a"]), ("logit_bias", [1]), ("logit_bias", {"a": 1}), ("logit_bias", {1: None}),
    ("ignore_eos", "x"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_values_of_another_kind_are_refused_by_name(name: str, value: Any) -> None:
    """Before they reach the engine, which they would stop in the middle of a step."""
    with pytest.raises(ParameterError, match=f"^{name} must ") as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


def test_values_as_good_as_their_fields() -> None:
    given: Any = {"n": np.int64(2), "temperature": np.float32(0.5), "stop": ("a", "b"), "stop_token_ids": None}
    assert SamplingParams(**given) == SamplingParams(n=2, temperature=0.5, stop=["a", "b"])
    assert type(SamplingParams(**given).n) is int
