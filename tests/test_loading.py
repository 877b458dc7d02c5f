"""A start that takes long says how far it is; and what is kept for the next can be listed and removed."""

from __future__ import annotations

import io
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from octavo.bars import LoadingBar
from octavo.cache.prefix import chain_key
from octavo.cache.store import BlockId, BlockStore
from octavo.cli.cache import cache
from octavo.config import ConfigError, EngineConfig, ServerConfig
from octavo.engine import load, packed
from octavo.engine.core import Engine
from octavo.engine.messages import Loading
from octavo.server.service import Service
from octavo.weights.image_file import ImageId
from octavo.weights.images import ImageStore
from tests.waiting import until


def test_a_slow_start_reports(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "MIN_BYTES", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = str(data / "gguf/tiny-llama-q4_1.gguf")

    def start(quiet: float) -> list[Loading]:
        monkeypatch.setattr(load, "QUIET_SECONDS", quiet)
        monkeypatch.setattr(load, "REPORT_SECONDS", 0.0)
        told: list[Loading] = []
        engine = Engine(EngineConfig(model=model, num_threads=1), told.append)
        until(lambda: list(tmp_path.glob("octavo/weights/*.weights")))
        engine.close()
        return told

    for what in ("packing the weights", "reading the weights"):
        told = start(quiet=0.0)
        assert {each.what for each in told} == {what}
        assert [each.done for each in told] == sorted(each.done for each in told)
        assert told[-1].done == told[-1].total > 0
    assert start(quiet=3600.0) == []


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("kind", [Terminal, io.StringIO])
def test_the_bar_is_for_terminals(kind: type[io.StringIO], monkeypatch: pytest.MonkeyPatch) -> None:
    screen = kind()
    monkeypatch.setattr(sys, "stderr", screen)
    with LoadingBar() as bar:
        for done in (0, 2 * 10**9, 4 * 10**9):
            bar.show(Loading("packing the weights", done, 4 * 10**9))
        assert ("packing the weights" in screen.getvalue()) == screen.isatty()
        assert ("2.0/4.0 GB" in screen.getvalue()) == screen.isatty()
    assert screen.isatty() or screen.getvalue() == ""


def test_readiness_says_how_far() -> None:
    client: Any = SimpleNamespace(bounds=None, loading=None, stats=None)
    service = Service(ServerConfig(), client, "model")
    assert service.trouble == "the model is still loading"
    client.loading = Loading("packing the weights", 1, 4)
    assert service.trouble == "the model is still loading: packing the weights, 25%"


def test_what_is_kept_is_listed_and_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = ImageStore(tmp_path / "weights", 10**8)
    for i, model in enumerate(("one.gguf", "two")):
        store.write(ImageId(bytes([i] * 16), bytes(16)), model, np.zeros(5000, np.uint8), lambda: False)
    blocks = BlockStore(tmp_path / "kv", bytes(16), 10**6)
    ids = tuple(range(16))
    blocks.write(BlockId(chain_key(bytes(16), ids), 0, bytes(16), ids), memoryview(bytes(1000)), 0.1, time.time_ns())
    cache("list", str(tmp_path / "weights"), tmp_path / "kv")
    text = capsys.readouterr().out
    assert f"2 models' packed weights in {tmp_path / 'weights'}, 4.0" in text
    assert "  one.gguf\n" in text and "  two\n" in text
    assert f"1 KV blocks in {tmp_path / 'kv'}, 1.13 KiB" in text
    cache("clear", str(tmp_path / "weights"), tmp_path / "kv")
    assert "2 models' packed weights removed from" in capsys.readouterr().out
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    cache("list", str(tmp_path / "nothing here"), None)
    assert capsys.readouterr().out.startswith("0 models' packed weights in")
    with pytest.raises(ConfigError, match="there is no `octavo cache drop`"):
        cache("drop")
