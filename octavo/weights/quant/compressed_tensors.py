"""compressed-tensors, what llm-compressor writes.

Per module X: X.weight (int8 or e4m3 [N, K]) or X.weight_packed (fields of fewer bits in words along K, plus half of
their range; e2m1 codes two to a byte), X.weight_scale [N, G], of one tile or of all, X.weight_zero_point ([N, G] int8, or
packed along N), X.weight_shape (N, K), X.weight_g_idx [K], and for NVFP4 X.weight_global_scale, which divides.
Scales and zero points of activations (X.input_*) are accepted and not used: docs/FORMATS.md.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octavo.weights.formats.codes import E2M1, E4M3
from octavo.weights.quant import blocks
from octavo.weights.quant.blocks import F32, I32, U8, unpack
from octavo.weights.quant.floats import fp8
from octavo.weights.quant.found import Found
from octavo.weights.quant.fp8 import kv_scales
from octavo.weights.quant.matrix import DEQUANTISED, Blocks, Integers, Matrix, Place, finite, plain_groups, to_f32
from octavo.weights.quant.mxfp4 import mxfp4_rows
from octavo.weights.quant.schemes import Scheme, Schemes
from octavo.weights.quant.settings import Settings, unknown_keys
from octavo.weights.safetensors_file import Entry, Tensors
from octavo.weights.spec import CheckpointError

_OTHERS = ("input_scale", "input_zero_point", "input_global_scale")


def find(settings: Settings, tensors: Tensors) -> Found:
    schemes = Schemes(settings)
    settings.known("quant_method", "version", "quantization_status", "global_compression_ratio", "kv_cache_scheme")
    settings.empty("transform_config")
    sparsity = settings.inner("sparsity_config")
    sparsity.serve("format", "dense")
    matrices: dict[str, Matrix] = {}
    idle: set[str] = set()
    notices = schemes.notices + unknown_keys(settings) + kv_scales(tensors, idle)
    for name in tensors.entries:
        if not name.endswith(".weight_scale"):
            continue
        module = name.removesuffix(".weight_scale")
        scheme = schemes.of(module)
        if scheme is None:
            raise CheckpointError(
                f"{tensors.path}: tensor {name!r} belongs to a module that the config leaves as it is"
            )
        others = tuple(other for end in _OTHERS if (other := f"{module}.{end}") in tensors)
        matrices[f"{module}.weight"] = _matrix(tensors, module, scheme, others)
    if settings.get("kv_cache_scheme") is not None:
        notices.append("the config asks for an 8-bit KV cache (kv_cache_scheme): kv_dtype says what ours holds")
    if not matrices:
        raise CheckpointError(f"{settings.where}: no tensor is quantised: none is called *.weight_scale")
    return Found(matrices, idle, notices)


def _matrix(tensors: Tensors, module: str, scheme: Scheme, others: tuple[str, ...]) -> Matrix:
    if scheme.format.endswith("fp4-pack-quantized"):
        return _fp4(tensors, module, scheme, others)
    if scheme.kind == "int":
        return _integers(tensors, module, scheme, others)
    tile = scheme.tile if scheme.group is None else (1, scheme.group)
    return fp8(tensors, f"{module}.weight", f"{module}.weight_scale", tile, others)


def _integers(tensors: Tensors, module: str, scheme: Scheme, others: tuple[str, ...]) -> Integers:
    bits, packed = scheme.bits, scheme.format == "pack-quantized"
    weight = f"{module}.weight_packed" if packed else f"{module}.weight"
    entry = tensors.check(weight, ("I32",) if packed else ("I8",), (None, None))
    file = str(entry.file.path)
    rows, cols = _shape(tensors, module, entry) if packed else entry.shape
    words = (-(-cols * bits // 32), -(-cols // (32 // bits)))  # packed densely, or as many whole fields as fit a word
    if not rows or not cols or (packed and (entry.shape[0] != rows or entry.shape[1] not in words)):
        raise CheckpointError(
            f"{file}: tensor {weight!r} has shape {entry.shape}, expected ({rows}, {words[0]}) for {cols} inputs"
        )
    if scheme.tile is not None:
        raise CheckpointError(f"{file}: {module}: integers with scales of tiles are not supported")
    size = cols if scheme.group is None else scheme.group
    groups = -(-cols // size)
    scale = tensors.check(f"{module}.weight_scale", ("F32", "BF16", "F16"))
    whole = scale.shape in ((), (1,)) and groups == 1  # one for the tensor
    if not whole and scale.shape not in ((rows, groups), *([(rows,)] if groups == 1 else [])):
        raise CheckpointError(
            f"{file}: tensor {module}.weight_scale has shape {scale.shape}, expected ({rows}, {groups})"
        )
    parts = [weight, f"{module}.weight_scale", *others]
    parts += [f"{module}.weight_shape"] if packed else []
    indices = f"{module}.weight_g_idx"
    if indices in tensors:
        tensors.check(indices, ("I32", "I64"), (cols,))
        parts.append(indices)
    asymmetric = not scheme.symmetric or f"{module}.weight_zero_point" in tensors
    points = _ZeroPoints(tensors, module, bits, (1 if whole else rows, groups)) if asymmetric else None
    if points:
        parts.append(points.name)

    def read_groups() -> I32:
        given = tensors.values(indices) if indices in tensors else None
        return plain_groups(cols, size)() if given is None or (given < 0).all() else given.astype(np.int32)

    def codes(start: int, stop: int) -> U8:
        values = tensors.values(weight)[start:stop]
        if not packed:  # of `bits` or fewer, in bytes
            return (values + np.int8(2 ** (bits - 1) - 128)).view(np.uint8) ^ np.uint8(0x80)
        return fields(values.view(np.uint32), bits, cols)

    def pairs(start: int, stop: int) -> U8:
        return np.ascontiguousarray(tensors.values(weight)[start:stop]).view(np.uint8)[:, : cols // 2]

    def scales(start: int, stop: int) -> F32:
        found = to_f32(tensors.values(f"{module}.weight_scale"), scale.dtype)
        return np.broadcast_to(found.reshape(1, 1), (stop - start, 1)) if whole else found.reshape(rows, -1)[start:stop]

    zeros = points.read if points and not points.symmetric else None
    place = Place(f"{module}.weight", (rows, cols), file, tuple(parts))
    in_pairs = pairs if packed and bits == 4 else None
    return Integers(place, bits, groups, read_groups, codes, scales, zeros, scale.dtype, in_pairs)


def fields(words: NDArray[np.uint32], bits: int, count: int) -> U8:
    """[n, W] words to [n, count] fields, packed densely, or as many whole fields as fit into a word."""
    if words.shape[1] == -(-count * bits // 32):
        return unpack(words, bits, count)
    each = 32 // bits
    return unpack(np.ascontiguousarray(words).reshape(-1, 1), bits, each).reshape(len(words), -1)[:, :count]


class _ZeroPoints:
    """Of a module: int8 [N, G], or fields packed along N [N bits / 32, G]; N is 1 where the tensor has one."""

    def __init__(self, tensors: Tensors, module: str, bits: int, shape: tuple[int, int]) -> None:
        self.name = f"{module}.weight_zero_point"
        self._tensors, self._bits, self._shape = tensors, bits, shape
        rows, groups = shape
        packed = {(-(-rows * bits // 32), groups), (-(-rows // (32 // bits)), groups)}
        entry = tensors.check(self.name, ("I32", "I8"))
        self._packed = entry.dtype == "I32"
        if entry.shape not in (packed if self._packed else {shape, shape[:1], ()} if rows == 1 else {shape}):
            raise CheckpointError(
                f"{entry.file.path}: tensor {self.name!r} has shape {entry.shape}, expected "
                f"{shape if not self._packed else min(packed)}"
            )
        self.symmetric = bool((self._values() == 2 ** (bits - 1)).all())

    def _values(self) -> U8:
        values, half = self._tensors.values(self.name), 2 ** (self._bits - 1)
        if self._packed:
            return fields(values.T.view(np.uint32), self._bits, self._shape[0]).T
        return np.asarray(values.reshape(self._shape).astype(np.int16) + half, np.uint8)

    def read(self, start: int, stop: int) -> U8:
        values = self._values()
        return values[start:stop] if len(values) > 1 else np.repeat(values, stop - start, axis=0)


def _fp4(tensors: Tensors, module: str, scheme: Scheme, others: tuple[str, ...]) -> Blocks:
    entry = tensors.check(f"{module}.weight_packed", ("U8",), (None, None))
    file = str(entry.file.path)
    rows, cols = entry.shape[0], 2 * entry.shape[1]
    mx = scheme.format.startswith("mx")
    size = 32 if mx else 16
    if not rows or not cols:
        raise CheckpointError(f"{file}: tensor '{module}.weight_packed' of shape {entry.shape} is empty")
    if scheme.group != size or cols % size:
        raise CheckpointError(
            f"{file}: {module}: {cols} inputs in groups of {scheme.group} are not supported ({size} are)"
        )
    scale = f"{module}.weight_scale"
    tensors.check(scale, ("U8", "F8_E8M0") if mx else ("F8_E4M3",), (rows, cols // size))
    parts = (f"{module}.weight_packed", scale, *others)

    def codes(start: int, stop: int) -> U8:
        return unpack(tensors.values(f"{module}.weight_packed")[start:stop], 4, cols)

    if mx:
        place = Place(f"{module}.weight", (rows, cols), file, parts)

        def rows_of(start: int, stop: int) -> tuple[U8, F32 | None]:
            pairs = tensors.values(f"{module}.weight_packed")[start:stop]
            return mxfp4_rows(place, pairs, tensors.values(scale)[start:stop]), None

        return Blocks(place, "MXFP4", rows_of)

    divisor = f"{module}.weight_global_scale"
    tensors.check(divisor, ("F32",))
    place = Place(f"{module}.weight", (rows, cols), file, (*parts, divisor))
    if tensors.values(divisor).size != 1:
        raise CheckpointError(f"{file}: tensor {divisor!r} has shape {tensors.entry(divisor).shape}, expected (1,)")

    def nvfp4_rows(start: int, stop: int) -> tuple[U8, F32 | None]:
        scales: U8 = tensors.values(scale)[start:stop]
        with np.errstate(divide="ignore"):
            factor = finite(place, np.asarray(1 / tensors.values(divisor).reshape(1), np.float32))
        if (scales >= 0x7F).any():  # negative, or no number
            raise CheckpointError(f"{file}: a scale of {place.name} is negative or no number")
        if cols % 64 == 0:
            return blocks.nvfp4(codes(start, stop), scales), np.repeat(factor, stop - start)
        wide = np.repeat(E4M3[scales] * factor, 16, axis=1)
        return (E2M1[codes(start, stop)] * np.float32(0.5) * wide).view(np.uint8), None

    return Blocks(place, "NVFP4" if cols % 64 == 0 else DEQUANTISED, nvfp4_rows)


def _shape(tensors: Tensors, module: str, entry: Entry) -> tuple[int, int]:
    name = f"{module}.weight_shape"
    tensors.check(name, ("I64", "I32"), (2,))
    rows, cols = map(int, tensors.values(name))
    if not (0 < rows < 2**31 and 0 < cols < 2**31):
        raise CheckpointError(f"{entry.file.path}: tensor {name!r} says ({rows}, {cols})")
    return rows, cols
