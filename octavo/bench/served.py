"""A server process to measure."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from octavo.config import EngineConfig
from octavo.engine.client import EngineDead


class Served(NamedTuple):
    port: int
    pid: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def served(config: EngineConfig, *flags: str) -> Iterator[Served]:
    """An `octavo serve` that is ready; it is told to end with the context. `config.model` is a path."""
    command = [sys.executable, "-m", "octavo.cli.main", "serve", config.model, "--port", "0"]
    command += ["--request-log", "off", *_flags(config), *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            yield Served(_port(server), server.pid)
        finally:
            server.send_signal(signal.SIGTERM)


def touch(path: Path) -> None:
    """Bring the files of a model into the page cache."""
    for file in [path] if path.is_file() else sorted(p for p in path.iterdir() if p.is_file()):
        with file.open("rb") as f:
            while f.read(2**24):
                pass


def _flags(config: EngineConfig) -> list[str]:
    """What differs from the defaults, for the command line."""
    flags = []
    for f in dataclasses.fields(EngineConfig):
        value, name = getattr(config, f.name), f.name.replace("_", "-")
        if f.name != "model" and value != f.default:
            flags.append(
                f"--{name}={value}" if not isinstance(value, bool) else f"--{name}" if value else f"--no-{name}"
            )
    return flags


def _port(server: subprocess.Popen[str]) -> int:
    assert server.stdout is not None
    for line in server.stdout:
        if line.startswith("listening on "):
            return int(line.rsplit(":", 1)[1])
    raise EngineDead("the server ended before it was ready")
