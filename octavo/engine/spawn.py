"""Spawned: an engine's process, from its birth on. Imports nothing of the package, so that a command can begin with it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

_PACKAGE_PARENT = str(Path(__file__).parents[2])


class Spawned:
    """A running `octavo.engine.process`, which loads its modules and waits to be told what to serve.

    `lifeline` is a file descriptor that becomes readable (end of file) when the process has ended, however it ended.
    """

    def __init__(self) -> None:
        self.launched = time.time()
        self.told = False
        self.lifeline, far_end = os.pipe()
        path = os.pathsep.join(filter(None, [_PACKAGE_PARENT, os.environ.get("PYTHONPATH")]))
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "octavo.engine.process"],
            stdin=subprocess.PIPE,
            pass_fds=[far_end],
            env={**os.environ, "PYTHONPATH": path},
        )
        os.close(far_end)

    def tell(self, launch: bytes) -> None:
        """An encoded `Launch`. Once."""
        assert self.popen.stdin is not None
        self.told = True
        try:
            with self.popen.stdin as pipe:
                pipe.write(launch)
        except BrokenPipeError:  # it died already; the lifeline tells
            pass

    def abandon(self) -> None:
        """End it, where it was not told."""
        if not self.told:
            self.told = True
            self.popen.kill()
            self.popen.communicate()
            os.close(self.lifeline)
