"""What the bits of native results depend on beside graph and weights: they are promised for one machine and build (P1)."""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path

from octavo import _native
from octavo.backends.base import NUMERICS_VERSION


def fingerprint(isa: str) -> str:
    """Equal where kernels of level `isa` give equal results. Reads the native module's file, a few megabytes."""
    build = hashlib.sha256(Path(_native.__file__).read_bytes()).hexdigest()
    libc = " ".join(platform.libc_ver())  # its cosine makes the tables of rope
    return " ".join((str(NUMERICS_VERSION), isa, build, platform.machine(), libc, *_processors()))


def _processors() -> list[str]:
    with open("/proc/cpuinfo") as lines:
        return sorted({" ".join(line.split()) for line in lines if line.startswith(("model name", "CPU part"))})
