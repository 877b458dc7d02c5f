"""GPTQ (Frantar et al. 2022) as AutoGPTQ and GPTQModel write it.

X.qweight i32 [K bits / 32, N] holds the codes of a column of K from the lowest bit on, X.qzeros i32 [G, N bits / 32]
the zero points of a row of G, X.scales [G, N], X.g_idx i32 [K] the group of each input. The first form of the format
("gptq") holds zero points less one; the words were diminished as a whole.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.weights.quant.blocks import F32, I32, U8, unpack
from octavo.weights.quant.found import Found
from octavo.weights.quant.matrix import Integers, Matrix, Place, plain_groups, to_f32
from octavo.weights.quant.settings import Settings, unknown_keys
from octavo.weights.safetensors_file import Tensors
from octavo.weights.spec import CheckpointError

BITS = (2, 3, 4, 8)


def find(settings: Settings, tensors: Tensors) -> Found:
    bits, size = settings.number("bits"), settings.get("group_size", -1)
    first = settings.serve("checkpoint_format", "gptq", "gptq_v2", default=settings.get("format", "gptq")) == "gptq"
    settings.serve("format", "gptq", "gptq_v2")
    settings.serve("pack_dtype", "int32")
    settings.empty("is_marlin_format", "adapter", "rotation")
    settings.known(
        "quant_method", "method", "desc_act", "sym", "lm_head", "meta", "damp_percent", "damp_auto_increment",
        "static_groups", "true_sequential", "model_name_or_path", "model_file_base_name", "dataset", "tokenizer",
        "batch_size", "block_name_to_quantize", "cache_block_outputs", "exllama_config", "use_exllama", "version",
        "use_cuda_fp16", "max_input_length", "model_seqlen", "module_name_preceding_first_block", "pad_token_id",
        "disable_exllama", "backend", "modules_in_block_to_quantize", "mse", "act_group_aware", "hyb_act", "quantizer",
        "modules_to_not_convert", "cache_examples_on_gpu", "modules_to_not_quantize",
    )  # fmt: skip
    dynamic = _Dynamic(settings, bits, size)
    matrices: dict[str, Matrix] = {}
    idle: set[str] = set()
    for name in tensors.entries:
        if not name.endswith(".qweight"):
            continue
        module = name.removesuffix(".qweight")
        matrices[f"{module}.weight"] = _matrix(tensors, module, *dynamic.of(module), first)
        bias = f"{module}.bias"  # AutoGPTQ writes one for every module
        if bias in tensors and not tensors.values(bias).any():
            idle.add(bias)
    if not matrices:
        raise CheckpointError(f"{settings.where}: no tensor is quantised: none is called *.qweight")
    return Found(matrices, idle, unknown_keys(settings))


class _Dynamic:
    """GPTQModel's `dynamic`: the first pattern that matches a module changes its settings; "-:" leaves it alone."""

    def __init__(self, settings: Settings, bits: int, size: Any) -> None:
        self._default = self._checked(settings, bits, size)
        self._rules: list[tuple[re.Pattern[str], tuple[int, int]]] = []
        rules = settings.inner("dynamic")
        for pattern in rules.items():
            inner = rules.inner(pattern)
            inner.known("desc_act", "sym", "static_groups", "mse", "damp_percent")
            changed = self._checked(inner, inner.get("bits", bits), inner.get("group_size", size))
            inner.serve("pack_dtype", "int32")
            for key in inner.unknown():
                raise inner.refused(key, inner.get(key), "unknown")
            try:
                self._rules.append((re.compile(re.sub(r"^[+-]:", "", pattern)), changed))
            except re.error as error:
                raise CheckpointError(f"{rules.where}: {pattern!r} is no regular expression: {error}") from error

    def _checked(self, settings: Settings, bits: Any, size: Any) -> tuple[int, int]:
        if bits not in BITS:
            raise settings.refused("bits", bits, f"served: {', '.join(map(str, BITS))}")
        if type(size) is not int or not (size == -1 or size > 0):
            raise settings.refused("group_size", size, "-1 or a number above 0")
        return bits, size

    def of(self, module: str) -> tuple[int, int]:
        return next((found for pattern, found in self._rules if pattern.match(module)), self._default)


def _matrix(tensors: Tensors, module: str, bits: int, size: int, first: bool) -> Integers:
    scales = tensors.check(f"{module}.scales", ("F16", "BF16", "F32"), (None, None))
    groups, rows = scales.shape
    qweight = tensors.check(f"{module}.qweight", ("I32",), (None, rows))
    cols = qweight.shape[0] * 32 // bits
    file = str(qweight.file.path)
    if qweight.shape[0] * 32 != cols * bits or rows * bits % 32 or not cols or not rows:
        raise CheckpointError(f"{file}: {module}.qweight of shape {qweight.shape} is no matrix of {bits} bits")
    size = cols if size == -1 else size
    if groups != -(-cols // size):
        raise CheckpointError(
            f"{file}: {module}.scales has {groups} groups; {cols} inputs in groups of {size} have {-(-cols // size)}"
        )
    tensors.check(f"{module}.qzeros", ("I32",), (groups, rows * bits // 32))
    parts = [f"{module}.{part}" for part in ("qweight", "qzeros", "scales")]
    if f"{module}.g_idx" in tensors:
        tensors.check(f"{module}.g_idx", ("I32",), (cols,))
        parts.append(f"{module}.g_idx")
    place = Place(f"{module}.weight", (rows, cols), file, tuple(parts))

    def read_groups() -> I32:
        return tensors.values(f"{module}.g_idx") if len(parts) == 4 else plain_groups(cols, size)()

    def codes(start: int, stop: int) -> U8:
        return unpack(tensors.values(f"{module}.qweight")[:, start:stop].T.view(np.uint32), bits, cols)

    def pairs(start: int, stop: int) -> U8:
        return np.ascontiguousarray(tensors.values(f"{module}.qweight")[:, start:stop].T).view(np.uint8)

    def read_scales(start: int, stop: int) -> F32:
        return to_f32(tensors.values(f"{module}.scales")[:, start:stop].T, scales.dtype)

    def zeros(start: int, stop: int) -> U8:
        return _zero_points(place, tensors.values(f"{module}.qzeros").view(np.uint32), bits, first, start, stop).T

    symmetric = bool((zeros(0, rows) == 2 ** (bits - 1)).all())
    return Integers(
        place, bits, groups, read_groups, codes, read_scales, None if symmetric else zeros, scales.dtype,
        pairs if bits == 4 else None,
    )  # fmt: skip


def _zero_points(place: Place, words: NDArray[np.uint32], bits: int, first: bool, start: int, stop: int) -> U8:
    """Of columns [start, stop): [G, n]. The first form lacks a one in every field, words taken as a whole."""
    low = start // 32  # 32 fields are whole words, of any number of bits
    words = words[:, low * bits : -(-stop // 32) * bits]
    fields = slice(start - 32 * low, stop - 32 * low)
    if not first:
        return unpack(words, bits, stop - 32 * low)[:, fields]
    if bits != 3:
        return unpack(words + np.uint32(0xFFFFFFFF // (2**bits - 1)), bits, stop - 32 * low)[:, fields]
    # Tools disagree about words that share a field: AutoGPTQ diminishes fields, GPTQModel words, by these constants.
    # Where one of the readings makes all zero points the middle of the range, as symmetric quantisation does, it is that.
    ones = np.resize(np.array([0x24924924, 0x92492492, 0x49249249], np.uint32), words.shape[1])
    for values in (unpack(words, 3, stop - 32 * low) + np.uint8(1), unpack(words + ones, 3, stop - 32 * low)):
        if (values == 4).all():
            return values[:, fields]
    raise CheckpointError(
        f"{place.file}: {place.name} has 3 bits and zero points in the form 'gptq', which tools read differently; "
        "symmetric ones, and the form 'gptq_v2', are supported"
    )
