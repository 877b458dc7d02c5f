"""Small number types as numpy arrays: bf16, fp16, FP8 (OCP e4m3), E8M0 scales, fields of a few bits."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

U8 = NDArray[np.uint8]
F32 = NDArray[np.float32]


def bf16_to_f32(bits: NDArray[np.uint16]) -> F32:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def f32_to_bf16(values: F32) -> NDArray[np.uint16]:
    """Bits of the nearest bf16, ties to even; a NaN stays a (quiet) NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(values), (bits >> 16) | 0x40, rounded).astype(np.uint16)


def f16_to_f32(bits: NDArray[np.uint16]) -> F32:
    return bits.view(np.float16).astype(np.float32)


def e4m3_to_f32(codes: U8) -> F32:
    """FP8 e4m3fn (OCP 8-bit floating point, 1.0): bias 7, subnormals, 0x7F and 0xFF are NaN, no infinity."""
    return _E4M3[codes]


def _e4m3_table() -> F32:
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, (code & 7).astype(np.float64)
    value = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    value = np.where(code & 0x7F == 0x7F, np.nan, value)
    return np.where(code < 128, value, -value).astype(np.float32)


_E4M3 = _e4m3_table()


def fields(data: U8, dtype: Any) -> NDArray[Any]:
    """The last axis of bytes as little-endian numbers of `dtype`."""
    return np.ascontiguousarray(data).view(dtype)


def as_bytes(array: NDArray[Any]) -> U8:
    return np.ascontiguousarray(array).view(np.uint8)


def bits_of(data: U8, width: int) -> U8:
    """[..., n] bytes to [..., 8 / width, n]: the fields of `width` bits, lowest first."""
    shifts = np.arange(0, 8, width, dtype=np.uint8)
    return data[..., None, :] >> shifts[:, None] & np.uint8((1 << width) - 1)


def nibbles(data: U8) -> U8:
    """[..., 16] bytes to [..., 32] values: low nibbles first."""
    return bits_of(data, 4).reshape(*data.shape[:-1], 2 * data.shape[-1])


def up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
