"""From a float checkpoint to a quantised one: every tensor in turn, layer after layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from typing import NamedTuple, Protocol, Self

import numpy as np

from octavo.graph.ir import Graph
from octavo.quantize.calibrate import Calibration
from octavo.quantize.gptq import gptq, importance
from octavo.quantize.grid import F32, I16, Grid, concatenate
from octavo.weights.formats import dequantise
from octavo.weights.spec import Checkpoint, CheckpointError, base_name

Fit = Callable[[F32, F32], Grid]
"""(w [N, K], importance [K])"""

Report = Callable[[int, int, str], None]
"""(done, total, what was done)"""

_AT_ONCE = 2**20
"""Values that a fit takes at once: its temporaries are some ten times as much."""


class Output(Protocol):
    """A context: at its end files are closed, whole or not."""

    names: list[str]  # of the tensors that it takes, in this order

    @property
    def num_bytes(self) -> int:
        """Of all tensors that were written."""
        ...

    def fit(self, name: str) -> Fit | None:
        """How the matrix is quantised; None: it stays as it is."""
        ...

    def put(self, name: str, grid: Grid, codes: I16) -> None: ...

    def copy(self, name: str) -> None: ...

    def finish(self) -> None:
        """All tensors are there. Raises CheckpointError where what was written is another model."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *exception: object) -> None: ...


class Method(NamedTuple):
    """Texts are token ids; without any, weights are rounded to nearest."""

    texts: Sequence[Sequence[int]] = ()
    act_order: bool = True
    damping: float = 0.1
    num_threads: int = 0


class Sizes(NamedTuple):
    """Of the matrices that were quantised."""

    num_weights: int
    num_matrices: int
    num_bytes: int  # in the file


def convert(checkpoint: Checkpoint, graph: Graph, output: Output, method: Method, report: Report) -> Sizes:
    """graph: of `checkpoint`, with float32 activations. Raises CheckpointError naming what cannot be quantised."""
    layers = _layers(graph)
    calibration = Calibration(graph, checkpoint, method.texts, method.num_threads) if method.texts else None
    done = num_weights = num_matrices = num_bytes = 0
    for layer, group in groupby(output.names, key=lambda name: layers.get(name, -1)):
        hessians = calibration.inputs(layer) if calibration and layer >= 0 else {}
        changed: dict[str, F32] = {}
        for name in group:
            fit = output.fit(name)
            if fit is None:
                output.copy(name)
            else:
                w = matrix(checkpoint, name)
                grid, codes = quantise(w, fit, hessians.get(name), method)
                start = output.num_bytes
                output.put(name, grid, codes)
                num_bytes += output.num_bytes - start
                num_weights, num_matrices = num_weights + w.size, num_matrices + 1
                if calibration:
                    changed[name] = grid.values(codes).reshape(checkpoint.info(name).shape)
            checkpoint.release(name)
            done += 1
            report(done, len(output.names), f"layer {layer}" if layer >= 0 else name)
        if calibration and layer >= 0:
            calibration.advance(layer, changed)
    if not num_matrices:
        raise CheckpointError(f"{checkpoint.path}: nothing is left to quantise")
    return Sizes(num_weights, num_matrices, num_bytes)


def quantise(w: F32, fit: Fit, hessian: F32 | None, method: Method) -> tuple[Grid, I16]:
    """hessian [K, K] of the inputs; None: to the nearest."""
    costs = np.ones(w.shape[1], np.float32) if hessian is None else importance(hessian)
    step = max(1, _AT_ONCE // w.shape[1])
    parts = [w[row : row + step] for row in range(0, len(w), step)]
    with ThreadPoolExecutor(method.num_threads or None) as pool:
        grid = concatenate(list(pool.map(lambda part: fit(part, costs), parts)))
    return grid, grid.round(w) if hessian is None else gptq(w, hessian, grid, method.act_order, method.damping)


def matrix(checkpoint: Checkpoint, name: str) -> F32:
    """Values [N, K] of a tensor of the checkpoint; those of a vector are one row. Raises CheckpointError."""
    info, data, factor = checkpoint.read(name)
    w = dequantise(info.source, data.reshape(-1, data.shape[-1]), info.shape[-1], factor)
    if not np.isfinite(w).all():
        raise CheckpointError(f"{info.file}: {name} has a value that is infinite or no number")
    return w


def _layers(graph: Graph) -> dict[str, int]:
    """The layer that reads each tensor; -1 outside of them."""
    return {base_name(part.name): node.layer for node in graph.nodes for v in node.ins for part in v.parts}
