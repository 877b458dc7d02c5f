"""Packed weights from disk: byte for byte those packed anew, bit for bit in what is generated, and never waited for."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo import _native, weights
from octavo.backends import cpu_weights
from octavo.backends.cpu import CpuBackend
from octavo.config import ConfigError, EngineConfig
from octavo.engine import packed
from octavo.engine.core import Engine
from octavo.engine.messages import Add, pooled
from octavo.graph.adapt import targets
from octavo.models import build_graph
from octavo.request import SamplingParams
from octavo.weights import image_file
from octavo.weights.checkpoint import open_checkpoint
from octavo.weights.digest import WeightsDigest
from octavo.weights.images import ImageStore
from octavo.weights.spec import Checkpoint
from tests.quantised_model import ACT_ORDER, GPTQ, save_quantised, sorted_alike
from tests.random_adapter import random_adapter
from tests.small_fixtures import ALL
from tests.test_same_bits import Answers
from tests.waiting import SECONDS, until

GGUF = "gguf/tiny-llama-q4_1.gguf"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this user's caches are; even the smallest models are kept, in small files, and mapped."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(image_file, "ALIGN", 2**16)
    monkeypatch.setattr(cpu_weights, "in_huge_pages", lambda mapped: True)
    monkeypatch.setattr(packed, "MIN_BYTES", 0)
    return tmp_path / "home" / "octavo"


def start(model: Path, **options: Any) -> Engine:
    return Engine(EngineConfig(model=str(model), num_threads=2, max_model_len=200, **options))


def written(directory: Path, count: int = 1) -> list[Path]:
    """The files, as soon as so many are there."""
    until(lambda: len(list(directory.glob("*.weights"))) >= count)
    return sorted(directory.glob("*.weights"))


def answers(engine: Engine) -> dict[tuple[str, int], Any]:
    found = Answers()
    ids = list(range(5, 45))
    for i, digest in enumerate(["", *engine.loaded.named_adapters.values()]):
        engine.add(pooled(f"p{i}", ids, "mean", adapter=digest))
        if engine.bounds.abilities.generates:
            params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True, logprobs=3, prompt_logprobs=1)
            engine.add(Add(f"r{i}", ids, params, seed=1, adapter=digest))
    while (output := engine.step()) is not None:
        found.take(output.progress)
    return found.choices


def assert_same(first: Engine, second: Engine) -> None:
    assert "pack" in first.loaded.phases and "pack" not in second.loaded.phases
    np.testing.assert_array_equal(first.loaded.weights.image, second.loaded.weights.image)
    assert answers(first) == answers(second)


@pytest.mark.parametrize(
    "kind", ["arch/phi3", "arch/deepseek_v3_narrow", "arch/minimax_m2", "arch/smollm3", GGUF, "gptq", "encoder"]
)
def test_from_disk_is_as_packed_anew(
    data: Path, tmp_path: Path, home: Path, request: pytest.FixtureRequest, kind: str
) -> None:
    """Joined matrices, experts, tied embeddings, blocks of GGUF, sorted columns, an encoder."""
    if kind == "gptq":
        path = save_quantised(tmp_path / "model", GPTQ, sorted_alike, max_position_embeddings=256, **ACT_ORDER)
    elif kind == "encoder":
        path = request.getfixturevalue("fixtures") / "encoders" / "bert"
    else:
        path = data / kind
    first = start(path)
    written(home / "weights")
    assert_same(first, start(path))


def test_adapters_beside_weights_from_disk(data: Path, tmp_path: Path, home: Path) -> None:
    found = targets(build_graph(open_checkpoint(data / GGUF)))
    lora = (f"one={random_adapter(tmp_path / 'one', found, seed=1, rank=8)}",)
    first = start(data / GGUF, lora=lora)
    written(home / "weights")
    second = start(data / GGUF, lora=lora)
    assert_same(first, second)
    assert len(list((home / "weights").iterdir())) == 1


def restored(checkpoint: Checkpoint, activations: str, store: ImageStore) -> None:
    """Through a file and back, byte for byte."""
    backend, graph = CpuBackend(num_threads=2), build_graph(checkpoint, activations)
    first, packing = backend.pack(graph, checkpoint), backend.packing(graph)
    id = image_file.ImageId(os.urandom(16), packing.digest())
    store.write(id, "", first.image, lambda: False)
    file = store.open(id, packing.num_bytes)
    assert file is not None
    with file:
        read, mapped = packing.empty(), packing.mapped(file.descriptor, file.start)
        assert mapped is not None
        file.read(read.image, 2)
        file.check(mapped.image, 2)
    for again in (read, mapped):
        assert (again.parts, again.vectors) == (first.parts, first.vectors)
        np.testing.assert_array_equal(again.image, first.image)


@pytest.mark.parametrize("name", ALL)
def test_every_small_model_comes_back(data: Path, tmp_path: Path, name: str) -> None:
    for activations in ("auto", "f32"):
        restored(open_checkpoint(data / name), activations, ImageStore(tmp_path, 10**9))


def test_every_format_and_family_comes_back(fixtures: Path, tmp_path: Path) -> None:
    paths = [*(fixtures / "gguf").glob("*.gguf"), *(file.parent for file in fixtures.glob("*/**/config.json"))]
    models = [path for path in paths if "tokenizers" not in path.parts]
    assert len(models) > 70
    for path in models:
        restored(open_checkpoint(path), "auto", ImageStore(tmp_path, 10**9))


def test_whatever_changes_the_bytes_changes_the_name(
    data: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Formats, places, what is joined, and any line of the code that reads and packs."""

    def digest(name: str, isa: str = "auto") -> bytes:
        cpu_weights.packer_digest.cache_clear()
        return CpuBackend(isa, num_threads=1).packing(build_graph(open_checkpoint(data / name))).digest()

    digests = [digest(name) for name in ("arch/llama", "arch/phi3", GGUF)]
    assert digest(GGUF) == digest(GGUF, isa="generic") == digests[-1], "the same bytes on every processor"
    (tmp_path / "other.py").write_text("another version")
    for module, name, value in (
        (_native, "__file__", str(tmp_path / "other.py")),
        (cpu_weights, "__file__", str(tmp_path / "other.py")),
        (weights, "__path__", [str(tmp_path)]),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, value)
            digests.append(digest(GGUF))
    cpu_weights.packer_digest.cache_clear()
    assert len(set(digests)) == len(digests) == 6


def test_same_content_under_another_name(data: Path, tmp_path: Path, home: Path) -> None:
    """The first start of a copy reads it once; its packed weights are there already."""
    first = start(data / GGUF)
    (image,) = written(home / "weights")
    copy = tmp_path / "copy.gguf"
    copy.write_bytes((data / GGUF).read_bytes())
    second = start(copy)
    assert "pack" in second.loaded.phases
    assert second.loaded.packed is not None
    WeightsDigest(second.loaded.checkpoint).take()
    assert_same(first, start(copy))
    assert written(home / "weights") == [image]


def test_changed_content_is_packed_anew(data: Path, tmp_path: Path, home: Path) -> None:
    model = tmp_path / "model.gguf"
    content = bytearray((data / GGUF).read_bytes())
    model.write_bytes(content)
    first = start(model)
    written(home / "weights")
    content[-100] ^= 1
    model.write_bytes(content)
    changed = start(model)
    assert "pack" in changed.loaded.phases
    written(home / "weights", 2)
    assert_same(changed, start(model))
    assert (changed.loaded.weights.image != first.loaded.weights.image).any()


def test_what_changes_while_it_is_packed_is_not_kept(
    data: Path, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The digest of what the file held is known, and its packed weights are not there."""
    model = tmp_path / "model.gguf"
    content = (data / GGUF).read_bytes()
    model.write_bytes(content)
    first = start(model)
    written(home / "weights")[0].unlink()
    first.close()
    pack = CpuBackend.pack

    def changed(*args: Any) -> Any:
        with model.open("r+b") as file:
            file.seek(-100, os.SEEK_END)
            file.write(bytes([content[-100] ^ 1]))
        return pack(*args)

    with monkeypatch.context() as patch:
        patch.setattr(CpuBackend, "pack", changed)
        engine = start(model, disk_cache=str(tmp_path / "kv"))
    assert engine.loaded.packed is not None and engine.loaded.packed._thread is not None
    engine.loaded.packed._thread.join()
    assert not list((home / "weights").iterdir())
    told = list[str]()
    for what in ("the packed weights are not kept", "the disk cache is closed"):
        line = re.compile(f"{what}, .*model.gguf is not the file that was loaded")
        until(lambda line=line: told.append(capfd.readouterr().err) or line.search("".join(told)))
    again = start(model)
    written(home / "weights")
    assert_same(again, start(model))


@pytest.mark.parametrize("huge", [False, True])
def test_where_files_have_no_huge_pages_they_are_read(
    data: Path, home: Path, monkeypatch: pytest.MonkeyPatch, huge: bool
) -> None:
    monkeypatch.setattr(cpu_weights, "in_huge_pages", lambda mapped: huge)
    first = start(data / GGUF)
    written(home / "weights")
    second = start(data / GGUF)
    assert second.loaded.packed is not None
    assert second.loaded.packed.mapped_bytes == (second.loaded.weights.num_bytes if huge else 0)
    assert_same(first, second)


def test_damaged_images_are_packed_anew(data: Path, home: Path) -> None:
    first = start(data / GGUF)
    (image,) = written(home / "weights")
    for at in (9, 100, 5000, -1):
        content = bytearray(image.read_bytes())
        content[at] ^= 1
        image.write_bytes(content)
        again = start(data / GGUF)
        assert "pack" in again.loaded.phases
        np.testing.assert_array_equal(again.loaded.weights.image, first.loaded.weights.image)
        written(home / "weights")
    assert_same(first, start(data / GGUF))


def test_a_directory_that_cannot_be_used_fails_no_start(
    data: Path, home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    home.mkdir(parents=True)
    (home / "weights").write_text("in the way")
    engine = start(data / GGUF)
    until(lambda: "packed weights are not kept" in capfd.readouterr().err)
    assert len(answers(engine)) == 2


def test_options(data: Path, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert start(data / GGUF, weights_cache="off").loaded.packed is None
    small = start(data / GGUF, weights_cache_size="100KiB").loaded
    assert small.packed is None and "they take 801.25 KiB" in " ".join(small.notices)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"weights_cache is .*, which is no directory"):
        start(data / GGUF, weights_cache=str(tmp_path / "file"))
    engine = start(data / GGUF, weights_cache=str(tmp_path / "here"))
    written(tmp_path / "here")
    assert not (home / "weights").exists()
    engine.close()
    monkeypatch.setattr(packed, "MIN_BYTES", 10**6)
    assert start(data / GGUF).loaded.packed is None, "small weights are packed as fast"


@pytest.fixture
def slow_digest(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Digests that are taken when the test is over; True for each that had to be taken before."""
    over, early = threading.Event(), list[bool]()
    take = WeightsDigest.take

    def wait(self: WeightsDigest) -> bytes:
        early.append(not over.wait(SECONDS))
        return take(self)

    monkeypatch.setattr(WeightsDigest, "take", wait)
    yield early
    over.set()


def test_nothing_waits_for_the_digest(data: Path, home: Path, slow_digest: list[bool]) -> None:
    """Neither the first answer nor the end of the engine; and who ends before it is known holds no memory."""
    engine = start(data / GGUF)
    answers(engine)
    cache = engine.loaded.packed
    engine.close()
    assert cache is not None and cache._data is None and not slow_digest
    assert not (home / "weights").exists()
