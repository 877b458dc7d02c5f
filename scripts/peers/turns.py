"""Engines that take turns: all are ready, one runs, the others are stopped."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO, Any, Self

from peers.protocol import Workload

from octavo.bench import serve
from octavo.bench.http import Target
from octavo.config import ConfigError
from octavo.engine.client import EngineError

HERE = Path(__file__).parent


class Unable(Exception):
    """An engine cannot do a workload; why."""


class Engine:
    """A driver in a session of its own. Raises Unable where it does not get ready."""

    def __init__(self, name: str, python: Path, workload: Workload, log: Path) -> None:
        self.name = name
        self._workload = workload
        self._draw = random.Random(5)
        self._log = log.open("a")
        driver = HERE / f"drive_{name.replace('.', '_')}.py"
        environment = {**os.environ, "PYTHONPATH": str(HERE)}
        if name == "octavo":
            environment["PYTHONPATH"] += f":{HERE.parents[1]}"
        elif name == "vllm":  # before its processes start
            environment |= _vllm_environment(python, workload.threads)
        self._process = subprocess.Popen(
            [python, driver], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
            start_new_session=True, env=environment,
        )  # fmt: skip
        try:
            self.words = self._ask(json.dumps(workload._asdict()))
        except BaseException:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def run(self, number: int) -> float:
        self._signal(signal.SIGCONT)
        try:
            if "url" in self.words:
                return self._over_http()
            return float(self._ask(str(number))["value"])
        finally:
            self._signal(signal.SIGSTOP)

    def close(self) -> None:
        self._signal(signal.SIGCONT)
        self._pipe(self._process.stdin).close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait()
        self._pipe(self._process.stdout).close()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _over_http(self) -> float:
        w = self._workload
        load = serve.Workload(w.num_prompts, w.shared_len, w.input_len, w.output_len)

        async def run() -> float:
            target = Target(self.words["url"])
            seconds, _ = await serve.one_run(target, await target.model(), load, self._draw)
            return seconds

        try:
            seconds = asyncio.run(run())
        except (OSError, ConfigError, EngineError) as error:
            raise Unable(str(error)) from None
        return seconds if w.kind == "prefix" else w.num_prompts * w.output_len / seconds

    def _ask(self, line: str) -> dict[str, Any]:
        try:
            print(line, file=self._pipe(self._process.stdin), flush=True)
        except BrokenPipeError:
            pass  # it has said why
        answer = self._pipe(self._process.stdout).readline()
        found: dict[str, Any] = json.loads(answer) if answer else {"error": f"it ended; see {self._log.name}"}
        if "error" in found:
            raise Unable(found["error"])
        return found

    def _signal(self, number: int) -> None:
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            pass

    @staticmethod
    def _pipe(pipe: IO[str] | None) -> IO[str]:
        assert pipe is not None
        return pipe


def _vllm_environment(python: Path, threads: int) -> dict[str, str]:
    """Its documentation asks for Intel's OpenMP, which comes with it; without the number its threads spin in each other's way."""
    found = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": str(threads)}
    openmp = python.parents[1] / "lib" / "libiomp5.so"
    return found | ({"LD_PRELOAD": str(openmp)} if openmp.exists() else {})


def own_python() -> Path:
    return Path(sys.executable)
