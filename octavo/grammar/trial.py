"""A process that compiles grammars for trial, so that one which takes too much time or memory harms nobody.

`python -m octavo.grammar.trial FD`: FD is a socket on which jobs come, each as the descriptor of a socket of its own.
A job is done in a fork, under limits of the kernel. It is a `Structured`, to the end of file; the answer is a `Verdict`,
or nothing where the fork was killed.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import sys
from pathlib import Path

import msgspec
from llguidance import LLTokenizer

from octavo.grammar.source import Refused, compiled, grammar_of
from octavo.grammar.vocabulary import load_vocabulary
from octavo.request import Structured

CPU_SECONDS = 4
MEMORY_BYTES = 96 << 20

PR_SET_PDEATHSIG = 1
"""Linux's prctl: the signal that comes when the parent ends."""


class Launch(msgspec.Struct, frozen=True):
    """On standard input."""

    model: str  # files with a tokenizer
    vocab_size: int
    end_ids: list[int]


class Verdict(msgspec.Struct, frozen=True):
    grammar: str = ""  # for LLMatcher
    num_bytes: int = 0  # that it takes when compiled, about
    error: str | None = None  # why it is refused


def give_way() -> None:
    """This thread, and what it forks, runs where a core has nothing else to do.

    A nice value does not do: the kernel takes a core where somebody nice runs for busy, and wakes two threads of the engine on
    the other one, where each waits for the other.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except OSError:  # forbidden here
        os.nice(19)


def main() -> None:
    give_way()
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to the whole group; the socket tells when to end
        signal.signal(number, signal.SIG_IGN)
    launch = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Launch)
    vocabulary = load_vocabulary(Path(launch.model), launch.vocab_size, launch.end_ids)
    forks: set[int] = set()
    with socket.socket(fileno=int(sys.argv[1])) as jobs:
        while (job := _next(jobs)) is not None:
            forks = {pid for pid in forks if os.waitpid(pid, os.WNOHANG) == (0, 0)}
            with job:
                if (pid := os.fork()) == 0:
                    try:
                        jobs.close()
                        _do(job, vocabulary)
                    finally:
                        os._exit(0)
                forks.add(pid)
    for pid in forks:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _next(jobs: socket.socket) -> socket.socket | None:
    """None: the engine has gone."""
    data, descriptors, _, _ = socket.recv_fds(jobs, 1, 1)
    return socket.socket(fileno=descriptors[0]) if data else None


def _do(job: socket.socket, vocabulary: LLTokenizer) -> None:
    structured = msgspec.msgpack.decode(b"".join(iter(lambda: job.recv(1 << 16), b"")), type=Structured)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    held, reserved = _memory()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (reserved + MEMORY_BYTES,) * 2)
    with open(os.devnull, "wb") as null:
        os.dup2(null.fileno(), 2)  # what Rust says when memory is refused
    try:
        grammar = grammar_of(structured)
        matcher = compiled(structured, grammar, vocabulary)
        verdict = Verdict(grammar, max(0, _memory()[0] - held))
        del matcher
    except Refused as error:
        verdict = Verdict(error=str(error))
    except MemoryError:
        return
    except Exception as error:
        verdict = Verdict(error=f"the {structured.kind} cannot be compiled: {type(error).__name__}: {error}")
    job.sendall(msgspec.msgpack.encode(verdict))


def _memory() -> tuple[int, int]:
    """(held, reserved) bytes of this process."""
    reserved, held = Path("/proc/self/statm").read_text().split()[:2]
    return int(held) * resource.getpagesize(), int(reserved) * resource.getpagesize()


if __name__ == "__main__":
    main()
