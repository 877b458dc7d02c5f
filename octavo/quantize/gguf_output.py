"""Writing a model as one GGUF file, quantised matrix by matrix."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.constants import LlamaFileType
from numpy.typing import NDArray

from octavo.graph.ir import Graph
from octavo.models import build_graph
from octavo.quantize.blocks import FORMATS
from octavo.quantize.convert import Fit, matrix
from octavo.quantize.gguf_metadata import family_of, write_metadata
from octavo.quantize.gguf_vocabulary import check_vocabulary, write_vocabulary
from octavo.quantize.grid import F32, I16, Grid
from octavo.quantize.same import same_model
from octavo.weights.checkpoint import open_checkpoint
from octavo.weights.formats import row_bytes
from octavo.weights.formats.numbers import as_bytes, f32_to_bf16
from octavo.weights.gguf_names import Family
from octavo.weights.spec import Checkpoint, CheckpointError, base_name


class Table(NamedTuple):
    """A tensor that belongs to the metadata."""

    source: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]


class GgufOutput:
    """`convert.Output` of a model directory. sources: by name of each matrix the format that it gets."""

    def __init__(
        self, checkpoint: Checkpoint, graph: Graph, path: Path, sources: Mapping[str, str], label: str
    ) -> None:
        """Writes all but the tensors. Raises CheckpointError naming what cannot be written."""
        self._checkpoint, self._graph, self._path = checkpoint, graph, path
        self._source = Path(checkpoint.path)
        architecture, self._family = self._architecture()
        self._plus = {base_name(part.name): part.plus for value in graph.weights() for part in value.parts}
        gguf_names = self._gguf_names()
        self.names = sorted(gguf_names, key=_order)
        self._sources = {name: sources.get(name, self._kept_as(name)) for name in self.names}
        self.num_bytes = 0
        self._writer = writer = GGUFWriter(path, architecture)
        writer.add_file_type(_FILE_TYPES.get(label, LlamaFileType.GUESSED))
        writer.add_quantization_version(2)
        tables = self._write_metadata(writer)
        for name, table in tables.items():
            self._declare(name, table.shape, table.source)
        for name in self.names:
            self._declare(gguf_names[name], checkpoint.info(name).shape, self._sources[name])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for table in tables.values():
            writer.write_tensor_data(table.data)

    def fit(self, name: str) -> Fit | None:
        """None also where the matrix has that format already."""
        source = self._sources[name]
        return FORMATS[source].fit if source in FORMATS and source != self._checkpoint.info(name).source else None

    def put(self, name: str, grid: Grid, codes: I16) -> None:
        rows = FORMATS[self._sources[name]].encode(grid, codes)
        self._write(rows[self._order_of_rows(name, len(rows))])

    def copy(self, name: str) -> None:
        info, data, _ = self._checkpoint.read(name)
        plus = self._plus.get(name, 0)  # a layer for drafts is in no graph
        if len(info.shape) > 1 and info.source == self._sources[name] and not plus:
            self._write(data[self._order_of_rows(name, len(data))])
            return
        values = matrix(self._checkpoint, name) + np.float32(plus)
        rows = len(values) if len(info.shape) > 1 else values.size
        values = values.reshape(rows, -1)[self._order_of_rows(name, rows)]
        self._write(_as_source(values, self._sources[name]))

    def _write(self, data: Any) -> None:
        self._writer.write_tensor_data(np.ascontiguousarray(data))
        self.num_bytes += data.nbytes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._writer.close()

    def finish(self) -> None:
        """Raises CheckpointError where what was written is another model."""
        self._writer.close()
        written = build_graph(open_checkpoint(self._path), "f32")
        if difference := same_model(self._graph, written):
            raise CheckpointError(
                f"{self._checkpoint.path}: a GGUF file cannot say what this model is: {difference:.300}"
            )
        self._check_vocabulary()

    # ---- what is written beside the matrices: of a directory

    def _architecture(self) -> tuple[str, Family]:
        return family_of(self._checkpoint.config, self._checkpoint.path)

    def _gguf_names(self) -> dict[str, str]:
        """Of all tensors, by their own."""
        return {name: _gguf_name(name, self._family, self._checkpoint.path) for name in self._plus}

    def _write_metadata(self, writer: GGUFWriter) -> dict[str, Table]:
        writer.add_type("model")
        writer.add_name(self._source.name)
        found = write_metadata(writer, self._family, self._graph, self._checkpoint.config, self._checkpoint.path)
        write_vocabulary(writer, self._source, self._graph.vocab_size)
        return {name: Table("F32", table.shape, as_bytes(table)) for name, table in found.items()}

    def _check_vocabulary(self) -> None:
        check_vocabulary(self._path, self._source)

    # ---- internals

    def _declare(self, name: str, shape: tuple[int, ...], source: str) -> None:
        size = math.prod(shape[:-1]) * row_bytes(source, shape[-1])
        kind = GGMLQuantizationType[source]
        self._writer.add_tensor_info(name, shape, np.dtype(np.float16), size, raw_dtype=kind)

    def _kept_as(self, name: str) -> str:
        """Vectors are float32, as llama.cpp asks."""
        info = self._checkpoint.info(name)
        return info.source if len(info.shape) > 1 else "F32"

    def _order_of_rows(self, name: str, rows: int) -> Any:
        """Where the file has rotary pairs as neighbours: the inverse of GgufCheckpoint.read."""
        config = self._checkpoint.config
        if not self._family.interleaved or name.split(".")[-2] not in ("q_proj", "k_proj"):
            return slice(None)
        heads = config["num_attention_heads"]
        if name.split(".")[-2] == "k_proj":
            heads = config.get("num_key_value_heads") or heads
        return np.arange(rows).reshape(heads, 2, rows // heads // 2).swapaxes(1, 2).ravel()


_FILE_TYPES = {
    "F32": LlamaFileType.ALL_F32, "F16": LlamaFileType.MOSTLY_F16, "BF16": LlamaFileType.MOSTLY_BF16,
    "Q4_0": LlamaFileType.MOSTLY_Q4_0, "Q4_1": LlamaFileType.MOSTLY_Q4_1, "Q5_0": LlamaFileType.MOSTLY_Q5_0,
    "Q5_1": LlamaFileType.MOSTLY_Q5_1, "Q8_0": LlamaFileType.MOSTLY_Q8_0, "Q2_K": LlamaFileType.MOSTLY_Q2_K,
    "Q3_K": LlamaFileType.MOSTLY_Q3_K_M, "Q4_K": LlamaFileType.MOSTLY_Q4_K_M, "Q5_K": LlamaFileType.MOSTLY_Q5_K_M,
    "Q6_K": LlamaFileType.MOSTLY_Q6_K, "IQ4_NL": LlamaFileType.MOSTLY_IQ4_NL, "IQ4_XS": LlamaFileType.MOSTLY_IQ4_XS,
}  # fmt: skip


def _order(name: str) -> tuple[int, str]:
    """Layers one after the other, after the rest."""
    number = next((int(part) for part in name.split(".") if part.isdecimal()), -1)
    return number, name


def _gguf_name(name: str, family: Family, path: str) -> str:
    """blk.3.attn_q.weight of model.layers.3.self_attn.q_proj.weight."""
    layer = ""
    names, module = family.top, name
    if name.startswith(family.prefix):
        number, _, module = name.removeprefix(family.prefix).partition(".")
        names, layer = family.layer, f"blk.{number}."
    stem, _, kind = module.rpartition(".")
    for gguf, own in reversed(list(names.items())):  # a family that names a module otherwise than others says so last
        if own == module:
            return layer + gguf
        if own == stem and kind in ("weight", "bias"):
            return f"{layer}{gguf}.{kind}"
    raise CheckpointError(f"{path}: tensor {name!r} has no name in GGUF files of {family.architecture}")


def _as_source(values: F32, source: str) -> Any:
    if source == "BF16":
        return as_bytes(f32_to_bf16(values))
    return values.astype({"F16": np.float16, "F32": np.float32}[source])
