"""The terminal of a chat: reading what the user says, and writing answers as they come."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from octavo.cli.conversation import Piece

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.key_binding import KeyBindings
    from rich.console import Console, ConsoleOptions, RenderResult

BLOCK = '"""'
"""Opens and closes text of several lines, where a line ends what is said."""

REFRESH_SECONDS = 0.08
"""Between two drawings of a block that is still being written: formatting takes longer than most tokens."""


class Reader(Protocol):
    def read(self) -> str | None:
        """What the user says next, "" for an interrupt, None at the end."""


class LineReader:
    """Of a pipe, or of a terminal that can do nothing: a line, or the lines between two \"\"\"."""

    def __init__(self, prompt: str) -> None:
        self._prompt = prompt

    def read(self) -> str | None:
        try:
            text = input(self._prompt)
            if not text.startswith(BLOCK):
                return text.strip()
            while not _is_whole(text):
                text += "\n" + input("... " if self._prompt else "")
        except EOFError:
            return None
        except KeyboardInterrupt:
            print()
            return ""
        return _unquoted(text)


class TerminalReader:
    """Of a terminal: arrow keys edit and recall, Alt-Enter begins a line, Tab completes commands, pasted text stays one."""

    def __init__(self, commands: Sequence[str], history: Path | None) -> None:
        """history: a file of earlier input, made if need be; None, or where it cannot be had: this session's alone."""
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import WordCompleter
        from prompt_toolkit.history import FileHistory, InMemoryHistory

        try:
            if history is not None:
                history.parent.mkdir(parents=True, exist_ok=True)
                os.close(os.open(history, os.O_CREAT | os.O_RDWR, 0o600))
        except OSError:
            history = None
        self._session: PromptSession[str] = PromptSession(
            history=InMemoryHistory() if history is None else FileHistory(str(history)),
            completer=WordCompleter(list(commands), sentence=True),
            complete_while_typing=False,
            multiline=True,
            prompt_continuation="  ",
            key_bindings=_keys(),
        )

    def read(self) -> str | None:
        try:
            return _unquoted(self._session.prompt("> ").strip())
        except EOFError:
            return None
        except KeyboardInterrupt:
            return ""


def _keys() -> KeyBindings:
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("enter")
    def enter(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if _is_whole(buffer.text):
            buffer.validate_and_handle()
        else:
            buffer.insert_text("\n")

    @keys.add("escape", "enter")
    @keys.add("c-j")
    def line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


def _is_whole(text: str) -> bool:
    stripped = text.strip()
    return not stripped.startswith(BLOCK) or (stripped.endswith(BLOCK) and len(stripped) >= 2 * len(BLOCK))


def _unquoted(text: str) -> str:
    stripped = text.strip()
    is_block = stripped.startswith(BLOCK) and _is_whole(text)
    return stripped[len(BLOCK) : -len(BLOCK)].strip("\n") if is_block else text


class Writer(Protocol):
    def write(self, piece: Piece) -> None: ...

    def end(self) -> None:
        """The answer is over, or was interrupted."""


class TextWriter:
    """Text as it is. Reasoning goes to standard error: standard output is the answer."""

    def write(self, piece: Piece) -> None:
        stream = sys.stderr if piece.reasoning else sys.stdout
        stream.write(piece.text)
        stream.flush()

    def end(self) -> None:
        sys.stdout.write("\n")
        sys.stdout.flush()


class MarkdownWriter:
    """Markdown, formatted. Blocks that are whole are printed for good; the last one is drawn anew as it grows."""

    def __init__(self, console: Console) -> None:
        from rich.live import Live

        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._text = ""  # behind the blocks that were printed
        self._thinks = False
        self._is_first = True
        self._drawn = 0.0

    def write(self, piece: Piece) -> None:
        if piece.reasoning:
            self._flush()
            self._console.print(piece.text, style="dim", end="", markup=False, highlight=False, soft_wrap=True)
            self._thinks = True
            return
        if self._thinks:
            self._console.print("\n")
            self._thinks = False
        self._text += piece.text
        whole = whole_blocks(self._text)
        if whole:
            self._clear()
            self._print(self._text[:whole])
            self._text = self._text[whole:]
        if time.monotonic() - self._drawn >= REFRESH_SECONDS:
            self._live.start()
            self._live.update(_Tail(self._text, self._is_first), refresh=True)
            self._drawn = time.monotonic()

    def end(self) -> None:
        if self._thinks:
            self._console.print()
        self._flush()
        self._thinks = False
        self._is_first = True

    def _flush(self) -> None:
        self._clear()
        if self._text.strip():
            self._print(self._text)
        self._text = ""

    def _clear(self) -> None:
        """Take the block that grows off the screen."""
        if self._live.is_started:
            self._live.update("")
            self._live.stop()

    def _print(self, text: str) -> None:
        from rich.markdown import Markdown

        if not self._is_first:
            self._console.print()
        self._console.print(Markdown(text))
        self._is_first = False


class _Tail:
    """The last lines of a block, as many as the screen has: what has scrolled away cannot be drawn anew."""

    def __init__(self, text: str, is_first: bool) -> None:
        self._text = text
        self._is_first = is_first

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.markdown import Markdown
        from rich.segment import Segment, Segments

        lines = console.render_lines(Markdown(self._text), options, pad=False)
        most = max(1, console.size.height - 2)
        shown = lines if self._is_first else [[], *lines]
        for line in shown[-most:]:
            yield Segments([*line, Segment.line()])


def whole_blocks(text: str) -> int:
    """Characters at the beginning of a Markdown text that more text cannot change: all blocks but the last."""
    from markdown_it import MarkdownIt

    blocks = [token.map for token in MarkdownIt().enable("table").parse(text) if token.level == 0 and token.map]
    if len(blocks) < 2:
        return 0
    return sum(len(line) for line in text.splitlines(keepends=True)[: blocks[-1][0]])
