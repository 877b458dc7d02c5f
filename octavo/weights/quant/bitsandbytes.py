"""bitsandbytes: NF4 and FP4 (QLoRA, Dettmers et al. 2023) and LLM.int8 (Dettmers et al. 2022).

4 bits: X.weight u8 holds the elements of the matrix, row by row, two to a byte, the first in the high nibble;
X.weight.absmax a scale for each `blocksize` of them, X.weight.quant_map the 16 values, X.weight.quant_state.* their
description in JSON. With double quantisation absmax is u8: nested_quant_map[absmax] * nested_absmax + an offset.
8 bits: X.weight i8 [N, K], X.SCB f32 [N]: w = q * SCB / 127. That outliers of activations are not rounded (the
"threshold") needs no counterpart: our activations are rounded in groups of 32, and a8 of such a group is as exact.
"""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import numpy as np

from octavo.weights.formats.codes import FP4, NF4
from octavo.weights.quant import blocks
from octavo.weights.quant.blocks import F32, U8
from octavo.weights.quant.found import Found
from octavo.weights.quant.matrix import DEQUANTISED, Blocks, Integers, Matrix, Place, finite, plain_groups
from octavo.weights.quant.settings import Settings, unknown_keys
from octavo.weights.safetensors_file import Tensors
from octavo.weights.spec import CheckpointError

_STATE = ".quant_state.bitsandbytes__"


def find(settings: Settings, tensors: Tensors) -> Found:
    settings.known(
        "quant_method", "_load_in_4bit", "_load_in_8bit", "load_in_4bit", "load_in_8bit", "bnb_4bit_compute_dtype",
        "bnb_4bit_quant_storage", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant", "llm_int8_threshold",
        "llm_int8_enable_fp32_cpu_offload", "llm_int8_has_fp16_weight", "llm_int8_skip_modules",
    )  # fmt: skip
    matrices: dict[str, Matrix] = {}
    idle: set[str] = set()
    for name in tensors.entries:
        if _STATE in name:
            weight = name.partition(_STATE)[0]
            matrices[weight] = _four_bits(tensors, weight, name, settings)
        elif name.endswith(".SCB"):
            weight = f"{name.removesuffix('.SCB')}.weight"
            matrices[weight] = _eight_bits(tensors, weight, name)
        elif name.endswith(".weight_format"):
            tensors.check(name, ("U8", "I8", "I32"))
            if tensors.values(name).any():
                raise CheckpointError(f"{tensors.path}: tensor {name!r} names a layout that is not supported (0 is)")
            idle.add(name)
    if not matrices:
        raise CheckpointError(f"{settings.where}: no tensor is quantised: none is called *.SCB or *{_STATE}*")
    return Found(matrices, idle, unknown_keys(settings))


def _eight_bits(tensors: Tensors, weight: str, scale: str) -> Integers:
    entry = tensors.check(weight, ("I8",), (None, None))
    rows, cols = entry.shape
    tensors.check(scale, ("F32",), (rows,))

    def codes(start: int, stop: int) -> U8:
        return tensors.values(weight)[start:stop].view(np.uint8) ^ np.uint8(0x80)

    def scales(start: int, stop: int) -> F32:
        return np.asarray(tensors.values(scale)[start:stop, None] / np.float32(127), np.float32)

    place = Place(weight, (rows, cols), str(entry.file.path), (weight, scale))
    return Integers(place, 8, 1, plain_groups(cols, cols), codes, scales, None, "F32")


def _four_bits(tensors: Tensors, weight: str, state: str, settings: Settings) -> Blocks:
    entry = tensors.check(weight, ("U8",))
    file = str(entry.file.path)
    tensors.check(state, ("U8",), (None,))
    try:
        said: dict[str, Any] = json.loads(tensors.values(state).tobytes())
        rows, cols = map(int, said["shape"])
        size, nested = int(said["blocksize"]), int(said.get("nested_blocksize") or 0)
        offset = np.float32(said.get("nested_offset", 0.0))
        if min(rows, cols, size) < 1 or nested < 0 or not np.isfinite(offset):
            raise ValueError(f"shape ({rows}, {cols}), blocks of {size} and {nested}, offset {offset}")
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{file}: tensor {state!r} does not say what it should: {error}") from error
    if math.prod(entry.shape) != -(-rows * cols // 2) or rows * cols % 2:
        raise CheckpointError(f"{file}: tensor {weight!r} has shape {entry.shape}, too few or many for {rows} x {cols}")
    count = -(-rows * cols // size)
    table = tensors.check(f"{weight}.quant_map", ("F32",), (16,))
    parts = [weight, state, f"{weight}.quant_map", f"{weight}.absmax"]
    if nested:
        tensors.check(f"{weight}.absmax", ("U8",), (count,))
        tensors.check(f"{weight}.nested_absmax", ("F32",), (-(-count // nested),))
        tensors.check(f"{weight}.nested_quant_map", ("F32",), (256,))
        parts += [f"{weight}.nested_absmax", f"{weight}.nested_quant_map"]
    else:
        tensors.check(f"{weight}.absmax", ("F32",), (count,))
    assert table.dtype == "F32"
    place = Place(weight, (rows, cols), file, tuple(parts))

    def scales(first: int, last: int) -> F32:
        absmax = tensors.values(f"{weight}.absmax")[first:last]
        if nested:
            of_block = tensors.values(f"{weight}.nested_absmax")[np.arange(first, last) // nested]
            absmax = tensors.values(f"{weight}.nested_quant_map")[absmax] * of_block + offset
        return finite(place, absmax.astype(np.float32, copy=False))

    def codes(start: int, stop: int) -> U8:
        first, last = start * cols, stop * cols
        data = tensors.values(weight).reshape(-1)[first // 2 : -(-last // 2)]
        pairs = np.stack([data >> np.uint8(4), data & np.uint8(15)], axis=-1).reshape(-1)
        return pairs[first % 2 :][: last - first].reshape(stop - start, cols)

    values: F32 = finite(place, tensors.values(f"{weight}.quant_map"))
    known = {kind: np.array_equal(values, map_) for kind, map_ in (("NF4", NF4), ("FP4", FP4))}
    _check_type(settings, state, said, next((kind.lower() for kind, same in known.items() if same), None), file)
    source = next((kind for kind, same in known.items() if same and size % 64 == 0 and cols % size == 0), DEQUANTISED)

    def rows_of(start: int, stop: int) -> tuple[U8, F32 | None]:
        if source == DEQUANTISED:
            element = np.arange(start * cols, stop * cols) // size
            of_element = scales(int(element[0]), int(element[-1]) + 1)[element - element[0]]
            return (values[codes(start, stop)] * of_element.reshape(-1, cols)).view(np.uint8), None
        of_block = scales(start * cols // size, stop * cols // size)
        return blocks.scaled_nibbles(
            blocks.halved(codes(start, stop)), np.repeat(of_block, size // 64).reshape(-1, cols // 64)
        ), None

    return Blocks(place, source, rows_of)


def _check_type(settings: Settings, state: str, said: dict[str, Any], of_values: str | None, file: str) -> None:
    """Raise CheckpointError where the places that name the type of a matrix, and its 16 values, are not of one mind."""
    name, _, ending = state.partition(_STATE)
    places = {
        f"{settings.where} with bnb_4bit_quant_type": settings.get("bnb_4bit_quant_type"),
        f"{file} with tensor {state!r}": ending or None,
        f"{file} with quant_type in {state!r}": said.get("quant_type"),
        f"{file} with values in {name + '.quant_map'!r}": of_values,
    }
    given = [(place, kind) for place, kind in places.items() if kind is not None]
    for (place, kind), (other, another) in itertools.pairwise(given):
        if kind != another:
            raise CheckpointError(f"{place} = {kind!r:.100}, but {other} = {another!r:.100}: one of them is wrong")
