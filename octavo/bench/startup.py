"""From the start of the server process to the first token a client sees."""

from __future__ import annotations

import http.client
import json
import time
from pathlib import Path

from octavo.bench.report import Result, Runs, result
from octavo.bench.served import served, touch
from octavo.config import EngineConfig


def measure(config: EngineConfig, repeat: int) -> Result:
    """Seconds. The model's files are in the page cache. `config.model` is a path."""
    touch(Path(config.model))
    runs = Runs(config, repeat, "start")
    seconds = []
    for _ in runs:
        started = time.perf_counter()
        with served(config) as server:
            response = _first_token(server.port)
            seconds.append(time.perf_counter() - started)
            response.read()  # so that nothing is open when the server is told to end
    return result(
        "start",
        "octavo serve with the model in the page cache: from the start of the process to the first streamed token "
        "of a short completion",
        "s",
        seconds,
        **runs.beside(),
    )


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
