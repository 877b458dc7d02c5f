"""EngineProcess: tells the engine's process what to serve, and how it ended."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile

import msgspec

from octavo.config import EngineConfig
from octavo.engine.messages import Launch
from octavo.engine.spawn import Spawned


class EngineProcess:
    """A running `octavo.engine.process`, which serves what its config says.

    The two socket addresses are in a directory that only this user can enter; `stop` removes it.
    """

    def __init__(self, config: EngineConfig, epoch: int = 1) -> None:
        self.directory = tempfile.mkdtemp(prefix="octavo-")
        self.commands = f"ipc://{self.directory}/commands"
        self.events = f"ipc://{self.directory}/events"
        self.config = config
        self._epoch = epoch

    def start(self, spawned: Spawned | None = None) -> None:
        """The sockets must be bound by now. Returns at once; the first event says whether the engine is ready.

        spawned: a process that is there already. Default: a new one.
        """
        spawned = spawned or Spawned()
        launch = Launch(
            config=self.config,
            commands=self.commands,
            events=self.events,
            parent_pid=os.getpid(),
            launched=spawned.launched,
            epoch=self._epoch,
        )
        self.lifeline = spawned.lifeline
        self._popen = spawned.popen
        spawned.tell(msgspec.msgpack.encode(launch))

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
