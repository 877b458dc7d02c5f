"""Parts of a checkpoint's tensors by name: one expert of many, some rows, a matrix the other way round.

An address is a tensor's name and steps, applied from left to right:

    name[3]        entry 3 of the first dimension
    name[0:8]      rows, or elements of a vector, as Python slices; name[0::2] every second one, name[:] of more
                   dimensions the matrix of its last one
    name[0:64%96]  of every 96 rows, those from 0 to 64
    name.T         transposed
    name.T(64)     every 64 rows transposed, one below the other

So `experts.gate_up_proj[3].T[0::2]` is a matrix like any other, with a shape, a format and rows that can be read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.weights.formats import dequantise
from octavo.weights.mapped import FileIdentity
from octavo.weights.spec import Checkpoint, CheckpointError, SourceTensor, TensorInfo, base_name

Rows = NDArray[np.int64]

_STEP = re.compile(r"\[(\d+)\]|\[(\d*):(\d*)(?::(\d*)|%(\d+))?\]|\.T(?:\((\d+)\))?")
_STEPS = re.compile(rf"(?:{_STEP.pattern})+")
_PLAIN: dict[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.uint16),
    "BF16": np.dtype(np.uint16),
}


class _Part(NamedTuple):
    shape: tuple[int, ...]
    rows: Rows  # of the tensor as a matrix; of a vector its elements
    row: int  # where the part is a vector: the row of the tensor that holds it
    transposed: int  # rows that are transposed together; 0: none
    after: Rows  # rows of what was transposed


class Addressed:
    """A `Checkpoint` that knows the parts of its tensors, too. Whole tensors are those of the checkpoint inside."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._part = lru_cache(maxsize=8)(self._find)
        self._turned: tuple[str, NDArray[np.uint8]] | None = None  # the last: its rows are asked for bit by bit
        self.path, self.config, self.generation = checkpoint.path, checkpoint.config, checkpoint.generation
        self.notices = checkpoint.notices

    def __contains__(self, name: str) -> bool:
        return base_name(name) in self._checkpoint

    def files(self) -> list[FileIdentity]:
        return self._checkpoint.files()

    def names(self) -> Iterable[str]:
        return self._checkpoint.names()

    def info(self, name: str) -> TensorInfo:
        """Raises CheckpointError where the tensor has no such part."""
        base = base_name(name)
        info = self._checkpoint.info(base)
        if base == name:
            return info
        part = self._part(name)
        order = None if part.transposed else info.order  # sorted columns are rows then, and put in their places
        return info._replace(shape=part.shape, source=_source(info, part), order=order)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> SourceTensor:
        base = base_name(name)
        if base == name:
            return self._checkpoint.read(name, start, stop)
        info, part = self.info(name), self._part(name)
        if len(part.shape) == 1:
            found = self._checkpoint.read(base, part.row, part.row + 1)
            size = found.data.shape[1] // self._checkpoint.info(base).shape[-1]
            return found._replace(info=info, data=found.data.reshape(-1, size)[part.rows].reshape(1, -1))
        if part.transposed:
            if self._turned is None or self._turned[0] != name:
                self._turned = name, self._transposed(base, part)
            return SourceTensor(info, self._turned[1][start:stop])
        return self._some_rows(base, part.rows[start:stop])._replace(info=info)

    def release(self, name: str) -> None:
        """Of a tensor in parts, when the part with its last row was packed."""
        base = base_name(name)
        self._turned = None
        if base != name and len(shape := self._checkpoint.info(base).shape) > 1:
            part = self._part(name)
            last = part.row if len(part.shape) == 1 else int(part.rows[-1])
            if last + 1 < math.prod(shape[:-1]):
                return
        self._checkpoint.release(base)

    # ---- internals

    def _some_rows(self, base: str, rows: Rows) -> SourceTensor:
        """A view where they are neighbours."""
        if not len(rows):
            return self._checkpoint.read(base, 0, 0)
        first, last = int(rows.min()), int(rows.max()) + 1
        found = self._checkpoint.read(base, first, last)
        if last - first == len(rows) and (np.diff(rows) == 1).all():
            return found
        factor = None if found.factor is None else found.factor[rows - first]
        return found._replace(data=found.data[rows - first], factor=factor)

    def _transposed(self, base: str, part: _Part) -> NDArray[np.uint8]:
        found, info = self._some_rows(base, part.rows), self._checkpoint.info(base)
        source, cols = info.source, info.shape[-1]
        if source in _PLAIN:
            values: NDArray[Any] = np.ascontiguousarray(found.data).view(_PLAIN[source])
        else:
            values = dequantise(source, found.data, cols, found.factor)
        if info.order is not None:
            values = values[:, np.argsort(info.order)]
        turned = values.reshape(-1, part.transposed, cols).swapaxes(1, 2).reshape(-1, part.transposed)
        return np.ascontiguousarray(turned[part.after]).view(np.uint8)

    def _find(self, address: str) -> _Part:
        base = base_name(address)
        info = self._checkpoint.info(base)

        def need(ok: bool) -> None:
            if not ok:
                raise CheckpointError(f"{info.file}: {base} has shape {info.shape}: there is no {address}")

        need(_STEPS.fullmatch(address, len(base)) is not None)
        steps = [step.groups() for step in _STEP.finditer(address, len(base))]
        shape, row = info.shape, 0
        while steps and steps[0][0] is not None:
            index = int(steps.pop(0)[0])
            need(len(shape) > 1 and index < shape[0])
            row, shape = row * shape[0] + index, shape[1:]
        shape = (math.prod(shape[:-1]), shape[-1]) if len(shape) > 2 and steps else shape
        need(len(shape) <= 2)
        first_row = row * shape[0] if len(shape) == 2 else 0
        selected, rows, transposed = np.arange(first_row, first_row + shape[0]), None, 0
        for index_again, first, last, stride, period, block in steps:
            need(index_again is None)
            if first is not None:
                start, end = int(first or 0), int(last or period or len(selected))
                if period is None:
                    need(int(stride or 1) > 0)
                    selected = selected[start : end : int(stride or 1)]
                else:
                    need(int(period) > 0 and len(selected) % int(period) == 0 and end <= int(period))
                    selected = selected.reshape(-1, int(period))[:, start:end].ravel()
                need(len(selected) > 0 and (end <= shape[0] or last is None))
                shape = (len(selected), *shape[1:])
            else:
                transposed = int(block or shape[0])
                need(len(shape) == 2 and rows is None and transposed > 0 and shape[0] % transposed == 0)
                rows, shape = selected, (shape[0] // transposed * shape[1], transposed)
                selected = np.arange(shape[0])
        return _Part(shape, selected if rows is None else rows, row, transposed, selected)


def _source(info: TensorInfo, part: _Part) -> str:
    return "F32D" if part.transposed and info.source not in _PLAIN else info.source


def output_rows(address: str, total: int) -> Rows | None:
    """Which of `total` output features a part of a linear's weight has; None where it is more than some rows of it."""
    rows = np.arange(total)
    for index, first, last, stride, period, block in map(
        re.Match.groups, _STEP.finditer(address, len(base_name(address)))
    ):
        if index is not None or block is not None or (first is None and len(rows) < total):
            return None
        if first is not None and period is not None:
            if int(period) == 0 or len(rows) % int(period):
                return None
            rows = rows.reshape(-1, int(period))[:, int(first or 0) : int(last or period)].ravel()
        elif first is not None:
            rows = rows[int(first or 0) : int(last) if last else None : int(stride or 1)]
    return rows
