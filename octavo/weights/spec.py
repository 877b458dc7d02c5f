"""What a checkpoint offers, whatever its file format. Tensor names are Hugging Face's; matrices are (out, in)."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray


class CheckpointError(ValueError):
    """The files cannot be served. One line: what is wrong, in which file, and what was expected."""


class TensorInfo(NamedTuple):
    shape: tuple[int, ...]  # (out, in), or (n,) for vectors
    source: str  # format in the file, GGUF spelling: F32 F16 BF16 Q8_0 Q4_0 Q4_1 Q6_K
    file: str


class SourceTensor(NamedTuple):
    info: TensorInfo
    data: NDArray[np.uint8]  # [rows, bytes per row], a view of the mapped file where rows need no reordering


class Checkpoint(Protocol):
    path: str
    config: dict[str, Any]  # as config.json of the Hugging Face layout; for GGUF made from its metadata
    generation: dict[str, Any]  # as generation_config.json

    def __contains__(self, name: str) -> bool: ...

    def info(self, name: str) -> TensorInfo:
        """Raise CheckpointError naming the tensor where it is missing."""
        ...

    def read(self, name: str) -> SourceTensor: ...

    def release(self, name: str) -> None:
        """The tensor was packed: drop its pages from memory."""
        ...

    @property
    def total_bytes(self) -> int: ...
