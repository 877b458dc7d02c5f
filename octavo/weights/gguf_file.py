"""GGUF files: metadata and tensor table. Format: the GGUF specification of ggml, versions 2 and 3."""

from __future__ import annotations

import itertools
import math
import struct
from pathlib import Path
from typing import Any, NamedTuple

from octavo.weights.mapped import MappedFile
from octavo.weights.spec import CheckpointError

VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32

_STRING, _ARRAY = 8, 9
_SCALARS = {
    number: struct.Struct(f"<{code}")
    for number, code in {
        0: "B",
        1: "b",
        2: "H",
        3: "h",
        4: "I",
        5: "i",
        6: "f",
        7: "?",
        10: "Q",
        11: "q",
        12: "d",
    }.items()
}
"""Types of metadata values by their numbers."""

_TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
}  # fmt: skip
"""Types of tensors by their numbers: name, columns and bytes of a block. Which are served: weights.formats."""

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


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
            position = start + _U64.unpack_from(data, position)[0]
            strings.append(str(data[start:position], "utf-8"))
        return strings


class _Tables:
    """What stands before the tensors, read from front to back. Every read beyond the end raises struct.error."""

    def __init__(self, file: MappedFile) -> None:
        self._file = file
        self._data = file.buffer
        self._at = 4
        version = self._number(_U32)
        if version and version & 0xFFFF == 0:
            raise ValueError("big-endian files are not supported")
        if version not in VERSIONS:
            raise ValueError(f"version {version} is not supported; {VERSIONS} are")
        num_tensors, num_values = self._number(_U64), self._number(_U64)
        self.values: dict[str, Any] = {}
        for _ in range(num_values):
            key = self._string()
            self.values[key] = self._value(self._number(_U32))
        infos = [self._tensor_info() for _ in range(num_tensors)]
        alignment = self.values.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"general.alignment must be a power of two; found {alignment!r}")
        start = -(-self._at // alignment) * alignment
        self.tensors: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in infos:
            if name in self.tensors:
                raise ValueError(f"tensor {name!r} occurs twice")
            if offset % alignment:
                raise ValueError(f"tensor {name!r} begins at {offset}, which is no multiple of {alignment}")
            self.tensors[name] = self._tensor(name, shape, kind, start + offset)
        in_order = sorted(self.tensors.items(), key=lambda item: item[1].start)
        for (name, tensor), (other, after) in itertools.pairwise(in_order):
            if after.start < tensor.stop:
                raise ValueError(f"tensors {name!r} and {other!r} have bytes in common")

    def _number(self, layout: struct.Struct) -> Any:
        (value,) = layout.unpack_from(self._data, self._at)
        self._at += layout.size
        return value

    def _string(self) -> str:
        start = self._at + 8
        self._at = start + self._number(_U64)
        if self._at > len(self._data):
            raise ValueError("a string passes the end of the file")
        try:
            return str(self._data[start : self._at], "utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"the string at byte {start} is not UTF-8: {bytes(self._data[start : self._at])!r:.100}"
            ) from error

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(self._number(_U32), self._number(_U64))
        if kind not in _SCALARS:
            raise ValueError(f"a value has the unknown type number {kind}")
        return self._number(_SCALARS[kind])

    def _array(self, kind: int, count: int) -> Any:
        if kind == _STRING:
            array, data, at, length = StringArray(self._file, self._at, count), self._data, self._at, _U64.unpack_from
            for _ in range(count):
                at += 8 + length(data, at)[0]
            self._at = at
            return array
        if kind not in _SCALARS:
            raise ValueError("nested arrays are not supported" if kind == _ARRAY else f"unknown type number {kind}")
        if count * _SCALARS[kind].size > len(self._data):
            raise ValueError("an array passes the end of the file")
        return list(self._number_list(_SCALARS[kind].format, count))

    def _number_list(self, code: str, count: int) -> tuple[Any, ...]:
        layout = struct.Struct(f"<{count}{code[1:]}")
        values = layout.unpack_from(self._data, self._at)
        self._at += layout.size
        return values

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name, num_dims = self._string(), self._number(_U32)
        if num_dims > len(self._data):
            raise ValueError(f"tensor {name!r} has {num_dims} dimensions")
        shape = self._number_list("<Q", num_dims)[::-1]
        return name, shape, self._number(_U32), self._number(_U64)

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, start: int) -> GgufTensor:
        if kind not in _TYPES:
            raise ValueError(f"tensor {name!r} has the unknown type number {kind}")
        source, block_cols, block_bytes = _TYPES[kind]
        if not shape or shape[-1] % block_cols:
            raise ValueError(f"tensor {name!r} of shape {shape} does not divide into blocks of {source}")
        stop = start + math.prod(shape) // block_cols * block_bytes
        if stop > len(self._data):
            raise ValueError(f"truncated: tensor {name!r} ends at byte {stop}, the file at {len(self._data)}")
        return GgufTensor(source, shape, self._file, start, stop)


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
        if bytes(file.buffer[:4]) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        tables = _Tables(file)
    except (OSError, ValueError, struct.error, OverflowError, MemoryError) as error:
        cause = "its tables pass the end of the file" if isinstance(error, struct.error) else error
        raise CheckpointError(f"{path}: damaged, truncated or no GGUF file: {cause}") from error
    return GgufFile(file, tables.values, tables.tensors)
