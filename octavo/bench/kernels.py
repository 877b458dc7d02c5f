"""Products of every packed format, and attention, as shares of what the machine can do at that moment.

The ceiling of a product is the longer of two times: of reading its packed weights at the rate of a streaming read, and of
its arithmetic at the rate of the instructions that its kernel is made of, both measured beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from octavo.backends.speeds import KERNELS, WIDTH, Kernel, Speeds
from octavo.bench.report import RUNS, Result, cpu_name, result
from octavo.config import EngineConfig

ROWS = {1: 2**28, 4: 2**28, 16: 2**26, 64: 2**26, 512: 2**23}
"""Of the activations, and bytes of weights that are taken in turn: more than a cache holds where they bound the time."""

ATTENTION = [(kv, head_dim, group) for kv in ("bf16", "i8") for head_dim, group in ((64, 3), (64, 8), (128, 4))]
"""KV type, head size, query heads of a KV head."""
CONTEXTS = (512, 4096)


def measure(config: EngineConfig, repeat: int) -> Iterator[Result]:
    """Products on one thread, then on all of them; attention on one."""
    everything, alone = Speeds(config.isa, config.num_threads), Speeds(config.isa, 1)
    threads = (alone, everything) if everything.num_threads > 1 else (everything,)
    for speeds, kernel in _shown([(speeds, kernel) for speeds in threads for kernel in KERNELS]):
        ceiling = speeds.bandwidth(), speeds.peak(kernel)
        found = [speeds.of(kernel, rows, size, ceiling, repeat) for rows, size in ROWS.items()]
        yield result(
            f"{kernel.format} x {kernel.act}, {speeds.num_threads} thread{'s' * (speeds.num_threads > 1)}",
            f"products of so many rows with matrices of {WIDTH} x {WIDTH}",
            "% of the ceiling",
            [round(100 * speed.share, 1) for speed in found],
            **{RUNS: [f"{rows} row{'s' * (rows > 1)}" for rows in ROWS]},
            bits=round(kernel.bits, 3),
            gb_s=[round(speed.gb_s, 1) for speed in found],
            gop_s=[round(speed.gop_s, 1) for speed in found],
            bandwidth_gb_s=round(ceiling[0] / 1e9, 1),
            peak_gop_s=round(ceiling[1] / 1e9, 1),
            cpu=cpu_name(),
            isa=speeds.isa,
        )
    yield from _attention(alone)


def _attention(speeds: Speeds) -> Iterator[Result]:
    """Decoding as a share of a streaming read; prefill of the rate of the instructions for bf16, tiles where there are."""
    peak = speeds.peak(Kernel("bf16", "bf16"))
    for kv, head_dim, group in ATTENTION:
        bandwidth = speeds.bandwidth()
        decode = [speeds.decode_attention(kv, head_dim, group, context) for context in CONTEXTS]
        prefill = [speeds.prefill_attention(kv, head_dim, group, context) for context in CONTEXTS]
        yield result(
            f"attention over {kv}, head {head_dim}, group {group}, 1 thread",
            "one token of each of many sequences, then the last 512 of one, at a context",
            "% of the ceiling",
            [round(100 * rate / bandwidth, 1) for rate in decode]
            + [round(100 * rate / peak, 1) if peak else 0.0 for rate in prefill],
            **{RUNS: [f"{rows} at {context:,}" for rows in (1, 512) for context in CONTEXTS]},
            gb_s=[round(rate / 1e9, 1) for rate in decode],
            gflop_s=[round(rate / 1e9, 1) for rate in prefill],
            bandwidth_gb_s=round(bandwidth / 1e9, 1),
            peak_gflop_s=round(peak / 1e9, 1),
        )


def _shown(work: list[tuple[Speeds, Kernel]]) -> Iterable[tuple[Speeds, Kernel]]:
    """With a progress bar where somebody looks on."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    return track(work, "kernels", console=console, transient=True, disable=not console.is_terminal)
