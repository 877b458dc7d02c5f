"""Octavo, by the engine of its own bench."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

from protocol import Run, Workload, main

from octavo.bench.offline import Offline, check
from octavo.config import EngineConfig


def load(w: Workload) -> tuple[Run, dict[str, Any]]:
    config = EngineConfig(
        model=w.model, num_threads=w.threads, max_num_seqs=max(64, w.num_prompts), kv_dtype="int8" if w.kv_dtype == "int8" else "auto",
    )  # fmt: skip
    work = Offline(config)
    ready = work.engine.loaded.ready(0, 0.0)
    kinds = {"offline": offline, "stream": stream, "prefill": prefill, "decode": decode}
    return (lambda run: kinds[w.kind](work, w, w.prompts(run))), {"isa": ready.isa, "threads": ready.threads}


def offline(work: Offline, w: Workload, prompts: list[list[int]]) -> float:
    began = time.perf_counter()
    for prompt in prompts:
        work.add(prompt, w.output_len)
    check(sum(work.steps()), w.num_prompts * w.output_len, work.num_cached)
    return w.num_prompts * (w.input_len + w.output_len) / (time.perf_counter() - began)


def stream(work: Offline, w: Workload, prompts: list[list[int]]) -> float:
    work.add(prompts[0], w.output_len)
    moments = list(_moments(work, 1))
    check(len(moments), w.output_len, work.num_cached)
    return (w.output_len - 1) / (moments[-1] - moments[0])


def prefill(work: Offline, w: Workload, prompts: list[list[int]]) -> float:
    began = time.perf_counter()
    work.add(prompts[0], 1)
    check(sum(work.steps()), 1, work.num_cached)
    return w.input_len / (time.perf_counter() - began)


def decode(work: Offline, w: Workload, prompts: list[list[int]]) -> float:
    """The prompts are computed before; the cache gives them back, so that all streams begin together."""
    prompts = [prompt[: w.input_len - w.output_len // 2] for prompt in prompts]
    for prompt in prompts:
        work.add(prompt, 1)
    check(sum(work.steps()), w.num_prompts)
    for prompt in prompts:
        work.add(prompt, w.output_len + 1)
    moments = list(_moments(work, w.num_prompts))
    check(len(moments), w.output_len + 1)
    return w.num_prompts * w.output_len / (moments[-1] - moments[0])


def _moments(work: Offline, each: int) -> Iterator[float]:
    """Of the steps out of which so many tokens came."""
    for count in work.steps():
        if count == each:
            yield time.perf_counter()


def serve(w: Workload, port: int) -> list[str]:
    command = [sys.executable, "-m", "octavo.cli.main", "serve", w.model, "--port", str(port), "--request-log", "off"]
    command += ["--num-threads", str(w.threads), "--max-num-seqs", str(max(64, w.num_prompts))]
    return command + (["--kv-dtype", "int8"] if w.kv_dtype == "int8" else [])


if __name__ == "__main__":
    main(load, serve)
