"""What the bytes of each weight format mean: numpy definitions, which the native code is tested against.

*Source* formats are those of checkpoints: GGUF's types in its spelling, and our blocks for what others hold
(`sources`, `codes`). *Packed* formats are those of native/kernels.h (`packing`). docs/FORMATS.md says which source is
packed as what. Nothing is mutated.
"""

from octavo.weights.formats.numbers import F32, U8, bf16_to_f32, f32_to_bf16
from octavo.weights.formats.packing import LAYOUTS, check_factor, column_factors, pack, packed_bytes, panel_bytes
from octavo.weights.formats.sources import BLOCKS, dequantise, row_bytes, to_native
from octavo.weights.spec import act_of, packed_format

__all__ = [
    "BLOCKS",
    "F32",
    "LAYOUTS",
    "U8",
    "act_of",
    "bf16_to_f32",
    "check_factor",
    "column_factors",
    "dequantise",
    "f32_to_bf16",
    "pack",
    "packed_bytes",
    "packed_format",
    "panel_bytes",
    "row_bytes",
    "to_native",
]
