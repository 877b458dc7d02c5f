"""[NAME(key=value, ...), ...]: Llama 3.2 and 4, with or without <|python_start|> and <|python_end|> around it."""

from __future__ import annotations

import ast
import re
from typing import Any

from octavo.text.parser import MessageParser, Steps
from octavo.text.tools.json_calls import to_json
from octavo.text.tools.shape import Shape

START, END = "<|python_start|>", "<|python_end|>"
_CALL_START = re.compile(r"\s*([A-Za-z_][\w.]*)\s*\(")
_MARK = re.compile(r"""["'()\[\]{}]""")
_NAMES = {"true": True, "false": False, "null": None}  # what models of JSON write


class Pythonic(MessageParser):
    """A call is read as a whole, since what a Python expression says is known at its end."""

    markers = (START, END)
    shape = Shape(trigger="", open="[", before="NAME(", after=")", between=", ", close="]", arguments="python")

    def _body(self) -> Steps[None]:
        space = yield from self._space()
        self._perhaps(space)
        yield from self._list()
        while (mark := (yield from self._content_until(START, END))) is not None:
            if mark == START:
                self._perhaps(START)
                yield from self._list()

    def _list(self) -> Steps[None]:
        """The list of calls that comes next, if one does."""
        yield from self._space()
        if (yield from self._skip("[")):
            while (yield from self._call()):
                self._perhaps()
                yield from self._space()
                if (yield from self._skip("]")):
                    self._record = None
                    return
                if not (yield from self._skip(",")):
                    break
        self._no_call()

    def _call(self) -> Steps[bool]:
        """Consume one call of an offered tool. False: what was consumed is none."""
        expression: list[str] = []
        while (start := _CALL_START.match(self._text)) is None:
            if "(" in self._text or not re.fullmatch(r"\s*[A-Za-z_]?[\w.]*\s*", self._text):
                return False
            if not (yield from self._more()):
                return False
        if start[1] not in self.tools:
            return False
        self._take(start.end() - 1)
        if not (yield from self._bracketed(expression)):
            return False
        arguments = _arguments("f" + "".join(expression))
        if arguments is None:
            return False
        self._begin_call(start[1])(arguments)
        return True

    def _bracketed(self, parts: list[str]) -> Steps[bool]:
        """Consume what stands in brackets, brackets included; strings in it may hold any."""
        depth = 0
        while True:
            mark = _MARK.search(self._text)
            if mark is None:
                parts.append(self._take(len(self._text)))
                if not (yield from self._more()):
                    return False
                continue
            parts.append(self._take(mark.end()))
            if mark[0] in "\"'":
                if not (yield from self._python_string(mark[0], parts)):
                    return False
                continue
            depth += 1 if mark[0] in "([{" else -1
            if depth == 0:
                return True

    def _python_string(self, quote: str, parts: list[str]) -> Steps[bool]:
        """Consume a string behind its opening quote."""
        end = re.compile(r"\\(?s:.)|" + quote)
        while True:
            mark = end.search(self._text)
            if mark is None:
                whole = self._text.rstrip("\\")  # a backslash takes the next character with it
                parts.append(self._take(len(whole)))
                if not (yield from self._more()):
                    return False
                continue
            parts.append(self._take(mark.end()))
            if mark[0] == quote:
                return True


def _arguments(call: str) -> str | None:
    """The keyword arguments of a call expression as a JSON object; None where they are anything but literals."""
    try:
        tree = ast.parse(call, mode="eval").body
        if not isinstance(tree, ast.Call) or tree.args or any(k.arg is None for k in tree.keywords):
            return None
        values = {k.arg: _literal(k.value) for k in tree.keywords}
        return to_json(values)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


class _Literals(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Constant(_NAMES[node.id]) if node.id in _NAMES else node


def _literal(node: ast.expr) -> Any:
    value: Any = ast.literal_eval(_Literals().visit(node))
    return value
