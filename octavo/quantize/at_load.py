"""`--quantize`: matrices of a float checkpoint as blocks of integers, made row by row while they are packed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from octavo.graph.ir import Graph
from octavo.quantize.blocks import FORMATS
from octavo.quantize.roles import Role, roles
from octavo.weights.digest import code_digest
from octavo.weights.formats import dequantise
from octavo.weights.mapped import FileIdentity
from octavo.weights.spec import Checkpoint, CheckpointError, SourceTensor, TensorInfo

FLOATS = ("F32", "F16", "BF16")
"""Source formats that can be quantised."""

SOURCES = {"int8": "Q8_0", "int4": "Q4_0"}
"""Value of the option -> source format of the layers' matrices: symmetric, groups of 32."""

_OTHERS = "Q8_0"
"""Of embeddings and the head."""


def identity(quantize: str) -> str:
    """What the bytes of weights depend on beside their files and formats: the option, and the code of this package. ""
    where nothing is quantised at load."""
    code = sorted(Path(__file__).parent.glob("*.py"))
    return "" if quantize == "none" else f"{quantize} {code_digest(code).hex()}"


def quantised(checkpoint: Checkpoint, graph: Graph, quantize: str) -> Checkpoint:
    """`checkpoint` as int8 or int4; `graph` is its own. What experts are chosen by stays as it is.

    Raises CheckpointError naming a matrix that is quantised already.
    """
    sources: dict[str, str] = {}
    ragged: list[str] = []
    for name, role in roles(graph).items():
        info = checkpoint.info(name)
        if info.source not in FLOATS and role in (Role.LINEAR, Role.EXPERT):
            raise CheckpointError(
                f"{info.file}: {name} is quantised already ({info.source}): quantize is for {', '.join(FLOATS)}"
            )
        if role is Role.KEPT or info.source not in FLOATS:
            continue
        source = SOURCES[quantize] if role in (Role.LINEAR, Role.EXPERT) else _OTHERS
        if info.shape[-1] % FORMATS[source].cols:
            ragged.append(name)
        else:
            sources[name] = source
    return _Quantised(checkpoint, sources, ragged)


class _Quantised:
    """A `Checkpoint` with other formats for some names, addresses among them."""

    def __init__(self, checkpoint: Checkpoint, sources: Mapping[str, str], ragged: list[str]) -> None:
        self._checkpoint, self._sources = checkpoint, sources
        self.path, self.config, self.generation = checkpoint.path, checkpoint.config, checkpoint.generation
        self.notices = list(checkpoint.notices)
        if ragged:
            self.notices.append(
                f"{len(ragged)} matrices are not quantised, as their rows are no multiple of 32 values: {ragged[0]}"
            )

    def __contains__(self, name: str) -> bool:
        return name in self._checkpoint

    def names(self) -> Iterable[str]:
        return self._checkpoint.names()

    def files(self) -> list[FileIdentity]:
        return self._checkpoint.files()

    def info(self, name: str) -> TensorInfo:
        info = self._checkpoint.info(name)
        return info._replace(source=self._sources.get(name, info.source))

    def read(self, name: str, start: int = 0, stop: int | None = None) -> SourceTensor:
        found = self._checkpoint.read(name, start, stop)
        if name not in self._sources:
            return found
        form, cols = FORMATS[self._sources[name]], found.info.shape[-1]
        w = dequantise(found.info.source, found.data, cols)
        if not np.isfinite(w).all():
            raise CheckpointError(f"{found.info.file}: {name} has a value that is infinite or no number")
        grid = form.fit(w, np.ones(cols, np.float32))
        return SourceTensor(self.info(name), form.encode(grid, grid.round(w)))

    def release(self, name: str) -> None:
        self._checkpoint.release(name)
