"""What the weights of a checkpoint are, whatever the files are called: a digest, taken once per file and remembered."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from octavo.disk import cache_home
from octavo.weights.spec import Checkpoint

CHUNK = 2**22


class FileIdentity(NamedTuple):
    """Stays while a file's content does: every way to change one changes its time of modification, or its inode."""

    path: str
    device: int
    inode: int
    size: int
    modified_ns: int

    @classmethod
    def of(cls, path: Path) -> FileIdentity:
        info = path.stat()
        return cls(str(path.resolve()), info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns)


class FileChanged(OSError):
    """A file is not the one that was loaded."""


class WeightsDigest:
    """Of the files that decide the values of a checkpoint's tensors, as they are when this is made. Thread-safe."""

    def __init__(self, checkpoint: Checkpoint, rounding: str = "", memory: Path | None = None) -> None:
        """rounding: how weights are made of what the files hold (`quantize.at_load`); "": they are as the files hold them.
        memory: as of `weights_digest`. Default: one for all models of this user."""
        self._rounding = rounding
        self._files = weight_files(checkpoint)
        self._memory = memory or cache_home() / "digests.json"
        self._lock = threading.Lock()
        self._digest: bytes | None = None

    def known(self) -> bytes | None:
        """What is remembered; None where a file would have to be read."""
        if self._digest is None:
            known = _read(self._memory)
            if all(_key(file) in known for file in self._files):
                self._digest = self._with_rounding(_joined([known[_key(file)] for file in self._files]))
        return self._digest

    def take(self) -> bytes:
        """As `weights_digest`: minutes for the largest models, once."""
        with self._lock:  # whoever else wants it waits instead of reading the files, too
            if self._digest is None:
                self._digest = self._with_rounding(weights_digest(self._files, self._memory))
            return self._digest

    def _with_rounding(self, digest: bytes) -> bytes:
        return hashlib.sha256(digest + self._rounding.encode()).digest() if self._rounding else digest


def weight_files(checkpoint: Checkpoint) -> list[FileIdentity]:
    """The files that decide the values of tensors, as they are now."""
    return [FileIdentity.of(Path(file)) for file in checkpoint.files()]


def weights_digest(files: Sequence[FileIdentity], memory: Path) -> bytes:
    """SHA-256 over the digests of `files`. Reads each at most once on this machine: `memory` is a JSON file of digests.

    Raises FileChanged where a file is no longer what it was, OSError where it cannot be read. That nothing can be
    remembered is no error.
    """
    known = _read(memory)
    digests = [known.get(_key(file)) or _digest(file) for file in files]
    new = {_key(file): digest for file, digest in zip(files, digests, strict=True) if _key(file) not in known}
    if new:
        _write(memory, {**_read(memory), **new})
    return _joined(digests)


def _joined(digests: Sequence[str]) -> bytes:
    return hashlib.sha256("".join(digests).encode()).digest()


def _digest(file: FileIdentity) -> str:
    path = Path(file.path)
    with path.open("rb", buffering=0) as data:
        digest = hashlib.sha256()
        while chunk := data.read(CHUNK):
            digest.update(chunk)
        info = os.fstat(data.fileno())
    if (info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns) != file[1:]:
        raise FileChanged(f"{path} is not the file that was loaded")
    return digest.hexdigest()


def _key(file: FileIdentity) -> str:
    return ":".join(map(str, (*file[1:], file.path)))


def _read(memory: Path) -> dict[str, str]:
    """Empty where there is none, or something else is in its place."""
    try:
        known = json.loads(memory.read_text())
        return {key: value for key, value in known.items() if len(value) == 64}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def _write(memory: Path, digests: dict[str, str]) -> None:
    scratch = memory.with_name(f".{memory.name}.{os.getpid()}")
    try:
        memory.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_text(json.dumps(digests, indent=1))
        os.replace(scratch, memory)
    except OSError:
        with suppress(OSError):
            scratch.unlink()
