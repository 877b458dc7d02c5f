"""The meaning of the operations of mixtures of experts, in numpy (conventions of reference_ops).

E experts, k of them for each of n rows. routing is float32 [n, 2k]: expert ids, then weights.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.backends import reference_ops as meaning
from octavo.graph import ops

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
Ids = NDArray[np.intp]


def route(scores: F32, bias: F32 | None, a: ops.Route) -> F32:
    """scores [n, E], bias [1, E] -> routing [n, 2k]. NaN counts as the lowest score when experts are chosen."""
    if a.scoring == "sparse_mixer":
        return _sparse_mixer(scores, a)
    wide = scores.astype(np.float64)
    p = _softmax(wide) if a.scoring == "softmax" else _sigmoid(wide) if a.scoring == "sigmoid" else wide
    choice = p if bias is None else p + bias
    choice = np.where(np.isnan(choice), -np.inf, choice)
    if a.groups > 1:
        grouped = choice.reshape(len(choice), a.groups, -1)
        best = np.sort(grouped, axis=2)[:, :, -a.group_best :].sum(axis=2)
        kept = np.zeros((*best.shape, 1), bool)
        np.put_along_axis(kept[..., 0], _greatest(best, a.top_groups), True, axis=1)
        choice = np.where(kept, grouped, -np.inf).reshape(choice.shape)
    ids = _greatest(choice, a.top_k)
    weights = np.take_along_axis(p, ids, axis=1)
    if a.scoring == "softmax_top":
        weights = _softmax(weights)
    if a.normalise:
        weights = weights / (weights.sum(axis=1, keepdims=True) + 1e-20)
    return np.concatenate([ids, weights * a.scale], axis=1).astype(np.float32)


def order(routing: F32) -> Ids:
    """row * k + rank of each dispatched row: by expert, then by row."""
    k = routing.shape[1] // 2
    return np.argsort(routing[:, :k].astype(np.intp).ravel(), kind="stable")


def of_rows(routing: F32) -> Ids:
    """The expert of each dispatched row."""
    return np.sort(routing[:, : routing.shape[1] // 2].astype(np.intp), axis=None)


def gather_cols(x: F32, routing: F32, columns: F32) -> F32:
    """x [k*n, K], columns [1, E*K] -> [k*n, K]."""
    of_expert = columns.reshape(-1, x.shape[1]).astype(np.intp)
    return np.take_along_axis(x, of_expert[of_rows(routing)], axis=1)


def linear(x: NDArray[Any], routing: F32, weights: list[list[F32]], bias: F32 | None) -> F32:
    """x [k*n, K], weights of each expert [N_i, K], bias [1, E*N] -> [k*n, sum N_i]."""
    expert = of_rows(routing)
    cols = sum(len(w) for w in weights[0])
    y = np.empty((len(x), cols), np.float32)
    for e in np.unique(expert):
        rows = np.flatnonzero(expert == e)
        y[rows] = meaning.linear(x[rows], weights[e], None if bias is None else bias[:, e * cols : (e + 1) * cols])
    return y


def combine(x: F32, routing: F32) -> F32:
    """x [k*n, H] -> [n, H]."""
    k = routing.shape[1] // 2
    by_rank = np.empty_like(x)
    by_rank[order(routing)] = x
    wide = by_rank.reshape(len(routing), k, -1).astype(np.float64)
    return np.asarray((wide * routing[:, k:, None]).sum(axis=1), np.float32)


def _greatest(x: F64, count: int) -> Ids:
    """Of each row the places of the greatest, in descending order, equal ones in ascending order of place."""
    return np.argsort(-x, axis=1, kind="stable")[:, :count]


def _softmax(x: F64) -> F64:
    e = np.exp(x - x.max(axis=1, keepdims=True))
    return np.asarray(e / e.sum(axis=1, keepdims=True))


def _sigmoid(x: F64) -> F64:
    return np.asarray(1 / (1 + np.exp(-x)))


def _sparse_mixer(scores: F32, a: ops.Route) -> F32:
    left = np.where(np.isnan(scores), -np.inf, scores).astype(np.float64)
    ids, weights = [], []
    for _ in range(a.top_k):
        best = _greatest(left, 1)
        top = np.take_along_axis(left, best, axis=1)
        far = (top - scores) / np.maximum(np.abs(scores), top) > 2 * a.jitter
        p = _softmax(np.where(far, -np.inf, left))
        ids.append(best)
        weights.append(np.take_along_axis(p, best, axis=1) * a.scale)
        np.put_along_axis(left, best, -np.inf, axis=1)
    return np.concatenate(ids + weights, axis=1).astype(np.float32)
