"""The numpy definitions of weight formats: against the gguf library, against a second reading of kernels.h, and the
native packer against them."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from octavo import _native
from octavo.weights import formats
from octavo.weights.formats.codes import E2M1, E4M3, FP4, IQ4_NL, NF4
from octavo.weights.spec import DECODED, PACKED, CheckpointError
from tests.random_blocks import random_rows

SOURCES = sorted(formats.BLOCKS)
OURS = ("I4Z32", "I4Z64", "I4C", "I8Z64", "F8", "NF4", "FP4")
COLS = {"F32": [1, 33, 64], "F16": [7, 64, 96], "BF16": [31, 128]}
GGUF_SOURCES = [source for source in SOURCES if source not in (*OURS, "F32D")]


def fitting(source: str, cols: int) -> int:
    """The next multiple of the source's block; blocks of our own may pass the end of a row."""
    block = 1 if source in OURS else formats.BLOCKS[source][0]
    return -(-cols // block) * block


@pytest.mark.parametrize("source", GGUF_SOURCES)
def test_dequantise_equals_the_gguf_library(source: str) -> None:
    kind = gguf.GGMLQuantizationType[source]
    assert formats.BLOCKS[source] == gguf.GGML_QUANT_SIZES[kind]
    for cols in COLS.get(source, [fitting(source, cols) for cols in (32, 64, 512)]):
        data = random_rows(source, 5, cols)
        expected = gguf.dequantize(data, kind).reshape(5, cols)
        found = formats.dequantise(source, data, cols)
        assert found.dtype == np.float32 and np.abs(expected).max() > 0
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("source", OURS)
def test_dequantise_blocks_of_our_own(source: str) -> None:
    """Element by element, as weights.formats.codes words it."""
    cols, (block_cols, block_bytes) = 187, formats.BLOCKS[source]
    data = random_rows(source, 3, cols)
    factor = np.array([1, 0.3, -7], np.float32)
    found = formats.dequantise(source, data, cols, factor)
    for row in range(3):
        for i in range(cols):
            block = data[row, i // block_cols * block_bytes :][:block_bytes]
            at = i % block_cols
            nibble = block[4 + at // 32 * 16 + at % 16] >> (4 if at % 32 >= 16 else 0) & 15
            if source == "I4C":
                w = np.float32(int(nibble) - int(block[0]))
            elif source.startswith("I"):
                q = int(block[4 + at] if source == "I8Z64" else nibble)
                w = block[:2].view(np.float16).astype(np.float32)[0] * np.float32(q - int(block[2]))
            else:
                value = E4M3[block[4 + at]] if source == "F8" else (NF4 if source == "NF4" else FP4)[nibble]
                w = block[:4].view(np.float32)[0] * value
            assert found[row, i] == w * factor[row]


def test_e4m3() -> None:
    assert E4M3[[0, 1, 7, 8, 0x38, 0x7E, 0xFE]].tolist() == [0, 2**-9, 7 * 2**-9, 2**-6, 1, 448, -448]
    assert np.isnan(E4M3[[0x7F, 0xFF]]).all()
    assert np.isfinite(E4M3).sum() == 254 and (np.diff(E4M3[:127]) > 0).all()


CONSTANT_ZERO = {"w8": 128, "w4": 8, "w5": 16, "w3k": 4, "w6k": 32}
TABLES = {"w4n": IQ4_NL, "w4x": IQ4_NL, "w4m": E2M1, "w4v": E2M1, "f8": E4M3}
PLACES = {8: lambda quad: (quad, 0), 4: lambda quad: (quad % 4, quad // 4 * 4), 2: lambda quad: (quad // 4, quad % 4 * 2),
          1: lambda quad: (0, quad)}  # fmt: skip
"""Line and lowest bit of a quad, by the width of its plane."""
FACTORED = ("w4z", "w4z64", "w4c", "w8z64", "w4v")


def unpacked(packed: str, data: formats.U8, rows: int, cols: int) -> formats.F32:
    """Packed bytes to float32 [rows padded, cols padded], element by element as kernels.h words it."""
    n, k = -(-rows // 32) * 32, -(-cols // 64) * 64
    out = np.zeros((n, k), np.float32)
    if packed in ("f32", "f16", "bf16"):
        panels = data.reshape(n // 32, -1)
        for row in range(n):
            panel, column = panels[row // 32], row % 32
            if packed == "bf16":
                out[row] = formats.bf16_to_f32(panel.view(np.uint16).reshape(k // 2, 32, 2)[:, column].ravel())
            else:
                out[row] = panel.view(np.float32 if packed == "f32" else np.float16).reshape(k, 32)[:, column]
        return out
    layout = formats.LAYOUTS[packed]
    per_unit = layout.unit
    k = -(-cols // per_unit) * per_unit
    out = np.zeros((n, k), np.float32)
    units = data[: n // 16 * (k // per_unit) * layout.bytes].reshape(n // 16, k // per_unit, layout.bytes)
    factors = data[units.size :].view(np.float32)
    assert factors.size == (n if packed in FACTORED else 0)
    for row in range(n):
        for i in range(k):
            unit, at, c = units[row // 16, i // per_unit], i % per_unit, row % 16
            group, quad, byte = at // 32, at % 32 // 4, at % 4
            q = place = shift = 0
            for width in layout.planes:
                line, low = PLACES[width](quad)
                stored = int(unit[place + (group * width + line) * 64 + c * 4 + byte])  # a line per bit and 32 K
                q |= (stored >> low & (1 << width) - 1) << shift
                shift += width
                place += per_unit // 32 * width * 64
            number = {}
            for name, kind, per in layout.fields:
                dtype = {"f16": np.float16, "bf16": np.uint16, "f32": np.float32, "i8": np.int8}.get(kind, np.uint8)
                count = per_unit // per
                stored = unit[place : place + count * 16 * np.dtype(dtype).itemsize].view(dtype)[at // per * 16 + c]
                place += count * 16 * np.dtype(dtype).itemsize
                if kind == "bf16":
                    number[name] = formats.bf16_to_f32(np.array([stored]))[0]
                elif kind == "e4m3":
                    number[name] = E4M3[stored] * np.float32(0.5)
                elif kind == "u4u4":
                    number[name], number["sub_minimum"] = np.float32(stored & 15), np.float32(stored >> 4)
                else:
                    number[name] = np.float32(stored)
            value = TABLES[packed][q] if packed in TABLES else q - number.get("zero", CONSTANT_ZERO.get(packed, 0))
            w = number.get("scale", np.float32(1)) * number.get("sub_scale", np.float32(1)) * np.float32(value)
            w += number.get("minimum", np.float32(0))
            w -= number.get("minimum_scale", np.float32(0)) * number.get("sub_minimum", np.float32(0))
            out[row, i] = w * factors[row] if factors.size else w
    return out


def packed_with(source: str) -> str:
    """The packed format of a source, also of one that the native code does not know yet."""
    return formats.packed_format(source, "auto")


def factor_of(packed: str, rows: int) -> formats.F32 | None:
    return np.random.default_rng(rows).uniform(0.1, 3, rows).astype(np.float32) if packed in FACTORED else None


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (33, 31), (17, 96)])
def test_pack_holds_every_weight_and_zero_padding(source: str, rows: int, cols: int) -> None:
    cols = fitting(source, cols)
    packed = packed_with(source)
    data, factor = random_rows(source, rows, cols), factor_of(packed, rows)
    result = formats.pack(packed, source, data, rows, cols, factor)
    assert result.shape == (formats.packed_bytes(packed, rows, cols),)
    expected = formats.dequantise(source, data, cols, factor)
    if source in DECODED:
        expected = formats.bf16_to_f32(formats.f32_to_bf16(expected))
    found = unpacked(packed, result, rows, cols)
    np.testing.assert_array_equal(found[:rows, :cols], expected)
    block = formats.BLOCKS[source][0]  # of our own sources, the last may pass the end of the row
    found[:rows, : -(-cols // block) * block] = 0
    assert not found.any()


@pytest.mark.parametrize("source", ["Q8_0", "Q4_1", "Q6_K", "MXFP4", "F8", "BF16"])
def test_padding_is_zero_bytes(source: str) -> None:
    packed = packed_with(source)
    whole = formats.pack(packed, source, random_rows(source, 16, fitting(source, 32)), 16, fitting(source, 32))
    half = whole.size // 2  # padded to 32 rows: the second panel of 16, or columns 16..31 of the one of 32
    if packed == "bf16":
        whole = whole.reshape(-1, 32, 4)[:, 16:].ravel()
        half = 0
    assert not whole[half:].any()


def test_decoded_rows_for_the_native_packer() -> None:
    data = random_rows("IQ3_S", 3, 256)
    exact = formats.dequantise("IQ3_S", data, 256)
    np.testing.assert_array_equal(formats.to_native("f32", "IQ3_S", data, 256).view(np.float32), exact)
    factor = np.array([1, 2, 0.3], np.float32)
    np.testing.assert_array_equal(
        formats.to_native("bf16", "IQ3_S", data, 256, factor).view(np.uint16),
        formats.f32_to_bf16(exact * factor[:, None]),
    )
    assert formats.to_native("w4", "Q4_0", data, 32) is data


def test_bf16_rounds_to_nearest_even_and_keeps_nan() -> None:
    one = 0x3F800000
    bits = np.array([one + 0x8000, one + 0x18000, one + 0x8001, one + 0x7FFF, 0x7F800001, 0x7F7FFFFF], np.uint32)
    rounded = formats.f32_to_bf16(bits.view(np.float32))
    assert rounded.tolist() == [0x3F80, 0x3F82, 0x3F81, 0x3F80, 0x7FC0, 0x7F80]


def test_every_source_has_one_packed_format() -> None:
    assert not PACKED.keys() & DECODED
    assert PACKED.keys() | DECODED == set(SOURCES)
    assert {p for p in PACKED.values() if p not in ("f32", "f16", "bf16")} <= formats.LAYOUTS.keys()
    assert {formats.packed_format(s, "f32") for s in DECODED} == {"f32"}
    assert {formats.packed_format(s, "auto") for s in DECODED} == {"bf16"}


def test_rounding_of_inputs() -> None:
    assert [formats.act_of(p, "auto") for p in ("f32", "f16", "bf16", "f8")] == ["f32", "f32", "bf16", "bf16"]
    assert {formats.act_of(p, "auto") for p in formats.LAYOUTS if p != "f8"} == {"a8"}
    attend = {dots: {p: formats.act_of(p, "auto", True, dots) for p in formats.LAYOUTS} for dots in (True, False)}
    assert set(attend[True].values()) == {"bf16"} and set(attend[False].values()) == {"bf16", "a16"}
    assert {p for p, act in attend[False].items() if act == "bf16"} == {"f8", "w8", "w8z64", "w4n", "w4x"}
    assert [formats.act_of(p, "bf16") for p in ("f32", "f16", "bf16", "w8")] == ["f32", "f32", "bf16", "bf16"]
    assert {formats.act_of(p, "f32") for p in ("f32", "f16", "bf16", *formats.LAYOUTS)} == {"f32"}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: formats.packed_format("Q8_K", "auto"), "Q8_K"),
        (lambda: formats.row_bytes("Q8_1", 256), "Q8_1"),
        (lambda: formats.row_bytes("Q8_0", 33), "33 .*32.*Q8_0"),
        (lambda: formats.dequantise("Q8_0", np.zeros((2, 33), np.uint8), 32), "33 bytes"),
        (lambda: formats.check_factor("w8", "Q8_0", np.ones(3, np.float32)), "Q8_0 .*factors"),
        (lambda: formats.check_factor("f32", "F32", np.ones(3, np.float32)), "F32 .*factors"),
    ],
)
def test_what_is_refused(call: object, message: str) -> None:
    assert callable(call)
    with pytest.raises(CheckpointError, match=message):
        call()


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(("rows", "cols"), [(1, 31), (31, 64), (33, 33), (100, 256)])
def test_native_packing_gives_these_bytes(source: str, rows: int, cols: int) -> None:
    cols = fitting(source, cols)
    data = random_rows(source, rows, cols)
    for activations in ("auto", "f32"):
        packed = formats.packed_format(source, activations)
        expected = formats.pack(packed, source, data, rows, cols)
        assert _native.packed_bytes(packed, rows, cols) == expected.size
        memory, view = guarded(expected.size)
        native = np.ascontiguousarray(formats.to_native(packed, source, data, cols))
        _native.pack(_native.Pool(2, []), memory, GUARD, packed, native, cols)
        panels = formats.panel_bytes(packed, rows, cols)
        np.testing.assert_array_equal(view[GUARD:-GUARD][:panels], expected[:panels])
        assert not view[:GUARD].any() and not view[-GUARD:].any() and not view[GUARD:-GUARD][panels:].any()


GUARD = 64


def guarded(size: int) -> tuple[_native.Memory, formats.U8]:
    """Zeros between guards."""
    memory = _native.Memory(GUARD + size + GUARD, False)
    return memory, memory.view(0, GUARD + size + GUARD)


@pytest.mark.parametrize("isa", _native.isa_levels())
@pytest.mark.parametrize("packed", ["f32", "f16", "bf16", *formats.LAYOUTS])
def test_native_values_of_a_packed_weight(packed: str, isa: str) -> None:
    """Bit for bit, but for factors: the last product of w, which the definition may take in another order."""
    source = next(source for source, p in PACKED.items() if p == packed)
    rows, cols = 37, fitting(source, 96)
    data, factor = random_rows(source, rows, cols), factor_of(packed, rows)
    memory, view = guarded(formats.packed_bytes(packed, rows, cols))
    view[GUARD:-GUARD] = formats.pack(packed, source, data, rows, cols, factor)
    found = np.full((rows, cols), np.nan, np.float32)
    _native.unpack(isa, memory, GUARD, packed, found)
    np.testing.assert_array_equal(found, formats.dequantise(source, data, cols, factor))


SIZES = {"Q8_0": 1.0, "Q4_0": 1.0, "Q4_1": 1.0, "Q5_0": 1.0, "Q5_1": 1.0, "IQ4_NL": 1.0, "Q2_K": 1.0, "Q3_K": 1.055,
         "Q4_K": 1.028, "Q5_K": 1.023, "Q6_K": 1.010, "IQ4_XS": 1.030, "MXFP4": 1.059, "NVFP4": 1.002}  # fmt: skip
"""Packed bytes over the bytes of the file, at most."""


def test_packed_bytes_are_near_those_of_the_file() -> None:
    rows = cols = 4096
    for source, most in SIZES.items():
        packed = formats.packed_bytes(formats.packed_format(source, "auto"), rows, cols)
        assert packed / (rows * formats.row_bytes(source, cols)) <= most + 0.0005, source
    for bits, group, packed in ((4, 32, "w4z"), (4, 64, "w4z64"), (4, 128, "w4z64"), (8, 128, "w8z64")):  # GPTQ, AWQ
        file = bits + (16 + bits) / group  # bits of a weight: fp16 scale and zero of a group
        assert formats.packed_bytes(packed, rows, cols) * 8 / (rows * cols) / file <= 1.10, packed
    for packed, bits in (("w4c", 4), ("w8z64", 8), ("f8", 8)):  # a scale for each output
        assert formats.packed_bytes(packed, rows, cols) * 8 / (rows * cols) / bits <= 1.10, packed
