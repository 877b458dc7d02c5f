"""The same long prompt before and after a restart of the server, with a disk cache."""

from __future__ import annotations

import dataclasses
import http.client
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from octavo.bench.report import Result, Runs, result
from octavo.bench.served import served, touch
from octavo.config import EngineConfig
from octavo.weights.checkpoint import open_checkpoint

PROMPT_LEN = 4096


BOUND = 5.0
"""Times as fast as the cold start that the first token after a restart has to be."""


class Answer(NamedTuple):
    first_token: float  # seconds from the request
    choices: list[object]  # as they were streamed, with scores
    num_cached: int


def measure(config: EngineConfig, repeat: int) -> Result:
    """Cold time to the first token over that after a restart. RuntimeError where the two answers differ in a bit."""
    touch(Path(config.model))
    vocab_size = open_checkpoint(config.model).config["vocab_size"]
    runs = Runs(config, repeat, "restart")
    ratios, colds, warms, cached = [], [], [], []
    for run in runs:
        prompt = random.Random(run).choices(range(vocab_size), k=PROMPT_LEN)
        with tempfile.TemporaryDirectory() as disk:
            on_disk = dataclasses.replace(config, disk_cache=disk)
            with served(on_disk) as server:
                cold = _ask(server.port, prompt)
            with served(on_disk) as server:
                warm = _ask(server.port, prompt)
        if cold.num_cached or cold.choices != warm.choices:
            raise RuntimeError("the answers before and after the restart differ")
        ratios.append(cold.first_token / warm.first_token)
        colds.append(cold.first_token)
        warms.append(warm.first_token)
        cached.append(warm.num_cached)
    return result(
        "restart",
        f"octavo serve --disk-cache with one request of {PROMPT_LEN} random tokens, the server started anew, the same "
        "request: time to the first token before by that after; the answers are equal with their scores",
        "times",
        ratios,
        held=statistics.median(ratios) >= BOUND,
        cold_ms=[round(1000 * seconds) for seconds in colds],
        warm_ms=[round(1000 * seconds) for seconds in warms],
        cached_tokens=cached,
        **runs.beside(),
    )


def _ask(port: int, prompt: list[int]) -> Answer:
    body = {
        "prompt": prompt, "max_tokens": 8, "temperature": 0, "logprobs": 3, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    connection = http.client.HTTPConnection("127.0.0.1", port)
    started = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    first = response.readline()
    seconds = time.perf_counter() - started
    if response.status != 200:
        raise RuntimeError(f"no token came: {response.status} {first!r}")
    lines = [first, *response.read().splitlines()]
    events = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
    usage = next(event["usage"] for event in reversed(events) if event.get("usage"))
    choices = [event["choices"] for event in events if event["choices"]]
    return Answer(seconds, choices, usage["prompt_tokens_details"]["cached_tokens"])
