"""Mixtures of experts: the reference against a token at a time, routing by every rule, weights in every layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from octavo.backends import reference_experts as meaning
from octavo.graph import ops

RNG = np.random.default_rng(0)


def softmax(x: Any) -> Any:
    e = np.exp(x - x.max())
    return e / e.sum()


def chosen(row: Any, a: ops.Route, bias: Any) -> list[tuple[int, float]]:
    """The experts of one token and their weights, written again from the papers."""
    row = row.astype(np.float64)
    p = {"softmax": softmax(row), "sigmoid": 1 / (1 + np.exp(-row)), "softmax_top": row}[a.scoring]
    preferred = p + bias
    size = len(row) // a.groups
    groups = [sorted(preferred[g * size : (g + 1) * size])[-a.group_best :] for g in range(a.groups)]
    best = sorted(range(a.groups), key=lambda g: (-sum(groups[g]), g))[: a.top_groups]
    allowed = [i for i in range(len(row)) if i // size in best]
    ids = sorted(allowed, key=lambda i: (-preferred[i], i))[: a.top_k]
    weights = softmax(row[ids]) if a.scoring == "softmax_top" else p[ids]
    if a.normalise:
        weights = weights / weights.sum()
    return list(zip(ids, weights * a.scale, strict=True))


ROUTES = [
    ops.Route(2),
    ops.Route(1, "softmax", normalise=True),
    ops.Route(8, "softmax", normalise=True, scale=2.5),
    ops.Route(3, "softmax_top"),
    ops.Route(2, "sigmoid", normalise=True, scale=1.5),
    ops.Route(3, "sigmoid", True, 2.5, groups=4, top_groups=2, group_best=2),
    ops.Route(3, "softmax", False, 16.0, groups=4, top_groups=3, group_best=1),
]


@pytest.mark.parametrize("a", ROUTES)
@pytest.mark.parametrize("biased", [False, True])
def test_routes_are_those_of_one_token_at_a_time(a: ops.Route, biased: bool) -> None:
    scores = RNG.standard_normal((20, 8)).astype(np.float32)
    bias = RNG.standard_normal((1, 8)).astype(np.float32) if biased else None
    routing = meaning.route(scores, bias, a)
    for row, got in zip(scores, routing, strict=True):
        want = chosen(row, a, 0 if bias is None else bias[0])
        assert [int(i) for i in got[: a.top_k]] == [i for i, _ in want]
        np.testing.assert_allclose(got[a.top_k :], [w for _, w in want], rtol=1e-6)


def test_equal_scores_go_to_the_lowest_expert_and_nan_to_nobody() -> None:
    scores = np.array([[1, 3, 3, 0], [2, 2, 2, 2], [np.nan, 0, 5, 5]], np.float32)
    assert meaning.route(scores, None, ops.Route(2))[:, :2].tolist() == [[1, 2], [0, 1], [0, 1]]
    assert meaning.route(scores[2:], None, ops.Route(2, "softmax_top"))[:, :2].tolist() == [[2, 3]]


def test_sparse_mixer_weighs_among_those_near_the_top() -> None:
    """Scores within 2 jitter of the top, relative to the greater magnitude, share its weight; once for each of two."""
    routing = meaning.route(
        np.array([[1.0, 0.99, 0.5, -3.0]], np.float32), None, ops.Route(2, "sparse_mixer", jitter=0.01)
    )
    assert routing[0, :2].tolist() == [0, 1]
    np.testing.assert_allclose(routing[0, 2:], [softmax(np.array([1.0, 0.99]))[0], 1.0], rtol=1e-6)


def test_experts_of_each_token_alone() -> None:
    """Dispatch, linear and combine give what each token's experts give it, weighted."""
    n, k, experts, inner, cols = 9, 2, 5, 3, 4
    ids = np.array([RNG.permutation([0, 1, 3, 4])[:k] for _ in range(n)])  # nobody goes to expert 2
    weights = RNG.standard_normal((n, k)).astype(np.float32)
    routing = np.concatenate([ids, weights], axis=1).astype(np.float32)
    x = RNG.standard_normal((n, inner)).astype(np.float32)
    w = RNG.standard_normal((experts, cols, inner)).astype(np.float32)
    bias = RNG.standard_normal((experts, cols)).astype(np.float32)
    dispatched = x[meaning.order(routing) // k]
    y = meaning.linear(dispatched, routing, [[m[:1], m[1:]] for m in w], bias.reshape(1, -1))
    want = [sum(weights[t, r] * (w[e] @ x[t] + bias[e]) for r, e in enumerate(ids[t])) for t in range(n)]
    np.testing.assert_allclose(meaning.combine(y, routing), want, rtol=1e-4, atol=1e-5)
