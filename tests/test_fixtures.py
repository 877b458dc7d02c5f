"""Every decoder of `--fixtures`, and the small ones here, against the values of transformers, on both backends."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from octavo.backends.base import Limits
from octavo.backends.cpu import CpuBackend
from octavo.backends.reference import ReferenceBackend, forward_logits
from octavo.graph.fuse import count, fuse
from octavo.graph.ir import Graph
from octavo.graph.plan import plan
from octavo.graph.verify import FUSED, verify
from octavo.models import build_graph
from octavo.weights.checkpoint import open_checkpoint
from octavo.weights.spec import CheckpointError
from tests.test_cpu_backend import NUM_BLOCKS, logits_of, same_bits, table
from tests.test_models import ODD

F32 = NDArray[np.float32]
HERE = Path(__file__).parent / "data/arch"
GOLDEN = Path(__file__).parent / "golden/families.json"
LIMITS = Limits(max_tokens=200, max_rows=200, max_seqs=8, max_model_len=200)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "family" in metafunc.fixturenames:
        metafunc.parametrize("family", sorted(folders_of(metafunc.config.getoption("fixtures"))))


def folders_of(fixtures: Path | None) -> dict[str, Path]:
    """Name of a fixture -> its folder; those in tests/data were made by scripts/make-fixture, or are copies."""
    made = [p.parent for p in HERE.glob("*/meta.json")]
    return {p.name: p for p in [*made, *((fixtures / "arch").iterdir() if fixtures else ())]}


class Case:
    """One fixture."""

    def __init__(self, path: Path) -> None:
        self.checkpoint = open_checkpoint(path)
        self.expected = np.load(path / "expected.npz")
        self.meta: dict[str, Any] = json.loads((path / "meta.json").read_text())
        self.prompts = [self.expected[f"ids_{i}"].astype(np.int32) for i in range(3)]
        self.generated = [self.expected[f"gen_{i}"].astype(np.int32) for i in range(3)]

    def check(self, i: int, whole: F32, most: float = 2e-3, cosine: float = 0.99999, share: float = 1.0) -> None:
        """`whole`: logits at every position of prompt i and its greedy continuation. `share` of the positions agree."""
        want, got = self.expected[f"logits_{i}"], whole[self.expected[f"pos_{i}"]]
        cosines = (got * want).sum(axis=1) / np.linalg.norm(got, axis=1) / np.linalg.norm(want, axis=1)
        near = (np.abs(got - want).max(axis=1) <= most) & (cosines >= cosine)
        assert near.mean() >= share, (np.abs(got - want).max(axis=1), cosines)

    def check_greedy(self, i: int, whole: F32, margin: float = 0.01) -> None:
        """Each token of the continuation is the best one, but from where the best two are nearer than `margin`."""
        best = whole[len(self.prompts[i]) - 1 : -1].argmax(axis=1)
        differs = np.flatnonzero(best != self.generated[i])
        assert differs.size == 0 or self.expected[f"gen_margin_{i}"][differs[0]] < margin

    def whole(self, i: int) -> NDArray[np.int32]:
        return np.concatenate([self.prompts[i], self.generated[i]])


@pytest.fixture
def case(family: str, request: pytest.FixtureRequest) -> Case:
    return Case(folders_of(request.config.getoption("fixtures"))[family])


def test_reference(case: Case, request: pytest.FixtureRequest) -> None:
    """The longest prompt only in a long run: the native backend computes it always."""
    graph = build_graph(case.checkpoint, "f32")
    weights = ReferenceBackend().pack(graph, case.checkpoint)
    for i in range(3 if request.config.getoption("long") else 2):
        logits = forward_logits(graph, weights, case.whole(i))
        case.check(i, logits)
        case.check_greedy(i, logits)


def native(graph: Graph, case: Case, fuse: bool = True) -> Any:
    backend = CpuBackend(num_threads=1, fuse=fuse)
    state = backend.make_state(graph, [NUM_BLOCKS] * len(graph.groups))
    return backend.compile(graph, backend.pack(graph, case.checkpoint), state, LIMITS)


def test_native_in_float32(case: Case) -> None:
    """Whole and in chunks, with the same bits."""
    graph = build_graph(case.checkpoint, "f32")
    program = native(graph, case)
    for i in range(3):
        ids = case.whole(i)
        logits = logits_of(program, ids, [len(ids)], table(len(ids)))
        case.check(i, logits)
        case.check_greedy(i, logits)
        same_bits(logits, logits_of(program, ids, [1, len(ids) - 20, *[1] * 3, 16], table(len(ids))))


def test_native_in_the_own_format(case: Case) -> None:
    """The loss is at most three times that of computing all in bf16; experts may be chosen otherwise at a near tie."""
    graph = build_graph(case.checkpoint, "auto")
    program = native(graph, case)
    experts = any(node.op == "route" for node in graph.nodes)
    for i in range(3):
        ids = case.whole(i)
        logits = logits_of(program, ids, [len(ids)], table(len(ids)))
        most = 3 * case.meta["max_abs_bf16_compute_vs_f32"]
        case.check(i, logits, most, 0.99, 0.9 if experts else 1.0)
        case.check_greedy(i, logits, 1.0)
        if i == 1:
            same_bits(logits, logits_of(native(graph, case, fuse=False), ids, [len(ids)], table(len(ids))))


def test_a_config_of_any_types_gives_a_graph_or_one_line(
    case: Case, family: str, request: pytest.FixtureRequest
) -> None:
    """Each key of config.json with odd values: one of them, in a long run all."""
    rng, config = random.Random(family), dict(case.checkpoint.config)
    lines = []
    for key in config:
        for value in ODD if request.config.getoption("long") else [rng.choice(ODD)]:
            case.checkpoint.config.clear()
            case.checkpoint.config.update({k: v for k, v in config.items() if k != key})
            if value != "absent":
                case.checkpoint.config[key] = value
            try:
                build_graph(case.checkpoint)
            except CheckpointError as error:
                lines.append(str(error))
    assert lines and not any("\n" in line for line in lines)


def test_golden_counts(fixtures: Path) -> None:
    """Operations and barriers of every family, fused and as planned for 64 tokens."""
    found = {}
    for name, folder in sorted(folders_of(fixtures).items()):
        fused = verify(fuse(build_graph(open_checkpoint(folder)), FUSED))
        found[name] = {**count(fused), "barriers": len(plan(fused, 64, 64).barriers)}
    known = json.loads(GOLDEN.read_text())
    wrong = [name for name in sorted(found.keys() | known.keys()) if found.get(name) != known.get(name)]
    lines = [f'"{name}": {json.dumps(found.get(name))},' for name in wrong]
    assert not wrong, "\n".join(["tests/golden/families.json should have", *lines])
