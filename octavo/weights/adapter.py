"""LoRA adapters in the layout of PEFT: adapter_config.json beside adapter_model.safetensors (Hu et al. 2021).

An adapter adds scale * B (A x) to the outputs of some modules. Everything in the two files is served or refused by name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.weights.adapter_config import CONFIG, AdapterConfig, AdapterError
from octavo.weights.address import output_rows
from octavo.weights.spec import CheckpointError, base_name, reading

TENSORS = "adapter_model.safetensors"

_PREFIX = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"
_TYPES = ("F32", "F16", "BF16")


class LowRank(NamedTuple):
    """What is added to the output of one module. Both matrices are rows of bytes, in the same source format."""

    a: NDArray[np.uint8]  # [r, bytes of K values]
    b: NDArray[np.uint8]  # [N, bytes of r values]
    source: str  # F32, F16 or BF16
    rank: int  # r
    rows: int  # N
    cols: int  # K
    scale: float  # alpha / r, or alpha / sqrt(r)


@dataclass(frozen=True)
class Adapter:
    path: str
    digest: str  # hexadecimal, of the content of both files
    modules: dict[str, LowRank]

    @property
    def rank(self) -> int:
        """The largest of its modules."""
        return max(module.rank for module in self.modules.values())


def read_adapter(path: str | Path, targets: Mapping[str, tuple[int, int]], max_rank: int) -> Adapter:
    """The adapter in a directory, for a model whose `targets` {module: (N, K)} can have one.

    Raises AdapterError naming file, key or tensor, and what was expected: where a value would change results and is not
    served, where a tensor is missing, has no place or the wrong shape, and where a rank is above `max_rank`.
    """
    path = Path(path).expanduser()
    files = [path / CONFIG, path / TENSORS]
    for file in files:
        if not file.is_file():
            others = sorted(p.name for p in path.glob("*.bin")) if path.is_dir() else []
            found = f"; found {', '.join(others[:4])}" if others else ""
            raise AdapterError(f"{path}: not an adapter in the layout of PEFT: {file.name} is missing{found}")
    try:
        with reading(path):
            contents = [file.read_bytes() for file in files]
            config = AdapterConfig(str(files[0]), contents[0])
            tensors = _tensors(str(files[1]), contents[1])
    except AdapterError:
        raise
    except CheckpointError as error:
        raise AdapterError(str(error)) from error
    digest = hashlib.sha256()
    for content in contents:
        digest.update(hashlib.sha256(content).digest())
    modules = _Modules(str(files[1]), config, tensors, targets, max_rank).read()
    return Adapter(str(path), digest.hexdigest(), modules)


class _Tensor(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]


def _is_finite(tensor: _Tensor) -> bool:
    """By exponents: those of infinity and of what is no number are all ones."""
    words: NDArray[Any] = tensor.data.view(np.uint32 if tensor.dtype == "F32" else np.uint16)
    ones = {"F32": 0x7F800000, "F16": 0x7C00, "BF16": 0x7F80}[tensor.dtype]
    return bool(((words & ones) != ones).all())


def _tensors(file: str, content: bytes) -> dict[str, _Tensor]:
    from safetensors import SafetensorError, deserialize

    try:
        entries = deserialize(content)  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        raise AdapterError(f"{file}: truncated or not a safetensors file: {error}") from error
    return {
        name: _Tensor(t["dtype"], tuple(t["shape"]), np.frombuffer(t["data"], np.uint8))
        for name, t in sorted(entries, key=itemgetter(0))
    }  # fmt: skip


class _Modules:
    """The tensors of an adapter as pairs of matrices, checked against config and model."""

    def __init__(
        self,
        file: str,
        config: AdapterConfig,
        tensors: dict[str, _Tensor],
        targets: Mapping[str, tuple[int, int]],
        max_rank: int,
    ) -> None:
        self._file = file
        self._config = config
        self._tensors = tensors
        self._max_rank = max_rank
        self._parts: dict[str, list[str]] = {}  # of the model's modules, by their names
        for part in targets:
            self._parts.setdefault(base_name(part), []).append(part)
        self._targets = targets

    def read(self) -> dict[str, LowRank]:
        found: dict[str, str] = {}
        for module in dict.fromkeys(map(self._module_of, self._tensors)):
            here = self._here(module)
            if here in found.values():
                raise AdapterError(f"{self._file}: {module} is the second name of one module of this model, {here}")
            found[module] = here
        for module in self._parts:
            if module not in found.values() and self._config.targets(module):
                name = f"{_PREFIX}{module}{_A}"
                raise AdapterError(f"{self._file}: tensor {name!r} is missing, though target_modules ask for it")
        if not found:
            raise AdapterError(f"{self._file}: there is no tensor in it")
        return {part: low for module, here in found.items() for part, low in self._pairs(module, here)}

    def _module_of(self, name: str) -> str:
        """The module that a tensor is for, which the model has and the config names."""
        ends = next((end for end in (_A, _B) if name.endswith(end)), None)
        module = name.removeprefix(_PREFIX).removesuffix(ends or "")
        if ends is None or not name.startswith(_PREFIX) or not self._here(module):
            raise AdapterError(
                f"{self._file}: tensor {name!r} has no place in this model: matrices lora_A and lora_B of its layers' "
                "linear modules are served, no embeddings, heads or experts"
            )
        if not self._config.targets(module):
            raise AdapterError(f"{self._file}: tensor {name!r} is of a module that target_modules do not name")
        return module

    def _here(self, module: str) -> str:
        """Its name in this model: whether names begin with `model.` depends on the class that was trained. "": none."""
        if module in self._parts:
            return module
        near = [name for name in self._parts if name.endswith("." + module) or module.endswith("." + name)]
        return near[0] if len(near) == 1 else ""

    def _pairs(self, module: str, here: str) -> Iterator[tuple[str, LowRank]]:
        """Of each part of the module: A is of all, B some of its rows."""
        parts = self._parts[here]
        sizes = [self._targets[part] for part in parts]
        total, cols = sum(rows for rows, _ in sizes), sizes[0][1]
        rank, scale = self._config.rank_and_scale(module)
        if rank > self._max_rank:
            raise AdapterError(
                f"{self._file}: {module} has rank {rank}; this server takes adapters of rank {self._max_rank} at most "
                "(max_lora_rank)"
            )
        a, b = self._matrix(module, _A, (rank, cols)), self._matrix(module, _B, (total, rank))
        if a.dtype != b.dtype:
            raise AdapterError(f"{self._file}: {module}: lora_A has type {a.dtype}, lora_B has type {b.dtype}")
        selected = [output_rows(part, total) for part in parts]
        whole = np.concatenate([np.zeros(0, np.int64) if rows is None else rows for rows in selected])
        if not np.array_equal(np.sort(whole), np.arange(total)):
            raise AdapterError(
                f"{self._file}: {module} is stored in another order in this model, which is not supported"
            )
        for part, rows in zip(parts, selected, strict=True):
            low = np.ascontiguousarray(b.data.reshape(total, -1)[rows])
            yield part, LowRank(a.data.reshape(rank, -1), low, a.dtype, rank, len(low), cols, scale)

    def _matrix(self, module: str, end: str, shape: tuple[int, int]) -> _Tensor:
        name = f"{_PREFIX}{module}{end}"
        tensor = self._tensors.get(name)
        if tensor is None:
            raise AdapterError(f"{self._file}: tensor {name!r} is missing")
        if tensor.shape != shape:
            raise AdapterError(f"{self._file}: {name} has shape {tensor.shape}, model and config ask for {shape}")
        if tensor.dtype not in _TYPES:
            raise AdapterError(
                f"{self._file}: {name} has type {tensor.dtype}, which is not supported ({', '.join(_TYPES)} are)"
            )
        if not _is_finite(tensor):
            raise AdapterError(f"{self._file}: {name} has a value that is infinite or no number")
        return tensor
