"""MessageParser: from the text of an answer to content, reasoning and tool calls, however the text is cut.

A parser is written as if the whole text were there: its steps are generators that yield where they need more of it.
What a step has consumed never changes any more, so that the sum of deltas depends on the text alone.

Whitespace next to tool calls and between reasoning and content is no content. Text that begins like a call and turns
out to be none is content, marker and all. The arguments of a call are the model's own characters: where it writes
broken JSON, or is cut off, they are broken too.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Generator, Mapping
from typing import Any, ClassVar, TypeVar

from octavo.text.message import MessageDelta, ToolCallDelta
from octavo.text.reasoning import ReasoningFormat

T = TypeVar("T")
Steps = Generator[None, None, T]
Write = Callable[[str], None]

_PIECE = 1024
"""Characters that are read at a time: what is consumed is cut off the text, which would take long from a long one."""

_SPECIAL = re.compile(r'["\\]')
_STRUCTURE = re.compile(r'["{}\[\]]')
_SCALAR_END = re.compile(r"[,}\]\s]")
_CONTROL = re.compile(r"[\x00-\x1f]")


class MessageParser:
    """One answer. Parsers of tool calls override `_body`; this one knows none."""

    markers: ClassVar[tuple[str, ...]] = ()
    """Special tokens that must be left in the text for this parser to see them."""

    def __init__(
        self, reasoning: ReasoningFormat | None = None, tools: Mapping[str, Any] | None = None, opened: bool = False
    ) -> None:
        """tools: name -> JSON schema of its parameters. opened: the prompt has begun the reasoning."""
        self.tools = tools or {}
        self.num_calls = 0
        self.thinks = opened
        self.may_reason = reasoning is not None  # now or later
        self._format = reasoning
        self._text = ""  # not consumed
        self._ended = False
        self._held = ""  # whitespace that is content, or reasoning, if more of it follows
        self._trim = False  # whitespace that comes now is none
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, tuple[str | None, str | None, list[str]]] = {}  # index -> id, name, arguments
        self._record: list[str] | None = None  # what was consumed of that which may be a call, and may be content
        self._steps = self._run()
        next(self._steps)

    def feed(self, text: str) -> MessageDelta:
        """What this text adds."""
        for start in range(0, len(text), _PIECE):
            self._text += text[start : start + _PIECE]
            next(self._steps, None)
        return self._news()

    def finish(self) -> MessageDelta:
        """What was held back. Nothing is fed after this."""
        self._ended = True
        next(self._steps, None)
        return self._news()

    def _news(self) -> MessageDelta:
        calls = (ToolCallDelta(i, id, name, "".join(parts)) for i, (id, name, parts) in self._calls.items())
        delta = MessageDelta("".join(self._content), "".join(self._reasoning), tuple(calls))
        self._content, self._reasoning, self._calls = [], [], {}
        return delta

    def _run(self) -> Steps[None]:
        yield
        if self._format is not None:
            yield from self._think(self._format)
        self.may_reason = False
        yield from self._body()
        self._content.append(self._held)
        self._held = ""

    def _think(self, form: ReasoningFormat) -> Steps[None]:
        if not self.thinks:
            space = yield from self._space()
            start = yield from self._next_is(*form.starts)
            if start is None:
                self._write_content(space)
                return
            self._take(len(start))
            self.thinks = True
        self._trim = True
        if (yield from self._until(form.ends, self._write_reasoning)) is None:
            self._reasoning.append(self._held)
        self._held, self._trim = "", True
        self.thinks = False

    def _body(self) -> Steps[None]:
        yield from self._content_until()

    # What is written.

    def _write_content(self, text: str) -> None:
        self._content.append(self._trimmed(text))

    def _write_reasoning(self, text: str) -> None:
        self._reasoning.append(self._trimmed(text))

    def _trimmed(self, text: str) -> str:
        """Text up to its last character that is no whitespace; what follows is held."""
        text = self._held + text
        if self._trim:
            text = text.lstrip()
        kept = text.rstrip()
        self._held = text[len(kept) :]
        self._trim = self._trim and not kept
        return kept

    def _begin_call(self, name: str, id: str | None = None) -> Write:
        """A call of a tool; gives the function that writes its arguments."""
        self._held, self._trim = "", True
        self._record = None
        index = self.num_calls
        self.num_calls += 1
        self._calls[index] = (id or self._new_id(), name, [])

        def write(arguments: str) -> None:
            if arguments:
                self._calls.setdefault(index, (None, None, []))[2].append(arguments)

        return write

    def _new_id(self) -> str:
        return f"call_{secrets.token_hex(12)}"

    # What is read. `_take` alone consumes.

    def _take(self, count: int) -> str:
        taken, self._text = self._text[:count], self._text[count:]
        if self._record is not None:
            self._record.append(taken)
        return taken

    def _perhaps(self, consumed: str = "") -> None:
        """What is consumed from here on may be a call; `_begin_call` says that it is one."""
        self._record = [consumed]

    def _no_call(self) -> None:
        """What was consumed since `_perhaps` is content, if no call has begun in it."""
        if self._record is not None:
            self._write_content("".join(self._record))
            self._record = None

    def _more(self) -> Steps[bool]:
        """Wait for more text; False where there is none."""
        if self._ended:
            return False
        have = len(self._text)
        while len(self._text) == have and not self._ended:
            yield
        return len(self._text) > have

    def _until(self, markers: tuple[str, ...], write: Write) -> Steps[str | None]:
        """Write the text before the first of the markers and consume both. None: the text ended without one.

        No marker may contain another, but at its end.
        """
        while True:
            at, marker = min(((at, m) for m in markers if (at := self._text.find(m)) >= 0), default=(-1, None))
            if marker is not None:
                write(self._take(at))
                self._take(len(marker))
                return marker
            write(self._take(len(self._text) - self._length_of_beginning(markers)))
            if not (yield from self._more()):
                write(self._take(len(self._text)))
                return None

    def _length_of_beginning(self, markers: tuple[str, ...]) -> int:
        """Of the longest end of the text that is the beginning of a marker."""
        for length in range(min(len(self._text), max(map(len, markers), default=1) - 1), 0, -1):
            if any(marker.startswith(self._text[-length:]) for marker in markers):
                return length
        return 0

    def _content_until(self, *markers: str) -> Steps[str | None]:
        """Content up to the first of the markers, which is consumed. What the reasoning format wraps answers in is dropped."""
        wrappers = self._format.wrappers if self._format is not None else ()
        while True:
            found = yield from self._until((*markers, *wrappers), self._write_content)
            if found is None or found in markers:
                return found
            self._held, self._trim = "", True

    def _next_is(self, *options: str) -> Steps[str | None]:
        """The longest of the options that the text goes on with, not consumed."""
        while True:
            open_options = [o for o in options if len(o) > len(self._text) and o.startswith(self._text)]
            if not open_options or not (yield from self._more()):
                break
        return max((o for o in options if self._text.startswith(o)), key=len, default=None)

    def _skip(self, token: str) -> Steps[bool]:
        """Consume this token where it comes next."""
        if (yield from self._next_is(token)) is None:
            return False
        self._take(len(token))
        return True

    def _space(self) -> Steps[str]:
        """Consume whitespace."""
        taken = ""
        while True:
            rest = self._text.lstrip()
            taken += self._take(len(self._text) - len(rest))
            if rest or not (yield from self._more()):
                return taken

    def _value(self, write: Write) -> Steps[bool]:
        """Consume one JSON value, written as it comes. False: the text ended within it."""
        if not self._text and not (yield from self._more()):
            return False
        if self._text[0] == '"':
            return (yield from self._quoted(write))
        if self._text[0] not in "{[":
            while (end := _SCALAR_END.search(self._text)) is None:
                write(self._take(len(self._text)))
                if not (yield from self._more()):
                    return False
            write(self._take(end.start()))
            return True
        depth = 0
        while True:
            while (mark := _STRUCTURE.search(self._text)) is not None:
                if mark[0] == '"':
                    write(self._take(mark.start()))
                    if not (yield from self._quoted(write)):
                        return False
                    continue
                write(self._take(mark.end()))
                depth += 1 if mark[0] in "{[" else -1
                if depth == 0:
                    return True
            write(self._take(len(self._text)))
            if not (yield from self._more()):
                return False

    def _quoted(self, write: Write) -> Steps[bool]:
        """Consume a JSON string, quotes included; the text begins with the first of them.

        Control characters, which models leave in their strings, are written escaped, as JSON wants them.
        """

        def write_escaped(text: str) -> None:
            write(_CONTROL.sub(lambda c: json.dumps(c[0])[1:-1], text))

        write(self._take(1))
        while True:
            mark = _SPECIAL.search(self._text)
            if mark is None:
                write_escaped(self._take(len(self._text)))
            elif mark[0] == '"':
                write_escaped(self._take(mark.end()))
                return True
            elif mark.end() < len(self._text):
                write_escaped(self._take(mark.end() + 1))
                continue
            if not (yield from self._more()):
                write(self._take(len(self._text)))
                return False

    def _string(self) -> Steps[str | None]:
        """Consume a JSON string: what it says; None where it is no string."""
        raw: list[str] = []
        if (yield from self._next_is('"')) is None or not (yield from self._quoted(raw.append)):
            return None
        try:
            text: str = json.loads("".join(raw))
        except ValueError:
            return None
        return text.encode("utf-8", "replace").decode()  # a lone surrogate is no text
