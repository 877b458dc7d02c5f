"""One generation at every kernel level of this machine, and of x86-64 processors that it is not, with the bits that are expected.

What is emulated needs Debian's qemu-user, which scripts/test installs where it may; the models of AVX-512 and AMX need nothing.
"""

from __future__ import annotations

import pytest

from octavo import _native
from tests.bits import check_emulated, golden, here

LEVELS = _native.isa_levels()


@pytest.mark.parametrize("isa", LEVELS)
def test_bits_of_a_level(isa: str) -> None:
    assert here(isa) == golden(isa), (
        f"results of {isa} changed. If they were meant to, raise NUMERICS_VERSION in octavo/backends/base.py and run "
        f"python -m tests.bits {isa}"
    )


# That no instruction of AVX-512 is met on the way: what avx2 computes is tested by the processor itself.
@pytest.mark.skipif("avx512" not in LEVELS, reason="this machine is an x86-64 without AVX-512 itself")
@pytest.mark.parametrize("brief", [True, pytest.param(False, marks=pytest.mark.long)])
def test_without_avx512(brief: bool) -> None:
    check_emulated("avx2", "avx2", brief=brief)


@pytest.mark.long
@pytest.mark.parametrize("isa", ["avx512", "amx"])
def test_models_of_instructions(isa: str) -> None:
    check_emulated(isa, isa)
