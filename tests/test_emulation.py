"""One generation at every kernel level, on this machine and on emulated ones, with the bits that are expected.

The emulated processors need Debian's qemu-user and g++-aarch64-linux-gnu, which scripts/test installs where it may.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from octavo import _native
from octavo.backends.base import NUMERICS_VERSION

ROOT = Path(__file__).parents[1]
SECONDS = 3600.0
"""What a busy machine may take."""

GOLDEN = ROOT / "tests" / "golden" / "bits.json"


def run(*command: str) -> dict[str, Any]:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def digest(result: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(result["runs"], sort_keys=True).encode()).hexdigest()[:16]


@pytest.mark.parametrize("isa", _native.isa_levels())
def test_bits_of_a_level(isa: str) -> None:
    assert digest(run(sys.executable, "tests/emulated.py", isa)) == golden(isa), (
        f"results of {isa} changed. If they were meant to, raise NUMERICS_VERSION in octavo/backends/base.py and run "
        f"python tests/test_emulation.py {isa}"
    )


TARGETS = [("aarch64", "generic"), *(pytest.param(isa, isa, marks=pytest.mark.long) for isa in ("avx512", "amx"))]
if "avx512" in _native.isa_levels():  # otherwise this machine is an x86-64 without AVX-512 itself
    TARGETS.append(("avx2", "avx2"))


@pytest.mark.parametrize(("target", "isa"), TARGETS)
def test_another_machine_has_the_bits_of_the_level(target: str, isa: str) -> None:
    emulated = run("scripts/emulate", target, "--python", sys.executable)
    assert emulated["isa"] == isa and emulated["machine"] == ("aarch64" if target == "aarch64" else "x86_64")
    assert digest(emulated) == golden(isa)


def golden(isa: str) -> str:
    known: dict[str, Any] = json.loads(GOLDEN.read_text())
    assert known["numerics_version"] == NUMERICS_VERSION
    digest: str = known[isa]
    return digest


if __name__ == "__main__":  # writes the digests of the levels that are named
    known = json.loads(GOLDEN.read_text()) | {"numerics_version": NUMERICS_VERSION}
    known |= {isa: digest(run(sys.executable, "tests/emulated.py", isa)) for isa in sys.argv[1:]}
    GOLDEN.write_text(json.dumps(known, indent=2) + "\n")
