"""One generation on an emulated aarch64, with the bits that are expected.

It needs Debian's qemu-user and g++-aarch64-linux-gnu, which scripts/test installs where it may.
"""

from __future__ import annotations

from tests.bits import check_emulated


def test_aarch64() -> None:
    check_emulated("aarch64", "generic", "aarch64")
