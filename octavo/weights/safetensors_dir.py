"""Checkpoints in the Hugging Face layout: config.json beside model.safetensors, or beside an index of several files."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.weights.end_tokens import end_tokens_of_directory
from octavo.weights.formats import BLOCKS
from octavo.weights.hf_config import ModelConfig, read_json, read_json_if_present
from octavo.weights.mapped import FileIdentity
from octavo.weights.quant.matrix import Matrix
from octavo.weights.quant.method import find_quantised
from octavo.weights.safetensors_file import Entry, Tensors
from octavo.weights.spec import ORDER, CheckpointError, SourceTensor, TensorInfo


class SafetensorsDir:
    """A `Checkpoint` over a directory. Files are mapped and no weight is read before `read`.

    Quantised matrices, which are made of several tensors, have the name of the plain weight and come as rows of blocks.
    """

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        if not (path / "config.json").is_file():
            raise CheckpointError(f"{path}: not a model directory: it has no config.json")
        self.config: dict[str, Any] = ModelConfig(read_json(path / "config.json"), str(path / "config.json"))
        self.generation = read_json_if_present(path / "generation_config.json")
        self.generation["eos_token_id"] = sorted(end_tokens_of_directory(path))
        self.notices: list[str] = []
        self._tensors = Tensors(path)
        self._files = {str(entry.file.path): entry.file.identity for entry in self._tensors.entries.values()}
        self._matrices: dict[str, Matrix] = {}
        unlisted: set[str] = set()
        if (quantised := find_quantised(path, self.config, self._tensors)) is not None:
            found, described = quantised
            self._matrices, self.notices = found.matrices, found.notices
            unlisted = found.idle.union(*(matrix.parts for matrix in found.matrices.values()))
            self._files[str(described)] = FileIdentity.of(described)
        self._names = [name for name in self._tensors.entries if name not in unlisted] + list(self._matrices)

    def __contains__(self, name: str) -> bool:
        return name in self._matrices or name in self._tensors or self._order(name) is not None

    def names(self) -> Iterable[str]:
        return self._names

    def info(self, name: str) -> TensorInfo:
        if name in self._matrices:
            return self._matrices[name].info
        if (order := self._order(name)) is not None:
            return TensorInfo(order.shape, "F32", self.info(name.removesuffix(ORDER)).file)
        entry = self._entry(name)
        return TensorInfo(entry.shape, entry.dtype, str(entry.file.path))

    def read(self, name: str, start: int = 0, stop: int | None = None) -> SourceTensor:
        """`data` is a view of the mapped file, valid while the checkpoint lives; a vector is one row."""
        if name in self._matrices:
            matrix = self._matrices[name]
            rows = range(math.prod(matrix.info.shape[:-1]))[start:stop]
            if rows:
                return matrix.read(rows.start, rows.stop)
            found = matrix.read(0, 1)
            return found._replace(data=found.data[:0], factor=None if found.factor is None else found.factor[:0])
        if (order := self._order(name)) is not None:
            return SourceTensor(self.info(name), order.astype(np.float32).view(np.uint8).reshape(1, -1)[start:stop])
        entry = self._entry(name)
        data = entry.file.data[entry.start : entry.stop].reshape(math.prod(entry.shape[:-1]), -1)
        return SourceTensor(self.info(name), data[start:stop])

    def release(self, name: str) -> None:
        if self._order(name) is None:
            self._tensors.release(self._matrices[name].parts if name in self._matrices else [name])

    def files(self) -> list[FileIdentity]:
        return [self._files[path] for path in sorted(self._files)]

    def _order(self, name: str) -> NDArray[np.int32] | None:
        """What `name` asks for: of each column of a matrix its input."""
        matrix = name.removesuffix(ORDER)
        if matrix == name or not (matrix in self._matrices or matrix in self._tensors):
            return None
        info = self.info(matrix)
        return np.arange(info.shape[-1], dtype=np.int32) if info.order is None else info.order

    def _entry(self, name: str) -> Entry:
        entry = self._tensors.entry(name)
        if entry.dtype not in BLOCKS:
            raise CheckpointError(
                f"{entry.file.path}: tensor {name!r} has type {entry.dtype}, which is not supported (F32, F16 and BF16 are)"
            )
        return entry
