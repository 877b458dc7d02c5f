"""Models in every packed format: GGUF files of llama.cpp's own quantisation tool against their dequantised weights in float32,
and models of random blocks of every format."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

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


@pytest.mark.parametrize(("activations", "bf16_dots"), [("auto", True), ("auto", False), ("bf16", True)])
def test_native_with_rounded_activations(case: Case, activations: str, bf16_dots: bool) -> None:
    """Logits near those of the dequantised weights, and the perplexity of the continued prompts within 1 % of theirs."""
    graphs = build_graph(case.checkpoint, activations, bf16_dots=bf16_dots), build_graph(case.checkpoint, "f32")
    program, strict = (native(graph, case) for graph in graphs)
    worst, scores = 0.0, []
    for i in range(3):
        ids = case.whole(i)
        logits, exact = (logits_of(p, ids, [len(ids)], table(len(ids))) for p in (program, strict))
        case.check(i, logits, 0.5, 0.998)
        case.check_greedy(i, logits, 0.5)
        worst = max(worst, float(np.abs(logits - exact).max()))
        scores.append((negative_logprobs(logits, ids), negative_logprobs(exact, ids)))
    found, expected = (np.exp(np.concatenate(s).mean()) for s in zip(*scores, strict=True))
    loss = found / expected - 1
    print(
        f"{case.meta['ftype']}, activations {activations}, bf16 dots {bf16_dots}: logits differ by {worst:.3f}, perplexity by {loss:+.3%}"
    )
    assert abs(loss) < 0.01


def negative_logprobs(logits: NDArray[np.float32], ids: NDArray[np.int32]) -> NDArray[np.float64]:
    """Of each token but the first, under the logits before it."""
    wide = logits[:-1].astype(np.float64)
    total = np.log(np.exp(wide - wide.max(axis=1, keepdims=True)).sum(axis=1)) + wide.max(axis=1)
    scores: NDArray[np.float64] = total - wide[np.arange(len(wide)), ids[1:]]
    return scores


@pytest.mark.parametrize("isa", _native.isa_levels())
@pytest.mark.parametrize("activations", ["auto", "bf16", "f32"])
def test_operations_of_every_format(tmp_path: Path, isa: str, activations: str) -> None:
    """Each node of a model in which every GGUF format makes some matrix, on the native kernels and the reference."""
    checkpoint = open_checkpoint(write_mixed(tmp_path / "mixed.gguf", MIXED))
    backend = CpuBackend(isa=isa, num_threads=1, fuse=False, reuse=False)
    graph = build_graph(checkpoint, activations, bf16_dots=backend.bf16_dots)
    assert {part.format for value in graph.weights() for part in value.parts} >= {PACKED[source] for source in MIXED}
    wrong = diff(graph, checkpoint, backend)
    assert wrong is None, str(wrong)


@pytest.mark.parametrize("isa", _native.isa_levels())
@pytest.mark.parametrize(
    ("name", "packed"),
    [
        ("gptq/gptq_4b_g32_asym_act0", "w4z"),
        ("awq/awq_g64", "w4z64"),
        ("compressed-tensors/w8a16_channel", "w8z64"),
        ("fp8-block/llama_fp8_block", "f8"),
    ],
)
def test_operations_of_formats_of_other_checkpoints(fixtures: Path, name: str, packed: str, isa: str) -> None:
    checkpoint = open_checkpoint(fixtures / "quant" / name)
    backend = CpuBackend(isa=isa, num_threads=1, fuse=False, reuse=False)
    graph = build_graph(checkpoint, bf16_dots=backend.bf16_dots)
    assert packed in {part.format for value in graph.weights() for part in value.parts}
    wrong = diff(graph, checkpoint, backend)
    assert wrong is None, str(wrong)
