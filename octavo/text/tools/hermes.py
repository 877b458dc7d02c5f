"""<tool_call>{"name": ..., "arguments": ...}</tool_call>: Hermes, Qwen 2.5 and 3, Granite 4, and models without a format."""

from __future__ import annotations

from octavo.text.parser import Steps
from octavo.text.tools.json_calls import JsonCalls, drop
from octavo.text.tools.shape import Shape

START, END = "<tool_call>", "</tool_call>"


class Hermes(JsonCalls):
    markers = (START, END)
    shape = Shape(
        trigger=START, before='<tool_call>\n{"name": "NAME", "arguments": ', after="}\n</tool_call>", between="\n"
    )

    def _body(self) -> Steps[None]:
        while (yield from self._content_until(START)) is not None:
            yield from self._block()

    def _block(self) -> Steps[None]:
        """What follows a start mark, through the end mark; without one, to the next call."""
        mark: str | None = START
        while mark == START:
            self._perhaps(START)
            yield from self._space()
            while (yield from self._json_call()):
                yield from self._space()
                if (yield from self._next_is("{")) is None:
                    break
                self._perhaps()
            if self._record is not None:
                self._no_call()
                return
            mark = yield from self._until((START, END), drop)
