"""compressed-tensors (what llm-compressor writes, and transformers, vLLM and this package read): integers and FP8.

The layout is that of weights.quant.compressed_tensors, from the writing side. N rows, K columns, G groups of a row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.quantize.directory import Tensor
from octavo.quantize.fit import fit_range, fit_scale
from octavo.quantize.grid import F32, I16, Grid
from octavo.weights.formats.codes import E4M3
from octavo.weights.formats.numbers import bf16_to_f32, f32_to_bf16

_FINITE = E4M3[np.isfinite(E4M3)]
FP8_VALUES: F32 = np.unique(_FINITE)
"""Ascending, one zero."""
_FP8_CODES = np.array([int(np.flatnonzero(value == E4M3)[0]) for value in FP8_VALUES], np.uint8)
_FP8_MOST = float(FP8_VALUES[-1])


class CompressedFormat(NamedTuple):
    name: str
    layout: str  # compressed-tensors' name of it
    bits: int
    group: int | None  # columns that share a scale; None: the whole row
    symmetric: bool = True
    kind: str = "int"
    rounded_inputs: bool = False  # activations are rounded as the weights are, token by token

    def fit(self, w: F32, importance: F32, scale_type: str) -> Grid:
        """scale_type: that of the checkpoint's weights; scales have it in the file."""
        size = self.group or w.shape[1]
        x, weights = w.reshape(len(w), -1, size), importance.reshape(1, -1, size)
        low, high = -(2 ** (self.bits - 1)), 2 ** (self.bits - 1) - 1
        if self.kind == "float":
            scale = _kept_scale(np.abs(x).max(axis=-1) / np.float32(_FP8_MOST), scale_type)
            return Grid(scale, 0, len(FP8_VALUES) - 1, table=FP8_VALUES)
        if self.symmetric:
            return Grid(_kept_scale(fit_scale(x, weights, low, high, signed=False), scale_type), low, high)
        # As the offset of the codes, a zero point is within their range: the range of every group has 0 in it.
        with_zero = np.concatenate([x, np.zeros((*x.shape[:2], 1), np.float32)], axis=-1)
        none = np.zeros((1, weights.shape[1], 1), np.float32)
        scale, offset = fit_range(with_zero, np.concatenate([weights, none], axis=-1), high - low + 1, below_zero=True)
        scale = _kept_scale(scale, scale_type)
        steps = np.divide(-offset, scale, out=np.zeros_like(scale), where=scale > 0)
        zero = np.clip(np.rint(steps), 0, high - low).astype(np.float32)
        # Codes from 0 on; in the file both they and the zero points are less by half of the range.
        return Grid(scale, 0, high - low, offset=-zero * scale, stored={"zero": zero.astype(np.int16)})

    def tensors(self, module: str, grid: Grid, codes: I16, scale_type: str) -> dict[str, Tensor]:
        """What the file holds of a module's weight."""
        rows, cols = codes.shape
        found = {f"{module}.weight_scale": _scales(grid.scale, scale_type)}
        if self.kind == "float":
            found[f"{module}.weight"] = Tensor("F8_E4M3", (rows, cols), _FP8_CODES[codes])
            return found
        plus = 2 ** (self.bits - 1) if self.symmetric else 0
        if self.layout == "int-quantized":
            found[f"{module}.weight"] = Tensor("I8", (rows, cols), codes.astype(np.int8))
            return found
        found[f"{module}.weight_packed"] = _packed(codes + np.int16(plus), self.bits)
        found[f"{module}.weight_shape"] = Tensor("I64", (2,), np.array([rows, cols], np.int64))
        if not self.symmetric:
            packed = _packed(np.ascontiguousarray(grid.stored["zero"].T), self.bits)
            words = np.ascontiguousarray(packed.data.T)
            found[f"{module}.weight_zero_point"] = Tensor("I32", words.shape, words)
        return found

    def config(self, ignored: list[str]) -> dict[str, Any]:
        """quantization_config of config.json. ignored: linear modules that stay as they are."""
        args: dict[str, Any] = {"dynamic": False, "num_bits": self.bits, "type": self.kind}
        weights = {
            **args, "actorder": None, "block_structure": None, "group_size": self.group, "observer": "mse",
            "observer_kwargs": {}, "strategy": "group" if self.group else "channel", "symmetric": self.symmetric,
        }  # fmt: skip
        inputs = {
            **args, "dynamic": True, "actorder": None, "block_structure": None, "group_size": None, "observer": None,
            "observer_kwargs": {}, "strategy": "token", "symmetric": True,
        }  # fmt: skip
        group = {
            "format": self.layout, "input_activations": inputs if self.rounded_inputs else None,
            "output_activations": None, "targets": ["Linear"], "weights": weights,
        }  # fmt: skip
        return {
            "config_groups": {"group_0": group}, "format": self.layout, "global_compression_ratio": None,
            "ignore": ignored, "kv_cache_scheme": None, "quant_method": "compressed-tensors",
            "quantization_status": "compressed", "version": "0.10.0",
        }  # fmt: skip


FORMATS = {
    "w4a16": CompressedFormat("w4a16", "pack-quantized", 4, 128),
    "w8a16": CompressedFormat("w8a16", "pack-quantized", 8, None),
    "w8a8": CompressedFormat("w8a8", "int-quantized", 8, None, rounded_inputs=True),
    "fp8": CompressedFormat("fp8", "float-quantized", 8, None, kind="float", rounded_inputs=True),
}


def _kept_scale(scale: F32, scale_type: str) -> F32:
    """As its type holds it. Of float32 checkpoints it is a bf16, too: so many digits as kernels make use of."""
    if scale_type == "F16":
        return scale.astype(np.float16).astype(np.float32)
    return bf16_to_f32(f32_to_bf16(scale))


def _scales(scale: F32, scale_type: str) -> Tensor:
    kinds: dict[str, NDArray[Any]] = {"F16": scale.astype(np.float16), "F32": scale}
    return Tensor(scale_type, scale.shape, kinds[scale_type] if scale_type in kinds else f32_to_bf16(scale))


def _packed(codes: I16, bits: int) -> Tensor:
    """[n, m] codes below 2^bits as words of 32 bits along m, the first lowest; the last word is filled up with zeros."""
    each = 32 // bits
    padded = np.pad(codes, ((0, 0), (0, -codes.shape[1] % each))).astype(np.uint32).reshape(len(codes), -1, each)
    words = np.bitwise_or.reduce(padded << np.arange(0, 32, bits, dtype=np.uint32), axis=-1).view(np.int32)
    return Tensor("I32", words.shape, words)
