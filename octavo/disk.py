"""Directories of caches: where they are, who may read them, and how they keep within a bound."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

STALE_SECONDS = 3600
"""A temporary file older than this was left by a process that is gone."""


class StoredFile(NamedTuple):
    used_ns: int  # the time of modification, which every use sets
    num_bytes: int
    path: str


def cache_home() -> Path:
    """The user's directory for what can be made again: `octavo` in $XDG_CACHE_HOME, which is ~/.cache where it is not set
    (XDG Base Directory Specification)."""
    return _home("XDG_CACHE_HOME", ".cache")


def state_home() -> Path:
    """The same for what cannot be made again, but may be lost: $XDG_STATE_HOME, or ~/.local/state."""
    return _home("XDG_STATE_HOME", ".local/state")


def _home(variable: str, default: str) -> Path:
    home = os.environ.get(variable, "")
    return (Path(home) if os.path.isabs(home) else Path.home() / default) / "octavo"


def private(path: str, flags: int) -> int:
    """An opener: what is made is for its owner alone."""
    return os.open(path, flags, 0o600)


def is_stale(info: os.stat_result) -> bool:
    """Of a temporary file."""
    return info.st_mtime < time.time() - STALE_SECONDS


def oldest(files: Sequence[StoredFile], most_bytes: int) -> list[StoredFile]:
    """The least recently used, as many as have to go for the others to have `most_bytes` at most."""
    total, found = sum(file.num_bytes for file in files), []
    for file in sorted(files):
        if total <= most_bytes:
            break
        total -= file.num_bytes
        found.append(file)
    return found


def remove(files: Iterable[StoredFile]) -> None:
    """It is no error where another process removed one. Raises OSError where one cannot be removed."""
    for file in files:
        Path(file.path).unlink(missing_ok=True)
