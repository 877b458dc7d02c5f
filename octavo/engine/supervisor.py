"""EngineProcess: starts the engine's process and tells how it ended."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from octavo.config import EngineConfig
from octavo.engine.messages import Launch

_PACKAGE_PARENT = str(Path(__file__).parents[2])


class EngineProcess:
    """A running `octavo.engine.process`.

    `lifeline` is a file descriptor that becomes readable (end of file) when the process has ended, however it ended.
    The two socket addresses are in a directory that only this user can enter; `stop` removes it.
    """

    def __init__(self, config: EngineConfig, epoch: int = 1) -> None:
        self.directory = tempfile.mkdtemp(prefix="octavo-")
        self.commands = f"ipc://{self.directory}/commands"
        self.events = f"ipc://{self.directory}/events"
        self.config = config
        self._epoch = epoch
        self.lifeline, self._far_end = os.pipe()

    def start(self) -> None:
        """The sockets must be bound by now. Returns at once; the first event says whether the engine is ready."""
        launch = Launch(
            config=self.config,
            commands=self.commands,
            events=self.events,
            parent_pid=os.getpid(),
            launched=time.time(),
            epoch=self._epoch,
        )
        path = os.pathsep.join(filter(None, [_PACKAGE_PARENT, os.environ.get("PYTHONPATH")]))
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "octavo.engine.process"],
            stdin=subprocess.PIPE,
            pass_fds=[self._far_end],
            env={**os.environ, "PYTHONPATH": path},
        )
        os.close(self._far_end)
        assert self._popen.stdin is not None
        try:
            with self._popen.stdin as pipe:
                pipe.write(msgspec.msgpack.encode(launch))
        except BrokenPipeError:  # it died already; the lifeline tells
            pass

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def alive(self) -> bool:
        return self._popen.poll() is None

    def how_it_ended(self) -> str:
        """Waits for the end."""
        code = self._popen.wait()
        if code < 0:
            return f"the engine process was ended by signal {signal.Signals(-code).name}"
        return f"the engine process ended with exit code {code}"

    def stop(self, timeout: float) -> None:
        """Wait `timeout` seconds for it to end by itself, then kill it; releases everything."""
        try:
            self._popen.wait(timeout)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        os.close(self.lifeline)
        shutil.rmtree(self.directory, ignore_errors=True)
