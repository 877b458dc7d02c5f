"""What quantised blocks say: integer codes, and the numbers that give them their values.

A reader turns blocks [rows, blocks, bytes of a block] of one source format into `Codes`, from which both the values
(`values`) and the packed form (`packing`) are made. Layouts of GGUF types: the GGUF specification of ggml.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.weights.formats.numbers import F32, U8, bf16_to_f32, bits_of, e4m3_to_f32, f16_to_f32, fields, nibbles

IQ4_NL = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
"""Values of the codes of IQ4_NL and IQ4_XS."""
E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
"""Values of the codes of MXFP4 and NVFP4 (OCP Microscaling formats 1.0), doubled."""
E4M3 = e4m3_to_f32(np.arange(256, dtype=np.uint8))
FP4 = np.array([0, 1 / 192, 2 / 3, 1, 1 / 3, 1 / 2, 1 / 6, 1 / 4], np.float32)
FP4 = np.concatenate([FP4, -FP4])
"""Values of the codes of bitsandbytes' FP4."""
NF4 = np.array(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
        -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ],
    np.float32,
)  # fmt: skip
"""Values of the codes of NF4 (QLoRA: Dettmers et al. 2023, appendix E)."""


class Codes(NamedTuple):
    """Rows of `cols` codes. Other arrays are [rows, cols / n]: an entry for every n columns, n as the format has it.

    w = scale [* sub_scale] * (table[q] or q - zero) [+ minimum] [- minimum_scale * sub_minimum]
    """

    q: U8  # [rows, cols]
    scale: F32
    sub_scale: F32 | None = None  # integers
    zero: F32 | int = 0  # integers
    table: F32 | None = None
    minimum: F32 | None = None
    minimum_scale: F32 | None = None
    sub_minimum: F32 | None = None  # integers


def values(c: Codes) -> F32:
    """float32 [rows, cols]. Exact but for the last sum where codes mean integers: scale, sub_scale and q fit 24 bits."""
    cols = c.q.shape[1]

    def wide(part: F32) -> F32:
        return np.repeat(part, cols // part.shape[1], axis=1)

    scale = wide(c.scale) if c.sub_scale is None else wide(_times(c.scale, c.sub_scale))
    if c.table is not None:
        codes = c.table[c.q]
    else:
        codes = c.q.astype(np.float32) - (c.zero if isinstance(c.zero, int) else wide(c.zero))
    w = scale * codes
    if c.minimum is not None:
        w += wide(c.minimum)
    if c.minimum_scale is not None and c.sub_minimum is not None:
        w -= wide(_times(c.minimum_scale, c.sub_minimum))
    return w.astype(np.float32, copy=False)


def _times(scale: F32, sub: F32) -> F32:
    return np.repeat(scale, sub.shape[1] // scale.shape[1], axis=1) * sub


# ---- blocks of 32 columns: an fp16 scale [, an fp16 minimum] [, the fifth bits], 16 bytes of nibbles or 32 of int8


def _half(data: U8) -> F32:
    return f16_to_f32(fields(data, np.uint16))[..., 0]


def _row(blocks: NDArray[Any]) -> NDArray[Any]:
    """[rows, blocks, columns ...] to [rows, all columns]."""
    return blocks.reshape(blocks.shape[0], -1)


def q8_0(b: U8) -> Codes:
    return Codes(_row(b[..., 2:] ^ np.uint8(0x80)), _half(b[..., :2]), zero=128)


def q4_0(b: U8) -> Codes:
    return Codes(_row(nibbles(b[..., 2:])), _half(b[..., :2]), zero=8)


def q4_1(b: U8) -> Codes:
    return Codes(_row(nibbles(b[..., 4:])), _half(b[..., :2]), minimum=_half(b[..., 2:4]))


def q5_0(b: U8) -> Codes:
    return Codes(_row(_fifth(b[..., 2:6]) | nibbles(b[..., 6:])), _half(b[..., :2]), zero=16)


def q5_1(b: U8) -> Codes:
    q = _row(_fifth(b[..., 4:8]) | nibbles(b[..., 8:]))
    return Codes(q, _half(b[..., :2]), minimum=_half(b[..., 2:4]))


def _fifth(word: U8) -> U8:
    """Bit i of a little-endian word is the fifth bit of column i."""
    return np.unpackbits(word, axis=-1, bitorder="little") << np.uint8(4)


def iq4_nl(b: U8) -> Codes:
    return Codes(_row(nibbles(b[..., 2:])), _half(b[..., :2]), table=IQ4_NL)


def mxfp4(b: U8) -> Codes:
    return Codes(_row(nibbles(b[..., 1:])), bf16_to_f32(half_e8m0(b[..., 0])), table=E2M1)


def half_e8m0(exponent: U8) -> NDArray[np.uint16]:
    """2^(exponent - 128) as bf16 bits; the two smallest are subnormal."""
    e = exponent.astype(np.uint16)
    return np.where(e < 2, np.uint16(0x20) << e, e - np.minimum(e, 1) << 7).astype(np.uint16)


# ---- blocks of 64 columns


def i4z32(b: U8) -> Codes:
    """32 columns: fp16 scale, u8 zero, 0, 16 bytes of nibbles in the order of Q4_0."""
    return Codes(_row(nibbles(b[..., 4:])), _half(b[..., :2]), zero=b[..., 2].astype(np.float32))


def i4z64(b: U8) -> Codes:
    """fp16 scale, u8 zero, 0, twice 16 bytes of nibbles in the order of Q4_0."""
    q = nibbles(b[..., 4:].reshape(*b.shape[:2], 2, 16))
    return Codes(_row(q), _half(b[..., :2]), zero=b[..., 2].astype(np.float32))


def i4c(b: U8) -> Codes:
    """256 columns: u8 zero, three times 0, eight times 16 bytes of nibbles in the order of Q4_0. No scale: the factor of
    the row is all of it."""
    q = nibbles(b[..., 4:].reshape(*b.shape[:2], 8, 16))
    return Codes(_row(q), np.ones(b.shape[:2], np.float32), zero=b[..., 0].astype(np.float32))


def i8z64(b: U8) -> Codes:
    """fp16 scale, u8 zero, 0, 64 u8."""
    return Codes(_row(b[..., 4:]), _half(b[..., :2]), zero=b[..., 2].astype(np.float32))


def f8(b: U8) -> Codes:
    """float32 scale, 64 e4m3."""
    return Codes(_row(b[..., 4:]), fields(b[..., :4], np.float32)[..., 0], table=E4M3)


def nf4(b: U8) -> Codes:
    """float32 scale, twice 16 bytes of nibbles in the order of Q4_0."""
    return Codes(
        _row(nibbles(b[..., 4:].reshape(*b.shape[:2], 2, 16))), fields(b[..., :4], np.float32)[..., 0], table=NF4
    )


def fp4(b: U8) -> Codes:
    return nf4(b)._replace(table=FP4)


def nvfp4(b: U8) -> Codes:
    """Four unsigned e4m3 scales (0x7F means 0) of 16 columns each, four times 8 bytes: low nibbles first."""
    scale = e4m3_to_f32(_row(b[..., :4]) & np.uint8(0x7F)) * np.float32(0.5)
    q = bits_of(b[..., 4:].reshape(*b.shape[:2], 4, 8), 4)
    return Codes(_row(q), np.nan_to_num(scale, copy=False), table=E2M1)


# ---- K-quants: super-blocks of 256 columns with integer sub-scales


def q2_k(b: U8) -> Codes:
    """16 bytes {sub-scale, sub-minimum} of 16 columns each, 64 bytes of bit pairs, scale, scale of the minima."""
    sub = _row(b[..., :16]).astype(np.uint8)
    return Codes(
        _row(bits_of(b[..., 16:80].reshape(*b.shape[:2], 2, 32), 2)),
        _half(b[..., 80:82]),
        sub_scale=(sub & 15).astype(np.float32),
        minimum_scale=_half(b[..., 82:84]),
        sub_minimum=(sub >> 4).astype(np.float32),
    )


def q3_k(b: U8) -> Codes:
    """32 bytes of third bits (bit n: columns 32 n ..), 64 bytes of bit pairs, 16 sub-scales of 6 bits, scale."""
    low = bits_of(b[..., 32:96].reshape(*b.shape[:2], 2, 32), 2).reshape(*b.shape[:2], 8, 32)
    q = low | bits_of(b[..., :32], 1) << np.uint8(2)
    return Codes(_row(q), _half(b[..., 108:110]), sub_scale=_row(q3_k_sub(b[..., 96:108])).astype(np.float32), zero=4)


def q3_k_sub(s: U8) -> NDArray[np.int8]:
    """12 bytes to 16 sub-scales -32 .. 31: 8 bytes of low nibbles, 4 bytes of upper bit pairs."""
    low = bits_of(s[..., :8], 4).reshape(*s.shape[:-1], 16)
    high = bits_of(s[..., 8:], 2).reshape(*s.shape[:-1], 16)
    return _minus_32(low | high << np.uint8(4))


def q4_k(b: U8) -> Codes:
    """Scale, scale of the minima, 8 sub-scales and 8 sub-minima of 6 bits, 128 bytes of nibbles in runs of 32."""
    return _with_sub_minima(b, bits_of(b[..., 16:].reshape(*b.shape[:2], 4, 32), 4))


def q5_k(b: U8) -> Codes:
    """As Q4_K, with 32 bytes of fifth bits (bit n: columns 32 n ..) before the nibbles."""
    low = bits_of(b[..., 48:].reshape(*b.shape[:2], 4, 32), 4)
    high = bits_of(b[..., 16:48], 1) << np.uint8(4)
    return _with_sub_minima(b, low.reshape(*b.shape[:2], 8, 32) | high)


def _with_sub_minima(b: U8, q: U8) -> Codes:
    scales, minima = q4_k_sub(b[..., 4:16])
    return Codes(
        _row(q),
        _half(b[..., :2]),
        sub_scale=_row(scales).astype(np.float32),
        minimum_scale=_half(b[..., 2:4]),
        sub_minimum=_row(minima).astype(np.float32),
    )


def q4_k_sub(s: U8) -> tuple[U8, U8]:
    """12 bytes to 8 sub-scales and 8 sub-minima, 0 .. 63: of the first four the low 6 bits of bytes 0-3 and 4-7; of the
    last four a nibble of bytes 8-11 and the upper pair of bytes 0-3 and 4-7."""
    a, m, rest = s[..., :4], s[..., 4:8], s[..., 8:]
    scales = np.concatenate([a & 63, rest & 15 | a >> 2 & 0x30], axis=-1)
    minima = np.concatenate([m & 63, rest >> 4 | m >> 2 & 0x30], axis=-1)
    return scales, minima


def q6_k(b: U8) -> Codes:
    """128 bytes of nibbles, 64 of upper bit pairs, 16 int8 sub-scales of 16 columns, scale. Per half of 128 columns:
    nibble bytes in two runs of 32 for columns 0-31 and 32-63 (low), 64-95 and 96-127 (high)."""
    low = bits_of(b[..., :128].reshape(*b.shape[:2], 2, 64), 4).reshape(*b.shape[:2], 2, 4, 32)
    high = bits_of(b[..., 128:192].reshape(*b.shape[:2], 2, 32), 2)
    sub = _row(b[..., 192:208]).view(np.int8).astype(np.float32)
    return Codes(_row(low | high << np.uint8(4)), _half(b[..., 208:210]), sub_scale=sub, zero=32)


def iq4_xs(b: U8) -> Codes:
    """Scale, 16 upper bit pairs and then nibbles of 8 sub-scales, 128 bytes of nibbles, each 16 as in Q4_0."""
    sub = _row(iq4_xs_sub(b)).astype(np.float32)
    return Codes(_row(nibbles(b[..., 8:].reshape(*b.shape[:2], 8, 16))), _half(b[..., :2]), sub_scale=sub, table=IQ4_NL)


def iq4_xs_sub(b: U8) -> NDArray[np.int8]:
    """8 sub-scales -32 .. 31 of 32 columns each."""
    pairs = fields(b[..., 2:4], np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16) & np.uint16(3)
    low = np.stack([b[..., 4:8] & 15, b[..., 4:8] >> 4], axis=-1).reshape(*b.shape[:-1], 8)
    return _minus_32(low | pairs.astype(np.uint8) << np.uint8(4))


def _minus_32(sub: U8) -> NDArray[np.int8]:
    signed: NDArray[np.int8] = sub.view(np.int8) - np.int8(32)
    return signed
