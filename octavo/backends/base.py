"""The protocol every backend implements, and the arrays of one step.

Index ranges of a step (half-open)::

    sequence s owns token rows   [seq_starts[s], seq_starts[s+1])        n = their number, at least 1
    at positions                 [context_lens[s] - n, context_lens[s])
    logit row r is token row     logit_rows[r], ascending
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from octavo.graph.ir import Graph
    from octavo.weights.adapter import Adapter

I32 = NDArray[np.int32]
F32 = NDArray[np.float32]
U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]

BLOCK_SIZE = 16
"""Tokens per KV block: one panel of 16 keys is one vector of scores (KERNELS 5.1)."""

KV_TILE = 128
"""Tokens per tile of online softmax, at absolute positions (P1). 128: section 14, within 2 % of 64 and 256."""

KV_SPLIT = 512
"""Tokens per split of attention, at absolute positions; a multiple of KV_TILE."""

NUMERICS_VERSION = 4
"""Raised whenever a change alters the bits of results of the CPU backend (tests/golden/bits.json holds their digest)."""

SMALL_T = 64
"""Token rows up to which the small plan is used."""


class SamplingArrays(NamedTuple):
    """Per logit row r. Ragged lists of row r are [starts[r], starts[r+1]) of the arrays beside them."""

    temperature: F32  # [R] 0: greedy
    top_k: I32  # [R] 0: all
    top_p: F32  # [R]
    min_p: F32  # [R]
    repetition: F32  # [R] 1: none
    presence: F32  # [R]
    frequency: F32  # [R]
    noise_key: U64  # [R] sampling.definition.noise_key(seed, choice)
    position: I32  # [R] absolute position of the token to draw
    num_top: I32  # [R] alternatives wanted, -1: no scores at all
    target: I32  # [R] -1: draw; otherwise the token to score (prompt logprobs)
    bias_starts: I32  # [R+1]
    bias_ids: I32
    bias_values: F32  # added to the logits; -inf masks
    history_starts: I32  # [R+1]  only rows with penalties have entries
    history_ids: I32  # distinct tokens of prompt and output
    history_counts: I32  # occurrences in the output (0: only in the prompt)
    mask_rows: I32  # [R] row of masks; -1: none
    masks: U32  # [G, W <= ceil(vocab / 32)] bit i % 32 of word i // 32: token i may be drawn; ids past 32 W may not
    dry_starts: I32  # [R+1]
    dry_ids: I32
    dry_values: F32  # subtracted after the penalties
    chain_starts: I32  # [R+1]  rows without a chain have the usual order
    chain_ops: I32  # sampling.chain.Op
    chain_values: F32  # [C, 2]

    @staticmethod
    def extras(num_rows: int) -> dict[str, Any]:
        """The fields from `mask_rows` on for rows that have none of them."""
        starts = np.zeros(num_rows + 1, np.int32)
        return {
            "mask_rows": np.full(num_rows, -1, np.int32), "masks": _NO_MASKS, "dry_starts": starts, "dry_ids": _NO_IDS,
            "dry_values": _NO_VALUES, "chain_starts": starts, "chain_ops": _NO_IDS, "chain_values": _NO_PAIRS,
        }  # fmt: skip


_NO_MASKS, _NO_IDS = np.zeros((0, 0), np.uint32), np.zeros(0, np.int32)
NO_TYPES = _NO_IDS
_NO_VALUES, _NO_PAIRS = np.zeros(0, np.float32), np.zeros((0, 2), np.float32)


NO_ADAPTERS: I32 = np.zeros(0, np.int32)


class StepBatch(NamedTuple):
    token_ids: I32  # [T]
    positions: I32  # [T]
    seq_starts: I32  # [S+1]
    context_lens: I32  # [S] tokens in the cache once this step is done
    block_tables: tuple[I32, ...]  # per KV group [S, most blocks]; entries past a sequence's blocks are 0
    copies: tuple[I32, ...]  # per KV group [C, 2] (source, destination): whole blocks, copied before anything else
    logit_rows: I32  # [R]
    sampling: SamplingArrays
    adapters: I32 = NO_ADAPTERS  # [T] slot of each token's adapter, -1: none. Empty: no token has one
    token_types: I32 = NO_TYPES  # [T] of encoders that tell two texts apart; empty: all 0


class StepResult(NamedTuple):
    """Per logit row. `top_ids`, `top_logprobs`: the `num_top[r]` best of row r come first, the rest is padding."""

    token_ids: I32  # [R]; rows with a target repeat it
    logprobs: F32  # [R] of token_ids; 0 where num_top is -1
    ranks: I32  # [R] 1: most likely
    top_ids: I32  # [R, max(num_top)]
    top_logprobs: F32
    invalid: NDArray[np.bool_]  # [R] NaN or no finite logit: fail that request only

    @staticmethod
    def nothing(num_rows: int, width: int = 0) -> StepResult:
        """Zeros: of a graph that draws nothing. width: of the alternatives."""
        return StepResult(
            token_ids=np.zeros(num_rows, np.int32),
            logprobs=np.zeros(num_rows, np.float32),
            ranks=np.zeros(num_rows, np.int32),
            top_ids=np.zeros((num_rows, width), np.int32),
            top_logprobs=np.zeros((num_rows, width), np.float32),
            invalid=np.zeros(num_rows, np.bool_),
        )


class StepHandle(Protocol):
    def result(self) -> StepResult:
        """Wait for the step. The arrays belong to the caller."""
        ...


class Limits(NamedTuple):
    """Sizes a Program is compiled for."""

    max_tokens: int  # T
    max_rows: int  # R
    max_seqs: int
    max_model_len: int
    max_adapters: int = 0  # slots


class TraceSpan(NamedTuple):
    name: str  # op, e.g. linear
    layer: int
    seconds: float  # of worker 0, waiting at the barrier before it included in `wait`
    wait: float


class KvTiles(NamedTuple):
    """Tiles of KV_TILE tokens of one layer and KV head, in all steps so far."""

    read: int  # by the work items of attention
    saved: int  # further ones, had no two sequences shared any


class Program(Protocol):
    @property
    def kv_tiles(self) -> KvTiles: ...

    def run(self, batch: StepBatch) -> StepHandle: ...

    def set_adapter(self, slot: int, packed: Any | None) -> None:
        """What `Backend.pack_adapter` made is the adapter of this slot from now on; None: nothing is. Between runs."""
        ...

    def logits(self) -> F32:
        """[R, vocab] of the last run; valid until the next.

        ValueError where the backend left some out: those of rows without scores (num_top -1) may be drawn from unseen.
        """
        ...

    def output(self, name: str) -> F32:
        """[R, cols] of the last run: an output of the graph, as "hidden", the states after the final norm."""
        ...

    def trace(self, batch: StepBatch) -> list[TraceSpan]:
        """Run once with timers."""
        ...


class Packing(Protocol):
    """Packed weights as bytes that can be kept, and used again by any process that computes the same `digest`."""

    num_bytes: int

    def digest(self) -> bytes:
        """16 bytes, of all that the packed bytes depend on beside the files of the checkpoint."""
        ...

    def empty(self) -> Any:
        """Weights whose `image` [num_bytes] is to be filled with what was that of packed ones."""
        ...

    def mapped(self, file: int, start: int) -> Any:
        """Weights whose `image` is that of a file, by its descriptor, from `start` on: not read yet, and shared with other
        processes. None where products with them would be slower. Raises RuntimeError where it cannot be mapped."""
        ...


class Backend(Protocol):
    name: str
    fusions: frozenset[str]  # fused ops it can run
    num_threads: int
    bf16_dots: bool  # it has instructions for products of bf16 (`weights.spec.act_of`)

    def fingerprint(self) -> str:
        """Equal where the results have equal bits, graph and weights being equal: build, machine, kernels."""
        ...

    def pack(self, graph: Graph, checkpoint: Any, progress: Callable[[int, int], None] | None = None) -> Any:
        """Read every weight once, in the layout of this backend. progress(done, total) in bytes of that layout."""
        ...

    def packing(self, graph: Graph) -> Packing | None:
        """How what `pack` makes can be kept: all bytes of it are its `image`. None: it is not worth keeping."""
        ...

    def weight_bytes(self, graph: Graph) -> int:
        """Bytes of what `pack` makes."""
        ...

    def pack_adapter(self, adapter: Adapter) -> Any:
        """The adapter's matrices in the layout of this backend. From any thread."""
        ...

    def adapter_bytes(self, adapter: Adapter) -> int:
        """Bytes of what `pack_adapter` makes."""
        ...

    def block_bytes(self, graph: Graph) -> list[int]:
        """Bytes of one block of each KV group, all layers and heads of the group."""
        ...

    def make_state(self, graph: Graph, num_blocks: Sequence[int]) -> Any:
        """KV arenas, reserved and not touched."""
        ...

    def compile(self, graph: Graph, weights: Any, state: Any, limits: Limits) -> Program: ...
