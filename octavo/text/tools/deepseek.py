"""DeepSeek V3 and R1 (function<sep>NAME and a fenced JSON block) and V3.1 (NAME<sep>{...}), each between marks."""

from __future__ import annotations

from octavo.text.parser import Steps
from octavo.text.tools.json_calls import JsonCalls, drop
from octavo.text.tools.shape import Shape

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
FENCE = "```json"


class DeepSeek(JsonCalls):
    markers = (BEGIN, END, CALL, SEPARATOR, CALL_END)
    shape = Shape(
        trigger=BEGIN,
        open=BEGIN,
        before=f"{CALL}function{SEPARATOR}NAME\n{FENCE}\n",
        after=f"\n```{CALL_END}",
        between="\n",
        close=END,
    )

    def _body(self) -> Steps[None]:
        while (mark := (yield from self._content_until(BEGIN, CALL, END))) is not None:
            if mark == CALL:
                self._perhaps(CALL)
                yield from self._call()
                self._no_call()
            else:
                self._held, self._trim = "", True

    def _call(self) -> Steps[None]:
        first: list[str] = []
        if (yield from self._until((SEPARATOR,), first.append)) is None:
            return
        name = "".join(first)
        yield from self._space()
        if (yield from self._next_is("{")) is None:
            second: list[str] = []
            if (yield from self._until((FENCE,), second.append)) is None:
                return
            name = "".join(second)
            yield from self._space()
        yield from self._value(self._begin_call(name.strip()))
        yield from self._until((CALL_END,), drop)


class DeepSeekV31(DeepSeek):
    shape = Shape(trigger=BEGIN, open=BEGIN, before=f"{CALL}NAME{SEPARATOR}", after=CALL_END, close=END)
