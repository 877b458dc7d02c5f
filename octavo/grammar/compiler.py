"""Compiler: grammars for requests, compiled beside the engine's loop and kept for the next who asks for the same."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
from llguidance import LLMatcher, LLTokenizer

from octavo.grammar.matcher import Matcher
from octavo.grammar.source import Refused, compiled
from octavo.grammar.trial import CPU_SECONDS, MEMORY_BYTES, Launch, Verdict, give_way
from octavo.grammar.vocabulary import load_vocabulary
from octavo.request import GateError, ParameterError, Structured

CACHE_BYTES = 256 << 20
CACHE_ENTRIES = 256
ENTRY_BYTES = 16 << 10
"""Of the smallest compiled grammar, about."""

NUM_THREADS = 4
"""So that a grammar which takes seconds does not hold up those behind it."""

END_SECONDS = 1

WALL_SECONDS = 120
"""For a trial, where the machine is busy."""

DEATH_SECONDS = 0.2
"""The kernel closes the sockets of a process that was killed before it can be waited for."""


class Compilation:
    """A grammar that is, or will be, ready for use: the gate of the requests that wait for it."""

    reason = "grammar"

    def __init__(self, structured: Structured) -> None:
        self.structured = structured
        self.num_bytes = ENTRY_BYTES + len(structured.text)
        self.error: ParameterError | GateError | None = None
        self._ready: tuple[LLMatcher, LLTokenizer, int] | None = None

    def is_open(self) -> bool:
        """Raises ParameterError where the grammar is refused, GateError where compiling failed."""
        if self.error is not None:
            raise self.error.with_traceback(None)  # it is raised for each who asks
        return self._ready is not None

    def start(self) -> Matcher:
        """For one output; the gate must be open."""
        assert self._ready is not None
        return Matcher(*self._ready)


class Compiler:
    """The first grammar starts a process for trials and reads the tokenizer: a model without grammars pays nothing."""

    def __init__(self, model: str, vocab_size: int, end_ids: Iterable[int], wake: Callable[[], None]) -> None:
        """model: files with a tokenizer. end_ids: tokens that end an output. wake: called from any thread when a
        compilation has ended."""
        self._launch = Launch(model, vocab_size, sorted(end_ids))
        self._wake = wake
        self._pending: weakref.WeakValueDictionary[Structured, Compilation] = weakref.WeakValueDictionary()
        self._finished: deque[Compilation] = deque()  # on their way into the cache
        self._cache: OrderedDict[Structured, Compilation] = OrderedDict()  # least recently used first
        self._threads = ThreadPoolExecutor(NUM_THREADS, "grammar", give_way)
        self._lock = threading.Lock()  # of what follows
        self._trials: _Trials | None = None
        self._vocabulary: LLTokenizer | None = None
        self.num_compiled = 0
        self.num_reused = 0
        self.num_refused = 0

    def compile(self, structured: Structured) -> Compilation:
        """Returns at once. Equal grammars are compiled once while they are in the cache; one that nobody holds any more
        when its turn comes is not compiled."""
        while self._finished:
            finished = self._finished.popleft()
            self._cache[finished.structured] = finished
        self._shrink()
        known = self._cache.get(structured) or self._pending.get(structured)
        if known is not None and not isinstance(known.error, GateError):
            if structured in self._cache:
                self._cache.move_to_end(structured)
            self.num_reused += 1
            return known
        compilation = self._pending[structured] = Compilation(structured)
        self._threads.submit(self._run, weakref.ref(compilation))
        return compilation

    def stats(self) -> dict[str, int]:
        """Fields of `engine.messages.Stats`, by name."""
        return {
            "grammars_compiled": self.num_compiled,
            "grammars_reused": self.num_reused,
            "grammars_refused": self.num_refused,
        }

    def close(self) -> None:
        """Ends the process for trials, and with it what the threads wait for."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._trials is not None:
            self._trials.close()

    def _shrink(self) -> None:
        num_bytes = sum(compilation.num_bytes for compilation in self._cache.values())
        while self._cache and (num_bytes > CACHE_BYTES or len(self._cache) > CACHE_ENTRIES):
            num_bytes -= self._cache.popitem(last=False)[1].num_bytes

    def _run(self, asked: weakref.ref[Compilation]) -> None:
        compilation = asked()
        if compilation is None:  # the clients have left
            return
        ready: tuple[LLMatcher, LLTokenizer, int] | None = None
        error: ParameterError | GateError | None = None
        try:
            ready = self._compile(compilation)
        except Refused as e:
            error = ParameterError(compilation.structured.field, str(e))
        except Exception as e:  # a client waits; who asks next may have more luck
            error = GateError(f"grammars cannot be compiled: {type(e).__name__}: {e}")
        with self._lock:
            self.num_compiled += ready is not None
            self.num_refused += isinstance(error, ParameterError)
        if not isinstance(error, GateError):
            self._finished.append(compilation)
        compilation.error, compilation._ready = error, ready
        self._wake()

    def _compile(self, compilation: Compilation) -> tuple[LLMatcher, LLTokenizer, int]:
        structured = compilation.structured
        with self._lock:  # the others that come with the first wait here
            if self._trials is None or not self._trials.alive:
                self._trials = _Trials(self._launch)
            if self._vocabulary is None:
                launch = self._launch
                self._vocabulary = load_vocabulary(Path(launch.model), launch.vocab_size, launch.end_ids)
        verdict = self._trials.run(structured)
        if verdict is None:
            raise Refused(
                f"the {structured.kind} takes more than the {CPU_SECONDS} seconds of processor time or the "
                f"{MEMORY_BYTES >> 20} MB of memory that compiling may take"
            )
        if verdict.error is not None:
            raise Refused(verdict.error)
        compilation.num_bytes += verdict.num_bytes
        return compiled(structured, verdict.grammar, self._vocabulary), self._vocabulary, self._launch.vocab_size


class _Trials:
    """The process of `octavo.grammar.trial`."""

    def __init__(self, launch: Launch) -> None:
        self._jobs, theirs = socket.socketpair()
        root = str(Path(__file__).parents[2])
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "octavo.grammar.trial", str(theirs.fileno())],
                stdin=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))},
            )
        self.close = weakref.finalize(self, _end, self._process, self._jobs)
        assert self._process.stdin is not None
        with self._process.stdin as pipe:
            pipe.write(msgspec.msgpack.encode(launch))

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def run(self, structured: Structured) -> Verdict | None:
        """None: killed by a limit. Raises OSError where the process has ended, or does not answer."""
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                socket.send_fds(self._jobs, [b"\0"], [theirs.fileno()])
            ours.settimeout(WALL_SECONDS)
            ours.sendall(msgspec.msgpack.encode(structured))
            ours.shutdown(socket.SHUT_WR)
            answer = b"".join(iter(lambda: ours.recv(1 << 16), b""))
        if answer:
            return msgspec.msgpack.decode(answer, type=Verdict)
        try:
            self._process.wait(DEATH_SECONDS)
        except subprocess.TimeoutExpired:
            return None
        raise OSError("the process for trials has ended")


def _end(process: subprocess.Popen[bytes], jobs: socket.socket) -> None:
    jobs.close()  # it kills its forks and ends
    try:
        process.wait(timeout=END_SECONDS)
    except subprocess.TimeoutExpired:  # it is reading the tokenizer
        process.kill()
        process.wait()
