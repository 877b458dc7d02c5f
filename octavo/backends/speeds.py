"""Speeds of single kernels on this machine, and the ceilings that they are held against (native/measure.h)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from octavo import _native
from octavo.backends import threads
from octavo.backends.ceilings import READ_BYTES
from octavo.weights.formats import LAYOUTS
from octavo.weights.spec import MULTIPLY_A16

WIDTH = 2048
"""Rows and columns of a weight: the hidden size of the 1B shape. Many of them are as large as a model."""


class Kernel(NamedTuple):
    format: str
    act: str

    @property
    def bits(self) -> float:
        """Of a weight, packed."""
        return _native.packed_bytes(self.format, WIDTH, WIDTH) * 8 / WIDTH**2


class Speed(NamedTuple):
    rows: int
    gb_s: float  # of packed weights
    gop_s: float
    share: float  # of the ceiling


_ACTS = {"f8": ("bf16",)} | dict.fromkeys(MULTIPLY_A16, ("a8", "a16", "bf16"))
KERNELS = [
    Kernel("f32", "f32"),
    Kernel("f16", "f32"),
    Kernel("bf16", "bf16"),
    *(Kernel(f, act) for f in LAYOUTS for act in ("a8", "a16", "bf16") if act in _ACTS.get(f, ("a8", "bf16"))),
]
"""With the activations that their linears may take (docs/FORMATS.md); float32 ones go through the kernel of f32."""


class Speeds:
    """num_threads: as in EngineConfig. Takes 256 MiB, which read as small numbers in every format."""

    def __init__(self, isa: str, num_threads: int) -> None:
        self.num_threads = num_threads or threads.default_threads()
        self.isa = _native.isa_levels()[-1] if isa == "auto" else isa
        self._pool = _native.Pool(self.num_threads, threads.pinning(self.num_threads))
        self._memory = _small_numbers(READ_BYTES)

    def bandwidth(self) -> float:
        return _native.read_rate(self._pool, self._memory)

    def peak(self, kernel: Kernel) -> float:
        return _native.peak_ops(self.isa, kernel.format, kernel.act) * self.num_threads

    def of(self, kernel: Kernel, rows: int, num_bytes: int, ceiling: tuple[float, float], repeat: int = 3) -> Speed:
        """ceiling: bandwidth, peak."""
        packed = _native.packed_bytes(kernel.format, WIDTH, WIDTH)
        seconds = self._seconds(kernel, rows, WIDTH, max(1, num_bytes // packed), repeat)
        work = 2 * rows * WIDTH * WIDTH
        bandwidth, peak = ceiling
        best = max(packed / bandwidth, work / peak if peak else 0.0)
        return Speed(rows, packed / seconds / 1e9, work / seconds / 1e9, best / seconds)

    def decode_attention(self, kv_type: str, head_dim: int, group: int, context: int) -> float:
        """Bytes a second of keys and values, one token of each of many sequences, on one thread."""
        blocks = READ_BYTES // _native.kv_block_bytes(kv_type, head_dim, head_dim)
        seconds, num_bytes, _ = _native.attention_rate(
            self.isa, self._memory, kv_type, head_dim, group, blocks // -(-context // 16), 1, context, 3
        )
        return num_bytes / seconds

    def prefill_attention(self, kv_type: str, head_dim: int, group: int, context: int) -> float:
        """Flop a second of the last 512 tokens of a prompt, on one thread."""
        block = _native.kv_block_bytes(kv_type, head_dim, head_dim)
        kv = _small_numbers(2 * -(-context // 16) * block)  # of two layers
        seconds, _, flop = _native.attention_rate(
            self.isa, kv, kv_type, head_dim, group, 1, min(512, context), context, 3
        )
        return flop / seconds

    def cached(self, kernel: Kernel, rows: int, num_bytes: int) -> float:
        """Operations a second with a weight of so many bytes."""
        n = max(32, num_bytes // _native.packed_bytes(kernel.format, 32, WIDTH) * 32)
        return 2 * rows * n * WIDTH / self._seconds(kernel, rows, n, 1, 400 // rows + 5)

    def _seconds(self, kernel: Kernel, rows: int, n: int, copies: int, repeat: int) -> float:
        return _native.product_seconds(self._pool, self.isa, self._memory, *kernel, rows, n, WIDTH, copies, repeat)


def _small_numbers(num_bytes: int) -> _native.Memory:
    """Neither NaN nor subnormal in any format."""
    memory = _native.Memory(num_bytes, huge_pages=True)
    numbers = memory.view(0, num_bytes).view(np.uint16)
    numbers[:] = 0x2C40 + np.arange(len(numbers), dtype=np.uint32) % 63
    return memory
