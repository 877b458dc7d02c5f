"""The workloads that need a scheduler, in small: they run, and print what they promise. No figure is asserted."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

from octavo.backends.speeds import Kernel
from octavo.bench import decode, kernels, latency, overhead, overload, prefill, serve, stall, stolen
from octavo.bench.http import Target
from octavo.bench.plot import check_plot, draw
from octavo.bench.report import result
from octavo.bench.served import served
from octavo.bench.stall import percentile
from octavo.config import ConfigError, EngineConfig
from octavo.engine.client import EngineError
from octavo.engine.phases import Phase


def test_stall(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stall, "TOKENS_BEFORE", 8)
    monkeypatch.setattr(stall, "NUM_STREAMS", 4)
    config = EngineConfig(model=str(data / "arch" / "llama"), num_threads=1, max_model_len=2048)
    found = stall.measure(config, prompt_len=600, repeat=1)
    assert found.median > 0 and found.runs == [found.median]
    details = found.details
    assert details["usual_gap_ms"] <= details["bound_ms"] and details["longest_gap_ms"] >= found.median - 0.1
    assert 0 < details["prefill_alone_s"] <= details["prefill_bound_s"] and details["fixed_chunk_p99_ms"] > 0
    assert details["undisturbed_p99_ms"] is None or details["undisturbed_p99_ms"] <= details["longest_gap_ms"]
    assert isinstance(details["held"], bool)


def test_what_the_host_took_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = stolen.stolen_seconds()
    assert seconds is None or seconds >= 0
    now = iter([10.0, 10.0 + 0.25 * (os.cpu_count() or 1)])
    clock = iter([100.0, 101.0])
    monkeypatch.setattr(stolen, "stolen_seconds", lambda: next(now))
    monkeypatch.setattr(stolen.time, "monotonic", lambda: next(clock))
    assert stolen.Stolen().percent == pytest.approx(25)
    monkeypatch.undo()
    monkeypatch.setattr(stolen, "stolen_seconds", lambda: None)
    assert stolen.Stolen().percent is None


def test_overload(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overload, "OUTPUT_LEN", 8)
    config = EngineConfig(model=str(data / "arch" / "llama"), num_threads=1)
    found = overload.measure(config, seconds=1.5, repeat=2)
    details = found.details
    assert details["lost"] == 0 and min(details["served"]) > 0
    assert isinstance(details["held"], bool) and min(details["served_per_s"]) > 0 and len(found.runs) == 2


def test_streams_over_http(data: Path) -> None:
    """Against a server of its own, and against one that runs, by its URL."""
    config = EngineConfig(model=str(data / "arch" / "llama"), num_threads=1, max_model_len=256)
    found = serve.shared_prefix(config, serve.Server(), serve.Workload(8, 200, 8, 4), repeat=1)
    assert found.median > 0 and found.unit == "s"
    as_it_was, had_it_shared_none = found.details["kv_tiles_per_step"]
    assert 0 < as_it_was <= had_it_shared_none
    with served(config) as server:
        load = serve.Workload(4, 0, 16, 5, rate=100.0)
        found = serve.measure(config, serve.Server(server.url + "/v1"), load, repeat=2)
        assert len(found.runs) == 2 and found.details["first_token_ms"][0] <= found.details["first_token_ms"][1]
        with pytest.raises(EngineError, match=r"status 404 and 0 tokens where 5 were asked for"):
            serve.measure(config, serve.Server(server.url, model="other"), load, repeat=1)
    with pytest.raises(ConfigError, match="no address of a server"):
        serve.measure(config, serve.Server("localhost:8000"), load, repeat=1)
    with pytest.raises(ConfigError, match=r"http://h:99999: Port out of range"):
        Target("http://h:99999")


def test_tiles_of_a_step_are_read_off_the_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    series = {"attention_kv_tiles": 60, "attention_kv_tiles_saved": 140, "engine_steps": 20}
    text = "".join(f"# HELP octavo_{name}_total x\noctavo_{name}_total {value}\n" for name, value in series.items())
    monkeypatch.setattr(serve, "urlopen", lambda url: io.BytesIO(text.encode()))
    assert serve._attention(Target("http://localhost:1")) == {"kv_tiles_per_step": [3, 10]}


def test_overhead(data: Path) -> None:
    config = EngineConfig(model=str(data / "arch" / "llama"), num_threads=1)
    many, one, http = overhead.measure(config, num_streams=3, input_len=8, output_len=6)
    for found in (many, one):
        assert 0 < found.median < 100 and list(found.details["step_ms"]) == list(Phase)
        operations = found.details["operations_percent"]
        assert operations["linear_sample"] > 0 and sum(operations.values()) == pytest.approx(100, abs=2)
    assert [found.details["most"] for found in (many, one)] == [5, 10]
    assert http.details["api_us_per_token"] >= 0 and set(http.details["tokens_per_second"]) == {"offline", "http"}
    assert all(isinstance(found.details["held"], bool) for found in (many, one, http))


def test_plot(tmp_path: Path) -> None:
    found = [result("serve", "", "tokens/s", [3.0, 1.0, 2.0]), result("start", "", "s", [0.9])]
    with pytest.raises(ConfigError, match=r"must end in \.png, \.svg, \.pdf"):
        check_plot(tmp_path / "runs.txt")
    with pytest.raises(ConfigError, match="no such folder"):
        check_plot(tmp_path / "missing" / "runs.svg")
    check_plot(tmp_path / "runs.svg")
    draw(tmp_path / "runs.svg", "demo", found)
    assert (tmp_path / "runs.svg").read_text().count("<svg") == 1


def test_prefill_decode_latency(data: Path) -> None:
    """With what the machine could do beside each figure, and the share of it where reading memory is the limit."""
    config = EngineConfig(model=str(data / "arch" / "llama"), num_threads=1)
    found = [
        prefill.measure(config, 64, repeat=2),
        decode.measure(config, 5, 48, repeat=2),
        latency.measure(config, 16, 8, repeat=2),
    ]
    for each in found:
        assert len(each.runs) == 2 and each.unit == "tokens/s" and each.median > 0
        assert each.details["bandwidth_gb_s"] > 0.1 and each.details["barrier_ns"] > 0 and each.details["threads"] == 1
    for each in found[1:]:
        assert each.details["share_of_bandwidth"] > 0 and each.details["read_mb"] > 0
    for bad, message in (
        (EngineConfig(model=config.model, prefix_caching=False), "need prefix_caching"),
        (EngineConfig(model=config.model, max_num_seqs=4), "as many max_num_seqs"),
    ):
        with pytest.raises(ConfigError, match=message):
            decode.measure(bad, 5, 48, repeat=1)
    with pytest.raises(ConfigError, match="at least 32 tokens; got 20"):
        decode.measure(config, 5, 20, repeat=1)


def test_percentile() -> None:
    values = [float(i) for i in range(1, 101)]
    assert percentile(values, 0.99) == 99 and percentile(values, 1.0) == 100
    assert percentile([5.0], 0.99) == 5 and percentile([1.0, 2.0], 0.5) == 1


def test_kernels_are_shares_of_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "KERNELS", [Kernel("w4k", "a8")])
    monkeypatch.setattr(kernels, "ROWS", {1: 2**22, 64: 2**20})
    monkeypatch.setattr(kernels, "ATTENTION", [("bf16", 64, 3)])
    product, *_, attention = kernels.measure(EngineConfig(num_threads=1), 1)
    assert product.name == "w4k x a8, 1 thread"
    assert product.details["bits"] == pytest.approx(4.625)
    assert len(product.runs) == 2 and min(product.details["gop_s"] + product.details["gb_s"]) > 0
    assert len(attention.runs) == 4 and min(attention.details["gb_s"] + attention.details["gflop_s"]) > 0
