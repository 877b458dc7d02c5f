"""What the linears of a model see: its layers run one at a time on the native backend, in float32.

A layer becomes a graph of its own whose first operation looks its states up in a table, a row for each token of the text.
So only one layer's weights are in memory, whatever the model, and those before it may be the quantised ones already.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.backends.base import BLOCK_SIZE, Limits
from octavo.backends.cpu import CpuBackend
from octavo.backends.diff import make_step
from octavo.graph import ops
from octavo.graph.ir import Dim, DType, Graph, Kind, Node, T, Value, WeightPart
from octavo.quantize.grid import F32
from octavo.weights.address import Addressed
from octavo.weights.mapped import FileIdentity
from octavo.weights.spec import Checkpoint, CheckpointError, SourceTensor, TensorInfo, base_name

_STATES = "states of all tokens"


class Calibration:
    """Texts on their way through a model. `layer` is the next that they go through."""

    def __init__(
        self, graph: Graph, checkpoint: Checkpoint, texts: Sequence[Sequence[int]], num_threads: int = 0
    ) -> None:
        """graph: of `checkpoint`, with float32 activations. Raises CheckpointError where its layers do not follow one
        another."""
        self._graph, self._checkpoint = graph, checkpoint
        self._texts = [np.asarray(text, np.int32) for text in texts]
        self._backend = CpuBackend(num_threads=num_threads, fuse=False, reuse=False)
        self._layers = sorted({node.layer for node in graph.nodes if node.layer >= 0})
        first = next(i for i, node in enumerate(graph.nodes) if node.layer >= 0)
        before = graph.nodes[:first]
        self._state = self._passed_on(before)
        (self._rows,) = self._run(before, [self._state], self._texts)

    def inputs(self, layer: int) -> dict[str, F32]:
        """By the name of each matrix of the layer's linears: the sum of x x^T over its inputs [K, K]."""
        nodes = self._nodes(layer)
        linears = [node for node in nodes if isinstance(node.attrs, ops.Linear)]
        seen: dict[tuple[Value, int, int], F32] = {}
        for read in self._steps(nodes, self._rows, self._ids()):
            for x in {_key(node): node.ins[0] for node in linears}.values():
                values = read(x.root)[:, x.start : x.start + x.cols]
                key = (x.root, x.start, x.cols)
                seen[key] = seen[key] + values.T @ values if key in seen else values.T @ values
        return {base_name(part.name): seen[_key(node)] for node in linears for part in node.ins[1].parts}

    def advance(self, layer: int, changed: Mapping[str, F32]) -> None:
        """Take the states through the layer, with other values for some of its tensors."""
        nodes = self._nodes(layer)
        after = self._passed_on(self._graph.nodes[: self._graph.nodes.index(nodes[-1]) + 1])
        (self._rows,) = self._run(nodes, [after], self._ids(), self._rows, changed)
        self._state = after

    # ---- internals

    def _nodes(self, layer: int) -> list[Node]:
        return [node for node in self._graph.nodes if node.layer == layer]

    def _passed_on(self, done: Sequence[Node]) -> Value:
        """The one value that the rest of the graph reads of what was done."""
        made = {v for node in done for v in node.outs}
        rest = self._graph.nodes[len(done) :]
        read = {v.root for node in rest for v in node.ins} & made
        if len(read) != 1:
            raise CheckpointError(
                f"{self._checkpoint.path}: calibration needs layers that pass one value on; {done[-1]!r} is followed by "
                f"reads of {len(read)}"
            )
        return read.pop()

    def _ids(self) -> list[NDArray[np.int32]]:
        """Rows of the table, text by text."""
        ends = np.cumsum([len(text) for text in self._texts])
        return [np.arange(end - len(t), end, dtype=np.int32) for t, end in zip(self._texts, ends, strict=True)]

    def _run(
        self, nodes: Sequence[Node], wanted: Sequence[Value], ids: Sequence[NDArray[np.int32]], table: F32 | None = None,
        changed: Mapping[str, F32] | None = None,
    ) -> list[F32]:  # fmt: skip
        """The wanted values for every token."""
        found: list[list[F32]] = [[] for _ in wanted]
        for read in self._steps(nodes, table, ids, changed):
            for rows, value in zip(found, wanted, strict=True):
                rows.append(read(value))
        return [np.concatenate(rows) for rows in found]

    def _steps(
        self, nodes: Sequence[Node], table: F32 | None, ids: Sequence[NDArray[np.int32]],
        changed: Mapping[str, F32] | None = None,
    ) -> Iterator[Any]:  # fmt: skip
        """Compute `nodes` for each text; yields what reads a value of that step."""
        arrays = dict(changed or {})
        graph = self._part(nodes, table, arrays)
        if table is not None:
            arrays[_STATES] = table
        longest = max(map(len, ids))
        blocks = -(-longest // BLOCK_SIZE)
        weights = self._backend.pack(graph, Addressed(_With(self._checkpoint, arrays)))
        state = self._backend.make_state(graph, [blocks] * len(graph.groups))
        limits = Limits(max_tokens=longest, max_rows=1, max_seqs=1, max_model_len=longest)
        program = self._backend.compile(graph, weights, state, limits)
        for text in ids:
            program.run(make_step([(text, 0, list(range(blocks)))], len(graph.groups))).result()
            yield program.read

    def _part(self, nodes: Sequence[Node], table: F32 | None, changed: Mapping[str, F32]) -> Graph:
        whole = self._graph
        vocab, nodes = whole.vocab_size, [_in_float32(node, changed) for node in nodes]
        if table is not None:
            part = WeightPart(_STATES, len(table), "f32")
            rows = Value(_STATES, Dim(len(table)), table.shape[1], Kind.WEIGHT, parts=(part,))
            look_up = Node(ops.Embed(), (Value("token_ids", T, 1, Kind.INPUT, DType.I32), rows), (self._state,))
            vocab, nodes = len(table), [look_up, *nodes]
        return Graph(whole.name, vocab, whole.max_positions, whole.bounded, whole.causal, nodes, whole.groups)


def _in_float32(node: Node, names: Container[str]) -> Node:
    """The node with these tensors as float32, whatever the file holds them as."""
    ins = []
    for v in node.ins:
        parts = tuple(p._replace(format="f32") if base_name(p.name) in names else p for p in v.parts)
        ins.append(v if parts == v.parts else replace(v, parts=parts))
    return Node(node.attrs, tuple(ins), node.outs, node.layer)


def _key(node: Node) -> tuple[Value, int, int]:
    x = node.ins[0]
    return x.root, x.start, x.cols


class _With:
    """A `Checkpoint` with float32 arrays in place of some of its tensors."""

    def __init__(self, checkpoint: Checkpoint, arrays: Mapping[str, F32]) -> None:
        self._checkpoint, self._arrays = checkpoint, arrays
        self.path, self.config, self.generation = checkpoint.path, checkpoint.config, checkpoint.generation
        self.notices = checkpoint.notices

    def __contains__(self, name: str) -> bool:
        return name in self._arrays or name in self._checkpoint

    def names(self) -> Iterable[str]:
        return self._checkpoint.names()

    def files(self) -> list[FileIdentity]:
        return self._checkpoint.files()

    def info(self, name: str) -> TensorInfo:
        if name in self._arrays:
            return TensorInfo(self._arrays[name].shape, "F32", self.path)
        return self._checkpoint.info(name)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> SourceTensor:
        if name in self._arrays:
            array = self._arrays[name]
            rows = array.reshape(-1, array.shape[-1])[start:stop]
            return SourceTensor(self.info(name), np.ascontiguousarray(rows).view(np.uint8))
        return self._checkpoint.read(name, start, stop)

    def release(self, name: str) -> None:
        if name not in self._arrays:
            self._checkpoint.release(name)
