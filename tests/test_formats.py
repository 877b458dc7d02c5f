"""The numpy definitions of weight formats, against the gguf library and against a second reading of kernels.h."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from octavo import _native
from octavo.weights import formats
from octavo.weights.spec import CheckpointError

SOURCES = sorted(formats.BLOCKS)
COLS = {"F32": [1, 33, 64], "F16": [7, 64, 96], "BF16": [31, 128], "Q6_K": [256, 512]}


def random_rows(source: str, rows: int, cols: int, seed: int = 0) -> formats.U8:
    """Any bytes are a valid row, as long as the fp16 scales are finite and of ordinary size."""
    rng = np.random.default_rng([seed, rows, cols])
    if source == "F32":
        return rng.standard_normal((rows, cols)).astype(np.float32).view(np.uint8)
    if source == "F16":
        return rng.standard_normal((rows, cols)).astype(np.float16).view(np.uint8)
    if source == "BF16":
        return formats.f32_to_bf16(rng.standard_normal((rows, cols)).astype(np.float32)).view(np.uint8)
    block_cols, block_bytes = formats.BLOCKS[source]
    blocks = rng.integers(0, 256, (rows, cols // block_cols, block_bytes), np.uint8)
    places = {"Q6_K": [208], "Q4_1": [0, 2]}.get(source, [0])
    for place in places:
        scale = rng.uniform(-0.1, 0.1, blocks.shape[:2]).astype(np.float16)
        blocks[..., place : place + 2] = scale[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize("source", SOURCES)
def test_dequantise_equals_the_gguf_library(source: str) -> None:
    for cols in COLS.get(source, [32, 64, 96]):
        data = random_rows(source, 5, cols)
        expected = gguf.dequantize(data, gguf.GGMLQuantizationType[source])
        np.testing.assert_array_equal(formats.dequantise(source, data, cols), expected.reshape(5, cols))


def unpacked(packed: str, data: formats.U8, rows: int, cols: int) -> formats.F32:
    """Packed bytes to float32 [rows padded, cols padded], element by element as kernels.h words it."""
    n, k = -(-rows // 32) * 32, -(-cols // 64) * 64
    width = formats.PANEL_COLS[packed]
    panel_bytes = k // 64 * formats.UNIT_BYTES[packed]
    out = np.zeros((n, k), np.float32)
    for row in range(n):
        panel = data[row // width * panel_bytes :][:panel_bytes]
        column = row % width
        for i in range(k):
            if packed == "f32":
                out[row, i] = panel.view(np.float32)[i * 32 + column]
            elif packed == "f16":
                out[row, i] = panel.view(np.float16)[i * 32 + column]
            elif packed == "bf16":
                out[row, i] = formats.bf16_to_f32(panel.view(np.uint16)[(i // 2 * 32 + column) * 2 + i % 2 :][:1])[0]
            else:
                unit = panel[i // 64 * formats.UNIT_BYTES[packed] :][: formats.UNIT_BYTES[packed]]
                group, quad, byte = i % 64 // 32, i % 32 // 4, i % 4
                lines = 8 if packed == "w8" else 4  # of one group
                line = unit[(group * lines + quad % lines) * 64 :][:64]
                q = int(line[column * 4 + byte])
                if packed != "w8":
                    q = q >> 4 if quad >= 4 else q & 15
                scales = unit[2 * lines * 64 :].view(np.float16).astype(np.float32)
                scale = scales[group * 16 + column]
                zero = {"w8": 128, "w4": 8, "w4f": 0}[packed]
                minimum = scales[32 + group * 16 + column] if packed == "w4f" else np.float32(0)
                out[row, i] = scale * np.float32(q - zero) + minimum
    return out


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (33, 31), (40, 33), (32, 64), (31, 96)])
def test_pack_holds_every_weight_and_zero_padding(source: str, rows: int, cols: int) -> None:
    block = formats.BLOCKS[source][0]
    cols = -(-cols // block) * block
    packed = formats.packed_format(source, "auto")
    data = random_rows(source, rows, cols)
    result = formats.pack(packed, source, data, rows, cols)
    assert result.shape == (formats.packed_bytes(packed, rows, cols),)
    native = formats.to_native(packed, source, data, cols)
    native_source = "BF16" if source == "Q6_K" else source
    found = unpacked(packed, result, rows, cols)
    np.testing.assert_array_equal(found[:rows, :cols], formats.dequantise(native_source, native, cols))
    found[:rows, :cols] = 0
    assert not found.any()


@pytest.mark.parametrize(("packed", "source"), [("w8", "Q8_0"), ("w4", "Q4_0"), ("w4f", "Q4_1"), ("bf16", "BF16")])
def test_padding_is_zero_bytes(packed: str, source: str) -> None:
    whole = formats.pack(packed, source, random_rows(source, 16, 32), 16, 32)
    half = whole.size // 2  # padded to 32 rows: the second panel of 16, or columns 16..31 of the one of 32
    if packed == "bf16":
        whole = whole.reshape(-1, 32, 4)[:, 16:].ravel()
        half = 0
    assert not whole[half:].any()


def test_q6k_rows_for_the_native_packer() -> None:
    data = random_rows("Q6_K", 3, 256)
    exact = formats.dequantise("Q6_K", data, 256)
    np.testing.assert_array_equal(formats.to_native("f32", "Q6_K", data, 256).view(np.float32), exact)
    np.testing.assert_array_equal(
        formats.to_native("bf16", "Q6_K", data, 256).view(np.uint16), formats.f32_to_bf16(exact)
    )
    assert formats.to_native("w4", "Q4_0", data, 32) is data


def test_bf16_rounds_to_nearest_even_and_keeps_nan() -> None:
    one = 0x3F800000
    bits = np.array([one + 0x8000, one + 0x18000, one + 0x8001, one + 0x7FFF, 0x7F800001, 0x7F7FFFFF], np.uint32)
    rounded = formats.f32_to_bf16(bits.view(np.float32))
    assert rounded.tolist() == [0x3F80, 0x3F82, 0x3F81, 0x3F80, 0x7FC0, 0x7F80]


def test_packed_format_and_rounding_of_inputs() -> None:
    packed = {source: formats.packed_format(source, "auto") for source in SOURCES}
    assert packed == {
        "F32": "f32",
        "F16": "f16",
        "BF16": "bf16",
        "Q8_0": "w8",
        "Q4_0": "w4",
        "Q4_1": "w4f",
        "Q6_K": "bf16",
    }
    assert formats.packed_format("Q6_K", "f32") == "f32"
    assert [formats.act_of(p, "auto") for p in ("f32", "f16", "bf16", "w8", "w4", "w4f")] == [
        "f32",
        "f32",
        "bf16",
        "a8",
        "a8",
        "a8",
    ]
    assert [formats.act_of(p, "bf16") for p in ("f32", "f16", "bf16", "w8")] == ["f32", "f32", "bf16", "bf16"]
    assert {formats.act_of(p, "f32") for p in ("f32", "f16", "bf16", "w8")} == {"f32"}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: formats.packed_format("IQ4_NL", "auto"), "IQ4_NL"),
        (lambda: formats.row_bytes("Q2_K", 256), "Q2_K"),
        (lambda: formats.row_bytes("Q8_0", 33), "33 .*32.*Q8_0"),
        (lambda: formats.dequantise("Q8_0", np.zeros((2, 33), np.uint8), 32), "33 bytes"),
    ],
)
def test_what_is_refused(call: object, message: str) -> None:
    assert callable(call)
    with pytest.raises(CheckpointError, match=message):
        call()


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(("rows", "cols"), [(1, 31), (31, 64), (33, 33), (100, 256)])
def test_native_packing_gives_these_bytes(source: str, rows: int, cols: int) -> None:
    block = formats.BLOCKS[source][0]
    cols = -(-cols // block) * block
    data = random_rows(source, rows, cols)
    for activations in ("auto", "f32"):
        packed = formats.packed_format(source, activations)
        expected = formats.pack(packed, source, data, rows, cols)
        assert _native.packed_bytes(packed, rows, cols) == expected.size
        guard = 64
        memory = _native.Memory(guard + expected.size + guard, False)
        view = memory.view(0, guard + expected.size + guard)
        native = np.ascontiguousarray(formats.to_native(packed, source, data, cols))
        _native.pack(_native.Pool(2, []), memory, guard, packed, native, cols)
        np.testing.assert_array_equal(view[guard:-guard], expected)
        assert not view[:guard].any() and not view[-guard:].any()
