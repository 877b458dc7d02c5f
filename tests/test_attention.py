"""What attention can do besides plain causal attention: windows, softcap, ALiBi, sinks, int8 caches, both directions.

Against an independent softmax, node by node on every level, and bit by bit over chunks, threads and memory reuse.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from octavo import _native
from octavo.backends import reference_ops as meaning
from octavo.backends.base import KV_SPLIT, Limits
from octavo.backends.cpu import CpuBackend, CpuProgram
from octavo.backends.diff import diff, greedy, make_step
from octavo.graph import ops
from octavo.graph.build import Builder
from octavo.graph.ir import DType, Graph, KvGroup
from octavo.graph.rounding import round_inputs
from octavo.graph.verify import GraphError, verify
from tests.random_model import InMemory

HEADS, KV_HEADS, DIM, HIDDEN, VOCAB = 6, 2, 32, 48, 50
SLOPES = tuple(2.0 ** -(h + 1) for h in range(HEADS))
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 37},
    "softcap": {"softcap": 2.0},
    "slopes": {"slopes": SLOPES},
    "sinks": {"sinks": True},
    "window and sinks": {"window": 600, "sinks": True},
    "both directions": {"causal": False},
    "both directions in a window": {"causal": False, "window": 37},
    "all": {"window": 21, "softcap": 3.0, "slopes": SLOPES, "sinks": True},
}
KV_TYPES = [DType.BF16, DType.F32, DType.I8]
NUM_BLOCKS = 100


class Source:
    def __init__(self, model: InMemory) -> None:
        self._model = model

    def order(self, name: str) -> str:
        return ""

    def rows_cols_format(self, name: str) -> tuple[int, int, str]:
        shape = self._model.info(name).shape
        return (1, shape[0], "f32") if len(shape) == 1 else (*shape, "bf16")  # type: ignore[return-value]


def model(
    kv: DType,
    window: int | None = None,
    softcap: float = 0.0,
    slopes: tuple[float, ...] = (),
    sinks: bool = False,
    causal: bool = True,
) -> tuple[Graph, InMemory]:
    """One layer of attention between an embedding and the logits. Scores are large enough for the softcap to bend them."""
    rng = np.random.default_rng(0)
    q, kv_cols = HEADS * DIM, KV_HEADS * DIM
    shapes = {"embed": (VOCAB, HIDDEN), "o.weight": (HIDDEN, q), "sinks": (HEADS,)}
    shapes |= {"q.weight": (q, HIDDEN), "k.weight": (kv_cols, HIDDEN), "v.weight": (kv_cols, HIDDEN)}
    tensors = {
        name: rng.standard_normal(shape).astype(np.float32) / shape[-1] ** 0.25 for name, shape in shapes.items()
    }
    checkpoint = InMemory({}, tensors, "BF16")
    b = Builder("attention", VOCAB, 4096, Source(checkpoint))
    group = b.kv_group(KvGroup("only", (0,), KV_HEADS, DIM, kv, window if causal else None))
    embedding = b.matrix({"embed": VOCAB}, HIDDEN)
    x = b.embed(embedding)
    b.layer = 0
    parts = b.split(b.linear(x, {"q": q, "k": kv_cols, "v": kv_cols}), q, kv_cols, kv_cols)
    inv_freq = tuple(1000.0 ** (-2 * i / DIM) for i in range(DIM // 2))
    rotated = [b.rope(part, DIM, inv_freq, name=name) for part, name in zip(parts, "qk", strict=False)]
    sink, both = "sinks" if sinks else None, {} if causal else {"causal": False, "window": window}
    y = b.attention(*rotated, parts[2], group, DIM**-0.5, softcap, slopes, sink, **both)  # type: ignore[arg-type]
    y = b.add(x, b.linear(y, {"o": HIDDEN}))
    b.layer = -1
    b.sample(b.logits(b.gather_rows(y), embedding))
    graph = round_inputs(verify(b.graph), lambda *_: DType.BF16)
    return verify(graph), checkpoint


def naive(q: Any, k: Any, v: Any, first: int, start: int, a: ops.Attention, sinks: Any) -> NDArray[np.float64]:
    """Attention written again, a query and a head at a time, in float64 and natural units."""
    y = np.empty(q.shape)
    for t in range(len(q)):
        position = start + t
        end = position + 1 if a.causal else first + len(k)
        seen = [p for p in range(first, end) if a.window is None or abs(position - p) < a.window]
        for h in range(a.heads):
            scores = []
            for p in seen:
                s = float(q[t, h].astype(np.float64) @ k[p - first, h // (a.heads // a.kv_heads)]) * a.scale
                s = a.softcap * math.tanh(s / a.softcap) if a.softcap else s
                scores.append(s + (a.slopes[h] * (p - position) if a.slopes else 0))
            weights = np.exp(scores)
            total = weights.sum() + (math.exp(sinks[0, h]) if sinks is not None else 0)
            y[t, h] = weights @ v[[p - first for p in seen], h // (a.heads // a.kv_heads)] / total
    return y


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize(("start", "rows"), [(0, 45), (44, 1), (50, 9)])
def test_the_meaning(name: str, start: int, rows: int) -> None:
    features = dict(FEATURES[name])
    rng = np.random.default_rng(1)
    sinks = rng.standard_normal((1, HEADS)).astype(np.float32) if features.pop("sinks", False) else None
    a = ops.Attention(0, HEADS, KV_HEADS, DIM, DIM**-0.5, **features)
    first = max(0, start + 1 - a.window) if a.window else 0
    q = rng.standard_normal((rows, HEADS, DIM)).astype(np.float32)
    k, v = (rng.standard_normal((start + rows - first, KV_HEADS, DIM)).astype(np.float32) for _ in range(2))
    got = meaning.attention(q, k, v, first, start, a, DType.F32, sinks)
    np.testing.assert_allclose(got, naive(q, k, v, first, start, a, sinks), atol=2e-6)


@pytest.mark.parametrize("steps", [127, 32767])
def test_fixed_point_is_within_half_a_step(steps: int) -> None:
    x = np.random.default_rng(steps).standard_normal((5, 3, 33)).astype(np.float32) * np.float32(1e3)
    x[0] = 0
    x[1, 1, 4] = np.inf
    x[1, 2, 4] = np.nan
    got = meaning.fixed_point(x, steps)
    step = np.abs(x).max(axis=-1, keepdims=True) / steps
    assert (np.abs(got - x) <= 0.5001 * step)[2:].all() and (got[0] == 0).all()
    assert np.isnan(got[1]).tolist() == [[False] * 33, [True] * 33, [True] * 33]
    assert (np.abs(got).max(axis=-1) == np.abs(x).max(axis=-1))[
        2:
    ].mean() > 0.5  # the greatest is a whole number of steps


@pytest.mark.parametrize("isa", _native.isa_levels())
@pytest.mark.parametrize("kv", KV_TYPES)
@pytest.mark.parametrize("name", FEATURES)
def test_every_level_against_the_reference(name: str, kv: DType, isa: str) -> None:
    graph, checkpoint = model(kv, **FEATURES[name])
    found = diff(graph, checkpoint, CpuBackend(isa=isa, num_threads=2, fuse=False, reuse=False))
    assert found is None, str(found)


def program(graph: Graph, checkpoint: InMemory, max_tokens: int, **options: Any) -> CpuProgram:
    backend = CpuBackend(**options)
    limits = Limits(max_tokens=max_tokens, max_rows=max_tokens, max_seqs=2, max_model_len=NUM_BLOCKS * 16)
    state = backend.make_state(graph, [NUM_BLOCKS])
    return backend.compile(graph, backend.pack(graph, checkpoint), state, limits)


def logits(run: CpuProgram, ids: NDArray[np.int32], chunks: list[int], window: int | None) -> NDArray[np.float32]:
    """In these chunks, blocks in no order. What lies before the window of a chunk is overwritten and no longer named."""
    blocks = np.random.default_rng(2).permutation(NUM_BLOCKS)
    start, found = 0, []
    for n in chunks:
        table = blocks[: -(-(start + n) // 16)].copy()
        if window is not None:
            table[: max(0, start + 1 - window) // 16] = 0
        rows = np.arange(n, dtype=np.int32)
        batch = make_step([(ids[start : start + n], start, table.tolist())])
        run.run(batch._replace(logit_rows=rows, sampling=greedy(batch.positions + np.int32(1))))
        found.append(run.logits().copy())
        start += n
    return np.concatenate(found)


@pytest.mark.parametrize("kv", KV_TYPES)
@pytest.mark.parametrize("name", FEATURES)
def test_chunks_threads_and_memory_change_no_bit(name: str, kv: DType) -> None:
    """Three splits long: with threads to spare each split is work of its own, and merged."""
    graph, checkpoint = model(kv, **FEATURES[name])
    n, window = 2 * KV_SPLIT + 70, graph.groups[0].window
    ids = np.random.default_rng(4).integers(VOCAB, size=n).astype(np.int32)
    whole = logits(program(graph, checkpoint, n, num_threads=1), ids, [n], window)
    assert np.isfinite(whole).all()
    variants: list[tuple[dict[str, Any], list[int]]] = [
        ({"num_threads": 8}, [500, 1, 1, 33, *[1] * 16, n - 552, 1]),
        ({"num_threads": 2, "poison": True, "fuse": False}, [100, 417, 80, n - 597]),
        ({"num_threads": 1, "reuse": False, "poison": True}, [n - 9, *[1] * 9]),
    ]
    for options, chunks in variants:
        chunks = chunks if graph.causal else [n]
        got = logits(program(graph, checkpoint, max(chunks), **options), ids, chunks, window)
        np.testing.assert_array_equal(whole.view(np.uint32), got.view(np.uint32))


def test_an_int8_block_takes_half_the_memory() -> None:
    sizes = {kv: CpuBackend(num_threads=1).block_bytes(model(kv)[0])[0] for kv in KV_TYPES}
    assert sizes == {DType.F32: 128 * DIM * 2, DType.BF16: 64 * DIM * 2, DType.I8: (32 * DIM + 128) * 2}


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ({"window": 0}, "a window of 0 tokens"),
        ({"window": 0, "causal": False}, "the window is empty"),
        ({"slopes": (0.5,)}, "sinks and slopes are one per head"),
        ({"softcap": -1.0}, "softcap is negative"),
    ],
)
def test_what_cannot_be_is_refused(features: dict[str, Any], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        model(DType.BF16, **features)


def test_a_layer_has_the_window_of_its_group() -> None:
    graph, _ = model(DType.BF16, window=8)
    node = next(n for n in graph.nodes if isinstance(n.attrs, ops.Attention))
    node.attrs = ops.Attention(0, HEADS, KV_HEADS, DIM, DIM**-0.5, window=9)
    with pytest.raises(GraphError, match="the window is not its KV group's"):
        verify(graph)
    node.attrs = ops.Attention(0, HEADS, KV_HEADS, DIM, DIM**-0.5, window=8, causal=False)
    with pytest.raises(GraphError, match="is causal where the graph is not"):
        verify(graph)
    graph.causal = False
    with pytest.raises(GraphError, match="the window is not its KV group's"):
        verify(graph)
