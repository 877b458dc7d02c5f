"""Checkpoints in the Hugging Face layout: config.json beside model.safetensors, or beside an index of several files."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from octavo.weights.end_tokens import end_tokens_of_directory
from octavo.weights.formats import BLOCKS
from octavo.weights.hf_config import ModelConfig, read_json, read_json_if_present
from octavo.weights.mapped import MappedFile
from octavo.weights.spec import CheckpointError, SourceTensor, TensorInfo

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class _Entry(NamedTuple):
    file: MappedFile
    dtype: str  # safetensors' spelling, which is GGUF's for F32, F16 and BF16
    shape: tuple[int, ...]
    start: int  # bytes [start, stop) of the file
    stop: int


class SafetensorsDir:
    """A `Checkpoint` over a directory. Files are mapped and nothing of the tensors is read before `read`."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        if not (path / "config.json").is_file():
            raise CheckpointError(f"{path}: not a model directory: it has no config.json")
        self.config: dict[str, Any] = ModelConfig(read_json(path / "config.json"), str(path / "config.json"))
        self.notices: list[str] = []
        self.generation = read_json_if_present(path / "generation_config.json")
        self.generation["eos_token_id"] = sorted(end_tokens_of_directory(path))
        quantisation = self.config.get("quantization_config")
        if quantisation is not None:
            method = quantisation.get("quant_method", "unnamed") if isinstance(quantisation, dict) else quantisation
            raise CheckpointError(f"{path / 'config.json'}: quantization_config {method!r} is not supported")
        self._entries: dict[str, _Entry] = {}
        for file, expected in _weight_files(path).items():
            entries = _read_header(file)
            for name in expected:
                if name not in entries:
                    raise CheckpointError(f"{file}: tensor {name!r} is missing, though {INDEX} names this file for it")
            self._entries.update({name: entries[name] for name in expected} if expected else entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def names(self) -> Iterable[str]:
        return self._entries.keys()

    def info(self, name: str) -> TensorInfo:
        entry = self._entry(name)
        return TensorInfo(entry.shape, entry.dtype, str(entry.file.path))

    def read(self, name: str, start: int = 0, stop: int | None = None) -> SourceTensor:
        """`data` is a view of the mapped file, valid while the checkpoint lives; a vector is one row."""
        entry = self._entry(name)
        rows = math.prod(entry.shape[:-1])
        data = entry.file.data[entry.start : entry.stop].reshape(rows, -1)
        return SourceTensor(self.info(name), data[start:stop])

    def release(self, name: str) -> None:
        entry = self._entry(name)
        entry.file.release(entry.start, entry.stop)

    def files(self) -> list[str]:
        return sorted({str(entry.file.path) for entry in self._entries.values()})

    @property
    def total_bytes(self) -> int:
        return sum(entry.stop - entry.start for entry in self._entries.values())

    def _entry(self, name: str) -> _Entry:
        entry = self._entries.get(name)
        if entry is None:
            raise CheckpointError(f"{self.path}: tensor {name!r} is missing")
        if entry.dtype not in BLOCKS:
            raise CheckpointError(
                f"{entry.file.path}: tensor {name!r} has type {entry.dtype}, which is not supported (F32, F16 and BF16 are)"
            )
        return entry


def _weight_files(path: Path) -> dict[Path, list[str]]:
    """Each file with the tensors that the index expects in it; without an index, any."""
    if (path / SINGLE).is_file():
        return {path / SINGLE: []}
    if not (path / INDEX).is_file():
        others = sorted(p.name for pattern in ("*.bin", "*.pth", "*.safetensors", "*.gguf") for p in path.glob(pattern))
        found = f"; found {', '.join(others[:4])}" if others else ""
        raise CheckpointError(f"{path}: neither {SINGLE} nor {INDEX} is here{found}")
    weight_map = read_json(path / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path / INDEX}: key 'weight_map' is missing or empty")
    files: dict[Path, list[str]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(f"{path / INDEX}: {file!r} is not the name of a file beside it")
        if not (path / file).is_file():
            raise CheckpointError(f"{path / file}: file is missing, though {INDEX} names it")
        files.setdefault(path / file, []).append(name)
    return files


def _read_header(path: Path) -> dict[str, _Entry]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="numpy"):  # checks header, offsets and the length of the file
            pass
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: truncated or not a safetensors file: {error}") from error
    file = MappedFile(path)
    size = int.from_bytes(file.data[:8].tobytes(), "little")
    header = json.loads(file.data[8 : 8 + size].tobytes())
    entries = {}
    for name, tensor in header.items():
        if name == "__metadata__":
            continue
        start, stop = (8 + size + offset for offset in tensor["data_offsets"])
        entries[name] = _Entry(file, tensor["dtype"], tuple(tensor["shape"]), start, stop)
        assert math.prod(tensor["shape"]) == 0 or stop > start, name
    return entries
