"""scripts/check is part of the suite."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_check() -> None:
    done = subprocess.run([ROOT / "scripts" / "check", sys.executable], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("check: all good\n")
