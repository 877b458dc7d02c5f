"""The store of packed weights by itself: what is written comes back, and nothing else ever does."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import struct
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from numpy.typing import NDArray

from octavo.backends import cpu_weights
from octavo.weights import image_file, images
from octavo.weights.image_file import Damaged, ImageId
from octavo.weights.images import ImageStore, NoRoom, stored_images
from octavo.weights.mapped import MappedFile
from tests.waiting import SECONDS

ONE, TWO = ImageId(bytes(range(16)), bytes(16)), ImageId(bytes(16), bytes(range(16)))
SIZE = 1500


def image(seed: int = 0, size: int = SIZE) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def write(store: ImageStore, id: ImageId = ONE, data: NDArray[np.uint8] | None = None, model: str = "a model") -> None:
    store.write(id, model, image() if data is None else data, lambda: False)


def read(store: ImageStore, id: ImageId = ONE, size: int = SIZE, num_threads: int = 1) -> NDArray[np.uint8] | None:
    file = store.open(id, size)
    if file is None:
        return None
    out = np.zeros(size, np.uint8)
    try:
        with file:
            file.read(out, num_threads)
            file.check(out, num_threads)
    except Damaged:
        store.remove(id)
        return None
    store.used(id)
    return out


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three chunks in an image, few zeros in a header."""
    monkeypatch.setattr(image_file, "CHUNK", 512)
    monkeypatch.setattr(image_file, "ALIGN", 64)
    monkeypatch.setattr(image_file, "SYNC", 2)


@pytest.mark.parametrize("size", [1, 511, 512, 513, 1024, 10_000])
def test_images_come_back(tmp_path: Path, small: None, size: int) -> None:
    data = image(size, size)
    write(ImageStore(tmp_path / "made", 10**6), data=data, model="Modell " + "ä" * 2000)
    store = ImageStore(tmp_path / "made", 10**6)
    told: list[tuple[int, int]] = []
    for num_threads in (1, 2, 5):
        found = read(store, size=size, num_threads=num_threads)
        assert found is not None
        np.testing.assert_array_equal(found, data)
    file = store.open(ONE, size)
    assert file is not None
    with file:
        file.read(found, 1, lambda done, total: told.append((done, total)))
        found[-1] ^= 1
        with pytest.raises(Damaged):
            file.check(found, 2)
    assert told[-1] == (size, size) and told == sorted(told)
    assert ONE in store and TWO not in store and read(store, TWO) is None
    (listed,) = stored_images(tmp_path / "made")
    assert listed.model.startswith("Modell ää") and listed.file.num_bytes == Path(listed.file.path).stat().st_size
    assert all(path.stat().st_mode & 0o077 == 0 for path in (tmp_path / "made", *(tmp_path / "made").iterdir()))


def test_every_byte_counts(tmp_path: Path, small: None) -> None:
    """Each byte of the file in turn, one bit of it; and every length but the right one."""
    store = ImageStore(tmp_path, 10**6)
    write(store)
    (path,) = tmp_path.iterdir()
    good = path.read_bytes()
    for i in range(len(good)):
        path.write_bytes(good[:i] + bytes([good[i] ^ 1 << i % 8]) + good[i + 1 :])
        assert read(store, num_threads=1 + i % 2) is None and not path.exists(), i
    for bad in (b"", good[:1], good[:60], good[:-1], good + b"\0", good * 2, b"\0" * len(good)):
        path.write_bytes(bad)
        assert read(store) is None and not path.exists()
    path.write_bytes(good)
    assert (read(store) == image()).all()


def test_a_file_in_anothers_place_is_refused(tmp_path: Path, small: None) -> None:
    store = ImageStore(tmp_path, 10**6)
    write(store, ONE)
    write(store, TWO, image(1))
    (tmp_path / ONE.name).replace(tmp_path / TWO.name)
    assert read(store, TWO) is None and not list(tmp_path.iterdir())
    write(store)
    assert read(store, size=SIZE + 1) is None and ONE not in store
    write(store)
    path = tmp_path / ONE.name
    good = path.read_bytes()
    path.write_bytes(good[:8] + struct.pack("<I", image_file.VERSION + 1) + good[12:])
    assert read(store) is None


def test_the_least_recently_used_goes(tmp_path: Path, small: None) -> None:
    ids = [ImageId(bytes([i] * 16), bytes(16)) for i in range(5)]
    size = image_file.file_bytes("a model", SIZE)
    store = ImageStore(tmp_path, 3 * size)
    for i, each in enumerate(ids[:3]):
        write(store, each)
        os.utime(tmp_path / each.name, ns=(10**18 + i, 10**18 + i))
    assert read(store, ids[0]) is not None  # a use
    write(store, ids[3])
    assert [each in store for each in ids] == [True, False, True, True, False]
    write(store, ids[4], image(0, 3 * SIZE + 1000))
    assert [each in store for each in ids] == [True, False, True, True, False], "more than the bound is not kept"
    assert not store.has_room("a model", 3 * SIZE + 1000) and store.has_room("a model", SIZE)
    assert stored_images(tmp_path / "missing") == []


def test_what_an_older_version_packed_goes_first(tmp_path: Path, small: None) -> None:
    """When it was not used for a day, and only of the same weights."""
    old, other = ONE._replace(packing=bytes([7] * 16)), ImageId(bytes([9] * 16), ONE.packing)
    store = ImageStore(tmp_path, 10**6)
    for each in (old, other):
        write(store, each)
        os.utime(tmp_path / each.name, ns=(10**18, 10**18))
    write(store, recent := ONE._replace(packing=bytes([8] * 16)))
    write(store)
    assert [each in store for each in (old, other, recent, ONE)] == [False, True, True, True]


def test_no_more_goes_than_has_to(tmp_path: Path, small: None) -> None:
    """What an older version packed makes room first, and may be enough."""
    outdated = [ONE._replace(packing=bytes([i] * 16)) for i in (1, 2)]
    others = [ImageId(bytes([i] * 16), bytes(16)) for i in (3, 4)]
    size = image_file.file_bytes("a model", SIZE)
    store = ImageStore(tmp_path, 4 * size)
    for each in (*others, *outdated):
        write(store, each)
    for i, each in enumerate([*others, *outdated]):
        os.utime(tmp_path / each.name, ns=(10**18 + i, 10**18 + i))
    write(store)
    assert [each in store for each in [*outdated, *others, ONE]] == [False, False, True, True, True]


def test_nothing_goes_where_it_would_not_help(tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk on which there is no room even without what would be removed; and one where there is with it."""
    old, other = ONE._replace(packing=bytes([7] * 16)), ImageId(bytes([9] * 16), ONE.packing)
    size = image_file.file_bytes("a model", SIZE)
    store = ImageStore(tmp_path, 2 * size)
    for each in (old, other):
        write(store, each)
        os.utime(tmp_path / each.name, ns=(10**18, 10**18))
    disk = SimpleNamespace(total=20 * size, free=size - 1)
    monkeypatch.setattr(images.shutil, "disk_usage", lambda path: disk)
    with pytest.raises(NoRoom, match="would leave too little"):
        write(store)
    assert old in store and other in store
    disk.free = size
    write(store)
    assert old not in store and other in store and ONE in store


def test_what_cannot_be_read_stops_nothing(tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder, a pipe and a link that have the names of images, and a file of another user."""
    names = [ImageId(bytes([i] * 16), bytes(16)).name for i in range(1, 5)]
    (tmp_path / names[0]).mkdir()
    os.mkfifo(tmp_path / names[1])
    (tmp_path / names[2]).symlink_to("nowhere")
    (tmp_path / names[3]).write_text("not ours")
    read_name = images.model_of

    def model_of(path: Path) -> str:
        if path.name == names[3]:
            raise PermissionError(path)
        return read_name(path)

    monkeypatch.setattr(images, "model_of", model_of)
    store = ImageStore(tmp_path, 10**6)
    write(store, TWO)
    assert [image.model for image in stored_images(tmp_path)] == ["a model"]
    assert {path.name for path in tmp_path.iterdir()} == {*names, TWO.name}


def test_a_thread_that_fails_has_checked_nothing(tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it fails of: what it has taken, nobody else looks at."""
    store = ImageStore(tmp_path, 10**6)
    write(store)
    file = store.open(ONE, SIZE)
    assert file is not None
    digest = image_file.xxhash.xxh3_128_digest
    failed = threading.Event()

    def fail(chunk: memoryview) -> bytes:
        if threading.current_thread() is threading.main_thread():
            failed.wait(SECONDS)  # so that the other has one
            return digest(chunk)
        failed.set()
        raise MemoryError

    monkeypatch.setattr(image_file.xxhash, "xxh3_128_digest", fail)
    with file, pytest.raises(MemoryError):
        file.check(image(), 2)


def test_pages_that_cannot_be_read_are_an_error(tmp_path: Path) -> None:
    """As on a disk that fails: to touch them would end the process."""
    write(ImageStore(tmp_path, 10**8))
    store = ImageStore(tmp_path, 10**8)
    file = store.open(ONE, SIZE)
    assert file is not None
    with file:
        mapped = MappedFile(tmp_path / ONE.name).data[file.start :]
        file.check(mapped, 2)
        os.truncate(tmp_path / ONE.name, file.start)
        with pytest.raises(OSError, match="cannot be read"):
            file.check(mapped, 2)
        assert not cpu_weights.in_huge_pages(mapped)


def test_only_the_mapping_reads_the_image(tmp_path: Path) -> None:
    """Not the kernel ahead of what is read of the header: what comes in that way is not in huge pages."""
    size = 2 * image_file.ALIGN
    store = ImageStore(tmp_path, 10**9)
    write(store, data=image(0, size))
    mapped = MappedFile(tmp_path / ONE.name).data
    with open(tmp_path / ONE.name, "r+b") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if cached(mapped):
        pytest.skip("this file system keeps its files in memory")
    found = store.open(ONE, size)
    assert found is not None
    with found:
        time.sleep(0.05)  # of what is read ahead, nobody waits for
        assert cached(mapped[: found.start]) and not cached(mapped[found.start :])
        found.check(mapped[found.start :], 1)
    assert cached(mapped[found.start :])


def cached(mapped: NDArray[np.uint8]) -> bool:
    """Whether any page of a mapped file is in the page cache."""
    pages = np.zeros(-(-len(mapped) // mmap.PAGESIZE), np.uint8)
    libc = ctypes.CDLL(None)
    assert libc.mincore(*map(ctypes.c_void_p, (mapped.ctypes.data, len(mapped), pages.ctypes.data))) == 0
    return bool((pages & 1).any())


def test_foreign_files_are_left_alone(tmp_path: Path, small: None) -> None:
    store = ImageStore(tmp_path, image_file.file_bytes("", SIZE))
    foreign = ("notes.txt", f"{ONE.name}.bak", ONE.name.upper(), ".hidden")
    for name in foreign:
        (tmp_path / name).write_text("mine")
    left = [tmp_path / f".{ONE.name}.{pid}.1" for pid in (1, 2)]  # by writers, of which one is gone
    for path in left:
        path.write_bytes(b"half")
    os.utime(left[0], (0, 0))
    write(store, TWO, model="")
    assert {path.name for path in tmp_path.iterdir()} == {*foreign, left[1].name, TWO.name}
    assert [Path(image.file.path).name for image in stored_images(tmp_path)] == [TWO.name]


def test_stopped_in_the_middle_leaves_nothing(tmp_path: Path, small: None) -> None:
    told: list[int] = []
    ImageStore(tmp_path, 10**6).write(ONE, "", image(), lambda: bool(told.append(1)) or len(told) == 3)
    assert len(told) == 3 and not list(tmp_path.iterdir())


def test_a_full_disk_leaves_nothing(tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ImageStore(tmp_path, 10**6)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (900, hard))  # the disk takes a part of what is written
    try:
        with pytest.raises(OSError, match="File too large"):
            write(store)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(images, "KEPT_FREE", 1.0)
    with pytest.raises(NoRoom, match="would leave too little"):
        write(store)
    assert not list(tmp_path.iterdir())


def test_directories_that_cannot_be_used(tmp_path: Path, small: None) -> None:
    (tmp_path / "file").write_text("")
    for directory in (tmp_path / "file", tmp_path / "file" / "below"):
        store = ImageStore(directory, 10**6)
        assert ONE not in store and read(store) is None
        with pytest.raises(OSError, match=r"Not a directory|File exists"):
            write(store)
    store = ImageStore(tmp_path / "folder", 10**6)
    (tmp_path / "folder" / ONE.name).mkdir(parents=True)
    assert read(store) is None
