"""gpt-oss: messages with channels. Source: the harmony response format of OpenAI.

    <|channel|>analysis<|message|>TEXT<|end|><|start|>assistant<|channel|>final<|message|>TEXT<|return|>
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>

The prompt ends behind <|start|>assistant. Analysis is reasoning; commentary without a recipient and final are content.
"""

from __future__ import annotations

import re

from octavo.text.parser import MessageParser, Steps, Write
from octavo.text.tools.json_calls import drop
from octavo.text.tools.shape import Shape

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>")
_RECIPIENT = re.compile(r"to=([^\s<]+)")


class Harmony(MessageParser):
    markers = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)
    shape = Shape(
        trigger="<|channel|>commentary to=",
        before="<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>",
        one=True,
        thought=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
        answer="<|channel|>final<|message|>",
    )

    def _run(self) -> Steps[None]:
        self._has_reasoned = self._has_content = False
        self.may_reason = True
        yield
        while True:
            mark = yield from self._until((START, CHANNEL, MESSAGE, *ENDS), self._write_content)
            if mark is None:
                break
            if mark in (START, CHANNEL):
                yield from self._message()
        self._content.append(self._held)
        self._held = ""

    def _message(self) -> Steps[None]:
        header: list[str] = []
        mark = yield from self._until((MESSAGE, *ENDS), header.append)
        if mark != MESSAGE:
            return
        text = "".join(header).replace(START, "").replace(CHANNEL, " ").replace(CONSTRAIN, " ")
        recipient = _RECIPIENT.search(text)
        if recipient is not None and recipient[1].startswith("functions."):
            write = self._begin_call(recipient[1].removeprefix("functions."))
            yield from self._space()
            yield from self._value(write)
            yield from self._until((START, *ENDS), drop)
        elif recipient is not None or "analysis" in text.split():  # a tool that is no function is part of its thoughts
            self.thinks = True
            yield from self._text_of_message(self._write_reasoning, self._has_reasoned)
            self.thinks, self._has_reasoned = False, True
        else:
            yield from self._text_of_message(self._write_content, self._has_content)
            self._has_content = True

    def _text_of_message(self, write: Write, again: bool) -> Steps[None]:
        """again: a paragraph of its own behind earlier ones."""
        self._held, self._trim = ("\n\n", False) if again else ("", True)
        if (yield from self._until(ENDS, write)) is not None:
            self._held = ""
        elif self.thinks:
            self._reasoning.append(self._held)
            self._held = ""
