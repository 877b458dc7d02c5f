"""What a checkpoint offers, whatever its file format. Tensor names are Hugging Face's; matrices are (out, in)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:  # what knows a checkpoint by its errors alone does without
    import numpy as np
    from numpy.typing import NDArray

    from octavo.weights.mapped import FileIdentity


class CheckpointError(ValueError):
    """The files cannot be served. One line: what is wrong, in which file, and what was expected."""


@contextmanager
def reading(path: str | Path) -> Iterator[None]:
    """For code that reads files of any content: whatever they make it raise becomes a CheckpointError, one line."""
    try:
        yield
    except (CheckpointError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of a library in Rust is no Exception
        cause = " ".join(f"{type(error).__name__}: {error}".split())
        raise CheckpointError(f"{path}: damaged, or not what such a file holds: {cause:.500}") from error


ORDER = ".order"
"""What follows the name of a matrix to name its `TensorInfo.order`."""


class TensorInfo(NamedTuple):
    shape: tuple[int, ...]  # (out, in), or (n,) for vectors
    source: str  # format of its blocks, a name of weights.formats.BLOCKS
    file: str
    order: NDArray[np.int32] | None = None
    """[in]: column i of the rows read belongs to input order[i] (columns sorted by quantisation group). None: i.

    It can be read as a tensor of its own, float32, by the name of the matrix and ORDER, also where it is None.
    """


class SourceTensor(NamedTuple):
    info: TensorInfo
    data: NDArray[np.uint8]  # [rows, bytes per row], a view of the mapped file where rows need no reordering
    factor: NDArray[np.float32] | None = None  # [rows]: w = factor[row] * what the blocks say


def base_name(address: str) -> str:
    """The tensor that an address (`weights.address`) is a part of."""
    return re.split(r"\[|\.T(?=$|[\[(])", address, maxsplit=1)[0]


class Checkpoint(Protocol):
    path: str
    config: dict[str, Any]  # as config.json of the Hugging Face layout; for GGUF made from its metadata
    generation: dict[str, Any]  # as generation_config.json; eos_token_id is the whole set, as a list
    notices: list[str]  # lines for whoever starts the model: what of the checkpoint is computed otherwise than it says

    def __contains__(self, name: str) -> bool: ...

    def names(self) -> Iterable[str]:
        """Of all tensors."""
        ...

    def info(self, name: str) -> TensorInfo:
        """Raise CheckpointError naming the tensor where it is missing."""
        ...

    def read(self, name: str, start: int = 0, stop: int | None = None) -> SourceTensor:
        """Rows [start, stop) of a matrix, so that what is decoded at once stays small; a vector is one row.

        A tensor of more dimensions is the matrix of its last one.
        """
        ...

    def release(self, name: str) -> None:
        """The tensor was packed: drop its pages from memory."""
        ...

    def files(self) -> list[FileIdentity]:
        """Every file that decides the values of tensors, as it was when it was opened; in the order of their names."""
        ...


PACKED = {
    "F32": "f32",
    "F16": "f16",
    "BF16": "bf16",
    "Q8_0": "w8",
    "Q4_0": "w4",
    "Q4_1": "w4f",
    "Q5_0": "w5",
    "Q5_1": "w5f",
    "IQ4_NL": "w4n",
    "MXFP4": "w4m",
    "NVFP4": "w4v",
    "I4Z32": "w4z",
    "I4Z64": "w4z64",
    "I4C": "w4c",
    "I8Z64": "w8z64",
    "F8": "f8",
    "Q2_K": "w2k",
    "Q3_K": "w3k",
    "Q4_K": "w4k",
    "Q5_K": "w5k",
    "Q6_K": "w6k",
    "IQ4_XS": "w4x",
}
"""Source format -> packed format of a matrix (docs/FORMATS.md)."""

DECODED = frozenset(
    {"IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "TQ1_0", "TQ2_0", "NF4", "FP4", "F32D"}
)
"""Source formats that have no packed form of their own: a matrix becomes bf16, or f32 in the strict mode."""


def packed_format(source: str, activations: str) -> str:
    """Packed format (native/kernels.h, `weights.formats`) of a matrix stored as `source`.

    Raise CheckpointError naming a source format that is not served.
    """
    if source in DECODED:
        return "f32" if activations == "f32" else "bf16"
    if source not in PACKED:
        raise CheckpointError(
            f"weight format {source} is not supported; supported: {', '.join([*PACKED, *sorted(DECODED)])}"
        )
    return PACKED[source]


MULTIPLY_A16 = frozenset(PACKED.values()) - {"f32", "f16", "bf16", "f8", "w8", "w8z64", "w4n", "w4x"}
"""Formats whose integer products are more than twice as fast as those in float32: not those that need signed bytes."""


def act_of(packed: str, activations: str, attends: bool = False, bf16_dots: bool = True) -> str:
    """How the input of a product with a weight in format `packed` is rounded: f32, bf16, a16 or a8 (DESIGN section 4).

    attends: queries, keys or values are made. int8 there causes over a third of all loss by rounding, in a sixth of the
    work (docs/DECISIONS.md). bf16_dots: whether bf16 products are instructions.
    """
    if activations == "f32" or packed in ("f32", "f16"):
        return "f32"
    if activations == "bf16" or packed in ("bf16", "f8"):
        return "bf16"
    if attends:
        return "a16" if not bf16_dots and packed in MULTIPLY_A16 else "bf16"
    return "a8"


_STATE = (
    "its layers keep a recurrent or convolutional state from token to token, and the cache here holds keys and values"
)
_CHUNKS = "its layers attend within chunks of the text, and attention here is full or within a sliding window"
_TWO_PARTS = "an encoder reads the text and a decoder writes the answer, and models here are one of the two"
_UNSERVED = {
    **dict.fromkeys(
        ("bailinghybrid", "bamba", "falconh1", "falconmamba", "granitehybrid", "granitemoehybrid", "jamba", "kimilinear",
         "lfm2", "mamba", "minimaxfor", "minimaxtext01", "nemotronh", "olmohybrid", "plamo2", "qwen35", "qwen3next",
         "recurrentgemma", "rwkv", "xlstm", "zamba"),
        _STATE,
    ),
    "llama4": _CHUNKS,
    **dict.fromkeys(("bart", "m2m100", "marian", "mbart", "mt5", "pegasus", "t5", "umt5", "whisper"), _TWO_PARTS),
}  # fmt: skip
"""Beginning of an architecture's name, of config.json or GGUF, in small letters and digits -> what it would need."""


def why_unserved(architecture: str, served: Iterable[str]) -> str:
    """What to say of an architecture that is none of those `served`: what it would need, or which are."""
    name = re.sub(r"[^a-z0-9]", "", architecture.lower())
    why = next((why for beginning, why in _UNSERVED.items() if name.startswith(beginning)), None)
    return f"is not supported: {why}" if why else f"is not supported; supported: {', '.join(served)}"
