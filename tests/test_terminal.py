"""`octavo chat` as its user meets it: in a terminal, in one that can do nothing, in a pipe, and against a server."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, Self

import pytest
from rich.console import Console

from octavo import LLM, SamplingParams
from octavo.cli.conversation import Piece
from octavo.cli.screen import MarkdownWriter, whole_blocks
from tests.endless import CONTEXT, NUM_TOKENS
from tests.serving import ROOT, Server
from tests.waiting import SECONDS

PROMPT = "<prompt>"
PARAMS = SamplingParams(temperature=0, max_tokens=8)
FLAGS = ["--max-tokens", "8", "--temperature", "0", "--top-p", "1"]

_CODES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b[=>]|\r")


class Terminal:
    """`octavo` in a pseudo-terminal of 24 lines; `with` ends it."""

    def __init__(self, *arguments: Any, home: Path, **environment: str) -> None:
        self._master, slave = pty.openpty()
        env = {**os.environ, "TERM": "xterm", "HOME": str(home), "PROMPT_TOOLKIT_NO_CPR": "1", **environment}
        command = [sys.executable, "-m", "octavo.cli.main", *map(str, arguments)]

        def at_a_terminal() -> None:
            os.login_tty(slave)  # of a session of its own: an interrupt is sent to nobody else, and to it
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored where the suite runs in a shell's background

        self.process = subprocess.Popen(command, cwd=ROOT, env=env, preexec_fn=at_a_terminal)
        os.close(slave)
        self._raw = b""
        self._read = 0  # characters of `text` that were waited for

    @property
    def text(self) -> str:
        """Without control sequences; PROMPT where the terminal is told that pasted text is to be marked."""
        return _CODES.sub("", self._raw.decode(errors="replace").replace("\x1b[?2004h", PROMPT))

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def wait_for(self, text: str) -> None:
        """Until `text` is shown behind what was waited for before."""
        deadline = time.monotonic() + SECONDS
        while (found := self.text.find(text, self._read)) < 0:
            alive = time.monotonic() < deadline and self._take()
            assert alive, f"no {text!r} in {self.text[self._read :]!r}"
        self._read = found + len(text)

    def wait_for_more(self, count: int) -> None:
        """Until so many characters are shown behind what was waited for before."""
        while len(self.text) < self._read + count:
            assert self._take(), f"no more than {self.text[self._read :]!r}"

    def code(self) -> int:
        """Exit code, once it has ended."""
        while self._take():
            pass
        return self.process.wait(SECONDS)

    def _take(self) -> bool:
        if not select.select([self._master], [], [], SECONDS)[0]:
            return False
        try:
            part = os.read(self._master, 65536)
        except OSError:  # the other side is closed
            return False
        self._raw += part
        return bool(part)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


@pytest.fixture(scope="module")
def model(data: Path) -> Path:
    return data / "arch" / "llama"


@pytest.fixture(scope="module")
def answers(model: Path) -> Mapping[str, str]:
    """What the model says to a text."""
    with LLM(str(model), kv_cache_memory="4MiB") as llm:

        def ask(*said: str) -> str:
            messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]
            return llm.chat(messages, PARAMS)[0].outputs[0].text

        hello = ask("Hello")
        return {"Hello": hello, "again": ask("Hello", hello, "again"), "two\nlines": ask("two\nlines")}


def chat(*arguments: Any, stdin: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "octavo.cli.main", "chat", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, input=stdin, capture_output=True, text=True, timeout=SECONDS)


def shown(text: str) -> str:
    """An answer as `Terminal.text` has it."""
    return _CODES.sub("", text.replace("\n", "\r\n"))


def test_terminal(model: Path, answers: Mapping[str, str], tmp_path: Path) -> None:
    with Terminal("chat", model, *FLAGS, "--no-markdown", home=tmp_path) as terminal:
        terminal.wait_for("/help shows commands")
        terminal.wait_for(PROMPT)
        terminal.type("Hello\r")
        terminal.wait_for("Hello\n")
        terminal.wait_for(shown(answers["Hello"]))
        terminal.wait_for(PROMPT)
        terminal.type("/clear\r")
        terminal.wait_for(PROMPT)
        terminal.type("two\x1b\rlines\r")  # Alt-Enter
        terminal.wait_for(shown(answers["two\nlines"]))
        terminal.wait_for(PROMPT)
        terminal.type("/cle\t")
        terminal.wait_for("/clear")
        terminal.type("\r")
        terminal.wait_for(PROMPT)
        terminal.type("\x1b[A\x1b[A\x1b[A\r")  # up over /clear, and the lines of what was said before
        terminal.wait_for(shown(answers["two\nlines"]))
        terminal.wait_for(PROMPT)
        terminal.type("\x1b[200~two\nlines\x1b[201~ more\r/stats\r")  # pasted text is one message
        terminal.wait_for("all 4: ")
        terminal.wait_for(PROMPT)
        terminal.type("\x04")
        assert terminal.code() == 0
    history = tmp_path / ".local/state/octavo/chat-history"
    assert "+Hello\n" in history.read_text()
    assert history.stat().st_mode & 0o077 == 0


def test_interrupt_ends_the_answer_and_not_the_chat(model: Path, tmp_path: Path) -> None:
    endless = ["--max-tokens", NUM_TOKENS, "--max-model-len", CONTEXT, "--temperature", 1, "--no-history", "--seed", 1]
    with Terminal("chat", model, *endless, home=tmp_path) as terminal:
        terminal.wait_for(PROMPT)
        terminal.type("/set ignore_eos true\r")
        terminal.wait_for(PROMPT)
        terminal.type("Hello\r")
        terminal.wait_for("Hello")
        terminal.wait_for_more(50)
        terminal.type("\x03")
        terminal.wait_for(PROMPT)
        terminal.type("/stats\r")
        terminal.wait_for("ended by you")
        terminal.wait_for(PROMPT)
        terminal.type("/exit\r")
        assert terminal.code() == 0
    assert not (tmp_path / ".local").exists()


def test_dumb_terminal(model: Path, answers: Mapping[str, str], tmp_path: Path) -> None:
    with Terminal("chat", model, *FLAGS, home=tmp_path, TERM="dumb") as terminal:
        terminal.wait_for("> ")
        terminal.type("Hello\n")
        terminal.wait_for(shown(answers["Hello"]))
        terminal.wait_for("> ")
        terminal.type('/clear\n"""two\nlines"""\n')
        terminal.wait_for(shown(answers["two\nlines"]))
        terminal.type("\x04")
        assert terminal.code() == 0
        assert b"\x1b" not in terminal._raw.replace(answers["Hello"].encode(), b"")


def test_commands(model: Path, answers: Mapping[str, str], tmp_path: Path) -> None:
    saved = tmp_path / "chat.json"
    lines = [
        "Hello", f"/save {saved}", "/clear", "/regenerate", f"/load {saved}", "again", "/set temperature 1000", "/set",
        "/set messages []", "/set no_such_field 1", "/system You are a pirate.", "/system", "/load nowhere.json",
        "/clear now", "/nonsense", "/save", "/regenerate", "/exit", "not read",
    ]  # fmt: skip
    done = chat(model, *FLAGS, stdin="\n".join(lines) + "\n")
    assert done.returncode == 0
    assert done.stdout.startswith(
        f"{answers['Hello']}\n2 messages in {saved}\n2 messages from {saved}\n{answers['again']}\n"
    )
    assert "max_tokens = 8\ntemperature = 0.0\ntop_p = 1.0\nYou are a pirate.\n" in done.stdout
    errors = done.stderr.strip().splitlines()
    for error, says in zip(
        errors,
        ["nothing was said", "temperature must be", "messages cannot be set", "no_such_field", "nowhere.json", "/clear takes",
         "there is no /nonsense", "/save needs FILE"],
        strict=True,
    ):  # fmt: skip
        assert says in error
    said = json.loads(saved.read_text())
    assert said["messages"][1] == {"role": "assistant", "content": answers["Hello"]}
    saved.write_text(json.dumps({**said, "messages": [{"role": "robot"}]}))
    assert "no conversation" in chat(model, *FLAGS, stdin=f"/load {saved}\n").stderr


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    with Server(model, "--api-key", "secret") as running:
        yield running


def test_chat_with_a_server(server: Server, answers: Mapping[str, str]) -> None:
    done = chat(server.url, "--api-key", "secret", *FLAGS, stdin="Hello\nagain\n/set top_k -7\nagain\n/stats\n")
    assert done.stdout.startswith(f"{answers['Hello']}\n{answers['again']}\n")
    assert "all 2: " in done.stdout
    assert done.stderr.startswith("error: top_k must be")
    v1 = chat(server.url + "/v1/", "--api-key", "secret", *FLAGS, stdin="Hello\n")
    assert v1.stdout == answers["Hello"] + "\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["http://127.0.0.1:1"], "does not answer"),
        (["http://"], "no address"),
        (["http://127.0.0.1:99999"], "Port"),
        (["http://127.0.0.1:1", "--num-threads", "1"], "num_threads is a matter of the server"),
        (["demo", "--api-key", "secret"], "goes with the URL"),
    ],
)
def test_addresses_that_are_none(arguments: list[str], says: str) -> None:
    done = chat(*arguments, stdin="Hello\n")
    assert done.returncode in (1, 2)
    assert done.stderr.startswith("error: ")
    assert says in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("answer", [b"<html>", b"[]", b'{"data": []}', b'{"data": [{"id": "m"}]}'])
def test_a_server_of_something_else(answer: bytes) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answer)

        def do_POST(self) -> None:  # no stream of events
            self.do_GET()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as other:
        Thread(target=other.serve_forever, daemon=True).start()
        done = chat(f"http://127.0.0.1:{other.server_port}", stdin="Hello\n")
        other.shutdown()
    assert done.stderr.startswith("error: ") and len(done.stderr.splitlines()) == 1, done.stderr


def test_a_server_that_wants_a_key(server: Server) -> None:
    assert "needs an API key" in chat(server.url, stdin="Hello\n").stderr


TEXT = "# Head\n\nSome *text*\ngoes on.\n\n- one\n\n- two\n\n```py\nx = 1\n\ny = 2\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\nEnd.\n"


@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000])
def test_markdown_is_the_same_however_it_comes(step: int) -> None:
    """What stays on the screen does not depend on the pieces; a list stays one list, code stays code."""

    def written(step: int) -> str:
        out = io.StringIO()
        console = Console(file=out, force_terminal=False, width=60)
        writer = MarkdownWriter(console)
        for i in range(0, len(TEXT), step):
            writer.write(Piece(TEXT[i : i + step], False))
        writer.end()
        return out.getvalue()

    whole = written(len(TEXT))
    assert whole.count("•") == 2
    blocks = [line.strip() for line in written(step).splitlines() if line.strip()]
    assert blocks == [line.strip() for line in whole.splitlines() if line.strip()]


def test_whole_blocks_stay_what_they_are() -> None:
    from markdown_it import MarkdownIt

    for cut in range(len(TEXT)):
        done = whole_blocks(TEXT[:cut])
        assert done <= cut
        parts = [MarkdownIt().enable("table").render(part) for part in (TEXT[:done], TEXT[done:])]
        assert "".join(parts) == MarkdownIt().enable("table").render(TEXT)


def test_a_block_larger_than_the_screen_is_drawn_by_its_end() -> None:
    from octavo.cli.screen import _Tail

    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=40, height=10)
    console.print(_Tail("\n\n".join(f"- item {i}" for i in range(40)), True))
    assert "item 39" in out.getvalue()
    assert out.getvalue().count("\n") <= 10


def test_reasoning_and_text_are_told_apart() -> None:
    out = io.StringIO()
    writer = MarkdownWriter(Console(file=out, force_terminal=True, width=40))
    for piece in (Piece("I th", True), Piece("ink", True), Piece("So.", False)):
        writer.write(piece)
    writer.end()
    assert out.getvalue().index("ink") < out.getvalue().index("So.")
    assert "\x1b[2mI th" in out.getvalue()
