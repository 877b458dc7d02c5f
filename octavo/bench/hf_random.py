"""Random models in Hugging Face layout, quantised as GPTQ, AWQ, compressed-tensors and FP8 checkpoints are.

N rows (outputs), K columns (inputs), G groups of a row. All codes may be any; scales are such that values have the root
mean square K^-1/2, about, at which activations stay ordinary.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from octavo.quantize.compressed import FORMATS
from octavo.quantize.directory import Tensor, TensorShards
from octavo.weights.formats import f32_to_bf16

Rng = np.random.Generator
Tensors = dict[str, Tensor]
"""By the end of their names."""


class HfFormat(NamedTuple):
    config: dict[str, Any]  # quantization_config
    matrix: Callable[[int, int, Rng], Tensors]  # of (N, K)


def write_random(folder: Path, config: dict[str, Any], matrices: list[tuple[str, int, int]], form: HfFormat) -> None:
    """A Llama. config: its config.json; matrices: names, N and K of its modules. Embeddings, which are tied, and norms are bf16.

    The folder is there; it gets no tokenizer.
    """
    shards = TensorShards(folder)
    hidden, vocab, layers = config["hidden_size"], config["vocab_size"], config["num_hidden_layers"]
    for name, rows, cols in matrices:
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        for end, tensor in form.matrix(rows, cols, rng).items():
            shards.put(f"{name}{end}", tensor)
    table = np.random.default_rng(0).standard_normal((vocab, hidden), np.float32) * np.float32(hidden**-0.5)
    shards.put("model.embed_tokens.weight", Tensor("BF16", (vocab, hidden), f32_to_bf16(table)))
    ones = Tensor("BF16", (hidden,), f32_to_bf16(np.ones(hidden, np.float32)))
    for i in range(layers):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shards.put(f"model.layers.{i}.{norm}.weight", ones)
    shards.put("model.norm.weight", ones)
    shards.close()
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": form.config}, indent=2) + "\n")


# ---- tensors of a matrix


def _words(rng: Rng, *shape: int) -> Tensor:
    data = np.frombuffer(bytearray(rng.bytes(4 * int(np.prod(shape)))), np.int32)
    return Tensor("I32", shape, data.reshape(shape))


def _scales(rng: Rng, cols: int, typical: float, dtype: str, *shape: int) -> Tensor:
    """typical: the root mean square of what they multiply."""
    values = rng.uniform(0.7, 1.3, shape).astype(np.float32) * np.float32(cols**-0.5 / typical)
    return Tensor(dtype, shape, {"F16": values.astype(np.float16), "F32": values}.get(dtype, f32_to_bf16(values)))


_TYPICAL = {4: 5.0, 8: 74.0}
"""Root mean square of integers of so many bits."""


def _gptq(bits: int, group: int, rows: int, cols: int, rng: Rng) -> Tensors:
    """Zero points are random for 4 bits, the middle for 8."""
    groups = 1 if group == -1 else cols // group
    middle = np.full((groups, rows * bits // 32), 0x7F7F7F7F, np.int32)  # less one
    return {
        ".qweight": _words(rng, cols * bits // 32, rows),
        ".qzeros": _words(rng, groups, rows * bits // 32) if bits == 4 else Tensor("I32", middle.shape, middle),
        ".scales": _scales(rng, cols, _TYPICAL[bits], "F16", groups, rows),
    }


def _awq(group: int, rows: int, cols: int, rng: Rng) -> Tensors:
    return {
        ".qweight": _words(rng, cols, rows // 8),
        ".qzeros": _words(rng, cols // group, rows // 8),
        ".scales": _scales(rng, cols, _TYPICAL[4], "F16", cols // group, rows),
    }


def _compressed(bits: int, group: int | None, packed: bool, rows: int, cols: int, rng: Rng) -> Tensors:
    scales = {".weight_scale": _scales(rng, cols, _TYPICAL[bits], "BF16", rows, cols // (group or cols))}
    if packed:
        shape = Tensor("I64", (2,), np.array([rows, cols], np.int64))
        return {".weight_packed": _words(rng, rows, cols * bits // 32), ".weight_shape": shape, **scales}
    data = np.frombuffer(bytearray(rng.bytes(rows * cols)), np.int8).reshape(rows, cols)
    return {".weight": Tensor("I8", (rows, cols), data), **scales}


def _fp8(tile: int | None, rows: int, cols: int, rng: Rng) -> Tensors:
    """Values below 2, no NaN. tile: rows and columns that share a scale; None: a scale for each row."""
    values = np.frombuffer(rng.bytes(rows * cols), np.uint8).reshape(rows, cols) & np.uint8(0xBF)
    shape, end = ((rows, 1), "scale") if tile is None else ((-(-rows // tile), -(-cols // tile)), "scale_inv")
    return {
        ".weight": Tensor("F8_E4M3", (rows, cols), values),
        f".weight_{end}": _scales(rng, cols, 0.6, "F32", *shape),
    }


def _mxfp4(rows: int, cols: int, rng: Rng) -> Tensors:
    data = np.frombuffer(bytearray(rng.bytes(rows * cols // 2)), np.uint8).reshape(rows, -1)
    exponent = np.full((rows, cols // 32), 127 + round(np.log2(cols**-0.5 / 3)), np.uint8)
    return {".weight_packed": Tensor("U8", data.shape, data), ".weight_scale": Tensor("U8", exponent.shape, exponent)}


# ---- formats


def _of_gptq(bits: int, group: int) -> HfFormat:
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False, "sym": bits == 8}
    return HfFormat(config, lambda rows, cols, rng: _gptq(bits, group, rows, cols, rng))


def _of_compressed(name: str, group: int | None) -> HfFormat:
    form = FORMATS[name]._replace(group=group)
    packed = form.layout == "pack-quantized"
    if form.kind == "float":
        return HfFormat(form.config(["lm_head"]), lambda rows, cols, rng: _fp8(None, rows, cols, rng))
    return HfFormat(
        form.config(["lm_head"]), lambda rows, cols, rng: _compressed(form.bits, group, packed, rows, cols, rng)
    )


_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
_TILES = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
_MXFP4 = {
    "quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "ignore": ["lm_head"],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
        "type": "float", "num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": True, "dynamic": False,
    }}},
}  # fmt: skip

HF_FORMATS = {
    "gptq-g32": _of_gptq(4, 32),
    "gptq-g128": _of_gptq(4, 128),
    "gptq-channel": _of_gptq(4, -1),
    "gptq-8bit": _of_gptq(8, 128),
    "awq-g128": HfFormat(_AWQ, lambda rows, cols, rng: _awq(128, rows, cols, rng)),
    "w4a16-g128": _of_compressed("w4a16", 128),
    "w4a16-channel": _of_compressed("w4a16", None),
    "w8a16-channel": _of_compressed("w8a16", None),
    "w8a8": _of_compressed("w8a8", None),
    "fp8-channel": _of_compressed("fp8", None),
    "fp8-128x128": HfFormat(_TILES, lambda rows, cols, rng: _fp8(128, rows, cols, rng)),
    "mxfp4-packed": HfFormat(_MXFP4, _mxfp4),
}
"""GPTQ and AWQ with zero points, 8 bits without; compressed-tensors symmetric."""
