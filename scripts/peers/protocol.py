"""What a driver has in common with the others. It runs in the environment of its peer: standard library alone.

A driver is a program that reads JSON, a line at a time, and answers each line with one. The first is the Workload; the
answer is {"ready": ..., words about how the peer was set up} or {"error": ...}. Then each line is the number of a run, the
answer {"value": ...}: tokens a second, or seconds of `start`. Of `serve` and `prefix` the answer to the Workload has the
"url" of a server that is ready, with OpenAI's completions; who drives it measures. It ends with its input.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any, NamedTuple

VOCAB = range(100, 49_000)
"""Token ids of prompts: plain tokens of the vocabulary that all models here have."""


class Workload(NamedTuple):
    kind: str  # offline, stream, prefill, decode, serve, prefix, start
    model: str  # a GGUF file
    folder: str | None  # the same weights in Hugging Face layout, bf16
    num_prompts: int
    shared_len: int  # tokens that all prompts begin with
    input_len: int  # decode: the context in the middle of the steps
    output_len: int  # decode: steps
    threads: int
    kv_dtype: str  # auto: the usual 16 bits; int8

    @property
    def length(self) -> int:
        """Of the longest sequence."""
        return self.shared_len + self.input_len + self.output_len

    def prompts(self, run: int) -> list[list[int]]:
        """Of a run; no two of all begin alike, so that nothing can be taken from a cache."""
        draw = random.Random(0)
        firsts = draw.sample(VOCAB, (run + 1) * self.num_prompts)[-self.num_prompts :]
        draw = random.Random(run)
        return [[first, *draw.choices(VOCAB, k=self.input_len - 1)] for first in firsts]


Run = Callable[[int], float]
Load = Callable[[Workload], tuple[Run, dict[str, Any]]]
"""Makes a workload ready, and words about how."""
Serve = Callable[[Workload, int], list[str]]
"""The command of a server on a port."""


def main(load: Load, serve: Serve) -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a peer prints must not be taken for an answer

    def answer(**fields: Any) -> None:
        print(json.dumps(fields), file=out, flush=True)

    workload = Workload(**json.loads(sys.stdin.readline()))
    server = None
    try:
        if workload.kind == "start":
            run, words = (lambda _: _started(workload, serve)), {}
        elif workload.kind in ("serve", "prefix"):
            server, url = _serve(workload, serve)
            run, words = (lambda _: 0.0), {"url": url}
        else:
            run, words = load(workload)
        answer(ready=True, **words)
        for line in sys.stdin:
            answer(value=run(int(line)))
    except Exception as error:
        answer(error=f"{type(error).__name__}: {' '.join(str(error).split())[:500]}")
        raise
    finally:
        if server is not None:
            _end(server)


def _serve(workload: Workload, serve: Serve) -> tuple[subprocess.Popen[bytes], str]:
    port = _free_port()
    server = subprocess.Popen(serve(workload, port), stdin=subprocess.DEVNULL)
    try:
        _first_token(server, workload, port)
    except BaseException:
        _end(server)
        raise
    return server, f"http://127.0.0.1:{port}"


def _started(workload: Workload, serve: Serve) -> float:
    """Seconds from the start of the process to the first streamed token."""
    port = _free_port()
    command = serve(workload, port)
    began = time.perf_counter()
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        _first_token(server, workload, port)
        return time.perf_counter() - began
    finally:
        _end(server)


def _first_token(server: subprocess.Popen[bytes], workload: Workload, port: int) -> None:
    """Ask until an answer begins."""
    names = [workload.folder] if workload.folder else []
    body = {"prompt": list(VOCAB)[:4], "max_tokens": 2, "temperature": 0, "stream": True, "ignore_eos": True}
    while server.poll() is None:
        try:
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}/v1/completions",
                json.dumps(body | {"model": _model(port, names)}).encode(),
                {"content-type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=600) as answer:
                for line in answer:
                    if line.startswith(b"data: {"):
                        return
            raise RuntimeError("the server answered without a token")
        except urllib.error.HTTPError as error:
            if error.code not in (404, 503):  # not yet loaded
                raise RuntimeError(f"the server answered {error.code}: {error.read()[:300]!r}") from None
        except (urllib.error.URLError, ConnectionError):
            pass
        time.sleep(0.005)
    raise RuntimeError(f"the server ended with {server.returncode}")


def _model(port: int, names: list[str]) -> str:
    """What the server calls its model."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=60) as answer:
        return str(json.load(answer)["data"][0]["id"]) if not names else names[0]


def _end(server: subprocess.Popen[bytes]) -> None:
    server.send_signal(signal.SIGTERM)
    try:
        server.wait(20)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
