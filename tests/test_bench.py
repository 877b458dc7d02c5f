"""The workloads that need a scheduler, in small: they run, and print what they promise. No figure is asserted."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.bench import overload, stall
from octavo.bench.stall import percentile
from octavo.config import EngineConfig


def test_stall(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stall, "USUAL_STEPS", 8)
    monkeypatch.setattr(stall, "NUM_STREAMS", 4)
    config = EngineConfig(model=str(data / "arch" / "llama"), num_threads=1, max_model_len=2048)
    found = stall.measure(config, prompt_len=600, repeat=1)
    assert found.median > 0 and found.runs == [found.median]
    details = found.details
    assert details["usual_gap_ms"] <= details["bound_ms"] and details["longest_gap_ms"] >= found.median - 0.1
    assert 0 < details["prefill_alone_s"] <= details["prefill_bound_s"] and details["fixed_chunk_p99_ms"] > 0
    assert isinstance(details["held"], bool)


def test_overload(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overload, "OUTPUT_LEN", 8)
    config = EngineConfig(model=str(data / "arch" / "llama"), num_threads=1)
    found = overload.measure(config, seconds=1.5)
    details = found.details
    assert details["lost"] == 0 and min(details["served"]) > 0
    assert isinstance(details["held"], bool) and details["capacity_per_s"] > 0


def test_percentile() -> None:
    values = [float(i) for i in range(1, 101)]
    assert percentile(values, 0.99) == 99 and percentile(values, 1.0) == 100
    assert percentile([5.0], 0.99) == 5 and percentile([1.0, 2.0], 0.5) == 1
