"""Calls whose arguments are tagged texts: GLM 4.5 and later, Qwen3-Coder. The tool's schema says which are strings."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from typing import Any, ClassVar

from octavo.text.parser import MessageParser, Steps, Write
from octavo.text.tools.json_calls import drop, to_json
from octavo.text.tools.shape import Shape

START, END = "<tool_call>", "</tool_call>"
KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
FUNCTION, FUNCTION_END, PARAMETER, PARAMETER_END = "<function=", "</function>", "<parameter=", "</parameter>"


class Glm(MessageParser):
    """<tool_call>NAME, then <arg_key>KEY</arg_key><arg_value>VALUE</arg_value> for each, </tool_call>."""

    markers: ClassVar[tuple[str, ...]] = (START, END, KEY, KEY_END, VALUE, VALUE_END)
    shape = Shape(trigger=START, before="<tool_call>NAME\n", after=END, between="\n", arguments="glm")

    def _body(self) -> Steps[None]:
        while (yield from self._content_until(START)) is not None:
            self._perhaps(START)
            name: list[str] = []
            mark = yield from self._until((KEY, END), name.append)
            tool = "".join(name).strip()
            if mark is None or not tool or len(tool.split()) > 1:
                self._no_call()
                continue
            arguments = Arguments(self._begin_call(tool), self.tools.get(tool))
            while mark == KEY:
                key: list[str] = []
                yield from self._until((KEY_END,), key.append)
                if (yield from self._until((VALUE, END), drop)) == VALUE:
                    yield from self._tagged(arguments, "".join(key).strip(), (VALUE_END,))
                    mark = yield from self._until((KEY, END), drop)
                else:
                    mark = None
            if mark == END:
                arguments.end()

    def _tagged(self, arguments: Arguments, key: str, ends: tuple[str, ...]) -> Steps[bool]:
        """Consume the text of one argument, through its end."""
        if arguments.begin(key):
            if (yield from self._until(ends, arguments.write_string)) is None:
                return False
            arguments.end_string()
            return True
        parts: list[str] = []
        if (yield from self._until(ends, parts.append)) is None:
            return False
        arguments.write_value("".join(parts))
        return True


class QwenXml(Glm):
    """<tool_call><function=NAME>, then <parameter=KEY>\\nVALUE\\n</parameter> for each, </function></tool_call>."""

    markers = (START, END)
    shape = Shape(
        trigger=START,
        before="<tool_call>\n<function=NAME>\n",
        after="</function>\n</tool_call>",
        between="\n",
        arguments="qwen_xml",
    )

    def _body(self) -> Steps[None]:
        while (mark := (yield from self._content_until(START, FUNCTION))) is not None:
            self._perhaps(mark)
            if mark == START:
                yield from self._space()
                if not (yield from self._skip(FUNCTION)):
                    self._no_call()
                    continue
            name: list[str] = []
            if (yield from self._until((">", "\n"), name.append)) != ">":
                self._no_call()
                continue
            tool = "".join(name).strip()
            arguments = Arguments(self._begin_call(tool), self.tools.get(tool))
            while (mark := (yield from self._until((PARAMETER, FUNCTION_END, END), drop))) == PARAMETER:
                key: list[str] = []
                if (yield from self._until((">",), key.append)) is None:
                    break
                yield from self._skip("\n")
                ends = ("\n" + PARAMETER_END, PARAMETER_END)
                if not (yield from self._tagged(arguments, "".join(key).strip(), ends)):
                    break
            if mark in (FUNCTION_END, END):
                arguments.end()
            if mark == FUNCTION_END:
                yield from self._space()
                yield from self._skip(END)


class Arguments:
    """Writes tagged arguments as one JSON object."""

    def __init__(self, write: Write, schema: Any) -> None:
        """schema: of the parameters; None: an unknown tool."""
        properties = schema.get("properties") if isinstance(schema, dict) else None
        self._properties = properties if isinstance(properties, dict) else {}
        self._write = write
        self._count = 0

    def begin(self, key: str) -> bool:
        """The next argument. True: it is a string, and its text may be written as it comes."""
        self._write(("{" if self._count == 0 else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
        self._count += 1
        schema = self._properties.get(key)
        if isinstance(schema, dict) and schema.get("type") == "string":
            self._write('"')
            return True
        return False

    def write_string(self, text: str) -> None:
        self._write(json.dumps(text, ensure_ascii=False)[1:-1])

    def end_string(self) -> None:
        self._write('"')

    def write_value(self, text: str) -> None:
        """An argument that is no string by its schema: JSON, a Python literal, or a text after all."""
        self._write(_as_json(text))

    def end(self) -> None:
        self._write("}" if self._count else "{}")


def _as_json(text: str) -> str:
    readers: tuple[Callable[[str], Any], ...] = (json.loads, ast.literal_eval)
    for read in readers:
        try:
            return to_json(read(text.strip()))
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
    return to_json(text)
