"""BlockStore: KV blocks in files, one each, that outlive the process.

A block's name is its chain key (`prefix.chain_key`) under a seed that holds everything its bytes depend on, so equal
names mean equal bytes, whoever wrote them. Several processes may share a directory::

    DIR/<space>/<key>.<group>.kv     space: digest of weights, graph, numerics, build; key: digest of the prefix

A file holds a header, the token ids and the payload (see `_HEADER`). It is written beside its place and renamed, and
every byte of it is checked when it is read: what does not fit is refused and removed. Files are not forced to the
disk: what a power failure leaves half-written is found by its checksum.
"""

from __future__ import annotations

import errno
import os
import re
import struct
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import xxhash

from octavo.cache.prefix import Key
from octavo.disk import StoredFile, is_stale, oldest, private, remove

MAGIC = b"OctavoKV"
VERSION = 1

_HEADER = struct.Struct("<8s I I 16s 16s 16s I f Q")
"""magic, version, group, space, key, parent, number of token ids, seconds to compute them, bytes of payload.

Behind it: the token ids (u32 each), the payload, and XXH3-128 of all before. That hash finds damage, 14 GB/s a core;
it is no defence against an owner of the directory, who could as well replace the weights."""

_CHECKSUM_BYTES = 16
_NAME = re.compile(r"[0-9a-f]{32}\.[0-9]{1,3}\.kv")
_SPACE = re.compile(r"[0-9a-f]{32}")

LOW_WATER = 0.9
"""Of the bound, what is left after removing: so that not every write has to look for the oldest file."""


class BlockId(NamedTuple):
    """What a stored block holds: the keys and values of `token_ids` behind the prefix `parent`, for one KV group."""

    key: Key
    group: int
    parent: Key
    token_ids: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"{self.key.hex()}.{self.group}.kv"


class Counters(NamedTuple):
    """Of this process. They only go up."""

    written: int = 0  # files
    read: int = 0
    refused: int = 0  # damaged or foreign, and removed
    removed: int = 0  # to keep the bound


def stored_blocks(directory: Path) -> Iterator[StoredFile]:
    """Of all models; what else the user keeps there is not looked at. Removes what processes that are gone have left
    unfinished. Raises OSError."""
    for folder in os.scandir(directory):
        if not (_SPACE.fullmatch(folder.name) and folder.is_dir(follow_symlinks=False)):
            continue
        for entry in os.scandir(folder.path):
            with suppress(FileNotFoundError):  # another process removed it
                info = entry.stat(follow_symlinks=False)
                if _NAME.fullmatch(entry.name):
                    yield StoredFile(info.st_mtime_ns, info.st_size, entry.path)
                elif _NAME.match(entry.name, 1) and is_stale(info):
                    os.unlink(entry.path)


class BlockStore:
    """Thread-safe. Methods raise OSError where the directory cannot be used; a block that is not there is no error."""

    def __init__(self, directory: Path, space: bytes, max_bytes: int) -> None:
        """Makes the directory, readable by its owner only, and looks at what is in it. `space`: 16 bytes."""
        self._root = directory
        self._space = space
        self._max_bytes = max_bytes
        self._folder = directory / space.hex()
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._looking = threading.Lock()
        self._names: set[str] = set()  # of this space
        self._meanwhile: dict[str, bool] | None = None  # what came (True) and went since the look under way began
        self._num_bytes = 0  # of all spaces, as far as known
        self._unseen = 0  # written since the last look at what others did
        self._counters = Counters()
        self.refresh()

    @property
    def space(self) -> bytes:
        return self._space

    @property
    def counters(self) -> Counters:
        return self._counters

    @property
    def num_bytes(self) -> int:
        """Of all files, also those of other models; files that others wrote are counted with the next look."""
        return self._num_bytes

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, block: BlockId) -> bool:
        """Whether a file of this name was there at the last look, or was written since. No input or output."""
        return block.name in self._names

    def write(self, block: BlockId, payload: memoryview, seconds: float, used_ns: int) -> None:
        """Store a block, unless it is there. `seconds`: what it cost to compute. `used_ns`: as in `touch`.

        The block is known to be there somewhat later than its file is seen, and counted last.
        """
        if block in self:
            return
        header = self._header(block, len(payload), seconds)
        checksum = xxhash.xxh3_128(header)
        checksum.update(payload)
        path = self._folder / block.name
        scratch = self._folder / f".{block.name}.{os.getpid()}.{threading.get_ident()}"
        num_bytes = len(header) + len(payload) + _CHECKSUM_BYTES
        try:
            with open(scratch, "xb", buffering=0, opener=private) as file:
                if os.writev(file.fileno(), [header, payload, checksum.digest()]) != num_bytes:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            os.utime(scratch, ns=(used_ns, used_ns))
            os.replace(scratch, path)
        except OSError:
            scratch.unlink(missing_ok=True)
            raise
        with self._lock:
            self._num_bytes += num_bytes
            self._unseen += num_bytes
        self._note(block.name, True)
        self._count(written=1)
        if self._num_bytes > self._max_bytes or self._unseen > self._max_bytes // 32:
            self.refresh()

    def read(self, block: BlockId, payload: memoryview) -> float | None:
        """Fill `payload`, which has the block's size, and return the seconds that the block cost to compute.

        None, and the file is gone: it was not there, or one of its bytes is not what was written. `payload` then holds
        anything.
        """
        path = self._folder / block.name
        expected = self._header(block, len(payload), 0.0)
        header, checksum = bytearray(len(expected)), bytearray(_CHECKSUM_BYTES)
        num_bytes = len(expected) + len(payload) + _CHECKSUM_BYTES
        try:
            with path.open("rb", buffering=0) as file:
                whole = os.fstat(file.fileno()).st_size == num_bytes
                whole = whole and os.preadv(file.fileno(), [header, payload, checksum], 0) == num_bytes
        except FileNotFoundError:
            self._note(block.name, False)
            return None
        if whole:
            digest = xxhash.xxh3_128(header)
            digest.update(payload)
            seconds = float(_HEADER.unpack_from(header)[7])
            if digest.digest() == checksum and header == self._header(block, len(payload), seconds):
                self._count(read=1)
                return seconds
        path.unlink(missing_ok=True)
        self._note(block.name, False)
        self._count(refused=1)
        return None

    def touch(self, blocks: Iterable[BlockId], used_ns: int) -> None:
        """The blocks of one chain, first to last, were used at `used_ns` (wall clock): the first is removed last."""
        for depth, block in enumerate(blocks):
            try:
                os.utime(self._folder / block.name, ns=(used_ns - depth, used_ns - depth))
            except FileNotFoundError:
                self._note(block.name, False)

    def forget(self) -> None:
        """From now on no block is known to be there; `clear` removes the files."""
        with self._lock:
            self._names, self._meanwhile = set(), None

    def clear(self) -> None:
        """Remove all blocks of this space."""
        for entry in os.scandir(self._folder):
            if _NAME.fullmatch(entry.name):
                Path(entry.path).unlink(missing_ok=True)
        self.refresh()

    def refresh(self) -> None:
        """Look at what is there, others' files too; remove the least recently used ones beyond the bound."""
        with self._looking:
            self._look()

    def _look(self) -> None:
        meanwhile: dict[str, bool] = {}
        with self._lock:
            self._meanwhile = meanwhile
        seen_ns = self._folder.stat().st_mtime_ns
        files = list(stored_blocks(self._root))
        total = sum(file.num_bytes for file in files)
        removed = oldest(files, int(LOW_WATER * self._max_bytes)) if total > self._max_bytes else []
        remove(removed)
        total -= sum(file.num_bytes for file in removed)
        paths = (Path(file.path) for file in set(files) - set(removed))
        names = {path.name for path in paths if path.parent == self._folder}
        with self._lock:
            if self._meanwhile is meanwhile:  # else all that was seen was forgotten
                self._names = {name for name in names if meanwhile.get(name, True)}
                self._names |= {name for name, there in meanwhile.items() if there}
            self._meanwhile = None
            self._num_bytes, self._unseen = total, 0
        self._seen_ns = seen_ns
        self._count(removed=len(removed))

    def refresh_if_changed(self) -> None:
        """Look again where another process may have added or removed blocks of this space."""
        if self._folder.stat().st_mtime_ns != self._seen_ns:
            self.refresh()

    def probe(self, payload: memoryview) -> tuple[int, float] | None:
        """(number of tokens, seconds they cost to compute) of some stored block that has the size of `payload`."""
        for name in list(self._names)[:8]:
            try:
                with (self._folder / name).open("rb") as file:
                    fixed = _HEADER.unpack(file.read(_HEADER.size))
                    num_tokens = min(fixed[6], len(payload))
                    token_ids = struct.unpack(f"<{num_tokens}I", file.read(4 * num_tokens))
            except (FileNotFoundError, struct.error):
                continue
            seconds = (
                self.read(BlockId(fixed[4], fixed[2], fixed[5], token_ids), payload)
                if fixed[8] == len(payload)
                else None
            )
            if seconds is not None:
                return num_tokens, seconds
        return None

    def _note(self, name: str, there: bool) -> None:
        with self._lock:
            (self._names.add if there else self._names.discard)(name)
            if self._meanwhile is not None:
                self._meanwhile[name] = there

    def _count(self, **more: int) -> None:
        with self._lock:
            self._counters = Counters(*(n + more.get(name, 0) for name, n in self._counters._asdict().items()))

    def _header(self, block: BlockId, num_bytes: int, seconds: float) -> bytes:
        key, group, parent, token_ids = block
        fixed = (MAGIC, VERSION, group, self._space, key, parent, len(token_ids), seconds, num_bytes)
        return _HEADER.pack(*fixed) + struct.pack(f"<{len(token_ids)}I", *token_ids)
