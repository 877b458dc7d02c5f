"""Products of every packed format, and attention, as shares of what the machine can do at that moment.

The ceiling of a product is the longer of two times: of reading its packed weights at the rate of a streaming read, and of
its arithmetic at the rate of the instructions that its kernel is made of, both measured beside it.
"""

from __future__ import annotations

from collections.abc import Iterator

from octavo.backends.speeds import KERNELS, WIDTH, Speeds
from octavo.bench.report import Result, cpu_name, result
from octavo.config import EngineConfig

ROWS = {1: 2**28, 4: 2**28, 16: 2**26, 64: 2**26, 512: 2**23}
"""Of the activations, and bytes of weights that are taken in turn: more than a cache holds where they bound the time."""


def measure(config: EngineConfig, repeat: int) -> Iterator[Result]:
    """One thread, then all of them."""
    everything = Speeds(config.isa, config.num_threads)
    for speeds in (Speeds(config.isa, 1), everything) if everything.num_threads > 1 else (everything,):
        for kernel in KERNELS:
            ceiling = speeds.bandwidth(), speeds.peak(kernel)
            found = [speeds.of(kernel, rows, size, ceiling, repeat) for rows, size in ROWS.items()]
            yield result(
                f"{kernel.format} x {kernel.act}, {speeds.num_threads} thread{'s' * (speeds.num_threads > 1)}",
                f"products of {', '.join(map(str, ROWS))} rows with matrices of {WIDTH} x {WIDTH}",
                "% of the ceiling",
                [round(100 * speed.share, 1) for speed in found],
                bits=round(kernel.bits, 3),
                gb_s=[round(speed.gb_s, 1) for speed in found],
                gop_s=[round(speed.gop_s, 1) for speed in found],
                bandwidth_gb_s=round(ceiling[0] / 1e9, 1),
                peak_gop_s=round(ceiling[1] / 1e9, 1),
                cpu=cpu_name(),
                isa=speeds.isa,
            )
