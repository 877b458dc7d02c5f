"""AWQ (Lin et al. 2023) in the GEMM layout of AutoAWQ.

X.qweight i32 [K, N / 8] and X.qzeros i32 [G, N / 8] hold 8 outputs in a word, in the order 0 2 4 6 1 3 5 7 from the
lowest bits on; X.scales [G, N].
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octavo.weights.quant.blocks import F32, U8, unpack
from octavo.weights.quant.found import Found
from octavo.weights.quant.matrix import Integers, Matrix, Place, plain_groups, to_f32
from octavo.weights.quant.settings import Settings, unknown_keys
from octavo.weights.safetensors_file import Tensors
from octavo.weights.spec import CheckpointError

_FIELD_OF = [0, 4, 1, 5, 2, 6, 3, 7]
"""Which field of a word holds output i."""
_FIELDS = [0, 2, 4, 6, 1, 3, 5, 7]
"""The place of that field where the even ones come first."""


def find(settings: Settings, tensors: Tensors) -> Found:
    settings.serve("bits", 4, default=settings.serve("w_bit", 4))
    size = settings.get("group_size", settings.get("q_group_size", -1))
    if type(size) is not int or not (size == -1 or size > 0):
        raise settings.refused("group_size", size, "-1 or a number above 0")
    settings.serve("zero_point", True)
    version = settings.get("version", "gemm")
    if not isinstance(version, str) or version.lower() != "gemm":
        raise settings.refused("version", version, "served: gemm")
    settings.known(
        "quant_method", "modules_to_not_convert", "do_fuse", "fuse_max_seq_len", "modules_to_fuse", "exllama_config",
        "backend", "desc_act", "sym", "meta", "pack_dtype", "method", "format", "checkpoint_format", "lm_head",
    )  # fmt: skip
    matrices: dict[str, Matrix] = {}
    idle: set[str] = set()
    for name in tensors.entries:
        if name.endswith(".qweight"):
            module = name.removesuffix(".qweight")
            matrices[f"{module}.weight"] = _matrix(tensors, module, size)
            bias = f"{module}.bias"
            if bias in tensors and not tensors.values(bias).any():
                idle.add(bias)
    if not matrices:
        raise CheckpointError(f"{settings.where}: no tensor is quantised: none is called *.qweight")
    return Found(matrices, idle, unknown_keys(settings))


def _matrix(tensors: Tensors, module: str, size: int) -> Integers:
    qweight = tensors.check(f"{module}.qweight", ("I32",), (None, None))
    cols, rows = qweight.shape[0], qweight.shape[1] * 8
    size = cols if size == -1 else size
    groups = -(-cols // size) if cols else 0
    tensors.check(f"{module}.qzeros", ("I32",), (groups, rows // 8))
    scales = tensors.check(f"{module}.scales", ("F16", "BF16", "F32"), (groups, rows))
    if not rows or not cols or cols % 2:
        raise CheckpointError(f"{qweight.file.path}: {module}.qweight is empty, or has an odd number of inputs")

    def pairs(start: int, stop: int) -> U8:
        """Two inputs to a byte, for all words at once; then turned, so that outputs are rows."""
        words: NDArray[np.uint32] = tensors.values(f"{module}.qweight").view(np.uint32)[:, start // 8 : -(-stop // 8)]
        first, second, low = words[0::2], words[1::2], np.uint32(0x0F0F0F0F)
        even = first & low | (second & low) << np.uint32(4)
        odd = first >> np.uint32(4) & low | second & ~low
        fields = np.stack([even, odd], axis=-1).view(np.uint8)  # [K / 2, words, 8]: fields 0 2 4 6 1 3 5 7
        outputs = np.empty((fields.shape[1], 8, fields.shape[0]), np.uint8)
        for i, place in enumerate(_FIELDS):
            outputs[:, i] = fields[:, :, place].T
        return outputs.reshape(-1, cols // 2)[start % 8 :][: stop - start]

    def codes(start: int, stop: int) -> U8:
        return unpack(pairs(start, stop), 4, cols)

    def zeros(start: int, stop: int) -> U8:
        words: NDArray[np.uint32] = tensors.values(f"{module}.qzeros").view(np.uint32)
        fields = unpack(words, 4, rows).reshape(groups, -1, 8)
        return fields[..., _FIELD_OF].reshape(groups, rows)[:, start:stop].T

    def read_scales(start: int, stop: int) -> F32:
        return to_f32(tensors.values(f"{module}.scales")[:, start:stop].T, scales.dtype)

    parts = tuple(f"{module}.{part}" for part in ("qweight", "qzeros", "scales"))
    place = Place(f"{module}.weight", (rows, cols), str(qweight.file.path), parts)
    return Integers(place, 4, groups, plain_groups(cols, size), codes, read_scales, zeros, scales.dtype, pairs)
