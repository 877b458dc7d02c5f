"""The formats of checkpoints, and their values as float32."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from octavo.weights.formats import codes
from octavo.weights.formats.numbers import F32, U8, as_bytes, bf16_to_f32, f32_to_bf16, fields
from octavo.weights.spec import DECODED, CheckpointError, packed_format

_READERS: dict[str, tuple[int, int, Callable[[U8], codes.Codes]]] = {
    # source: columns and bytes of a block, reader
    "Q8_0": (32, 34, codes.q8_0),
    "Q4_0": (32, 18, codes.q4_0),
    "Q4_1": (32, 20, codes.q4_1),
    "Q5_0": (32, 22, codes.q5_0),
    "Q5_1": (32, 24, codes.q5_1),
    "IQ4_NL": (32, 18, codes.iq4_nl),
    "MXFP4": (32, 17, codes.mxfp4),
    "NVFP4": (64, 36, codes.nvfp4),
    "Q2_K": (256, 84, codes.q2_k),
    "Q3_K": (256, 110, codes.q3_k),
    "Q4_K": (256, 144, codes.q4_k),
    "Q5_K": (256, 176, codes.q5_k),
    "Q6_K": (256, 210, codes.q6_k),
    "IQ4_XS": (256, 136, codes.iq4_xs),
    "I4Z32": (32, 20, codes.i4z32),
    "I4Z64": (64, 36, codes.i4z64),
    "I4C": (256, 132, codes.i4c),
    "I8Z64": (64, 68, codes.i8z64),
    "F8": (64, 68, codes.f8),
    "NF4": (64, 36, codes.nf4),
    "FP4": (64, 36, codes.fp4),
}

_FLOATS = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16, "F32D": np.float32}

_BY_GGUF = {  # decoded by the gguf library
    "IQ1_S": (256, 50),
    "IQ1_M": (256, 56),
    "IQ2_XXS": (256, 66),
    "IQ2_XS": (256, 74),
    "IQ2_S": (256, 82),
    "IQ3_XXS": (256, 98),
    "IQ3_S": (256, 110),
    "TQ1_0": (256, 54),
    "TQ2_0": (256, 66),
}

BLOCKS = (
    {source: (1, np.dtype(dtype).itemsize) for source, dtype in _FLOATS.items()}
    | {source: (cols, size) for source, (cols, size, _) in _READERS.items()}
    | _BY_GGUF
)
"""Source format: (columns, bytes) of a block. GGUF's types by its names; those of OURS are what readers of other
checkpoints present what they find as (weights.formats.codes), F32D float32 that a reader had to decode."""

OURS = frozenset({"I4Z32", "I4Z64", "I4C", "I8Z64", "F8", "NF4", "FP4", "F32D"})
"""The last block of a row may pass its end; what lies there is finite and never read."""


def row_bytes(source: str, cols: int) -> int:
    """Bytes of a row of `cols` values. CheckpointError where blocks must divide the row and do not."""
    packed_format(source, "auto")  # refuses what is not served
    block_cols, block_bytes = BLOCKS[source]
    if cols % block_cols and source not in OURS:
        raise CheckpointError(f"a row of {cols} values is no multiple of the {block_cols} values of a {source} block")
    return -(-cols // block_cols) * block_bytes


def dequantise(source: str, data: U8, cols: int, factor: F32 | None = None) -> F32:
    """`data` [rows, bytes per row] of a source format as float32 [rows, cols], times `factor` [rows]."""
    rows = data.shape[0]
    if data.shape != (rows, row_bytes(source, cols)):
        raise CheckpointError(f"{data.shape[1]} bytes are not a row of {cols} values of type {source}")
    if source in _FLOATS:
        numbers = fields(data, _FLOATS[source])
        w: F32 = bf16_to_f32(numbers) if source == "BF16" else numbers.astype(np.float32)
    elif source in _BY_GGUF:
        from gguf import GGMLQuantizationType
        from gguf import dequantize as by_gguf

        w = by_gguf(data, GGMLQuantizationType[source]).reshape(rows, cols).astype(np.float32, copy=False)
    else:
        w = codes.values(read_codes(source, data))[:, :cols]
    return w if factor is None else w * factor[:, None]


def read_codes(source: str, data: U8) -> codes.Codes:
    """The codes of `data` [rows, bytes per row] of a quantised source format."""
    _, size, read = _READERS[source]
    return read(data.reshape(data.shape[0], -1, size))


def to_native(packed: str, source: str, data: U8, cols: int, factor: F32 | None = None) -> U8:
    """Rows as the native packer takes them: those of DECODED formats as bf16 or f32, others unchanged.

    `factor` [rows] is multiplied into what is decoded.
    """
    if source not in DECODED:
        return data
    w = dequantise(source, data, cols, factor)
    return as_bytes(w if packed == "f32" else f32_to_bf16(w))
