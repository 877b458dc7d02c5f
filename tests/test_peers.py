"""Engines that take turns (scripts/bench-peers): what drivers answer, and what the table says of it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import pytest

from octavo.bench.models import NAMES, Shape, demo_file, tokenizer_of, write_random

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "peers"]:
        del sys.modules[name]


def test_rows() -> None:
    from peers.rows import DEFAULT, PEERS, ROWS

    names = [row.name for row in ROWS]
    assert len(set(names)) == len(names) and set(DEFAULT) <= set(names)
    for row in ROWS:
        assert row.model in (*NAMES, "demo") and set(row.peers) <= set(PEERS)
        for size in (row.quick, row.full):
            assert row.kind != "decode" or size.input_len > size.output_len // 2
            assert size.shared_len == 0 or row.kind == "prefix"


def test_prompts_have_nothing_in_common() -> None:
    from peers.protocol import Workload

    work = Workload("offline", "", None, 64, 0, 16, 4, 2, "auto")
    runs = [work.prompts(run) for run in range(3)]
    assert runs[1] == work.prompts(1) and all(len(prompt) == 16 for run in runs for prompt in run)
    assert len({prompt[0] for run in runs for prompt in run}) == 3 * 64


def test_turns(tmp_path: Path) -> None:
    """A driver in its own process, of an engine in it and of a server; one that cannot says why."""
    from peers.protocol import Workload
    from peers.turns import Engine, Unable, own_python

    model = tmp_path / "model.gguf"
    shape = Shape(hidden=64, layers=1, heads=2, kv_heads=1, inner=64, positions=256)
    write_random(model, shape, "Q4_0", "making it", tokenizer_of(demo_file()))
    log = tmp_path / "log"
    for kind, shared_len in (("decode", 0), ("prefix", 48)):
        work = Workload(kind, str(model), None, 3, shared_len, 24, 8, 1, "auto")
        with Engine("octavo", own_python(), work, log) as engine:
            assert [engine.run(number) > 0 for number in range(2)] == [True, True], log.read_text()
    with pytest.raises(Unable, match="it has no such weights: bf16 alone is compared"):
        Engine("vllm", own_python(), work._replace(kind="offline"), log)
    with pytest.raises(Unable, match="the package has no server"):
        Engine("openvino", own_python(), work, log)
    with Engine("octavo", own_python(), work, log) as engine:
        engine.words["url"] = "http://127.0.0.1:1"
        with pytest.raises(Unable, match=r"127\.0\.0\.1"):
            engine.run(0)
    with pytest.raises(Unable, match="no such file"):
        Engine("octavo", own_python(), work._replace(kind="offline", model="missing.gguf"), log)


def test_openmp_of_vllm(tmp_path: Path) -> None:
    """Preloaded where it is installed; the number of threads in any case."""
    from peers.turns import _vllm_environment

    python, openmp = tmp_path / "bin" / "python", tmp_path / "lib" / "libiomp5.so"
    found = _vllm_environment(python, 2)
    assert found["OMP_NUM_THREADS"] == "2" and "LD_PRELOAD" not in found
    openmp.parent.mkdir()
    openmp.touch()
    assert _vllm_environment(python, 2) == found | {"LD_PRELOAD": str(openmp)}


def test_tile_config_of_llama_cpp(tmp_path: Path) -> None:
    from peers.install import _keep_tile_config

    source = tmp_path / "mmq.cpp"
    source.write_text("    alignas(64) tile_config_t tc = {};\n    tc.palette_id = 1;\n")
    _keep_tile_config(source)
    assert source.read_text() == "    alignas(64) static thread_local tile_config_t tc;\n    tc.palette_id = 1;\n"


def test_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first run is to warm up, but of starts; an engine that fails says why, and the others go on."""
    loader = SourceFileLoader("bench_peers", str(SCRIPTS / "bench-peers"))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "path", list(sys.path))
    script = module_from_spec(spec)
    loader.exec_module(script)
    from peers.protocol import Workload
    from peers.rows import ROWS
    from peers.turns import Unable

    class Fake(AbstractContextManager["Fake"]):
        def __init__(self, name: str, *rest: object) -> None:
            self.name = name

        def run(self, number: int) -> float:
            if self.name == "llama.cpp" and number == 2:
                raise Unable("it ended")
            return 10.0 + number

        def __exit__(self, *exception: object) -> None:
            pass

    monkeypatch.setattr(script, "Engine", Fake)
    rows = {row.name: row for row in ROWS}
    pythons = {name: Path() for name in ("octavo", "llama.cpp", "vllm")}
    for name, first in (("one stream, Q4_1", 11.0), ("start to first token", 10.0)):
        work = Workload(rows[name].kind, "", None, 1, 0, 4, 2, 1, "auto")
        outcome = script.measure(rows[name], work, False, pythons, 3, tmp_path)
        assert outcome.runs["octavo"] == [first, first + 1, first + 2] and outcome.unable == {"llama.cpp": "it ended"}
        assert outcome.runs["llama.cpp"] == ([11.0] if first == 11 else [10.0, 11.0]) and "vllm" not in outcome.runs
        assert len(outcome.bandwidth) == len(outcome.barrier) == 4


def test_table() -> None:
    from peers.rows import ROWS
    from peers.table import Outcome, markdown, notes

    rows = {row.name: row for row in ROWS}
    speed, time = rows["one stream, Q4_1"], rows["shared prefix over HTTP, bf16"]
    machine = [20e9, 22e9, 10e9], [100e-9, 300e-9, 200e-9]
    outcomes = [
        Outcome(speed, speed.quick, *machine, {"octavo": [90.0, 100.0, 300.0], "llama.cpp": [50.0, 40.0]}, {}),
        Outcome(time, time.full, *machine, {"octavo": [2.0], "vllm": [4.0], "llama.cpp": [8.0]}, {"openvino": "no"}),
        Outcome(speed, speed.full, *machine, {"octavo": [5.0]}, {"llama.cpp": "no"}),
    ]
    assert [outcome.ratio for outcome in outcomes] == [100 / 45, 2.0, None]
    lines = markdown(outcomes).splitlines()
    assert (
        lines[0] == "| workload | size | unit | octavo | llama.cpp | vllm | times the best peer | GB/s | barrier ns |"
    )
    assert lines[2] == "| one stream, Q4_1 | 1 x (256 -> 64) | tokens/s | 100 | 45.0 | - | 2.22 | 20.0 | 200 |"
    assert lines[3] == (
        "| shared prefix over HTTP, bf16 | 32 x (1024 + 64 -> 64) | s | 2.00 | 8.00 | 4.00 | 2.00 | 20.0 | 200 |"
    )
    assert notes(outcomes) == [f"openvino: no ({time.name})", f"llama.cpp: no ({speed.name})"]


def test_plot(tmp_path: Path) -> None:
    from peers.rows import ROWS
    from peers.table import Outcome, plot

    runs = {"octavo": [3.0], "llama.cpp": [1.0], "openvino": [2.0]}
    outcomes = [Outcome(row, row.quick, [1e9], [1e-6], runs, {}) for row in ROWS[:6]]
    plot(tmp_path / "peers.svg", outcomes, "a machine")
    assert (tmp_path / "peers.svg").read_text().count("<svg") == 1
