"""MXFP4 (OCP Microscaling formats 1.0) as gpt-oss has it: experts in two tensors of bytes.

X_blocks u8 [E, N, K / 32, 16] holds e2m1 codes, the first of two in the low nibble, X_scales u8 [E, N, K / 32] their
e8m0 scales. X is presented as X.weight [E, N, K]: outputs before inputs, unlike the same experts in bf16.
"""

from __future__ import annotations

from octavo.weights.quant import blocks
from octavo.weights.quant.blocks import F32, U8
from octavo.weights.quant.found import Found
from octavo.weights.quant.matrix import Blocks, Matrix, Place
from octavo.weights.quant.settings import Settings, unknown_keys
from octavo.weights.safetensors_file import Tensors
from octavo.weights.spec import CheckpointError


def find(settings: Settings, tensors: Tensors) -> Found:
    settings.known("quant_method", "modules_to_not_convert", "dequantize")
    matrices: dict[str, Matrix] = {}
    for name in tensors.entries:
        if name.endswith("_blocks"):
            stem = name.removesuffix("_blocks")
            matrices[f"{stem}.weight"] = _matrix(tensors, stem)
    if not matrices:
        raise CheckpointError(f"{settings.where}: no tensor is quantised: none is called *_blocks")
    return Found(matrices, set(), unknown_keys(settings))


def _matrix(tensors: Tensors, stem: str) -> Blocks:
    entry = tensors.check(f"{stem}_blocks", ("U8",), (None, None, None, 16))
    shape = entry.shape[:3]
    tensors.check(f"{stem}_scales", ("U8", "F8_E8M0"), shape)
    experts, outs, count = shape
    if not experts * outs * count:
        raise CheckpointError(f"{entry.file.path}: tensor {stem}_blocks is empty")

    def rows_of(start: int, stop: int) -> tuple[U8, F32 | None]:
        data = tensors.values(f"{stem}_blocks").reshape(experts * outs, -1)[start:stop]
        exponents = tensors.values(f"{stem}_scales").reshape(experts * outs, -1)[start:stop]
        return mxfp4_rows(place, data, exponents), None

    file = str(entry.file.path)
    place = Place(f"{stem}.weight", (experts, outs, 32 * count), file, (f"{stem}_blocks", f"{stem}_scales"))
    return Blocks(place, "MXFP4", rows_of)


def mxfp4_rows(place: Place, pairs: U8, exponents: U8) -> U8:
    """Codes two to a byte [n, K / 2], exponents [n, K / 32]; 255 is no number."""
    if (exponents == 255).any():
        raise CheckpointError(f"{place.file}: a scale of {place.name} is infinite or no number")
    return blocks.mxfp4(blocks.halved_pairs(pairs), exponents)
