"""Models in the formats of GGUF: files of llama.cpp's own quantisation tool against their dequantised weights in float32,
and models of random blocks of every format."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from octavo import _native
from octavo.backends.cpu import CpuBackend
from octavo.backends.diff import diff
from octavo.backends.reference import ReferenceBackend, forward_logits
from octavo.models import build_graph
from octavo.weights.checkpoint import open_checkpoint
from octavo.weights.spec import PACKED
from tests.random_blocks import MIXED, write_mixed
from tests.test_cpu_backend import logits_of, same_bits, table
from tests.test_fixtures import Case, native

KINDS = [
    "f16_bf16",
    "iq4_nl",
    "iq4_xs",
    "q2_k",
    "q3_k_m",
    "q4_0",
    "q4_1",
    "q4_k_m",
    "q5_0",
    "q5_1",
    "q5_k_m",
    "q6_k",
    "q8_0",
]


class GgufCase(Case):
    def __init__(self, path: Path) -> None:
        self.checkpoint = open_checkpoint(path)
        self.expected = np.load(path.with_suffix(".expected.npz"))
        self.meta = json.loads(path.with_suffix(".meta.json").read_text())
        self.prompts = [self.expected[f"ids_{i}"].astype(np.int32) for i in range(3)]
        self.generated = [self.expected[f"gen_{i}"].astype(np.int32) for i in range(3)]


@pytest.fixture(params=KINDS)
def case(fixtures: Path, request: pytest.FixtureRequest) -> Case:
    return GgufCase(fixtures / f"gguf/tiny-llama-{request.param}.gguf")


def test_the_list_of_fixtures_is_whole(fixtures: Path) -> None:
    assert {path.stem for path in fixtures.glob("gguf/*.gguf")} == {f"tiny-llama-{kind}" for kind in KINDS}


def test_native_in_float32(case: Case) -> None:
    """Whole and in chunks, with the same bits."""
    program = native(build_graph(case.checkpoint, "f32"), case)
    for i in range(3):
        ids = case.whole(i)
        logits = logits_of(program, ids, [len(ids)], table(len(ids)))
        case.check(i, logits)
        case.check_greedy(i, logits)
        same_bits(logits, logits_of(program, ids, [1, len(ids) - 20, *[1] * 3, 16], table(len(ids))))


def test_reference_in_float32(case: Case, request: pytest.FixtureRequest) -> None:
    """The shortest prompt; in a long run all."""
    graph = build_graph(case.checkpoint, "f32")
    weights = ReferenceBackend().pack(graph, case.checkpoint)
    for i in range(3 if request.config.getoption("long") else 1):
        logits = forward_logits(graph, weights, case.whole(i))
        case.check(i, logits)
        case.check_greedy(i, logits)


@pytest.mark.parametrize("activations", ["auto", "bf16"])
def test_native_with_rounded_activations(case: Case, activations: str) -> None:
    program = native(build_graph(case.checkpoint, activations), case)
    worst = 0.0
    for i in range(3):
        ids = case.whole(i)
        logits = logits_of(program, ids, [len(ids)], table(len(ids)))
        case.check(i, logits, 0.5, 0.998)
        case.check_greedy(i, logits, 0.5)
        worst = max(worst, float(np.abs(logits[case.expected[f"pos_{i}"]] - case.expected[f"logits_{i}"]).max()))
    print(f"{case.meta['ftype']}, activations {activations}: logits differ by {worst:.3f} at most")


@pytest.mark.parametrize("isa", _native.isa_levels())
@pytest.mark.parametrize("activations", ["auto", "bf16", "f32"])
def test_operations_of_every_format(tmp_path: Path, isa: str, activations: str) -> None:
    """Each node of a model in which every GGUF format makes some matrix, on the native kernels and the reference."""
    checkpoint = open_checkpoint(write_mixed(tmp_path / "mixed.gguf", MIXED))
    graph = build_graph(checkpoint, activations)
    assert {part.format for value in graph.weights() for part in value.parts} >= {PACKED[source] for source in MIXED}
    wrong = diff(graph, checkpoint, CpuBackend(isa=isa, num_threads=1, fuse=False, reuse=False))
    assert wrong is None, str(wrong)
