"""Safetensors files as typed views: the tensors that a directory holds, by name, before anything is made of them."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.weights.hf_config import read_json
from octavo.weights.mapped import MappedFile
from octavo.weights.spec import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_NOT_WHOLE = re.compile(r"^adapter_|-\d+-of-\d+\.safetensors$")
"""Files that are no model, or part of one."""

DTYPES: dict[str, type[np.generic]] = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16, "F8_E4M3": np.uint8, "F8_E5M2": np.uint8,
    "F8_E8M0": np.uint8, "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8, "U64": np.uint64,
    "U32": np.uint32, "U16": np.uint16, "U8": np.uint8, "BOOL": np.uint8,
}  # fmt: skip
"""numpy's type with the bits of each type; BF16 and the types of 8 bits have none of their own."""


class Entry(NamedTuple):
    file: MappedFile
    dtype: str  # safetensors' spelling, which is GGUF's for F32, F16 and BF16
    shape: tuple[int, ...]
    start: int  # bytes [start, stop) of the file
    stop: int


class Tensors:
    """All tensors of a directory. Files are mapped; values are read when they are used."""

    def __init__(self, directory: Path) -> None:
        self.path = str(directory)
        self.entries: dict[str, Entry] = {}
        for file, expected in _weight_files(directory).items():
            entries = _read_header(file)
            for name in expected:
                if name not in entries:
                    raise CheckpointError(f"{file}: tensor {name!r} is missing, though {INDEX} names this file for it")
            self.entries.update({name: entries[name] for name in expected} if expected else entries)

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def entry(self, name: str) -> Entry:
        entry = self.entries.get(name)
        if entry is None:
            raise CheckpointError(f"{self.path}: tensor {name!r} is missing")
        return entry

    def check(self, name: str, dtypes: Collection[str], shape: tuple[int | None, ...] | None = None) -> Entry:
        """Raise CheckpointError where the tensor is missing or has another type or shape. None: any size."""
        entry = self.entry(name)
        if entry.dtype not in dtypes:
            raise CheckpointError(
                f"{entry.file.path}: tensor {name!r} has type {entry.dtype}, expected {' or '.join(dtypes)}"
            )
        if shape is not None and not (
            len(shape) == len(entry.shape) and all(n in (None, m) for n, m in zip(shape, entry.shape, strict=True))
        ):
            wanted = ", ".join("any" if n is None else str(n) for n in shape)
            raise CheckpointError(f"{entry.file.path}: tensor {name!r} has shape {entry.shape}, expected ({wanted})")
        return entry

    def values(self, name: str) -> NDArray[Any]:
        """A view of the mapped file in the tensor's shape, of the type in DTYPES."""
        entry = self.entry(name)
        return entry.file.data[entry.start : entry.stop].view(DTYPES[entry.dtype]).reshape(entry.shape)

    def release(self, names: Iterable[str]) -> None:
        for name in names:
            entry = self.entry(name)
            entry.file.release(entry.start, entry.stop)


def _weight_files(path: Path) -> dict[Path, list[str]]:
    """Each file with the tensors that the index expects in it; without an index, any."""
    if (path / SINGLE).is_file():
        return {path / SINGLE: []}
    if not (path / INDEX).is_file():
        whole = [file for file in path.glob("*.safetensors") if not _NOT_WHOLE.search(file.name)]
        if len(whole) == 1:  # of a name that some tools choose, such as gptq_model-4bit-128g.safetensors
            return {whole[0]: []}
        others = sorted(p.name for pattern in ("*.bin", "*.pth", "*.safetensors", "*.gguf") for p in path.glob(pattern))
        found = f"; found {', '.join(others[:4])}" if others else ""
        raise CheckpointError(f"{path}: neither {SINGLE} nor {INDEX} is here{found}")
    weight_map = read_json(path / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path / INDEX}: key 'weight_map' is missing or empty")
    files: dict[Path, list[str]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or not 0 < len(file.encode()) < 256:
            raise CheckpointError(f"{path / INDEX}: {file!r:.300} of {name!r:.300} is not the name of a file beside it")
        if not (path / file).is_file():
            raise CheckpointError(f"{path / file}: file is missing, though {INDEX} names it")
        files.setdefault(path / file, []).append(name)
    return files


def _read_header(path: Path) -> dict[str, Entry]:
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
        entries[name] = Entry(file, tensor["dtype"], tuple(tensor["shape"]), start, stop)
    return entries
