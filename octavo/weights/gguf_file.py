"""GGUF files: metadata and tensor table. Format: the GGUF specification of ggml, versions 2 and 3."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from gguf.gguf_reader import GGUFReader, ReaderField

from octavo.weights.mapped import MappedFile
from octavo.weights.spec import CheckpointError

_SCALARS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}
_LENGTH = struct.Struct("<Q")


class GgufTensor(NamedTuple):
    source: str  # format, e.g. Q4_1
    shape: tuple[int, ...]  # (out, in): the file's order reversed
    file: MappedFile
    start: int  # bytes [start, stop) of the file
    stop: int


class StringArray(NamedTuple):
    """An array of strings not yet decoded: a vocabulary is of no use to whoever only wants the tensors."""

    file: MappedFile
    offset: int
    length: int

    def decode(self, count: int | None = None) -> list[str]:
        """All of them, or the first `count`."""
        data, position = self.file.buffer, self.offset
        strings = []
        for _ in range(self.length if count is None else count):
            start = position + 8
            position = start + _LENGTH.unpack_from(data, position)[0]
            strings.append(str(data[start:position], "utf-8"))
        return strings


class _Reader(GGUFReader):
    """The gguf library's reader, except for metadata values (its numpy view per array element takes seconds) and for
    the tensor table, which is checked against the length of the file."""

    values: dict[str, Any]
    table: dict[str, GgufTensor]

    def __init__(self, file: MappedFile) -> None:
        self.file = file
        super().__init__(file.path)

    def _build_fields(self, offs: int, count: int) -> int:
        if self.byte_order != "I":
            raise ValueError("big-endian files are not supported")
        self.values = {}
        for _ in range(count):
            key, position = self._string(offs)
            kind = GGUFValueType(self._scalar("I", position))
            self.values[key], offs = self._value(kind, position + 4)
            if key == "general.alignment":  # the base class reads it from here
                self.fields[key] = ReaderField(offs, key, [self._get(offs - 4, "<u4")], [0], [kind])
        return offs

    def _value(self, kind: GGUFValueType, offset: int) -> tuple[Any, int]:
        if kind is GGUFValueType.STRING:
            return self._string(offset)
        if kind is not GGUFValueType.ARRAY:
            code = _SCALARS[kind]
            return self._scalar(code, offset), offset + struct.calcsize(f"<{code}")
        element = GGUFValueType(self._scalar("I", offset))
        count = self._scalar("Q", offset + 4)
        offset += 12
        if element is GGUFValueType.STRING:
            array, data = StringArray(self.file, offset, count), self.file.buffer
            for _ in range(count):
                offset += 8 + _LENGTH.unpack_from(data, offset)[0]
            return array, offset
        if element is GGUFValueType.ARRAY:
            raise ValueError("nested arrays are not supported")
        layout = f"<{count}{_SCALARS[element]}"
        return list(struct.unpack_from(layout, self.file.buffer, offset)), offset + struct.calcsize(layout)

    def _string(self, offset: int) -> tuple[str, int]:
        stop = offset + 8 + self._scalar("Q", offset)
        if stop > len(self.file.buffer):
            raise ValueError("a string passes the end of the file")
        return str(self.file.buffer[offset + 8 : stop], "utf-8"), stop

    def _get(self, offset: int, dtype: npt.DTypeLike, count: int = 1, override_order: Any = None) -> npt.NDArray[Any]:
        if int(offset) + np.dtype(dtype).itemsize * int(count) > len(self.data):
            raise ValueError("its tables pass the end of the file")
        return super()._get(offset, dtype, count, override_order)

    def _scalar(self, code: str, offset: int) -> Any:
        return struct.unpack_from(f"<{code}", self.file.buffer, offset)[0]

    def _build_tensors(self, start_offs: int, fields: list[ReaderField]) -> None:
        self.table = {}
        for field in fields:
            _, name_bytes, _, dims, raw_type, offset = field.parts
            name = name_bytes.tobytes().decode()
            if name in self.table:
                raise ValueError(f"tensor {name!r} occurs twice")
            try:
                kind = GGMLQuantizationType(int(raw_type[0]))
            except ValueError:
                raise ValueError(f"tensor {name!r} has the unknown type number {int(raw_type[0])}") from None
            shape = tuple(int(n) for n in reversed(dims))
            block_cols, block_bytes = GGML_QUANT_SIZES[kind]
            if not shape or shape[-1] % block_cols:
                raise ValueError(f"tensor {name!r} of shape {shape} does not divide into blocks of {kind.name}")
            start = start_offs + int(offset[0])
            stop = start + math.prod(shape) // block_cols * block_bytes
            if stop > len(self.file.buffer):
                raise ValueError(f"truncated: tensor {name!r} ends at byte {stop}, the file at {len(self.file.buffer)}")
            self.table[name] = GgufTensor(kind.name, shape, self.file, start, stop)


class GgufFile(NamedTuple):
    """`metadata` values are Python's; arrays of strings stay undecoded (`strings`)."""

    file: MappedFile
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    def size(self, key: str) -> int:
        """Length of an array; 0 where there is none."""
        value = self.metadata.get(key)
        return value.length if isinstance(value, StringArray) else len(value) if isinstance(value, list) else 0

    def strings(self, key: str, count: int | None = None) -> list[str]:
        """An array of strings, or its first `count`; CheckpointError where there is none."""
        value = self.metadata.get(key)
        if not isinstance(value, StringArray):
            raise CheckpointError(f"{self.file.path}: metadata {key!r} is missing or no list of strings")
        try:
            return value.decode(count)
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.file.path}: metadata {key!r} is not UTF-8: {error}") from error


def read_gguf(path: Path) -> GgufFile:
    """Map a GGUF file and read its tables. CheckpointError where it is damaged or of another kind."""
    try:
        file = MappedFile(path)
        if file.data[:4].tobytes() != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        reader = _Reader(file)
    except (OSError, ValueError, KeyError, IndexError, struct.error, OverflowError, MemoryError) as error:
        cause = "its tables pass the end of the file" if isinstance(error, struct.error) else error
        raise CheckpointError(f"{path}: damaged, truncated or no GGUF file: {cause}") from error
    return GgufFile(file, reader.values, reader.table)
