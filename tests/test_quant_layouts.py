"""Every layout of quantised weights by its definition, on random values; and what is refused by name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from octavo.weights.checkpoint import open_checkpoint
from octavo.weights.formats import dequantise
from octavo.weights.formats.codes import FP4, NF4
from octavo.weights.mapped import FileIdentity
from octavo.weights.spec import ORDER, Checkpoint, CheckpointError
from tests import quant_writers as w
from tests.quant_writers import Raw, Written, compressed, group, save_module

Case = tuple[dict[str, Any], Written, str]  # quantization_config, tensors, source format


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def gptq(bits: int = 4, size: int = 64, v2: bool = False, **more: Any) -> dict[str, Any]:
    format = "gptq_v2" if v2 else "gptq"
    return {"quant_method": "gptq", "bits": bits, "group_size": size, "checkpoint_format": format, **more}


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True}
TILES = FP8 | {"weight_block_size": [128, 128]}

CASES: dict[str, Case] = {
    "gptq 4 bits": (gptq(), w.gptq(rng(), 64, 192), "Q4_0"),
    "gptq 8 bits": (gptq(8, 32), w.gptq(rng(), 32, 96, 8, 32), "Q8_0"),
    "gptq 8 bits, zero points": (gptq(8, 128), w.gptq(rng(), 32, 256, 8, 128, symmetric=False), "I8Z64"),
    "gptq zero points, groups of 32": (gptq(4, 32), w.gptq(rng(), 32, 96, 4, 32, symmetric=False), "I4Z32"),
    "gptq one group": (gptq(4, -1), w.gptq(rng(), 32, 128, 4, -1, symmetric=False), "I4Z64"),
    "gptq second form": (gptq(v2=True), w.gptq(rng(), 64, 128, symmetric=False, v2=True), "I4Z64"),
    "gptq short last group": (gptq(4, 128), w.gptq(rng(), 32, 192, 4, 128, symmetric=False), "I4Z64"),
    "gptq last block short": (gptq(4, 64), w.gptq(rng(), 32, 144, 4, 64, symmetric=False), "I4Z64"),
    "gptq act-order": (gptq(), w.gptq(rng(), 32, 192, act_order=rng(1)), "Q4_0"),
    "gptq act-order, zero points": (
        gptq(4, 32), w.gptq(rng(), 32, 96, 4, 32, act_order=rng(1), symmetric=False), "I4Z32",
    ),
    "gptq groups of 16": (gptq(4, 16), w.gptq(rng(), 32, 64, 4, 16, act_order=rng(1)), "F32D"),
    "gptq bf16 scales": (gptq(), w.gptq(rng(), 32, 128, dtype="BF16"), "I4Z64"),
    "gptq float32 scales": (gptq(), w.gptq(rng(), 32, 128, dtype="F32"), "F32D"),
    "gptq float32 scale of one group": (gptq(4, -1), w.gptq(rng(), 32, 128, 4, -1, dtype="F32"), "I4Z64"),
    "gptq 2 bits": (gptq(2), w.gptq(rng(), 32, 128, 2, symmetric=False), "I4Z64"),
    "gptq 3 bits": (gptq(3), w.gptq(rng(), 64, 128, 3), "Q4_0"),
    "gptq 3 bits, second form": (gptq(3, v2=True), w.gptq(rng(), 64, 128, 3, symmetric=False, v2=True), "I4Z64"),
    "gptq dynamic": (gptq(4, dynamic={"+:m.*": {"bits": 8}}), w.gptq(rng(), 32, 128, 8), "Q8_0"),
    "awq": (AWQ, w.awq(rng(), 48, 192), "I4Z64"),
    "awq of older tools": (
        {"quant_method": "awq", "w_bit": 4, "q_group_size": 32, "version": "GEMM"}, w.awq(rng(), 32, 96, 32), "I4Z32",
    ),
    "autoround": (
        {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4, "group_size": 64, "sym": True},
        w.gptq(rng(), 32, 128), "Q4_0",
    ),
    "autoround, a layer of its own": (
        {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4, "group_size": 64,
         "data_type": "int", "extra_config": {"n": {"bits": 16}, "m": {"bits": 8, "group_size": 32}}},
        w.gptq(rng(), 32, 128, 8, 32), "Q8_0",
    ),
    "autoround as awq": (
        {"quant_method": "auto-round", "packing_format": "auto_round:auto_awq", "bits": 4, "group_size": 64},
        w.awq(rng(), 32, 128), "I4Z64",
    ),
    "w4a16": (compressed(group(group_size=128)), w.compressed_int(rng(), 32, 256, size=128), "I4Z64"),
    "w4a16 fp16 scales": (compressed(group(group_size=64)), w.compressed_int(rng(), 32, 128, dtype="F16"), "Q4_0"),
    "w4a16 zero points": (
        compressed(group(group_size=64, symmetric=False)), w.compressed_int(rng(), 40, 128, symmetric=False), "I4Z64",
    ),
    "w4a16 zero points in bytes": (
        compressed(group(group_size=64, symmetric=False)),
        w.compressed_int(rng(), 40, 128, symmetric=False, zeros_in_bytes=True), "I4Z64",
    ),
    "w4a16 act-order": (
        compressed(group(group_size=64, actorder="group")), w.compressed_int(rng(), 32, 256, act_order=True), "I4Z64",
    ),
    "w4a16 channel": (compressed(group(strategy="channel")), w.compressed_int(rng(), 32, 96, size=None), "I4Z64"),
    "w3a16 densely": (compressed(group(bits=3, group_size=32)), w.compressed_int(rng(), 33, 96, 3, 32), "I4Z32"),
    "w3a16 whole fields": (
        compressed(group(bits=3, group_size=32)), w.compressed_int(rng(), 33, 128, 3, 32, dense=False), "I4Z32",
    ),
    "w8a16": (compressed(group(bits=8, strategy="channel")), w.compressed_int(rng(), 32, 128, 8, None), "I8Z64"),
    "w8a8": (
        compressed(group(bits=8, strategy="channel", format="int-quantized")),
        w.compressed_int(rng(), 32, 128, 8, None, packed=False), "I8Z64",
    ),
    "w8a8 zero points": (
        compressed(group(bits=8, strategy="channel", format="int-quantized", symmetric=False)),
        w.compressed_int(rng(), 32, 128, 8, None, packed=False, symmetric=False), "I8Z64",
    ),
    "w8a8 one scale": (
        compressed(group(bits=8, format="int-quantized", symmetric=False)),
        w.compressed_int(rng(), 32, 128, 8, None, packed=False, symmetric=False, whole=True), "I8Z64",
    ),
    "int4 in bytes": (
        compressed(group(bits=4, strategy="channel", format="naive-quantized")),
        w.compressed_int(rng(), 32, 128, 4, None, packed=False), "I4Z64",
    ),
    "fp8 tiles": (TILES, w.fp8(rng(), 200, 320), "F8"),
    "fp8 tiles, last block short": (TILES, w.fp8(rng(), 160, 160), "F8"),
    "fp8 tiles, e8m0": (TILES, w.fp8(rng(), 130, 256, dtype="U8"), "F8"),
    "fp8 small tiles": (FP8 | {"weight_block_size": [16, 32]}, w.fp8(rng(), 40, 96, (16, 32)), "F32D"),
    "fp8 one scale": (FP8, w.fp8(rng(), 32, 128, None, ".weight_scale", flat=True), "F8"),
    "fp8 channel": (
        compressed(group("float", 8, "float-quantized", strategy="channel")),
        w.fp8(rng(), 33, 128, (1, 128), ".weight_scale", "BF16"), "F8",
    ),
    "fp8 blocks": (
        compressed(group("float", 8, "float-quantized", strategy="block", block_structure=[128, 128])),
        w.fp8(rng(), 130, 192, (128, 128), ".weight_scale", "BF16"), "F8",
    ),
    "mxfp8": (
        compressed(group("float", 8, "mxfp8-quantized", group_size=32)),
        w.fp8(rng(), 33, 96, (1, 32), ".weight_scale", "U8"), "F32D",
    ),
    "mxfp4": (compressed(group("float", 4, "mxfp4-pack-quantized", group_size=32)), w.mxfp4(rng(), 33, 96), "MXFP4"),
    "nvfp4": (
        compressed(group("float", 4, "nvfp4-pack-quantized", group_size=16, strategy="tensor_group")),
        w.nvfp4(rng(), 33, 128), "NVFP4",
    ),
    "nvfp4, last block short": (
        compressed(group("float", 4, "nvfp4-pack-quantized", group_size=16)), w.nvfp4(rng(), 33, 80), "F32D",
    ),
    "experts in mxfp4": ({"quant_method": "mxfp4"}, w.mxfp4(rng(), 33, 96, experts=3), "MXFP4"),
    "nf4": (BNB, w.bitsandbytes4(rng(), 33, 128, NF4), "NF4"),
    "nf4 twice": (BNB, w.bitsandbytes4(rng(), 24, 256, NF4, size=128, nested=32), "NF4"),
    "nf4 across rows": (BNB, w.bitsandbytes4(rng(), 33, 40, NF4, nested=4), "F32D"),
    "fp4": (BNB, w.bitsandbytes4(rng(), 33, 128, FP4, "fp4"), "FP4"),
    "another table": (BNB, w.bitsandbytes4(rng(), 33, 128, NF4 * np.float32(0.5)), "F32D"),
    "int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, w.bitsandbytes8(rng(), 33, 128), "I8Z64"),
}  # fmt: skip


def values(checkpoint: Checkpoint, name: str, *rows: int) -> NDArray[np.float32]:
    """Rows as the definition of their blocks has them, in the order of the inputs."""
    info, data, factor = checkpoint.read(name, *rows)
    found = dequantise(info.source, data, info.shape[-1], factor)
    if info.order is None:
        return found
    natural = np.empty_like(found)
    natural[:, info.order] = found
    return natural


@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_the_definition(tmp_path: Path, name: str) -> None:
    """Within the roundings of three float32 products; in ranges of rows as well."""
    config, written, source = CASES[name]
    checkpoint = open_checkpoint(save_module(tmp_path / "m", written, config))
    info = checkpoint.info("m.weight")
    assert list(checkpoint.names()) == ["m.weight"] and checkpoint.notices == []
    assert (info.source, info.shape) == (source, written.values.shape)
    want = written.values.reshape(-1, info.shape[-1])
    got = values(checkpoint, "m.weight")
    np.testing.assert_allclose(got, want, rtol=3 * 2.0**-24, atol=0)
    for start, stop in ((0, 1), (5, 22), (23, len(want))):
        np.testing.assert_array_equal(values(checkpoint, "m.weight", start, stop), got[start:stop])
    checkpoint.release("m.weight")
    assert {Path(file.path).name for file in checkpoint.files()} == {"config.json", "model.safetensors"}


def test_the_order_of_columns_is_a_tensor(tmp_path: Path) -> None:
    """Transposed, the columns are in their places."""
    written = w.gptq(rng(), 32, 128, act_order=rng(1))
    checkpoint = open_checkpoint(save_module(tmp_path / "m", written, gptq()))
    order = checkpoint.info("m.weight").order
    info, data, _ = checkpoint.read(f"m.weight{ORDER}")
    assert order is not None and (info.shape, info.source) == ((128,), "F32")
    np.testing.assert_array_equal(data.view(np.float32)[0], order)
    assert sorted(order) == list(range(128)) and f"m.weight{ORDER}" in checkpoint
    checkpoint.release(f"m.weight{ORDER}")
    turned = checkpoint.info("m.weight.T")
    assert (turned.source, turned.shape, turned.order) == ("F32D", (128, 32), None)
    np.testing.assert_allclose(values(checkpoint, "m.weight.T"), written.values.T, rtol=3 * 2.0**-24)


def test_columns_that_are_not_sorted_have_an_order_when_asked(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save_module(tmp_path / "m", w.gptq(rng(), 32, 128), gptq()))
    assert checkpoint.info("m.weight").order is None
    np.testing.assert_array_equal(checkpoint.read(f"m.weight{ORDER}").data.view(np.float32)[0], np.arange(128))


def test_zero_points_that_3_bit_tools_wrote_in_whole_words(tmp_path: Path) -> None:
    """GPTQModel takes constants from words, where AutoGPTQ takes one from fields; both are symmetric here."""
    written = w.gptq(rng(), 64, 64, 3, v2=True)
    words = written.tensors[".qzeros"].values.view(np.uint32)
    ones = np.resize(np.array([0x24924924, 0x92492492, 0x49249249], np.uint32), words.shape[1])
    written.tensors[".qzeros"] = Raw("I32", (words - ones).view(np.int32))
    checkpoint = open_checkpoint(save_module(tmp_path / "m", written, gptq(3)))
    np.testing.assert_allclose(values(checkpoint, "m.weight"), written.values, rtol=3 * 2.0**-24)


def test_words_that_were_diminished_as_a_whole(tmp_path: Path) -> None:
    """A zero point of 0 borrows from the next field, and gives it back."""
    written = w.gptq(rng(), 64, 64, symmetric=False, v2=True)
    zeros = np.tile(np.arange(8), 8)[None]
    scales = written.tensors[".scales"].values.astype(np.float32)
    codes = np.round(written.values / scales.T + 0.0)  # code - old zero point
    old = w.fields(zeros, 4)
    written.tensors[".qzeros"] = Raw("I32", (old.view(np.uint32) - np.uint32(0x11111111)).view(np.int32))
    checkpoint = open_checkpoint(save_module(tmp_path / "m", written, gptq()))
    got = values(checkpoint, "m.weight") / scales.T
    shift = np.round(codes - got)  # the same for all of a row: new zero point - old one
    np.testing.assert_array_equal(shift, np.broadcast_to(shift[:, :1], shift.shape))
    info, data, _ = checkpoint.read("m.weight")
    assert info.source == "I4Z64"
    np.testing.assert_array_equal(data[:, 2], zeros[0])


def test_parts_of_a_matrix(tmp_path: Path) -> None:
    """Some rows with their factors, and the matrix transposed."""
    config, written, _ = CASES["w8a8"]
    checkpoint = open_checkpoint(save_module(tmp_path / "m", written, config))
    whole = values(checkpoint, "m.weight")
    np.testing.assert_array_equal(values(checkpoint, "m.weight[4:8%16]"), np.concatenate([whole[4:8], whole[20:24]]))
    np.testing.assert_array_equal(values(checkpoint, "m.weight.T"), whole.T)


def test_a_file_of_another_name(tmp_path: Path) -> None:
    """Where it is the only one; neither an adapter nor a part of a model is one."""
    folder = save_module(tmp_path / "m", w.gptq(rng(), 32, 64), gptq())
    file = (folder / "model.safetensors").rename(folder / "gptq_model-4bit.safetensors")
    (folder / "adapter_model.safetensors").write_bytes(b"")
    assert open_checkpoint(folder).info("m.weight").source == "Q4_0"
    file.rename(folder / "model-00001-of-00002.safetensors")
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor .* found .*model-00001-of-00002"):
        open_checkpoint(folder)


def test_a_bias_of_zeros_need_not_be_read(tmp_path: Path) -> None:
    for value, listed in ((0, False), (1, True)):
        written = w.gptq(rng(), 32, 64)
        written.tensors[".bias"] = Raw("F16", np.full(32, value, np.float16))
        checkpoint = open_checkpoint(save_module(tmp_path / str(value), written, gptq()))
        assert ("m.bias" in checkpoint.names()) is listed and "m.bias" in checkpoint


def test_scales_of_activations_and_of_a_cache(tmp_path: Path) -> None:
    written = w.fp8(rng(), 32, 64, None, ".weight_scale")
    written.tensors[".input_scale"] = Raw("F32", np.ones(1, np.float32))
    written.tensors[".k_scale"] = Raw("F32", np.ones(1, np.float32))
    for config in (FP8, compressed(group("float", 8, "float-quantized"), kv_cache_scheme={"num_bits": 8})):
        checkpoint = open_checkpoint(save_module(tmp_path / "m", written, config))
        assert list(checkpoint.names()) == ["m.weight"]
        assert any("m.k_scale" in notice for notice in checkpoint.notices)


def test_side_files_from_before_quantization_config(tmp_path: Path) -> None:
    folder = save_module(tmp_path / "m", w.gptq(rng(), 32, 64), {})
    (folder / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"'m\.qweight'.*no quantization_config"):
        open_checkpoint(folder)
    (folder / "quantize_config.json").write_text('{"bits": 4, "group_size": 64, "desc_act": false}')
    checkpoint = open_checkpoint(folder)
    assert checkpoint.info("m.weight").source == "Q4_0"
    assert FileIdentity.of(folder / "quantize_config.json") in checkpoint.files()


def test_unknown_keys_are_told(tmp_path: Path) -> None:
    config = gptq(key_of_tomorrow=1)
    (notice,) = open_checkpoint(save_module(tmp_path / "m", w.gptq(rng(), 32, 64), config)).notices
    assert notice.endswith("has key 'key_of_tomorrow', which is unknown and was left aside")


INT4 = w.compressed_int(rng(), 32, 64)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "hqq": ({"quant_method": "hqq"}, "quant_method 'hqq' is not supported; supported: gptq, awq"),
    "no method": ({"bits": 4}, "quant_method None is not supported"),
    "no object": ([1], r"quantization_config is \[1\], expected an object"),  # type: ignore[dict-item]
    "no gptq": (gptq(), r"no tensor is quantised: none is called \*.qweight"),
    "5 bits": (gptq(5), r"bits = 5 is not supported \(served: 2, 3, 4, 8\)"),
    "marlin": (gptq() | {"checkpoint_format": "marlin"}, "checkpoint_format = 'marlin' is not supported"),
    "int64 words": (gptq(pack_dtype="int64"), "pack_dtype = 'int64' is not supported"),
    "group of 0": (gptq(4, 0), "group_size = 0 is not supported"),
    "dynamic": (gptq(dynamic={"m": {"scale": 2}}), "dynamic: m: scale = 2 is not supported"),
    "marlin-24": (compressed(group(), format="marlin-24"), "format = 'marlin-24' is not supported"),
    "order of tomorrow": (compressed(group(actorder="x")), "actorder = 'x' is not supported"),
    "no zero points": (compressed(group(symmetric=False)), r"weight_zero_point' is missing"),
    "bad pattern": (gptq(dynamic={"(": {}}), r"'\(' is no regular expression"),
    "gemv": (AWQ | {"version": "gemv"}, r"version = 'gemv' is not supported \(served: gemm\)"),
    "awq 3 bits": (AWQ | {"bits": 3}, "bits = 3 is not supported"),
    "awq without zero points": (AWQ | {"zero_point": False}, "zero_point = False is not supported"),
    "autoround": (
        {"quant_method": "auto-round", "bits": 4},
        r"packing_format = None is not supported \(served: auto_rou",
    ),
    "autoround floats": (
        {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4, "data_type": "mx_fp"},
        "data_type = 'mx_fp' is not supported",
    ),
    "e5m2": (FP8 | {"fmt": "e5m2"}, "fmt = 'e5m2' is not supported"),
    "tile": (FP8 | {"weight_block_size": [128]}, "weight_block_size = .* is not supported"),
    "marlin-24 of a group": (compressed(group(format="marlin-24")), "format = 'marlin-24' is not supported"),
    "dense": (compressed(group() | {"format": None}, format="dense"), "format = 'dense' is not supported"),
    "sparse": (
        compressed(group(group_size=64), sparsity_config={"format": "sparse-bitmask"}),
        "'sparse-bitmask' is not",
    ),
    "rotated": (
        compressed(group(group_size=64), transform_config={"R1": {}}),
        "transform_config = .* is not supported",
    ),
    "outputs": (compressed(group(group_size=64) | {"output_activations": {"a": 1}}), "output_activations = .* is not"),
    "ignored": (compressed(group(group_size=64), ignore=["re:m.*"]), r"'m\.weight_scale' belongs to a module that the"),
    "not targeted": (
        compressed(group(group_size=64) | {"targets": ["n"]}),
        "belongs to a module that the config leaves",
    ),
    "no groups": (compressed(), "config_groups is missing or empty"),
    "strategy": (compressed(group(strategy="attn_head")), "strategy = 'attn_head' is not supported"),
    "16 bits": (compressed(group(bits=16, group_size=64)), "num_bits = 16 is not supported"),
    "dynamic weights": (compressed(group(group_size=64, dynamic=True)), "dynamic = True is not supported"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_key_and_value(tmp_path: Path, name: str) -> None:
    config, message = REFUSED[name]
    folder = save_module(tmp_path / "m", INT4, config)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(folder)
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)


@pytest.mark.parametrize(
    ("config", "table", "kind", "ending", "message"),
    [
        ("fp4", NF4, "nf4", "nf4", "config.json: .*bnb_4bit_quant_type = 'fp4', but .*bitsandbytes__nf4' = 'nf4'"),
        ("nf4", FP4, "fp4", "fp4", "bnb_4bit_quant_type = 'nf4', but .*bitsandbytes__fp4' = 'fp4'"),
        (None, NF4, "fp4", "nf4", "bitsandbytes__nf4' = 'nf4', but .* quant_type in .* = 'fp4'"),
        (None, FP4, "nf4", "nf4", r"quant_type in .* = 'nf4', but .* values in 'm\.weight\.quant_map' = 'fp4'"),
        (4, NF4, "nf4", "nf4", "bnb_4bit_quant_type = 4, but"),
    ],
)
def test_types_of_one_matrix_that_differ(
    tmp_path: Path, config: Any, table: NDArray[np.float32], kind: str, ending: str, message: str
) -> None:
    written = w.bitsandbytes4(rng(), 32, 128, table, kind)
    state = ".weight.quant_state.bitsandbytes__"
    written.tensors[state + ending] = written.tensors.pop(state + kind)
    folder = save_module(tmp_path / "m", written, {**BNB, "bnb_4bit_quant_type": config})
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder)


def test_groups_by_name_pattern_and_class(tmp_path: Path) -> None:
    """The most exact target counts: a name, then a pattern, then a class."""
    eight = w.compressed_int(rng(), 32, 64, 8, packed=False)
    groups = [
        group(group_size=64), group(bits=8, group_size=64, format="int-quantized") | {"targets": ["re:.*down"]},
        group(group_size=32) | {"targets": ["b.down"]},
    ]  # fmt: skip
    folder = save_module(tmp_path / "m", eight, compressed(*groups), "a.down")
    assert open_checkpoint(folder).info("a.down.weight").source == "I8Z64"
    folder = save_module(tmp_path / "m", w.compressed_int(rng(), 32, 64, size=32), compressed(*groups), "b.down")
    assert open_checkpoint(folder).info("b.down.weight").source == "I4Z32"
    assert open_checkpoint(save_module(tmp_path / "m", INT4, compressed(*groups), "c.up")).info("c.up.weight")


def test_scales_that_are_no_numbers_are_named(tmp_path: Path) -> None:
    for config, written, end in (
        (gptq(), w.gptq(rng(), 32, 64), ".scales"),
        (TILES, w.fp8(rng(), 32, 64), ".weight_scale_inv"),
        (compressed(group("float", 4, "mxfp4-pack-quantized", group_size=32)), w.mxfp4(rng(), 32, 64), ".weight_scale"),
        (BNB, w.bitsandbytes4(rng(), 32, 64, NF4), ".weight.absmax"),
        (BNB, w.bitsandbytes4(rng(), 32, 64, NF4), ".weight.quant_map"),
    ):
        raw = written.tensors[end] = Raw(written.tensors[end].dtype, written.tensors[end].values.copy())
        raw.values.reshape(-1)[0] = 255 if raw.dtype == "U8" else np.nan
        folder = save_module(tmp_path / "m", written, config)
        with pytest.raises(CheckpointError, match=r"a scale of m\.\w+ is infinite or no number"):
            open_checkpoint(folder).read("m.weight")


def test_a_group_index_outside_is_named(tmp_path: Path) -> None:
    written = w.gptq(rng(), 32, 128)
    written.tensors[".g_idx"].values[7] = 2
    checkpoint = open_checkpoint(save_module(tmp_path / "m", written, gptq()))
    with pytest.raises(CheckpointError, match=r"m\.weight has columns in groups 0 to 2, of 2 groups"):
        checkpoint.info("m.weight")


@pytest.mark.parametrize("name", CASES)
def test_tensors_of_other_shapes_and_types_are_named(tmp_path: Path, name: str) -> None:
    """Each tensor missing, of another type, and with a row more or less: a CheckpointError that names the module."""
    config, written, _ = CASES[name]
    named = []
    for end, raw in written.tensors.items():
        values_ = raw.values
        changes: dict[str, Raw | None] = {"missing": None, "type": Raw("F64", values_.astype(np.float64))}
        if values_.ndim:
            changes["empty"] = Raw(raw.dtype, values_[:0])
        if values_.ndim and len(values_) > 1 and not end.startswith(".weight.quant_state"):
            changes["less"] = Raw(raw.dtype, values_[:-1])
            changes["more"] = Raw(raw.dtype, np.concatenate([values_, values_[:1]]))
        for kind, change in changes.items():
            tensors = {e: r for e, r in written.tensors.items() if e != end} | ({end: change} if change else {})
            if (kind == "missing" and end in (".g_idx", ".weight_g_idx")) or end == ".weight_format":
                continue
            folder = save_module(tmp_path / "m", Written(tensors, written.values), config)
            try:
                checkpoint = open_checkpoint(folder)
                checkpoint.read("m.weight")
            except CheckpointError as error:
                named.append(str(error))
            else:  # a matrix of another shape, which the model has no place for
                assert checkpoint.info("m.weight").shape != written.values.shape, (end, kind)
    assert len(named) >= 2 * len(written.tensors) - 1
    assert all("\n" not in line and re.search(r"\bm[._]|no tensor is quantised", line) for line in named), named


ODD: list[Any] = [None, True, -1, 0, 3, 1.5, 2**40, "", "x", "re:(", [], [1], ["m"], {}, {"m": 1}, {"a": {"b": []}}]


def changed(value: Any) -> Iterator[Any]:
    """`value` with one entry of one object in it replaced by something odd, or left out."""
    for key in value if isinstance(value, dict) else ():
        yield {k: v for k, v in value.items() if k != key}
        for other in ODD:
            yield {**value, key: other}
        for inner in changed(value[key]):
            yield {**value, key: inner}


@pytest.mark.parametrize("name", ["gptq dynamic", "awq", "w4a16 zero points", "fp8 blocks", "fp8 tiles", "nf4"])
def test_any_description_gives_values_or_one_line(tmp_path: Path, name: str) -> None:
    config, written, _ = CASES[name]
    folder = save_module(tmp_path / "m", written, config)
    lines = []
    for other in changed(config):
        (folder / "config.json").write_text(json.dumps({"quantization_config": other}))
        try:
            checkpoint = open_checkpoint(folder)
            assert checkpoint.read("m.weight").data.shape[0] == len(written.values)
        except CheckpointError as error:
            lines.append(str(error))
    assert lines and not any("\n" in line or "damaged" in line for line in lines), lines


@pytest.mark.parametrize("name", ["nf4 twice", "fp4"])
def test_any_state_of_bitsandbytes_gives_values_or_one_line(tmp_path: Path, name: str) -> None:
    config, written, _ = CASES[name]
    end = next(end for end in written.tensors if "quant_state" in end)
    said = json.loads(written.tensors[end].values.tobytes())
    lines = []
    for other in [*changed(said), [], 1]:
        state = Raw("U8", np.frombuffer(json.dumps(other).encode(), np.uint8))
        folder = save_module(tmp_path / "m", Written({**written.tensors, end: state}, written.values), config)
        try:
            open_checkpoint(folder).read("m.weight")
        except CheckpointError as error:
            lines.append(str(error))
    assert lines and not any("\n" in line or "damaged" in line for line in lines), lines
