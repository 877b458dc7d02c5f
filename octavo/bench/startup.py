"""From the start of the server process to the first token a client sees."""

from __future__ import annotations

import dataclasses
import http.client
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

from octavo.bench.report import Result, result
from octavo.config import EngineConfig
from octavo.engine.client import EngineDead


def measure(config: EngineConfig, repeat: int) -> Result:
    """Seconds. The model's files are in the page cache. `config.model` is a path."""
    _touch(Path(config.model))
    runs = []
    for _ in range(repeat):
        started = time.perf_counter()
        command = [sys.executable, "-m", "octavo.cli.main", "serve", config.model, "--port", "0", *_flags(config)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                response = _first_token(_port(server))
                runs.append(time.perf_counter() - started)
                response.read()  # so that nothing is open when the server is told to end
            finally:
                server.send_signal(signal.SIGTERM)
    return result(
        "start",
        "octavo serve with the model in the page cache: from the start of the process to the first streamed token "
        "of a short completion",
        "s",
        runs,
    )


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


def _touch(path: Path) -> None:
    for file in [path] if path.is_file() else sorted(p for p in path.iterdir() if p.is_file()):
        with file.open("rb") as f:
            while f.read(2**24):
                pass


def _port(server: subprocess.Popen[str]) -> int:
    assert server.stdout is not None
    for line in server.stdout:
        if line.startswith("listening on "):
            return int(line.rsplit(":", 1)[1])
    raise EngineDead("the server ended before it was ready")


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
