"""From the start of the server process to the first token a client sees: the first time, later, and from the disk."""

from __future__ import annotations

import compileall
import dataclasses
import http.client
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import octavo
from octavo.bench.report import Result, Runs, result
from octavo.bench.served import Served, served, touch
from octavo.config import EngineConfig
from octavo.disk import cache_home
from octavo.engine.packed import MIN_BYTES

Prepare = Callable[[EngineConfig], None]

KEPT_SECONDS = 600
"""For the packed weights to be on disk."""


def measure(config: EngineConfig, repeat: int) -> Iterator[Result]:
    """Seconds. `config.model` is a path. Where the packed weights are too small to be kept, every start is a first one."""
    model = Path(config.model)
    compileall.compile_dir(Path(octavo.__file__).parent, quiet=1)  # as an installed package is
    cache_home().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_home(), prefix="bench-weights-") as kept:  # as fast as the usual place
        config = dataclasses.replace(config, weights_cache=kept)
        is_kept = sum(file.stat().st_size for file in _files(model)) >= MIN_BYTES
        touch(model)
        yield _measure(config, repeat, "first start", "no packed weights on disk", _forget)
        if is_kept:
            with served(config):
                _wait_for_image(Path(kept))
            yield _measure(config, repeat, "start", "packed weights in the page cache", lambda config: None)
            yield _measure(config, repeat, "cold start", "model and packed weights on disk alone", _evict)


def _measure(config: EngineConfig, repeat: int, name: str, state: str, prepare: Prepare) -> Result:
    runs = Runs(config, repeat, name)
    seconds, phases = [], dict[str, float]()
    for _ in runs:
        prepare(config)
        started = time.perf_counter()
        with served(config) as server:
            response = _first_token(server.port)
            seconds.append(time.perf_counter() - started)
            response.read()  # so that nothing is open when the server is told to end
            phases = _phases(server)
    return result(
        name,
        f"octavo serve, {state}: from the start of the process to the first streamed token of a short completion",
        "s",
        seconds,
        last_phases_ms={phase: round(1000 * value) for phase, value in phases.items()},
        **runs.beside(),
    )


def _forget(config: EngineConfig) -> None:
    for image in Path(config.weights_cache).iterdir():
        image.unlink()


def _evict(config: EngineConfig) -> None:
    """Out of the page cache, as far as the kernel does it: what another process maps stays."""
    for file in (*_files(Path(config.model)), *Path(config.weights_cache).iterdir()):
        with file.open("rb") as data:
            os.fsync(data.fileno())
            os.posix_fadvise(data.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _wait_for_image(directory: Path) -> None:
    end = time.monotonic() + KEPT_SECONDS
    while not list(directory.glob("*.weights")):
        if time.monotonic() > end:
            raise RuntimeError(f"no packed weights came into {directory}")
        time.sleep(0.01)


def _files(model: Path) -> list[Path]:
    return [model] if model.is_file() else sorted(path for path in model.iterdir() if path.is_file())


def _phases(server: Served) -> dict[str, float]:
    """Seconds of each, the two processes beside each other."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    return {m[1]: float(m[2]) for m in re.finditer(r'^octavo_startup_seconds\{phase="(\w+)"\} (\S+)$', text, re.M)}


def _first_token(port: int) -> http.client.HTTPResponse:
    """The stream, of which the first line was read."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    body = {"prompt": "The capital of France is", "max_tokens": 2, "stream": True, "ignore_eos": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    line = response.readline()
    if response.status != 200 or not line.startswith(b"data: {"):
        raise RuntimeError(f"no token came: {response.status} {line!r}")
    return response
