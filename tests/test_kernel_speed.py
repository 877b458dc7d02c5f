"""No kernel has fallen far below its usual speed: a spilled register costs it half, noise does not.

Speeds are shares of the rate of the instructions that a kernel is made of, measured beside it on the same thread by the
time it computes. `python tests/test_kernel_speed.py` writes those of this machine's kernel level to the golden file.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from octavo.backends.speeds import KERNELS, Kernel, Speeds

USUAL = Path(__file__).parent / "golden/kernel_shares.json"
ROWS = (1, 16, 64)
CACHED = 200 * 1024
"""Bytes of a weight that stays in the second-level cache, so that memory and its other users do not count."""

TRIES = 100
"""Some ten seconds, for a kernel that is slow indeed: what disturbs one measurement does not disturb all of them."""


@pytest.fixture(scope="module")
def speeds() -> Speeds:
    return Speeds("auto", num_threads=1)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: f"{kernel.format}-{kernel.act}")
def test_share_of_peak(speeds: Speeds, kernel: Kernel) -> None:
    usual = json.loads(USUAL.read_text()).get(speeds.isa, {}).get(_name(kernel))
    if usual is None:
        pytest.skip(f"no usual speeds of {_name(kernel)} at level {speeds.isa} are known")
    for rows, share in zip(ROWS, usual, strict=True):
        found: list[float] = []
        while max(found, default=0) < share / 2 and len(found) < TRIES:
            time.sleep(0.1 * bool(found))
            found.append(_share(speeds, kernel, rows))
        assert max(found) >= share / 2, f"{_name(kernel)} at {rows} rows: {found} of the peak, usually {share}"


def _name(kernel: Kernel) -> str:
    return f"{kernel.format} x {kernel.act}"


def _share(speeds: Speeds, kernel: Kernel, rows: int) -> float:
    peak = speeds.peak(kernel)
    return round(speeds.cached(kernel, rows, CACHED) / peak, 3)


if __name__ == "__main__":
    shares = json.loads(USUAL.read_text()) if USUAL.exists() else {}
    here = Speeds("auto", num_threads=1)
    shares[here.isa] = {_name(k): [max(_share(here, k, rows) for _ in range(5)) for rows in ROWS] for k in KERNELS}
    USUAL.write_text(json.dumps(shares, indent=1) + "\n")
