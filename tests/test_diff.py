"""The native backend against the reference, node by node, at every level that this machine has."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo import _native
from octavo.backends.cpu import CpuBackend
from octavo.backends.diff import Checked, diff
from octavo.models import build_graph
from octavo.weights.checkpoint import open_checkpoint

MODELS = ["arch/llama", "arch/llama_rope_llama3"] + [
    f"gguf/tiny-llama-{kind}.gguf" for kind in ("f16_bf16", "q8_0", "q4_0", "q4_1")
]
LEVELS = _native.isa_levels()


def check(path: Path, activations: str, isa: str) -> None:
    checkpoint = open_checkpoint(path)
    graph = build_graph(checkpoint, activations)
    seen: list[Checked] = []
    backend = CpuBackend(isa=isa, num_threads=2, fuse=False, reuse=False)
    found = diff(graph, checkpoint, backend, report=seen.append)
    assert found is None, str(found)
    assert {c.node.op for c in seen} == {n.op for n in graph.nodes} - {"kv_write"}


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("model", MODELS)
def test_every_level(data: Path, model: str, isa: str) -> None:
    check(data / model, "auto", isa)


@pytest.mark.parametrize("activations", ["bf16", "f32"])
@pytest.mark.parametrize("model", MODELS[2:])
def test_strict_modes(data: Path, model: str, activations: str) -> None:
    check(data / model, activations, LEVELS[-1])


@pytest.mark.long
def test_demo(demo: Path) -> None:
    check(demo, "auto", LEVELS[-1])
