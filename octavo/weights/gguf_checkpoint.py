"""GGUF checkpoints under Hugging Face names: tensors and their row order."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from octavo.weights.end_tokens import end_tokens_of_gguf, gguf_token_id
from octavo.weights.formats import BLOCKS, U8
from octavo.weights.gguf_config import TABLES, GgufConfig
from octavo.weights.gguf_names import Family
from octavo.weights.gguf_parts import read_model
from octavo.weights.hf_config import ModelConfig
from octavo.weights.mapped import FileIdentity
from octavo.weights.spec import CheckpointError, SourceTensor, TensorInfo


class GgufCheckpoint:
    """A `Checkpoint` over a GGUF file, or several that are parts of a model.

    Where the converter interleaves the rotary pairs of q and k rows, `read` puts them back in halves (neox order), so
    that models need not know. Everything else is a view of the mapped file.
    """

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._gguf = read_model(path)
        self._check()
        found = GgufConfig(self._gguf, self.path)
        self._family = found.family
        names = [name for name in self._gguf.tensors if name not in TABLES]
        self._names = {hf_name(name, self._family, self.path): name for name in names}
        self.config: dict[str, Any] = ModelConfig(found.values, self.path)
        self.generation: dict[str, Any] = {"eos_token_id": sorted(end_tokens_of_gguf(self._gguf))}
        self.notices: list[str] = []
        bos = gguf_token_id(self._gguf, "bos")
        if bos is not None:
            self.generation["bos_token_id"] = bos

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def names(self) -> Iterable[str]:
        return self._names.keys()

    def info(self, name: str) -> TensorInfo:
        tensor = self._gguf.tensors[self._gguf_name(name)]
        if tensor.source not in BLOCKS:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} has type {tensor.source}, which is not supported ({', '.join(BLOCKS)} are)"
            )
        return TensorInfo(tensor.shape, tensor.source, str(tensor.file.path))

    def read(self, name: str, start: int = 0, stop: int | None = None) -> SourceTensor:
        """`data` of q and k is a copy, otherwise a view valid while the checkpoint lives; a vector is one row."""
        info = self.info(name)
        data = self._bytes(self._gguf_name(name))
        match = re.search(r"self_attn\.([qk])_proj\.(weight|bias)$", name)
        if match and self._family.interleaved:
            heads = self.config["num_attention_heads" if match[1] == "q" else "num_key_value_heads"]
            if info.shape[0] % (2 * heads):
                raise CheckpointError(f"{self.path}: tensor {name!r} has {info.shape[0]} rows for {heads} heads")
            halves = np.arange(info.shape[0]).reshape(heads, info.shape[0] // heads // 2, 2).swapaxes(1, 2).ravel()
            if len(info.shape) > 1:
                return SourceTensor(info, data[halves[start:stop]])
            data = data.reshape(info.shape[0], -1)[halves].reshape(1, -1)
        return SourceTensor(info, data[start:stop])

    def release(self, name: str) -> None:
        tensor = self._gguf.tensors[self._gguf_name(name)]
        tensor.file.release(tensor.start, tensor.stop)

    def files(self) -> list[FileIdentity]:
        files = {str(tensor.file.path): tensor.file.identity for tensor in self._gguf.tensors.values()}
        files[str(self._gguf.file.path)] = self._gguf.file.identity  # whose metadata says how rows are ordered
        return [files[path] for path in sorted(files)]

    def _bytes(self, gguf_name: str) -> U8:
        tensor = self._gguf.tensors[gguf_name]
        rows = math.prod(tensor.shape[:-1])
        return tensor.file.data[tensor.start : tensor.stop].reshape(rows, -1)

    def _gguf_name(self, name: str) -> str:
        if name not in self._names:
            raise CheckpointError(f"{self.path}: tensor {name!r} is missing")
        return self._names[name]

    def _check(self) -> None:
        if not self._gguf.tensors:
            raise CheckpointError(f"{self.path}: the file holds no tensors, only a vocabulary")


def hf_name(gguf_name: str, family: Family, path: str) -> str:
    """model.layers.3.self_attn.q_proj.weight of blk.3.attn_q.weight. What only layers for drafts have (nextn.*) is left."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?((?:nextn\.)?\w+)\.(weight|bias)", gguf_name)
    if match:
        layer, stem, kind = match.groups()
        names = family.top if layer is None else family.layer
        prefix = "" if layer is None else f"{family.prefix}{layer}."
        if f"{stem}.{kind}" in names:
            return prefix + names[f"{stem}.{kind}"]
        if stem in names:
            return f"{prefix}{names[stem]}.{kind}"
        if layer is not None and stem.startswith("nextn."):
            return f"{prefix}{stem}.{kind}"
    raise CheckpointError(f"{path}: tensor {gguf_name!r} has no known meaning in this architecture")
