"""Writers of quantised layouts: random codes, scales and zero points of one matrix, as tensors and as their values.

Each gives the tensors of module `m` by the end of their names, and the matrix [rows, cols] that they mean, in float64
by the definition of the format. What writes them in the field is the other side of octavo.weights.quant.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.weights.formats import bf16_to_f32, f32_to_bf16

Array = NDArray[Any]
Rng = np.random.Generator


class Raw(NamedTuple):
    dtype: str  # safetensors' spelling
    values: Array  # of the numpy type with its bits


class Written(NamedTuple):
    tensors: dict[str, Raw]  # by the end of their names, ".qweight" or the like
    values: NDArray[np.float64]


def save_raw(path: Path, tensors: Mapping[str, Raw]) -> None:
    """A safetensors file of types that numpy has not."""
    header, data = {}, b""
    for name, (dtype, values) in tensors.items():
        start = len(data)
        data += np.ascontiguousarray(values).tobytes()
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [start, len(data)]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def save_module(folder: Path, written: Written, config: dict[str, Any], module: str = "m") -> Path:
    """A directory that can be opened, with one matrix."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    save_raw(folder / "model.safetensors", {module + end: raw for end, raw in written.tensors.items()})
    return folder


def fields(codes: Array, bits: int) -> NDArray[np.int32]:
    """[n, count] codes as [n, count bits / 32] words: field after field, from the lowest bit on."""
    stream = (codes[..., None] >> np.arange(bits)) & 1
    return np.packbits(stream.reshape(len(codes), -1).astype(np.uint8), axis=1, bitorder="little").view(np.int32)


def random_scales(rng: Rng, shape: tuple[int, ...], cols: int, dtype: str) -> tuple[Raw, NDArray[np.float32]]:
    values = (rng.uniform(0.1, 0.4, shape) / cols**0.5).astype(np.float32)
    if dtype == "F16":
        return Raw(dtype, values.astype(np.float16)), values.astype(np.float16).astype(np.float32)
    if dtype == "BF16":
        return Raw(dtype, f32_to_bf16(values)), bf16_to_f32(f32_to_bf16(values))
    return Raw(dtype, values), values


def gptq(
    rng: Rng, rows: int, cols: int, bits: int = 4, size: int = 64, symmetric: bool = True,
    act_order: Rng | None = None, v2: bool = False, dtype: str = "F16",
) -> Written:  # fmt: skip
    """act_order: draws the order of the columns."""
    size = cols if size == -1 else size
    groups = -(-cols // size)
    codes = rng.integers(0, 2**bits, (rows, cols))
    zeros = rng.integers(1, 2**bits, (rows, groups)) if not symmetric else np.full((rows, groups), 2 ** (bits - 1))
    raw, scales = random_scales(rng, (groups, rows), cols, dtype)
    index = np.arange(cols) // size
    if act_order is not None:
        index = act_order.permutation(index)
    tensors = {
        ".qweight": Raw("I32", fields(codes, bits).T), ".scales": raw, ".g_idx": Raw("I32", index.astype(np.int32)),
        ".qzeros": Raw("I32", fields((zeros if v2 else zeros - 1).T, bits)),
    }  # fmt: skip
    return Written(tensors, scales.T[:, index].astype(np.float64) * (codes - zeros[:, index]))


def awq(rng: Rng, rows: int, cols: int, size: int = 64, dtype: str = "F16") -> Written:
    size = cols if size == -1 else size
    groups = -(-cols // size)
    codes, zeros = rng.integers(0, 16, (rows, cols)), rng.integers(0, 16, (rows, groups))
    raw, scales = random_scales(rng, (groups, rows), cols, dtype)

    def packed(values: Array) -> Raw:
        eights = values.T.reshape(values.shape[1], -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]]
        return Raw("I32", fields(eights.reshape(values.shape[1], -1), 4))

    tensors = {".qweight": packed(codes), ".qzeros": packed(zeros), ".scales": raw}
    index = np.arange(cols) // size
    return Written(tensors, scales.T[:, index].astype(np.float64) * (codes - zeros[:, index]))


def compressed_int(
    rng: Rng, rows: int, cols: int, bits: int = 4, size: int | None = 64, symmetric: bool = True, packed: bool = True,
    act_order: bool = False, dtype: str = "BF16", whole: bool = False, zeros_in_bytes: bool = False, dense: bool = True,
) -> Written:  # fmt: skip
    """size None: a scale for each output, or with `whole` one for all. dense: fields may pass the end of a word."""
    groups = 1 if size is None else -(-cols // size)
    half = 2 ** (bits - 1)
    codes = rng.integers(-half, half, (rows, cols))
    zeros = np.zeros((rows, groups), int) if symmetric else rng.integers(-half, half, (1 if whole else rows, groups))
    raw, scales = random_scales(rng, (1,) if whole else (rows, groups), cols, dtype)
    index = np.arange(cols) // (size or cols)
    if act_order:
        index = rng.permutation(index)

    def words(values: Array) -> NDArray[np.int32]:  # fields along the rows of `values`
        each = 32 // bits
        if dense:
            whole_words = np.pad(values + half, ((0, 0), (0, -values.shape[1] % 32)))
            return fields(whole_words, bits)[:, : -(-values.shape[1] * bits // 32)]
        padded = np.pad(values + half, ((0, 0), (0, -values.shape[1] % each))).reshape(len(values), -1, each)
        return (padded << (bits * np.arange(each))).sum(axis=2).astype(np.uint32).view(np.int32)

    tensors = {".weight_scale": raw}
    if packed:
        shape = Raw("I64", np.array([rows, cols], np.int64))
        tensors |= {".weight_packed": Raw("I32", words(codes)), ".weight_shape": shape}
    else:
        tensors[".weight"] = Raw("I8", codes.astype(np.int8))
    if not symmetric:
        in_bytes = zeros_in_bytes or not packed or whole
        point = Raw("I8", zeros.astype(np.int8)) if in_bytes else Raw("I32", words(zeros.T).T)
        tensors[".weight_zero_point"] = point
    if act_order:
        tensors[".weight_g_idx"] = Raw("I32", index.astype(np.int32))
    return Written(tensors, scales.reshape(-1, groups)[:, index].astype(np.float64) * (codes - zeros[:, index]))


E4M3 = np.array(
    [(-1) ** (b >> 7) * ((b & 7) / 8 + (b & 0x78 > 0)) * 2.0 ** (max(b >> 3 & 15, 1) - 7) for b in range(256)]
)
E4M3[[0x7F, 0xFF]] = np.nan
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def fp8(
    rng: Rng, rows: int, cols: int, tile: tuple[int, int] | None = (128, 128), scale: str = ".weight_scale_inv",
    dtype: str = "F32", flat: bool = False,
) -> Written:  # fmt: skip
    """tile None: one scale for all. flat: without the dimension of the tiles along K, where there is one."""
    tile = tile or (rows, cols)
    codes = rng.integers(0, 0x7F, (rows, cols)) | rng.integers(0, 2, (rows, cols)) << 7
    grid = (-(-rows // tile[0]), -(-cols // tile[1]))
    if dtype == "U8":
        exponents = rng.integers(115, 120, grid).astype(np.uint8)
        raw, scales = Raw(dtype, exponents), np.ldexp(1.0, exponents.astype(int) - 127)
    else:
        raw, scales = random_scales(rng, grid, cols, dtype)
    wide = scales[np.arange(rows) // tile[0]][:, np.arange(cols) // tile[1]]
    raw = Raw(raw.dtype, raw.values.reshape(-1)) if flat else raw
    return Written({".weight": Raw("F8_E4M3", codes.astype(np.uint8)), scale: raw}, E4M3[codes] * wide)


def pairs(codes: Array) -> NDArray[np.uint8]:
    """[..., K] nibbles two to a byte, the first in the low one."""
    return (codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8)


def mxfp4(rng: Rng, rows: int, cols: int, experts: int = 0) -> Written:
    """experts: as gpt-oss has them; 0: as compressed-tensors."""
    shape = (experts, rows, cols) if experts else (rows, cols)
    codes, exponents = rng.integers(0, 16, shape), rng.integers(118, 126, (*shape[:-1], cols // 32)).astype(np.uint8)
    values = E2M1[codes] * np.repeat(np.ldexp(1.0, exponents.astype(int) - 127), 32, axis=-1)
    data = pairs(codes)
    if not experts:
        return Written({".weight_packed": Raw("U8", data), ".weight_scale": Raw("U8", exponents)}, values)
    data = data.reshape(experts, rows, cols // 32, 16)
    return Written({"_blocks": Raw("U8", data), "_scales": Raw("U8", exponents)}, values)


def nvfp4(rng: Rng, rows: int, cols: int) -> Written:
    codes, scales = rng.integers(0, 16, (rows, cols)), rng.integers(1, 0x7F, (rows, cols // 16)).astype(np.uint8)
    divisor = np.array([1000.0 * cols**0.5], np.float32)
    values = E2M1[codes] * np.repeat(E4M3[scales], 16, axis=1) / divisor.astype(np.float64)
    tensors = {
        ".weight_packed": Raw("U8", pairs(codes)), ".weight_scale": Raw("F8_E4M3", scales),
        ".weight_global_scale": Raw("F32", divisor),
    }  # fmt: skip
    return Written(tensors, values)


def bitsandbytes4(
    rng: Rng, rows: int, cols: int, table: NDArray[np.float32], kind: str = "nf4", size: int = 64, nested: int = 0
) -> Written:
    codes = rng.integers(0, 16, rows * cols)
    count = -(-rows * cols // size)
    said: dict[str, Any] = {"quant_type": kind, "blocksize": size, "dtype": "bfloat16", "shape": [rows, cols]}
    tensors = {
        ".weight": Raw("U8", (codes[0::2] << 4 | codes[1::2]).astype(np.uint8)[:, None]),
        ".weight.quant_map": Raw("F32", table),
    }
    if nested:
        absmax = rng.integers(0, 256, count).astype(np.uint8)
        map_ = np.linspace(-1, 1, 256, dtype=np.float32)
        of_block = rng.uniform(0.01, 0.02, -(-count // nested)).astype(np.float32)
        said |= {"nested_blocksize": nested, "nested_offset": 0.0625, "nested_dtype": "float32"}
        tensors |= {
            ".weight.absmax": Raw("U8", absmax), ".weight.nested_absmax": Raw("F32", of_block),
            ".weight.nested_quant_map": Raw("F32", map_),
        }  # fmt: skip
        scales = map_[absmax].astype(np.float64) * of_block[np.arange(count) // nested] + 0.0625
    else:
        raw, scales32 = random_scales(rng, (count,), cols, "F32")
        tensors[".weight.absmax"], scales = raw, scales32.astype(np.float64)
    state = np.frombuffer(json.dumps(said).encode(), np.uint8)
    tensors[f".weight.quant_state.bitsandbytes__{kind}"] = Raw("U8", state)
    values = table[codes].astype(np.float64) * scales[np.arange(rows * cols) // size]
    return Written(tensors, values.reshape(rows, cols))


def bitsandbytes8(rng: Rng, rows: int, cols: int) -> Written:
    codes = rng.integers(-127, 128, (rows, cols))
    raw, scales = random_scales(rng, (rows,), cols, "F32")
    tensors = {".weight": Raw("I8", codes.astype(np.int8)), ".SCB": raw, ".weight_format": Raw("U8", np.uint8([0]))}
    return Written(tensors, codes * (scales.astype(np.float64) / 127)[:, None])


def group(kind: str = "int", bits: int = 4, format: str = "pack-quantized", **weights: Any) -> dict[str, Any]:
    """A config group of compressed-tensors for all linears."""
    return {"targets": ["Linear"], "format": format, "weights": {"num_bits": bits, "type": kind, **weights}}


def compressed(*groups: dict[str, Any], **others: Any) -> dict[str, Any]:
    named = {f"group_{i}": g for i, g in enumerate(groups)}
    return {"quant_method": "compressed-tensors", "config_groups": named, **others}


Writer = Callable[[Rng, int, int], Written]
