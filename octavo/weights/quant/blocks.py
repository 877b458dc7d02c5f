"""Rows of blocks (weights.formats) made of integers, scales and zero points: where the formats of checkpoints end.

n rows, K columns, B blocks of a row.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

U8 = NDArray[np.uint8]
F16 = NDArray[np.float16]
F32 = NDArray[np.float32]
I32 = NDArray[np.int32]


def unpack(words: NDArray[np.uint32] | U8, bits: int, count: int) -> U8:
    """[n, W] words of 32 or 8 bits to [n, count] fields of `bits`, which lie one after the other from the lowest bit on."""
    data: U8 = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return data[:, :count]
    if 8 % bits == 0:
        fields = np.empty((*data.shape, 8 // bits), np.uint8)
        for i in range(8 // bits):
            np.right_shift(data, np.uint8(bits * i), out=fields[..., i])
        fields &= np.uint8(2**bits - 1)
        return fields.reshape(len(data), -1)[:, :count]
    stream = np.unpackbits(data, axis=1, bitorder="little")[:, : bits * count]
    return np.packbits(stream.reshape(len(data), count, bits), axis=2, bitorder="little")[..., 0]


def halves(scales: F32) -> tuple[F16, F32]:
    """Scales [n, G] of a row's groups as fp16, and a float32 factor [n] of each row: their product is the scale.

    One group: the factor is all of it. Otherwise a power of two that puts the largest scale of a row below 2^15: what
    is less than 2^-31 of that may lose bits, nothing else does whose scale has 11 significant bits, as all bf16 have.
    """
    if scales.shape[1] == 1:
        return np.ones(scales.shape, np.float16), scales[:, 0].copy()
    _, exponent = np.frexp(np.abs(scales).max(axis=1))
    factor = np.ldexp(np.float32(1), np.maximum(exponent - 15, -126))
    return (scales / factor[:, None]).astype(np.float16), factor


def are_halves(scales: F32) -> bool:
    """Whether `halves` loses nothing: of scales that are float32 in the checkpoint."""
    fp16, factor = halves(scales)
    lost = np.abs(fp16.astype(np.float32) * factor[:, None] - scales)
    return bool((lost <= np.float32(2.0**-40) * np.abs(scales).max(axis=1, keepdims=True)).all())


def run_groups(groups: I32, width: int) -> I32 | None:
    """The group of each block of `width` columns, the last perhaps shorter; None where a block has columns of two."""
    padded = np.pad(groups, (0, -len(groups) % width), mode="edge").reshape(-1, width)
    return padded[:, 0] if (padded == padded[:, :1]).all() else None


def whole_blocks(codes: U8, width: int) -> U8:
    """[n, K] with columns of zeros up to a multiple of `width`."""
    spare = -codes.shape[1] % width
    return np.pad(codes, ((0, 0), (0, spare))) if spare else codes


def halved(codes: U8) -> U8:
    """Codes [n, K] below 16 as nibbles [n, K / 2]: byte i of every 16 holds columns i (low) and i + 16 (high) of 32."""
    runs = codes.reshape(len(codes), codes.shape[1] // 32, 2, 16)
    nibbles = runs[:, :, 1] << np.uint8(4)
    nibbles |= runs[:, :, 0]
    return nibbles.reshape(len(codes), codes.shape[1] // 2)


def halved_pairs(pairs: U8) -> U8:
    """The same of codes that lie two to a byte, the first in the low nibble: [n, K / 2], eight bytes at once."""
    n, size = pairs.shape
    words = np.ascontiguousarray(pairs).view(np.uint64)
    first, second, low = words[:, 0::2], words[:, 1::2], np.uint64(0x0F0F0F0F0F0F0F0F)
    nibbles = np.empty((n, size // 16, 8, 2), np.uint8)
    nibbles[..., 0] = (first & low | (second & low) << np.uint64(4)).view(np.uint8).reshape(n, size // 16, 8)
    nibbles[..., 1] = (first >> np.uint64(4) & low | second & ~low).view(np.uint8).reshape(n, size // 16, 8)
    return nibbles.reshape(n, size)


def q4_0(nibbles: U8, scales: F16) -> U8:
    """Nibbles as `halved` gives them, of codes with zero point 8; scales [n, K / 32]."""
    return _blocks(_bytes(scales), nibbles)


def q8_0(codes: U8, scales: F16) -> U8:
    """Codes [n, K] with zero point 128, scales [n, K / 32]."""
    blocks = np.empty((*scales.shape, 34), np.uint8)
    blocks[..., :2] = _bytes(scales)
    np.bitwise_xor(codes.reshape(*scales.shape, 32), np.uint8(0x80), out=blocks[..., 2:])
    return blocks.reshape(len(codes), -1)


def _blocks(header: U8, data: U8) -> U8:
    """header [n, B, bytes] before as many equal parts of data [n, bytes]: [n, bytes per row]."""
    n, count, size = header.shape
    blocks = np.empty((n, count, size + data.shape[1] // count), np.uint8)
    blocks[..., :size] = header
    blocks[..., size:] = data.reshape(n, count, -1)
    return blocks.reshape(n, -1)


def i4z(nibbles: U8, scales: F16, zeros: U8) -> U8:
    """Nibbles as `halved` gives them, scales and zeros [n, K / 32] (I4Z32) or [n, K / 64] (I4Z64)."""
    return _blocks(_scale_and_zero(scales, zeros), nibbles)


def i4c(nibbles: U8, zeros: U8) -> U8:
    """Nibbles as `halved` gives them, zeros [n, K / 256]."""
    header = np.zeros((*zeros.shape, 4), np.uint8)
    header[..., 0] = zeros
    return _blocks(header, nibbles)


def i8z64(codes: U8, scales: F16, zeros: U8) -> U8:
    """Codes [n, K], scales and zeros [n, K / 64]."""
    return _blocks(_scale_and_zero(scales, zeros), codes)


def scaled_nibbles(nibbles: U8, scales: F32) -> U8:
    """NF4 and FP4: nibbles as `halved` gives them, scales [n, K / 64]."""
    return _blocks(_bytes(scales), nibbles)


def f8(values: U8, scales: F32) -> U8:
    """e4m3 values [n, K], scales [n, K / 64]."""
    return _blocks(_bytes(scales), values)


def mxfp4(nibbles: U8, exponents: U8) -> U8:
    """e2m1 as `halved` gives it, e8m0 exponents [n, K / 32]."""
    return _blocks(exponents[..., None], nibbles)


def nvfp4(codes: U8, scales: U8) -> U8:
    """Codes [n, K] of e2m1, e4m3 scales [n, K / 16]: blocks of four scales, and four times 8 bytes, low nibbles first."""
    n, count = codes.shape[0], codes.shape[1] // 64
    pairs = codes.reshape(n, count, 4, 2, 8)
    nibbles = pairs[..., 0, :] | pairs[..., 1, :] << np.uint8(4)
    return _blocks(scales.reshape(n, count, 4), nibbles.reshape(n, -1))


def _scale_and_zero(scales: F16, zeros: U8) -> U8:
    header = np.zeros((*scales.shape, 4), np.uint8)
    header[..., :2] = _bytes(scales)
    header[..., 2] = zeros
    return header


def _bytes(scales: F16 | F32) -> U8:
    """[...] to the bytes of each, [..., 2 or 4]."""
    return np.ascontiguousarray(scales).view(np.uint8).reshape(*scales.shape, scales.itemsize)
