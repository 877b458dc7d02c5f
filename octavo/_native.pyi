"""The native module (native/module.cpp). Arrays are C-contiguous; ValueError names what is wrong."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from octavo.backends.base import StepBatch

def isa_levels() -> list[str]:
    """Kernel levels this machine can run, lowest first."""

def packed_bytes(format: str, n: int, k: int) -> int: ...
def kv_block_bytes(kv_type: str, head_dim: int, value_dim: int) -> int:
    """Bytes of a block of one layer and KV head (native/kernels.h)."""

def pack(pool: Pool, memory: Memory, offset: int, format: str, data: NDArray[np.uint8], k: int) -> None:
    """Pack data [n, bytes per row], in the form that native/pack.h says for `format`, to a place of zeros in `memory`."""

def unpack(isa: str, memory: Memory, offset: int, format: str, out: NDArray[np.float32]) -> None:
    """Fill out [n, k] with the values of the packed weight of n x k at `offset`."""

def read_rate(pool: Pool, memory: Memory) -> float:
    """Bytes a second of a streaming read of `memory` by all threads. It must have been written: untouched pages are one."""

def barrier_seconds(pool: Pool) -> float:
    """Of one barrier of all threads."""

def peak_ops(isa: str, format: str, act: str) -> float:
    """Operations a second of one core's instructions for such products (native/peak.h); 0: the level has none of its own."""

def product_seconds(
    pool: Pool,
    isa: str,
    weights: Memory,
    format: str,
    act: str,
    rows: int,
    n: int,
    k: int,
    copies: int,
    repeats: int,
) -> float:
    """Seconds of [rows, k] times [n, k]: the best of `repeats` over `copies` weights in turn (native/measure.h)."""

def attention_rate(
    isa: str,
    kv: Memory,
    kv_type: str,
    head_dim: int,
    group: int,
    seqs: int,
    tokens: int,
    context: int,
    repeats: int,
) -> tuple[float, float, float]:
    """Seconds, bytes and flop of attention of one KV head on the calling thread (native/attn_measure.h)."""

class Pool:
    """Worker threads; the thread that runs a program is the first of them. `cpus`: empty, or one per thread to pin to."""

    def __init__(self, num_threads: int, cpus: Sequence[int]) -> None: ...
    @property
    def num_threads(self) -> int: ...

class Memory:
    """Zeroed address space, touched on use. MemoryError when it is refused."""

    def __init__(self, num_bytes: int, huge_pages: bool) -> None: ...
    @staticmethod
    def of_file(file: int, offset: int, num_bytes: int) -> Memory:
        """Bytes of an open file, by its descriptor, from a multiple of the page size on; shared with all processes that map
        them. What is written to them stays in this process. RuntimeError where the file cannot be mapped."""
    @property
    def num_bytes(self) -> int: ...
    @property
    def touched_bytes(self) -> int: ...
    def view(self, offset: int, num_bytes: int) -> NDArray[np.uint8]:
        """Writable; keeps the memory alive."""

class Operand:
    """Columns [start, start + cols) of a value."""

    def __init__(self, value: int, start: int, cols: int) -> None: ...

class Node:
    """One instruction; native/plan.cpp says which fields each operation uses."""

    def __init__(self, op: str, layer: int) -> None: ...
    a: Operand
    b: Operand
    c: Operand
    out: Operand
    weights: list[int]
    vector: int
    bias: int
    centred: bool
    act: str
    low: float
    high: float
    ids: str
    offset: int
    eps: float
    scale: float
    heads: int
    head_dim: int
    group: int
    group_layer: int
    rope: int
    neox: bool
    window: int
    causal: bool
    softcap: float
    slopes: list[float]
    targets: list[int]
    ins: list[Operand]
    experts: int
    def set_route(
        self,
        experts: int,
        top_k: int,
        scoring: str,
        normalise: bool,
        scale: float,
        jitter: float,
        groups: int,
        top_groups: int,
        group_best: int,
    ) -> None: ...
    def set_barriers(self, small: bool, full: bool) -> None: ...

class ProgramSpec:
    """What a program is compiled from. The add_* methods return the index of what they added."""

    def __init__(
        self,
        max_tokens: int,
        max_rows: int,
        max_seqs: int,
        max_model_len: int,
        vocab: int,
        small_tokens: int,
        poison: bool,
        share: bool,
    ) -> None: ...
    def add_value(
        self, name: str, act: str, logit_rows: bool, times: int, cols: int, small_offset: int, full_offset: int
    ) -> int: ...
    def add_weight(self, name: str, memory: Memory, offset: int, format: str, n: int, k: int) -> int: ...
    def add_vector(self, name: str, memory: Memory, offset: int, k: int) -> int: ...
    def add_group(
        self, memory: Memory, kv_type: str, layers: int, kv_heads: int, head_dim: int, value_dim: int, num_blocks: int
    ) -> int: ...
    def add_rope(self, inv_freq: Sequence[float], scale: float) -> int: ...
    def set_max_adapters(self, n: int) -> None: ...
    def add_target(self, name: str, n: int, k: int) -> int:
        """A module of n output and k input features that adapters may have a delta for."""

    def add_node(self, node: Node) -> None: ...
    def set_arena(self, small_bytes: int, full_bytes: int) -> None: ...

class StepArrays:
    """A batch whose arrays have the right types and sizes. What is in them may change between runs."""

    def __init__(self, batch: StepBatch) -> None:
        """Raises ValueError naming the array that has not."""

    @property
    def rows(self) -> int: ...
    @property
    def most_top(self) -> int:
        """The most alternatives that a row wants."""

class Program:
    def __init__(self, pool: Pool, isa: str, spec: ProgramSpec) -> None: ...
    @property
    def arena_bytes(self) -> int: ...
    @property
    def touched_bytes(self) -> int: ...
    @property
    def kv_tiles(self) -> tuple[int, int]:
        """(read, saved) as in backends.base.KvTiles."""

    def set_adapter(
        self, slot: int, memory: Memory | None, parts: Sequence[tuple[int, str, int, int, int, float]]
    ) -> None:
        """The adapter of a slot from now on; no memory: none. parts: (target, format, rank, offset of A, offset of B, scale)."""

    def run(
        self,
        arrays: StepArrays,
        token_ids: NDArray[np.int32],
        logprobs: NDArray[np.float32],
        ranks: NDArray[np.int32],
        top_ids: NDArray[np.int32],
        top_logprobs: NDArray[np.float32],
        invalid: NDArray[np.bool_],
        timed: bool,
    ) -> list[tuple[int, float, float]]:
        """Fill the result arrays. Timed: (node, seconds, wait) of worker 0, node -1 for the preparation."""

    def logits(self) -> NDArray[np.float32]:
        """A view, valid until the next run."""

    def value_rows(self, value: int) -> int: ...
    def read(self, value: int, out: NDArray[np.float64]) -> None: ...
