"""Llama 3 and 4: {"name": ..., "parameters": ...}, several joined by semicolons.

With or without <|python_tag|> before them, or <|python_start|> and <|python_end|> around them.
"""

from __future__ import annotations

from octavo.text.parser import Steps
from octavo.text.tools.json_calls import JsonCalls
from octavo.text.tools.shape import Shape

STARTS = ("<|python_tag|>", "<|python_start|>")
END = "<|python_end|>"


class Llama3(JsonCalls):
    markers = (*STARTS, END)
    bare = True
    shape = Shape(trigger="", before='{"name": "NAME", "parameters": ', after="}", between="; ")

    def _body(self) -> Steps[None]:
        space = yield from self._space()
        self._perhaps(space)
        yield from self._objects()
        while (mark := (yield from self._content_until(*STARTS, END))) is not None:
            if mark != END:
                self._perhaps(mark)
                yield from self._objects()

    def _objects(self) -> Steps[None]:
        """The calls that come next, if any do."""
        while True:
            yield from self._space()
            if (yield from self._next_is("{", "[")) is None or not (yield from self._json_calls()):
                self._no_call()
                return
            self._perhaps()
            yield from self._space()
            if not (yield from self._skip(";")):
                yield from self._skip(",")
