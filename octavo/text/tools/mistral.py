"""Mistral: [TOOL_CALLS] and then an array of calls, or (from tokenizer version 11 on) NAME[ARGS]{...} for each call."""

from __future__ import annotations

import secrets
import string

from octavo.text.parser import Steps
from octavo.text.tools.json_calls import JsonCalls
from octavo.text.tools.shape import Shape

START, ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


class Mistral(JsonCalls):
    markers = (START, ID, ARGUMENTS)
    shape = Shape(
        trigger=START, open=START + "[", before='{"name": "NAME", "arguments": ', after="}", between=", ", close="]"
    )

    def _body(self) -> Steps[None]:
        while (yield from self._content_until(START)) is not None:
            self._perhaps(START)
            yield from self._space()
            if (yield from self._next_is("[", "{")) is not None:
                yield from self._json_calls()
            else:
                yield from self._named_call()
            self._no_call()

    def _named_call(self) -> Steps[None]:
        name: list[str] = []
        id: list[str] = []
        mark = yield from self._until((ID, ARGUMENTS), name.append)
        if mark == ID:
            mark = yield from self._until((ARGUMENTS,), id.append)
        if mark is not None:
            write = self._begin_call("".join(name).strip(), "".join(id).strip() or None)
            yield from self._space()
            yield from self._value(write)

    def _new_id(self) -> str:
        """Its templates refuse ids of any other form."""
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


class MistralNamed(Mistral):
    """Models whose template writes NAME[ARGS]."""

    shape = Shape(trigger=START, before="[TOOL_CALLS]NAME[ARGS]")
