"""Writing GGUF files tensor by tensor, so that the memory it takes is that of the largest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np

from octavo.weights.formats import U8, row_bytes
from octavo.weights.gguf_file import StringArray


class Tensor(NamedTuple):
    name: str
    shape: tuple[int, ...]  # (out, in), or (n,)
    source: str  # format
    rows: Iterator[U8]  # [some rows, bytes per row], in order

    @property
    def row_bytes(self) -> int:
        return row_bytes(self.source, self.shape[-1])

    @property
    def num_rows(self) -> int:
        return int(np.prod(self.shape[:-1]))


def write_gguf(path: Path, metadata: dict[str, Any], tensors: Sequence[Tensor], title: str) -> None:
    """metadata: as `weights.gguf_file` reads it, with general.architecture. A bar of this title shows how far it is."""
    from rich.console import Console
    from rich.progress import track

    writer = gguf.GGUFWriter(path, metadata["general.architecture"])
    for key, value in metadata.items():
        _add(writer, key, value)
    for tensor in tensors:
        kind = gguf.GGMLQuantizationType[tensor.source]
        size = tensor.num_rows * tensor.row_bytes
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), size, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    console = Console(stderr=True)
    for tensor in track(tensors, title, console=console, transient=True, disable=not console.is_terminal):
        data = np.empty((tensor.num_rows, tensor.row_bytes), np.uint8)
        start = 0
        for rows in tensor.rows:
            data[start : start + len(rows)] = rows
            start += len(rows)
        writer.write_tensor_data(data)
    writer.close()


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if key == "general.architecture":  # the writer has it
        return
    if isinstance(value, StringArray):
        writer.add_array(key, value.decode())
    elif isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_string(key, value)
