"""Writing a model in the Hugging Face layout: safetensors in shards, and the files beside them."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.weights.safetensors_file import INDEX, SINGLE

SHARD_BYTES = 2**31
"""Of a shard, about: what is held in memory before it is written."""

_BESIDE = (".json", ".jinja", ".model", ".txt", ".md", ".tiktoken")
_NAMES = ("LICENSE", "LICENCE", "NOTICE")
_OWN = ("config.json", INDEX)


class Tensor(NamedTuple):
    dtype: str  # safetensors' spelling
    shape: tuple[int, ...]
    data: NDArray[Any]  # its bytes, whatever the type of the array


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """A safetensors file, tensor after tensor. (The library's writer knows numpy's types alone: no bf16, no FP8.)"""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + data.nbytes]}
        end += data.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            np.ascontiguousarray(tensor.data).tofile(file)


class TensorShards:
    """Tensors of one model, in any order. `close` names the files, and writes the index where there are several."""

    def __init__(self, folder: Path, shard_bytes: int = SHARD_BYTES) -> None:
        self._folder, self._shard_bytes = folder, shard_bytes
        self._waiting: dict[str, Tensor] = {}
        self._written: list[tuple[Path, list[str]]] = []
        self.num_bytes = 0  # of all tensors

    def put(self, name: str, tensor: Tensor) -> None:
        self._waiting[name] = tensor
        self.num_bytes += tensor.data.nbytes
        if sum(waiting.data.nbytes for waiting in self._waiting.values()) >= self._shard_bytes:
            self._write()

    def close(self) -> None:
        if self._waiting:
            self._write()
        if len(self._written) == 1:
            self._written[0][0].rename(self._folder / SINGLE)
            return
        places: dict[str, str] = {}
        count = len(self._written)
        for i, (path, names) in enumerate(self._written):
            target = f"model-{i + 1:05}-of-{count:05}.safetensors"
            path.rename(self._folder / target)
            places |= dict.fromkeys(names, target)
        index = {"metadata": {"total_size": self.num_bytes}, "weight_map": dict(sorted(places.items()))}
        (self._folder / INDEX).write_text(json.dumps(index, indent=2))

    def _write(self) -> None:
        path = self._folder / f"shard-{len(self._written)}"
        write_tensors(path, self._waiting)
        self._written.append((path, list(self._waiting)))
        self._waiting = {}


def copy_beside(source: Path, target: Path) -> None:
    """Tokenizer, chat templates, generation config, licence: all but the weights and config.json."""
    for file in sorted(source.iterdir()):
        wanted = file.suffix in _BESIDE or file.name.upper().startswith(_NAMES)
        if file.is_file() and wanted and file.name not in _OWN:
            shutil.copyfile(file, target / file.name)
    templates = source / "additional_chat_templates"
    if templates.is_dir():
        shutil.copytree(templates, target / templates.name)
