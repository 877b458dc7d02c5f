"""The digest of weights, and the space of KV blocks that it is a part of."""

from __future__ import annotations

import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from octavo import _native, weights
from octavo.backends import fingerprint
from octavo.backends.cpu_weights import packer_digest
from octavo.engine import space
from octavo.models import build_graph
from octavo.weights import digest
from octavo.weights.checkpoint import open_checkpoint
from octavo.weights.digest import FileChanged, WeightsDigest, weights_digest
from octavo.weights.mapped import FileIdentity
from octavo.weights.spec import Checkpoint
from tests.waiting import SECONDS


def write(path: Path, content: bytes) -> FileIdentity:
    path.write_bytes(content)
    return FileIdentity.of(path)


def test_content_decides(tmp_path: Path) -> None:
    memory = tmp_path / "m" / "digests.json"
    a, b, c = (write(tmp_path / name, content) for name, content in (("a", b"x" * 9), ("b", b"x" * 9), ("c", b"y")))
    assert weights_digest([a], memory) == weights_digest([b], memory) != weights_digest([c], memory)
    assert weights_digest([a, c], memory) not in (weights_digest([a], memory), weights_digest([c, a], memory))


def test_a_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = tmp_path / "digests.json"
    file = write(tmp_path / "a", b"weights")
    first = weights_digest([file], memory)
    with monkeypatch.context() as patch:
        patch.setattr(digest, "_digest", lambda file: pytest.fail("read again"))
        assert weights_digest([file], memory) == first
    changed = write(tmp_path / "a", b"Weights")
    assert weights_digest([changed], memory) != first
    for other in ("", "[]", '{"a": 1}', "{"):
        memory.write_text(other)
        assert weights_digest([changed], memory) != first
        assert len(json.loads(memory.read_text())) == 1


def test_a_file_that_was_replaced_is_not_the_one_loaded(tmp_path: Path) -> None:
    file = write(tmp_path / "a", b"weights")
    write(tmp_path / "b", b"weights")
    os.replace(tmp_path / "b", tmp_path / "a")
    with pytest.raises(FileChanged, match="a is not the file that was loaded"):
        weights_digest([file], tmp_path / "digests.json")
    with pytest.raises(FileNotFoundError):
        weights_digest([file._replace(path=str(tmp_path / "c"))], tmp_path / "digests.json")


def test_what_is_known_is_not_read(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = open_checkpoint(data / "gguf" / "tiny-llama-q4_1.gguf")
    first = WeightsDigest(checkpoint, memory=tmp_path / "digests.json")
    assert first.known() is None
    taken = first.take()
    assert first.known() == taken
    monkeypatch.setattr(digest, "_digest", lambda file: pytest.fail("read again"))
    again = WeightsDigest(checkpoint, memory=tmp_path / "digests.json")
    assert again.known() == again.take() == taken


@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("remembered", [False, True])
def test_a_digest_is_of_what_was_mapped(data: Path, tmp_path: Path, replaced: bool, remembered: bool) -> None:
    """Not of what was written into the file since, which the mapping then shows, nor of what is in its place."""
    path, memory = tmp_path / "model.gguf", tmp_path / "digests.json"
    content = (data / "gguf" / "tiny-llama-q4_1.gguf").read_bytes()
    path.write_bytes(content)
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    if remembered:
        WeightsDigest(open_checkpoint(path), memory=memory).take()
    checkpoint = open_checkpoint(path)
    time.sleep(0.02)  # the clock of a file system may tick every 10 ms
    target = tmp_path / "other" if replaced else path
    target.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    os.utime(target, ns=times)  # as some tools do that copy
    if replaced:
        os.replace(target, path)
    digest = WeightsDigest(checkpoint, memory=memory)
    for _ in range(2):
        with pytest.raises(FileChanged, match="is not the file that was loaded"):
            digest.take()
    changed = WeightsDigest(open_checkpoint(path), memory=memory)
    assert changed.known() is None and changed.take() != digest.known()


def test_threads_remember_beside_each_other(tmp_path: Path) -> None:
    """Each in a file of its own, which is there before it is renamed."""
    names: list[str] = []
    meet = threading.Barrier(2)
    replace = os.replace

    def wait(scratch: Path, memory: Path) -> None:
        names.append(scratch.name)
        meet.wait(SECONDS)
        replace(scratch, memory)

    files = [write(tmp_path / name, name.encode()) for name in "ab"]
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.setattr(os, "replace", wait)
        list(pool.map(lambda file: weights_digest([file], tmp_path / "digests.json"), files))
    assert len(set(names)) == 2 and {path.name for path in tmp_path.iterdir()} == {"a", "b", "digests.json"}


def test_nothing_to_remember_in(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert len(weights_digest([write(tmp_path / "a", b"x")], tmp_path / "file" / "digests.json")) == 32


def test_whatever_changes_the_blocks_changes_the_space(data: Path, tmp_path: Path) -> None:
    def taken(checkpoint: Checkpoint) -> bytes:
        return WeightsDigest(checkpoint, memory=tmp_path / "digests.json").take()

    checkpoint = open_checkpoint(data / "gguf" / "tiny-llama-q4_1.gguf")
    files = taken(checkpoint)
    graph = build_graph(checkpoint)
    usual = space.kv_space(graph, "avx2 build 1", files)
    assert usual == space.kv_space(build_graph(open_checkpoint(checkpoint.path)), "avx2 build 1", files)
    others = [
        space.kv_space(graph, "avx2 build 2", files),
        space.kv_space(build_graph(checkpoint, "bf16"), "avx2 build 1", files),
        space.kv_space(build_graph(checkpoint, "f32"), "avx2 build 1", files),
        space.kv_space(graph, "avx2 build 1", taken(open_checkpoint(data / "gguf" / "tiny-llama-q8_0.gguf"))),
    ]
    for key, value in (("rope_theta", 9999.0), ("rms_norm_eps", 1e-3)):
        checkpoint.config[key] = value
        others.append(space.kv_space(build_graph(checkpoint), "avx2 build 1", files))
    assert len({usual, *others}) == 1 + len(others)


def test_the_fingerprint_names_version_level_and_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    usual = fingerprint.fingerprint("avx2")
    assert usual == fingerprint.fingerprint("avx2")
    others = [fingerprint.fingerprint("generic")]
    with monkeypatch.context() as patch:
        patch.setattr(fingerprint, "NUMERICS_VERSION", fingerprint.NUMERICS_VERSION + 1)
        others.append(fingerprint.fingerprint("avx2"))
    (tmp_path / "other.py").write_bytes(b"x")
    for module, name, value in (
        (_native, "__file__", str(tmp_path / "other.py")),
        (weights, "__path__", [str(tmp_path)]),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, value)
            packer_digest.cache_clear()
            others.append(fingerprint.fingerprint("avx2"))
    packer_digest.cache_clear()
    assert len({usual, *others}) == 1 + len(others) == 5
