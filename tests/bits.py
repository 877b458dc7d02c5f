"""What tests/emulated.py generates, as digests that are expected at every kernel level.

usage: python -m tests.bits ISA ...: writes the digests of these levels, as this machine has them.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

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


def here(isa: str, *options: str) -> str:
    return digest(run(sys.executable, "tests/emulated.py", isa, *options))


def golden(isa: str) -> str:
    known: dict[str, Any] = json.loads(GOLDEN.read_text())
    assert known["numerics_version"] == NUMERICS_VERSION
    expected: str = known[isa]
    return expected


def check_emulated(target: str, isa: str, machine: str = "x86_64", brief: bool = False) -> None:
    """`brief`: where this machine has the level itself."""
    options = ["--brief"] if brief else []
    emulated = run("scripts/emulate", target, "--python", sys.executable, *options)
    assert emulated["isa"] == isa and emulated["machine"] == machine
    assert digest(emulated) == (here(isa, *options) if brief else golden(isa))


if __name__ == "__main__":
    known = json.loads(GOLDEN.read_text()) | {"numerics_version": NUMERICS_VERSION}
    known |= {isa: here(isa) for isa in sys.argv[1:]}
    GOLDEN.write_text(json.dumps(known, indent=2) + "\n")
