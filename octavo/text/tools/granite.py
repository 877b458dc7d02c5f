"""Granite 3: <|tool_call|>[{"name": ..., "arguments": ...}, ...]; earlier ones write <tool_call> for it."""

from __future__ import annotations

from octavo.text.parser import Steps
from octavo.text.tools.json_calls import JsonCalls
from octavo.text.tools.shape import Shape

MARKS = ("<|tool_call|>", "<tool_call>")


class Granite(JsonCalls):
    markers = MARKS
    shape = Shape(
        trigger=MARKS[0],
        open="<|tool_call|>[",
        before='{"name": "NAME", "arguments": ',
        after="}",
        between=", ",
        close="]",
    )

    def _body(self) -> Steps[None]:
        while (mark := (yield from self._content_until(*MARKS))) is not None:
            self._perhaps(mark)
            yield from self._space()
            yield from self._json_calls()
            self._no_call()
