"""What the weights of a checkpoint are, whatever the files are called: a digest, taken once per file and remembered."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from octavo.disk import cache_home
from octavo.weights.mapped import FileIdentity
from octavo.weights.spec import Checkpoint

CHUNK = 2**22


class FileChanged(OSError):
    """A file is not the one that was loaded."""


class WeightsDigest:
    """Of the files that decide the values of a checkpoint's tensors, as they were when it was opened. Thread-safe."""

    def __init__(self, checkpoint: Checkpoint, rounding: str = "", memory: Path | None = None) -> None:
        """rounding: how weights are made of what the files hold (`quantize.at_load`); "": they are as the files hold them.
        memory: as of `weights_digest`. Default: one for all models of this user."""
        self._rounding = rounding
        self._files = checkpoint.files()
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
        """As `weights_digest`: minutes for the largest models, once. What was made of the files before is made of this.

        Raises FileChanged, too, where a file was changed or replaced since it was opened, whatever is remembered of it.
        """
        with self._lock:  # whoever else wants it waits instead of reading the files, too
            if self._digest is None:
                self._digest = self._with_rounding(weights_digest(self._files, self._memory))
            for file in self._files:  # a mapped file that is written to changes under its reader
                if FileIdentity.of(Path(file.path)) != file:
                    raise FileChanged(f"{file.path} is not the file that was loaded")
            return self._digest

    def _with_rounding(self, digest: bytes) -> bytes:
        return hashlib.sha256(digest + self._rounding.encode()).digest() if self._rounding else digest


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


def code_digest(files: Iterable[Path]) -> bytes:
    """16 bytes. Of code that decides what is made of weights, so that no change of it is forgotten."""
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        digest.update(hashlib.blake2b(file.read_bytes()).digest())
    return digest.digest()


def _joined(digests: Sequence[str]) -> bytes:
    return hashlib.sha256("".join(digests).encode()).digest()


def _digest(file: FileIdentity) -> str:
    path = Path(file.path)
    with path.open("rb", buffering=0) as data:
        digest = hashlib.sha256()
        while chunk := data.read(CHUNK):
            digest.update(chunk)
        now = FileIdentity.of(path, data.fileno())
    if now != file:
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
    scratch = memory.with_name(f".{memory.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        memory.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_text(json.dumps(digests, indent=1))
        os.replace(scratch, memory)
    except OSError:
        with suppress(OSError):
            scratch.unlink()
