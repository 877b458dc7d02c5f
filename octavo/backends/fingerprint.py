"""What the bits of native results depend on beside graph and weights: they are promised for one machine and build (P1)."""

from __future__ import annotations

import platform

from octavo.backends.base import NUMERICS_VERSION
from octavo.backends.cpu_weights import packer_digest


def fingerprint(isa: str) -> str:
    """Equal where kernels of level `isa` give equal results, and weights are packed by the same code. Reads the native
    module's file, a few megabytes."""
    libc = " ".join(platform.libc_ver())  # its cosine makes the tables of rope
    return " ".join((str(NUMERICS_VERSION), isa, packer_digest().hex(), platform.machine(), libc, *_processors()))


def _processors() -> list[str]:
    with open("/proc/cpuinfo") as lines:
        return sorted({" ".join(line.split()) for line in lines if line.startswith(("model name", "CPU part"))})
