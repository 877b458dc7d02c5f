"""Writing a model directory with compressed-tensors weights."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Self

from octavo.graph.ir import Graph
from octavo.models import build_graph
from octavo.quantize.at_load import FLOATS
from octavo.quantize.compressed import CompressedFormat
from octavo.quantize.convert import Fit
from octavo.quantize.directory import Tensor, TensorShards, copy_beside
from octavo.quantize.grid import I16, Grid
from octavo.quantize.roles import Role
from octavo.quantize.same import same_model
from octavo.weights.checkpoint import open_checkpoint
from octavo.weights.spec import Checkpoint, CheckpointError, base_name


class CompressedOutput:
    """`convert.Output`. Linear modules of the layers are quantised; embeddings, head and routers stay as they are."""

    def __init__(
        self, checkpoint: Checkpoint, graph: Graph, roles: dict[str, Role], folder: Path, form: CompressedFormat
    ) -> None:
        """folder: there, and empty. roles: of all weight parts, KEPT where the user wants them kept.

        Raises CheckpointError naming a matrix that the format cannot hold.
        """
        self._checkpoint, self._graph, self._folder, self._form = checkpoint, graph, folder, form
        self.names = sorted(checkpoint.names(), key=_order)
        linears = {name: role for name, role in roles.items() if role is not Role.EMBEDDING}
        self._modules = {}
        for part, role in linears.items():
            if role in (Role.LINEAR, Role.EXPERT):
                self._modules[base_name(part)] = self._module(part)
        whole = {base_name(name).removesuffix(".weight") for name in linears} | {"lm_head"}
        self._ignored = sorted(whole - set(self._modules.values()))
        self._shards = TensorShards(folder)

    @property
    def num_bytes(self) -> int:
        return self._shards.num_bytes

    def fit(self, name: str) -> Fit | None:
        if name not in self._modules:
            return None
        return partial(self._form.fit, scale_type=self._checkpoint.info(name).source)

    def put(self, name: str, grid: Grid, codes: I16) -> None:
        source = self._checkpoint.info(name).source
        for part, tensor in self._form.tensors(self._modules[name], grid, codes, source).items():
            self._shards.put(part, tensor)

    def copy(self, name: str) -> None:
        info, data, _ = self._checkpoint.read(name)
        self._shards.put(name, Tensor(info.source, info.shape, data.copy()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """Nothing is open."""

    def finish(self) -> None:
        """Raises CheckpointError where what was written is another model."""
        self._shards.close()
        source = Path(self._checkpoint.path)
        copy_beside(source, self._folder)
        config = self._checkpoint.config | {"quantization_config": self._form.config(self._ignored)}
        (self._folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        written = build_graph(open_checkpoint(self._folder), "f32")
        if difference := same_model(self._graph, written):
            raise CheckpointError(f"{self._folder}: what was written is another model: {difference:.300}")

    def _module(self, part: str) -> str:
        """Of a weight. Raises CheckpointError where it cannot be quantised."""
        name = base_name(part)
        info = self._checkpoint.info(name)
        if info.source not in FLOATS:
            raise CheckpointError(f"{info.file}: {name} is quantised already ({info.source})")
        if len(info.shape) != 2 or ".T" in part or not name.endswith(".weight"):
            raise CheckpointError(
                f"{info.file}: {name} of shape {info.shape} is not the weight of a linear module, as "
                f"{self._form.name} asks; it could be kept (--keep '{name.removesuffix('.weight')}')"
            )
        size, packed = self._form.group or 1, 32 // self._form.bits if self._form.layout == "pack-quantized" else 1
        if info.shape[1] % max(size, packed):
            raise CheckpointError(
                f"{info.file}: {name} has rows of {info.shape[1]} weights, no multiple of {max(size, packed)}: choose "
                f"another group size, or keep it (--keep '{name.removesuffix('.weight')}')"
            )
        return name.removesuffix(".weight")


def _order(name: str) -> tuple[int, str]:
    """Layer after layer, behind the rest."""
    return next((int(part) for part in name.split(".") if part.isdecimal()), -1), name
