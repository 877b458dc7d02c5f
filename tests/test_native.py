"""Runs the native tests (native/tests) at every kernel level of this machine; tests/test_sanitizers.py does so under
sanitizers.

Each prints the kernels it ran; a level or kernel that did not run is a failure.
"""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

from octavo import _native
from octavo.weights.formats import LAYOUTS

ROOT = Path(__file__).parents[1]
FORMATS = ("f32", "f16", "bf16", *LAYOUTS)
ACTIVATIONS = ("f32", "bf16", "a8")

KERNELS = {
    "test_gemm": [f"gemm {f} x {a}" for f in FORMATS for a in ACTIVATIONS]
    + [f"round {a}" for a in ACTIVATIONS]
    + [f"embed {f}" for f in FORMATS]
    + ["NaN of f8"],
    "test_attention": ["attention bf16", "attention f32", "attention i8", "attention_merge"],
    "test_attn_plan": ["every row and tile once", "shared prefixes"],
    "test_rows": [
        "rms_norm layer_norm norm_round",
        "act act_mul",
        "add mul scale softcap clamp",
        "rope",
        "kv_write bf16",
        "kv_write f32",
        "kv_write i8",
    ],
    "test_experts": ["route", "weighted_sum", "some rows"],
    "test_plan": ["same bits", "refusals"],
    "test_sampler": [
        "logit_max",
        "sum_exp",
        "collect",
        "count_before",
        "gumbel_argmax",
        "truncation",
        "sample_row",
        "draw",
    ],
}
PORTABLE = {
    "test_pool": ["barrier", "sleep and wake", "uneven work"],
    "test_memory": ["reserve", "huge pages", "refusal"],
    "test_hostile": ["changed programs"],
    "test_tiles": ["bytes", "bf16", "the same bits" if "amx" in _native.isa_levels() else "no tiles here"],
}


def test_every_native_test_is_known() -> None:
    assert {p.stem for p in (ROOT / "native/tests").glob("*.cpp")} == KERNELS.keys() | PORTABLE.keys()


@pytest.mark.parametrize("isa", _native.isa_levels())
@pytest.mark.parametrize("name", KERNELS)
def test_kernels(name: str, isa: str) -> None:
    check_output(run(plain_build() / name, "--isa", isa), [isa, *KERNELS[name]])


@pytest.mark.parametrize("name", PORTABLE)
def test_runtime(name: str) -> None:
    check_output(run(plain_build() / name), PORTABLE[name])


def check_output(output: str, expected: list[str]) -> None:
    for words in expected:
        assert re.search(rf"(?<![\w]){re.escape(words)}(?![\w])", output), f"{words} did not run:\n{output}"


def run(*command: object) -> str:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=3600)  # of a busy machine
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
    return done.stdout


@cache
def plain_build() -> Path:
    """The newest build with native tests: of the installation, or of scripts/build-native."""
    builds = [p.parent for p in (ROOT / "build").glob("*/test_gemm") if p.parent.name != "sanitize"]
    assert builds, "the native tests are not built: run scripts/build-native"
    return max(builds, key=lambda build: (build / "test_gemm").stat().st_mtime)
