"""A real server process for tests: `octavo serve` on a free port."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import httpx

from tests.waiting import SECONDS, until

ROOT = Path(__file__).parents[1]


class Server:
    """Started at birth; `with` ends it."""

    def __init__(self, model: Path | str, *options: str) -> None:
        command = [sys.executable, "-m", "octavo.cli.main", "serve", str(model), "--port", "0"]
        command += ["--request-log", "off", *options]
        if "--num-threads" not in options:  # as tests/conftest.py says
            command += ["--num-threads", "1"]
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=self.errors, text=True, process_group=0
        )
        assert self.process.stdout is not None
        self.printed: list[str] = []
        for line in self.process.stdout:
            self.printed.append(line.rstrip())
            if line.startswith("listening on "):
                self.url = line.split()[-1]
                break
        else:
            self.process.communicate()
            errors = self._errors()
            self.errors.close()
            raise RuntimeError(f"the server ended: {errors}")
        self.http = httpx.Client(base_url=self.url, timeout=SECONDS)

    @property
    def engine_pid(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        for child in children:
            if b"octavo.engine.process" in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
        raise RuntimeError("there is no engine process")

    def post(self, path: str, body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def complete(self, **body: Any) -> dict[str, Any]:
        response = self.post("/v1/completions", body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The chunks of a stream, which must end with its end mark."""
        with self.http.stream("POST", path, json={**body, "stream": True}) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            return events(response)

    def metric(self, name: str) -> float:
        """Value of a series, labels included in the name as Prometheus writes them."""
        for line in self.http.get("/metrics").text.splitlines():
            if line.startswith(name + " "):
                return float(line.split()[-1])
        raise KeyError(name)

    def wait_for(self, name: str, value: float) -> None:
        """Until a series has this value."""
        until(lambda: self.metric(name) == value, every=0.02)

    def wait_idle(self) -> None:
        """Until the engine has nothing to do and holds nothing."""
        self.wait_for("octavo_http_requests_open", 0)
        for name in ("octavo_requests_running", "octavo_requests_waiting", "octavo_kv_blocks_held"):
            self.wait_for(name, 0)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """The engine's process stands still meanwhile: what was sent to it is neither begun nor ended."""
        pid = self.engine_pid
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    @contextmanager
    def connected(self) -> Iterator[socket.socket]:
        address = httpx.URL(self.url)
        with socket.create_connection((address.host, address.port or 0), timeout=SECONDS) as connection:
            yield connection

    @contextmanager
    def asking(self, path: str, body: dict[str, Any]) -> Iterator[socket.socket]:
        """A client that has sent a request, and leaves with the block whatever was answered."""
        content = json.dumps(body).encode()
        with self.connected() as connection:
            connection.sendall(
                f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n".encode() + content
            )
            yield connection

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Exit code and what was written to standard error."""
        self.http.close()
        if self.process.poll() is None:
            self.process.send_signal(number)
        self.process.communicate(timeout=SECONDS)
        return self.process.returncode, self._errors()

    def _errors(self) -> str:
        self.errors.seek(0)
        return self.errors.read()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()
        for stream in (self.process.stdout, self.errors):
            if stream is not None:
                stream.close()
        try:
            os.killpg(self.process.pid, 0)
        except ProcessLookupError:
            return
        raise RuntimeError("the engine outlived its server")


def events(response: httpx.Response) -> list[dict[str, Any]]:
    chunks = []
    lines = [line for line in response.iter_lines() if line and not line.startswith(":")]  # no comments
    assert lines[-1] == "data: [DONE]", lines[-1]
    for line in lines[:-1]:
        assert line.startswith("data: ")
        chunks.append(json.loads(line[6:]))
    return chunks
