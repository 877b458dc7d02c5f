"""The engine's process: commands in, steps, events out. Started by `supervisor`, never by hand.

It blocks on its socket when there is nothing to compute, and ends when its parent has gone.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import time
import traceback

import msgspec
import zmq

from octavo.config import ConfigError
from octavo.engine.core import Engine
from octavo.engine.messages import (
    Abort,
    Add,
    Command,
    Event,
    Explain,
    Failed,
    Flush,
    Launch,
    LoadAdapter,
    Reply,
    Shutdown,
    StepOutput,
    UnloadAdapter,
)
from octavo.graph.verify import GraphError
from octavo.request import ParameterError
from octavo.weights.spec import CheckpointError

IDLE_MS = 1000
"""Between two looks whether the parent lives, and two Stats, when idle."""


class Channel:
    """The two sockets of an engine process."""

    def __init__(self, launch: Launch) -> None:
        self._context = zmq.Context()
        self._commands = self._context.socket(zmq.PULL)
        self._events = self._context.socket(zmq.PUSH)
        for socket, address in ((self._commands, launch.commands), (self._events, launch.events)):
            socket.set_hwm(0)
            socket.setsockopt(zmq.LINGER, 1000)
            socket.connect(address)
        self._decoder = msgspec.msgpack.Decoder(Command)
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, event: Event) -> None:
        self._events.send(self._encoder.encode(event), zmq.NOBLOCK)

    def wait(self, milliseconds: int, wakeup: int) -> bool:
        """Until a command is there, or something to read at the descriptor `wakeup`. False: neither came."""
        poller = zmq.Poller()
        poller.register(self._commands, zmq.POLLIN)
        poller.register(wakeup, zmq.POLLIN)
        return bool(poller.poll(milliseconds))

    def receive(self) -> Command | None:
        """The next command that is there already."""
        try:
            return self._decoder.decode(self._commands.recv(zmq.NOBLOCK))
        except zmq.Again:
            return None

    def close(self) -> None:
        """Sends what is left, for a second at most."""
        self._commands.close()
        self._events.close()
        self._context.term()


def serve(engine: Engine, channel: Channel, launch: Launch) -> None:
    """Run until Shutdown or until the parent has gone, and end the engine."""
    looked = 0.0
    output: StepOutput | None = None
    while True:
        idle = output is None or not engine.has_work
        wait_ms = int(min(IDLE_MS, 1000 * engine.idle_seconds + 1))
        if idle and not channel.wait(wait_ms, engine.wakeup) and not engine.has_work:
            engine.check(lambda: channel.wait(0, engine.wakeup))
        while (command := channel.receive()) is not None:
            if isinstance(command, Shutdown):
                engine.close(command.keep_seconds)
                return
            reply = _apply(engine, command)
            if reply is not None:
                channel.send(reply)
        for reply in engine.replies():
            channel.send(reply)
        output = engine.step()
        if output is not None:
            channel.send(output)
        if output is None or time.monotonic() > looked + 1:
            looked = time.monotonic()
            if os.getppid() != launch.parent_pid:
                shutil.rmtree(os.path.dirname(launch.commands.removeprefix("ipc://")), ignore_errors=True)
                engine.close()
                return
            if output is None:
                channel.send(StepOutput(launch.epoch, [], engine.stats()))


def _apply(engine: Engine, command: Add | Abort | Explain | Flush | LoadAdapter | UnloadAdapter) -> Reply | None:
    match command:
        case Add():
            try:
                engine.add(command)
            except ParameterError as e:
                engine.fail(command, e)
        case Abort():
            engine.abort(command)
        case Explain():
            return Reply(command.ticket, explanations=engine.explain(command.id))
        case Flush():
            return Reply(command.ticket, num_blocks=engine.flush())
        case LoadAdapter():
            engine.load_adapter(command)
        case UnloadAdapter():
            engine.unload_adapter(command)
            return Reply(command.ticket)
    return None


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to the whole group; the parent decides when to end
        signal.signal(number, signal.SIG_IGN)
    told = sys.stdin.buffer.read()
    if not told:  # the parent has gone
        return 0
    launch = msgspec.msgpack.decode(told, type=Launch)
    python_seconds = time.time() - launch.launched
    channel = Channel(launch)
    try:
        engine = Engine(launch.config, channel.send, launch.epoch)
        gc.freeze()  # what is loaded stays: never walk over it again
        channel.send(engine.loaded.ready(launch.epoch, python_seconds))
        serve(engine, channel, launch)
    except (ConfigError, GraphError, CheckpointError) as e:
        channel.send(Failed(str(e)))
        return 1
    except Exception as e:
        traceback.print_exc()
        channel.send(Failed(f"{type(e).__name__}: {e}"))
        return 1
    finally:
        channel.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
