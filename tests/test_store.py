"""The block store by itself: what is written comes back, and nothing else ever does."""

from __future__ import annotations

import os
import resource
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from octavo.cache import store as module
from octavo.cache.prefix import chain_key, root_key
from octavo.cache.store import BlockId, BlockStore

SPACE = bytes(range(16))
SIZE = 1000


def chain(count: int, seed: bytes = b"", group: int = 0) -> list[BlockId]:
    blocks, parent = [], root_key(seed)
    for i in range(count):
        token_ids = tuple(range(16 * i, 16 * i + 16))
        blocks.append(BlockId(chain_key(parent, token_ids), group, parent, token_ids))
        parent = blocks[-1].key
    return blocks


def payload(block: BlockId) -> memoryview:
    return memoryview((block.key * (SIZE // 16 + 1))[:SIZE])


def write(store: BlockStore, blocks: list[BlockId], used_ns: int = 10**18) -> None:
    for depth, block in enumerate(blocks):
        store.write(block, payload(block), 0.25, used_ns - depth)


def read(store: BlockStore, block: BlockId) -> bytes | None:
    buffer = bytearray(SIZE)
    return None if store.read(block, memoryview(buffer)) is None else bytes(buffer)


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.kv"))


def test_blocks_come_back_after_a_restart(tmp_path: Path) -> None:
    blocks = chain(5) + chain(2, b"salt") + chain(1, group=1)
    store = BlockStore(tmp_path, SPACE, 10**6)
    write(store, blocks)
    for again in (store, BlockStore(tmp_path, SPACE, 10**6)):
        assert len(again) == 8 and all(block in again for block in blocks)
        assert all(read(again, block) == payload(block) for block in blocks)
        assert again.num_bytes == sum(file.stat().st_size for file in files(tmp_path))
    assert read(store, chain(1, b"unknown")[0]) is None
    assert store.counters.refused == 0
    assert store.probe(memoryview(bytearray(SIZE))) == (16, 0.25)
    assert store.probe(memoryview(bytearray(SIZE + 1))) is None
    assert all(path.stat().st_mode & 0o077 == 0 for path in (tmp_path / SPACE.hex(), *files(tmp_path)))


def test_every_byte_counts(tmp_path: Path) -> None:
    """Each byte of the file in turn, one bit of it; and every length but the right one."""
    (block,) = chain(1)
    store = BlockStore(tmp_path, SPACE, 10**6)
    write(store, [block])
    (path,) = files(tmp_path)
    good = path.read_bytes()
    for i in range(len(good)):
        path.write_bytes(good[:i] + bytes([good[i] ^ 1 << i % 8]) + good[i + 1 :])
        assert read(store, block) is None and not path.exists() and block not in store
    damaged = len(good)
    for bad in (b"", good[:1], good[:79], good[:-1], good + b"\0", good * 2, b"\0" * len(good)):
        path.write_bytes(bad)
        assert read(store, block) is None and not path.exists()
        damaged += 1
    assert store.counters.refused == damaged and store.counters.read == 0
    path.write_bytes(good)
    assert read(store, block) == payload(block)


def test_a_file_in_anothers_place_is_refused(tmp_path: Path) -> None:
    """Whole and right, but of another prefix, parent, group, model or version."""
    one, two = chain(2)
    store = BlockStore(tmp_path / "a", SPACE, 10**6)
    other = BlockStore(tmp_path / "b", bytes(16), 10**6)
    write(store, [one, two])
    write(other, [one])
    place = {block: tmp_path / "a" / SPACE.hex() / block.name for block in (one, two)}
    good = place[one].read_bytes()
    for foreign in (place[two].read_bytes(), files(tmp_path / "b")[0].read_bytes()):
        place[one].write_bytes(foreign)
        assert read(store, one) is None and not place[one].exists()
    for wrong in (one._replace(parent=two.key), one._replace(token_ids=two.token_ids)):
        place[one].write_bytes(good)
        assert read(store, wrong) is None and not place[one].exists()
    write(store, [one._replace(group=1)])
    (tmp_path / "a" / SPACE.hex() / one._replace(group=1).name).replace(place[one])
    assert read(store, one) is None
    place[one].write_bytes(good[:8] + struct.pack("<I", module.VERSION + 1) + good[12:])
    assert read(store, one) is None
    assert store.counters.refused == 6


def test_the_least_recently_used_goes_tails_first(tmp_path: Path) -> None:
    size = SIZE + 80 + 4 * 16 + 16
    store = BlockStore(tmp_path, SPACE, 20 * size)
    old, new = chain(10, b"old"), chain(10, b"new")
    write(store, old, used_ns=10**18)
    write(store, new, used_ns=10**18 + 10**9)
    assert len(store) == 20 and store.num_bytes == 20 * size
    store.touch(old[:6], 10**18 + 2 * 10**9)
    write(store, chain(1, b"newest"), used_ns=10**18 + 3 * 10**9)
    assert store.num_bytes <= 18 * size and store.counters.removed == 3
    assert [block in store for block in old] == [True] * 7 + [False] * 3
    assert all(block in store for block in new)
    write(store, chain(10, b"more"), used_ns=10**18 + 4 * 10**9)
    assert store.num_bytes <= 20 * size
    assert all(block in store for block in old[:6]) and old[6] not in store and new[9] not in store
    assert store.num_bytes == sum(file.stat().st_size for file in files(tmp_path))


def test_the_bound_counts_other_models_and_touches_nothing_else(tmp_path: Path) -> None:
    size = SIZE + 80 + 4 * 16 + 16
    mine = [tmp_path / "letter.txt", tmp_path / SPACE.hex() / "letter.kv", tmp_path / "0123" / f"{'0' * 32}.0.kv"]
    BlockStore(tmp_path, bytes(16), 10 * size).write(chain(1)[0], payload(chain(1)[0]), 0.0, 10**18)
    store = BlockStore(tmp_path, SPACE, 10 * size)
    for path in mine:
        path.parent.mkdir(exist_ok=True)
        path.write_text("of the user")
    write(store, chain(10), used_ns=10**18 + 10**9)
    assert chain(1)[0] not in BlockStore(tmp_path, bytes(16), 10 * size)
    assert all(path.exists() for path in mine)
    assert len(BlockStore(tmp_path, SPACE, 4 * size)) == 3  # a bound that was lowered


def test_what_a_crash_left_is_removed(tmp_path: Path) -> None:
    store = BlockStore(tmp_path, SPACE, 10**6)
    write(store, chain(1))
    folder = tmp_path / SPACE.hex()
    old, young = (folder / f".{chain(1)[0].name}.{n}" for n in ("1.1", "2.2"))
    old.write_text("half")
    young.write_text("half")
    os.utime(old, (0, 0))
    store.refresh()
    assert not old.exists() and young.exists() and len(store) == 1


def test_two_processes_share_a_directory(tmp_path: Path) -> None:
    a, b = (BlockStore(tmp_path, SPACE, 10**6) for _ in range(2))
    blocks = chain(4)
    write(a, blocks[:2])
    assert blocks[0] not in b and read(b, blocks[0]) == payload(blocks[0])  # there, whatever b has seen
    b.refresh_if_changed()
    assert blocks[1] in b
    write(b, blocks)
    files(tmp_path)[0].unlink()  # by a third
    assert sorted(read(a, block) is None for block in blocks) == [False, False, False, True]
    assert a.counters.refused == 0

    def work(store: BlockStore, seed: bytes) -> None:
        for _ in range(30):
            for block in chain(5, seed):
                write(store, [block])
                assert read(store, block) in (None, payload(block))

    threads = [threading.Thread(target=work, args=(store, seed)) for store in (a, b) for seed in (b"x", b"x", b"y")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert a.counters.refused == b.counters.refused == 0


def test_what_changes_while_a_look_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread refuses a file that was seen, and writes one that was not; or forgets them all."""
    store = BlockStore(tmp_path, SPACE, 10**6)
    old, damaged, new = chain(3)
    write(store, [old, damaged])
    folder, scandir = tmp_path / SPACE.hex(), os.scandir

    def during_a_look(happens: Callable[[], object]) -> None:
        def seen(path: Path | str) -> Iterator[os.DirEntry[str]]:
            yield from scandir(path)
            if str(path) == str(folder):
                happens()

        with monkeypatch.context() as patch:
            patch.setattr(os, "scandir", seen)
            store.refresh()

    (folder / damaged.name).write_bytes(b"")
    during_a_look(lambda: (read(store, damaged), write(store, [new])))
    assert [block in store for block in (old, damaged, new)] == [True, False, True]
    during_a_look(store.forget)
    assert len(store) == 0
    store.refresh()
    assert [block in store for block in (old, damaged, new)] == [True, False, True]


def test_a_directory_that_fails_says_so(tmp_path: Path) -> None:
    store = BlockStore(tmp_path, SPACE, 10**6)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE // 2, hard))  # as a full disk, of a write a part is taken
    try:
        with pytest.raises(OSError, match="No space left"):
            write(store, chain(1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list((tmp_path / SPACE.hex()).iterdir()) == [] and len(store) == 0
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        BlockStore(tmp_path / "file", SPACE, 10**6)
    (tmp_path / SPACE.hex()).rmdir()
    with pytest.raises(OSError, match=SPACE.hex()):
        write(store, chain(1))
