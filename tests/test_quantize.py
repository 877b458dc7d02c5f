"""Quantising a matrix: what grids hold, what the formats' bytes mean, and that GPTQ does better than rounding."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from octavo.quantize import compressed
from octavo.quantize.blocks import FORMATS
from octavo.quantize.convert import Fit, Method, quantise
from octavo.quantize.fit import fit_range, fit_scale
from octavo.quantize.gptq import gptq, importance
from octavo.quantize.grid import F32, Grid, nearest_in
from octavo.weights.formats import BLOCKS, dequantise, row_bytes

COLS = 256


def weights(rows: int = 24, cols: int = COLS, seed: int = 0) -> F32:
    """Rows of zeros, of one value, with an outlier, tiny and huge, and plain ones."""
    rng = np.random.default_rng(seed)
    w = rng.standard_normal((rows, cols)).astype(np.float32) * np.float32(0.05)
    w[0], w[1], w[2, 7], w[3], w[4] = 0, 0.25, 9.0, w[3] * 1e-6, w[4] * 1e4
    w[5, :64], w[6] = 0, np.abs(w[6])
    return w


def inputs(cols: int = COLS, count: int = 800) -> F32:
    """Correlated, of different sizes, as those of a linear are."""
    rng = np.random.default_rng(1)
    mix = np.eye(cols) + rng.standard_normal((cols, cols)) / cols**0.5
    x = rng.standard_normal((count, cols)) @ mix * np.exp(rng.standard_normal(cols))
    return x.astype(np.float32)


def ones(cols: int = COLS) -> F32:
    return np.ones(cols, np.float32)


@pytest.mark.parametrize("name", FORMATS)
def test_bytes_of_blocks_mean_their_codes(name: str) -> None:
    """By our definition of the format and by the gguf library's."""
    form, w = FORMATS[name], weights()
    grid = form.fit(w, ones())
    rng = np.random.default_rng(2)
    for codes in (grid.round(w), rng.integers(grid.low, grid.high + 1, w.shape).astype(np.int16)):
        data = form.encode(grid, codes)
        assert data.shape == (len(w), row_bytes(name, COLS)) and form.cols == BLOCKS[name][0]
        values, own = dequantise(name, data, COLS), grid.values(codes)
        np.testing.assert_allclose(values, own, rtol=1e-6, atol=1e-6 * np.abs(own).max(axis=1).max())
        kind = gguf.GGMLQuantizationType[name]
        np.testing.assert_allclose(gguf.dequantize(data, kind), values, rtol=1e-6, atol=1e-9)


BITS = {"Q2_K": 2, "Q3_K": 3, "Q4_0": 4, "Q4_1": 4, "Q4_K": 4, "IQ4_NL": 4, "IQ4_XS": 4, "Q5_0": 5, "Q5_1": 5, "Q5_K": 5,
        "Q6_K": 6, "Q8_0": 8}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_error_of_blocks(name: str) -> None:
    """Of Gaussian weights: under that of a plain grid over +-3.2 standard deviations."""
    w = np.random.default_rng(3).standard_normal((64, COLS)).astype(np.float32)
    grid = FORMATS[name].fit(w, ones())
    error = np.sqrt(np.square(grid.values(grid.round(w)) - w).mean())
    assert error < 6.4 / 2 ** BITS[name] / 12**0.5


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_error_is_under_that_of_the_library(name: str) -> None:
    w, kind = weights(seed=4)[7:], gguf.GGMLQuantizationType[name]
    grid = FORMATS[name].fit(w, ones())
    own = np.square(grid.values(grid.round(w)) - w).sum()
    assert own < np.square(gguf.dequantize(gguf.quantize(w, kind), kind) - w).sum()


def test_scales_are_solved_exactly() -> None:
    """Weights on a grid are found again."""
    rng = np.random.default_rng(5)
    codes = rng.integers(-8, 8, (50, 32)).astype(np.float32)
    codes[:, 0] = -8
    scale = rng.uniform(-2, 2, (50, 1)).astype(np.float32)
    np.testing.assert_allclose(fit_scale(codes * scale, ones(32), -8, 7, signed=True), scale[:, 0], rtol=1e-5)
    codes = rng.integers(0, 16, (50, 32)).astype(np.float32)
    codes[:, :2] = 0, 15
    scale, offset = np.abs(scale), rng.uniform(-9, 9, (50, 1)).astype(np.float32)
    found = fit_range(codes * scale + offset, ones(32), 16, below_zero=False)
    np.testing.assert_allclose(found[0], scale[:, 0], rtol=1e-4)
    np.testing.assert_allclose(found[1], offset[:, 0], rtol=1e-3, atol=1e-4)


def test_importance_is_minded() -> None:
    """A weight that counts for nothing may be wrong."""
    x = np.array([[0.1, -0.2, 0.3, 5.0]], np.float32)
    plain, heeded = (fit_scale(x, np.array(w, np.float32), -8, 7, False)[0] for w in ([1, 1, 1, 1], [1, 1, 1, 0]))
    grids = [Grid(np.full((1, 1), scale, np.float32), -8, 7) for scale in (plain, heeded)]
    errors = [np.square((grid.values(grid.round(x)) - x)[0, :3]).sum() for grid in grids]
    assert errors[1] <= errors[0]


def test_nearest_of_a_table() -> None:
    table = np.array([-3, -1, 0, 2], np.float32)
    x = np.array([[-9, -2, -1.9, 0.9, 1.1, 7]], np.float32)
    np.testing.assert_array_equal(nearest_in(table, x), [[0, 0, 1, 2, 3, 3]])


# ---- GPTQ


def compressed_fit(**changes: object) -> Fit:
    form = compressed.FORMATS["w4a16"]._replace(**changes)  # type: ignore[arg-type]
    return lambda w, costs: form.fit(w, costs, "BF16")


GRIDS: dict[str, Fit] = {
    "w4a16": compressed_fit(),
    "w4a16 with zero points": compressed_fit(group=64, symmetric=False),
    "w8a16": compressed_fit(bits=8, group=None),
    **{name: FORMATS[name].fit for name in ("Q4_0", "Q4_1", "Q2_K", "Q4_K", "IQ4_NL")},
}


@pytest.mark.parametrize("name", GRIDS)
def test_gptq_changes_outputs_less(name: str) -> None:
    w, x = weights()[7:], inputs()
    hessian = x.T @ x
    nearest = quantise(w, GRIDS[name], None, Method())
    in_order, by_size = (quantise(w, GRIDS[name], hessian, Method(act_order=order)) for order in (False, True))

    def error(found: tuple[Grid, np.ndarray]) -> float:
        return float(np.square(x @ (found[0].values(found[1]) - w).T).sum())

    assert error(by_size) < 0.8 * error(nearest) and error(in_order) < 0.8 * error(nearest)
    assert by_size[1].min() >= by_size[0].low and by_size[1].max() <= by_size[0].high


def test_gptq_of_uncorrelated_inputs_rounds() -> None:
    """Nothing can make up for an error then."""
    w = weights()[7:]
    grid = FORMATS["Q4_0"].fit(w, ones())
    np.testing.assert_array_equal(gptq(w, np.eye(COLS, dtype=np.float32) * 3, grid), grid.round(w))


def test_gptq_follows_its_definition() -> None:
    """Column by column with the inverse of what is left of the Hessian (equations 2 and 3 of the paper), in float64."""
    w, x = weights(cols=96)[7:12], inputs(96)
    hessian = x.T @ x
    grid = FORMATS["Q4_1"].fit(w, ones(96))
    h = hessian.astype(np.float64) + np.eye(96) * 0.01 * np.diag(hessian).mean()
    left, codes = w.astype(np.float64), np.empty(w.shape, np.int16)
    for i in range(96):
        rest = np.linalg.inv(h[i:, i:])
        assert grid.offset is not None
        codes[:, i], values = grid.nearest(
            left[:, i].astype(np.float32), grid.scale[:, i // 32], grid.offset[:, i // 32]
        )
        left[:, i:] -= np.outer((left[:, i] - values) / rest[0, 0], rest[0])
    same = (gptq(w, hessian, grid, act_order=False, damping=0.01) == codes).mean()
    assert same > 0.98  # float32 here and there puts a weight on the other side of a boundary


def test_columns_that_calibration_never_saw() -> None:
    w, x = weights()[7:], inputs()
    x[:, ::3] = 0
    grid = FORMATS["Q4_0"].fit(w, importance(x.T @ x))
    codes = gptq(w, x.T @ x, grid)
    np.testing.assert_array_equal(codes[:, ::3], grid.round(w)[:, ::3])
    assert (importance(np.zeros((4, 4), np.float32)) == 1).all()
    np.testing.assert_array_equal(gptq(w, np.zeros((COLS, COLS), np.float32), grid), grid.round(w))


def test_matrices_are_fitted_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    w = weights()
    whole = quantise(w, FORMATS["Q4_K"].fit, None, Method())
    monkeypatch.setattr("octavo.quantize.convert._AT_ONCE", 5 * COLS)
    pieces = quantise(w, FORMATS["Q4_K"].fit, None, Method(num_threads=2))
    np.testing.assert_array_equal(whole[1], pieces[1])
    np.testing.assert_array_equal(*(FORMATS["Q4_K"].encode(*found) for found in (whole, pieces)))
