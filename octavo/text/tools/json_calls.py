"""Calls that are JSON objects with a name and arguments: what most families write, each within marks of its own."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from octavo.text.parser import MessageParser, Steps, Write

ARGUMENT_KEYS = ("arguments", "parameters")
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass
class _Call:
    name: str | None = None
    id: str | None = None
    arguments: str | None = None  # that came before the name
    write: Write | None = None  # once begun
    nested: bool = False  # {"type": "function", "function": {...}}


def drop(text: str) -> None:
    """What stands between a call and its end mark is neither content nor arguments."""


def to_json(value: Any) -> str:
    """JSON text of a value; TypeError or ValueError where it has none. Half a surrogate pair is written escaped."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if text.isascii() or not _SURROGATE.search(text) else json.dumps(value)


class JsonCalls(MessageParser):
    """Reads such objects. Arguments may be an object, or a JSON text within a string."""

    bare = False
    """No mark tells a call from JSON that is content: only an offered tool with arguments is a call."""

    def _json_call(self) -> Steps[bool]:
        """Consume one object. False: it is no call."""
        call = _Call()
        whole = yield from self._members(call)
        if call.write is None and whole and call.name is not None and not (self.bare and call.arguments is None):
            self._write_arguments(call, call.arguments or "{}")
        return call.write is not None

    def _json_calls(self) -> Steps[bool]:
        """Consume one object, or an array of them. False: what was consumed holds something else."""
        if not (yield from self._skip("[")):
            return (yield from self._json_call())
        while True:
            yield from self._space()
            if (yield from self._skip("]")):
                return True
            if (yield from self._skip(",")):
                continue
            if self._record is None:
                self._perhaps()
            if not (yield from self._json_call()):
                return False

    def _members(self, call: _Call) -> Steps[bool]:
        if not (yield from self._skip("{")):
            return False
        while True:
            yield from self._space()
            if (yield from self._skip("}")):
                return True
            if (yield from self._skip(",")):
                continue
            key = yield from self._string()
            if key is None:
                return False
            yield from self._space()
            if not (yield from self._skip(":")):
                return False
            yield from self._space()
            if not (yield from self._member(call, key)):
                return False

    def _member(self, call: _Call, key: str) -> Steps[bool]:
        text = (yield from self._next_is('"')) is not None
        if call.write is None and text and key in ("name", "function"):
            call.name = yield from self._string()
            if call.arguments is not None and call.name is not None:
                return self._write_arguments(call, call.arguments)
            return call.name is not None
        if call.write is None and key == "function" and not call.nested:
            call.nested = True
            return (yield from self._members(call))
        if call.write is None and text and key == "id":
            call.id = yield from self._string()
            return call.id is not None
        if call.write is None and key in ARGUMENT_KEYS:
            return (yield from self._arguments(call, text))
        return (yield from self._value(drop))

    def _arguments(self, call: _Call, text: bool) -> Steps[bool]:
        if text:
            arguments = yield from self._string()
            return arguments is not None and self._write_arguments(call, arguments.strip() or "{}")
        if (yield from self._next_is("{")) is None or call.name is None:
            parts: list[str] = []
            whole = yield from self._value(parts.append)
            value = "".join(parts)
            return whole and self._write_arguments(call, "{}" if value == "null" else value)
        if not self._write_arguments(call, ""):
            return False
        assert call.write is not None
        return (yield from self._value(call.write))

    def _write_arguments(self, call: _Call, arguments: str) -> bool:
        """Begin the call where its name is known; False where it may not begin."""
        call.arguments = arguments
        if call.name is None:
            return True
        if self.bare and call.name not in self.tools:
            return False
        call.write = self._begin_call(call.name, call.id)
        call.write(arguments)
        return True
