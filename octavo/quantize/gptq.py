"""GPTQ (Frantar et al. 2022): rounding column by column, each error carried into the columns still to come.

Grids are fitted before, to the weights as they are and with the diagonal of the Hessian as importance, so that the order
of the columns is free: those with the largest inputs first ("act-order"), without an order in the file.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octavo.quantize.grid import F32, I16, Grid

BLOCK = 128
"""Columns after which the rest of the matrix learns of their errors, in one product."""

F64 = NDArray[np.float64]


def importance(hessian: F32) -> F32:
    """[K]: what an error of a column costs, with a floor so that columns which calibration never saw count a little."""
    diagonal = np.diag(hessian).astype(np.float32)
    mean = float(diagonal.mean())
    return np.maximum(diagonal, np.float32(1e-3 * mean)) if mean > 0 else np.ones_like(diagonal)


def gptq(w: F32, hessian: F32, grid: Grid, act_order: bool = True, damping: float = 0.1) -> I16:
    """Codes [N, K] of w [N, K] such that the outputs, not the weights, change little.

    hessian [K, K]: the sum of x x^T over inputs x, in any scale. damping: part of its mean diagonal that is added to it;
    a tenth, not the paper's hundredth, since a few thousand tokens say little of directions that are rare in them.
    """
    cols = w.shape[1]
    diagonal = np.diag(hessian)
    order = np.argsort(-diagonal, kind="stable") if act_order else np.arange(cols)
    factor = _inverse_factor(hessian[np.ix_(order, order)], damping)
    left = np.ascontiguousarray(w[:, order].T)  # [K, N]: a column of weights lies together
    group = order // (cols // grid.scale.shape[1])
    scale = np.ascontiguousarray(grid.scale.T)
    offset = None if grid.offset is None else np.ascontiguousarray(grid.offset.T)
    codes = np.empty((cols, len(w)), np.int16)
    for start in range(0, cols, BLOCK):
        stop = min(start + BLOCK, cols)
        errors = np.empty((stop - start, len(w)), np.float32)
        for i in range(start, stop):
            of_group = None if offset is None else offset[group[i]]
            codes[order[i]], values = grid.nearest(left[i], scale[group[i]], of_group)
            error = errors[i - start]
            np.divide(left[i] - values, factor[i, i], out=error)
            left[i + 1 : stop] -= np.outer(factor[i, i + 1 : stop], error)
        left[stop:] -= factor[start:stop, stop:].T @ errors
    return np.ascontiguousarray(codes.T)


def _inverse_factor(hessian: F32, damping: float) -> F32:
    """Upper triangular U with U^T U = H^-1, H damped. Of H = R R^T, R upper triangular, it is R^-1."""
    h: F64 = hessian.astype(np.float64)
    diagonal = np.diag(h).copy()
    mean = diagonal.mean()
    damped = diagonal + damping * mean if mean > 0 else np.ones_like(diagonal)
    h[np.diag_indices_from(h)] = damped
    lower = np.linalg.cholesky(h[::-1, ::-1])
    return np.linalg.inv(lower[::-1, ::-1]).astype(np.float32)
