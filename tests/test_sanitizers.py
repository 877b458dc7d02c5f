"""Runs the native tests of tests/test_native.py under the address and undefined-behaviour sanitizers."""

from __future__ import annotations

import os
import sys
from functools import cache
from pathlib import Path

import pytest

from octavo import _native
from tests.test_native import KERNELS, PORTABLE, ROOT, check_output, run


@pytest.mark.parametrize("name", [*KERNELS, *PORTABLE])
def test_under_sanitizers(name: str) -> None:
    expected = PORTABLE.get(name) or [*_native.isa_levels(), *KERNELS[name]]
    quick = ["--quick"] if name in KERNELS else []
    check_output(run(sanitized_build() / name, *quick), expected)


@cache
def sanitized_build() -> Path:
    """Built here when it is not up to date: nothing else needs it."""
    jobs = len(os.sched_getaffinity(0))
    run(ROOT / "scripts/build-native", "--python", sys.executable, "--sanitize", "address,undefined", "--jobs", jobs)
    return ROOT / "build/sanitize"
