"""Kernel levels that the system has a say in: Linux gives a process the tiles of AMX when it asks for them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from octavo import _native

ASKED = "from octavo import _native; import json; print(json.dumps(_native.isa_levels()))"
SMALL_STACK = """
import ctypes
class Stack(ctypes.Structure):
    _fields_ = [("start", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]
memory = ctypes.create_string_buffer(4096)
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(Stack(ctypes.addressof(memory), 0, len(memory))), None) == 0
"""
"""For signals: too small to save tiles, for which Linux refuses them."""

amx = pytest.mark.skipif("amx" not in _native.isa_levels(), reason="no AMX here")


def levels(before: str, *options: str) -> list[str]:
    done = subprocess.run([sys.executable, *options, "-c", before + ASKED], capture_output=True, text=True, check=True)
    found: list[str] = json.loads(done.stdout)
    return found


@amx
def test_refused_tiles_leave_the_level_below() -> None:
    assert levels(SMALL_STACK) == [level for level in _native.isa_levels() if level != "amx"]


@amx
def test_the_stack_of_faulthandler_is_large_enough() -> None:
    assert levels("", "-X", "faulthandler")[-1] == "amx"
    assert (
        levels(f"{ASKED.split(';')[0]}; _native.isa_levels(); import faulthandler; faulthandler.enable()\n")[-1]
        == "amx"
    )
