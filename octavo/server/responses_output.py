"""ResponseOutput: the output items of one response as its deltas arrive, and the events that tell of them.

Source: the stream events of OpenAI's Responses API. Items come one after another: reasoning, messages, calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from octavo.request import FinishReason, TokenLogprobs
from octavo.server.responses_input import encoded
from octavo.text.assistant import MessageOutput
from octavo.text.message import ToolCallDelta
from octavo.text.output import Delta

Event = dict[str, Any]
"""Without its sequence number, which counts those of the whole response."""

Scores = list[msgspec.Raw]


class ResponseOutput:
    """Joined over all events, the items are the same however the text was cut."""

    def __init__(
        self, message: MessageOutput, write: Callable[[list[TokenLogprobs]], Scores] | None, id: str, encrypts: bool
    ) -> None:
        """write: scores of tokens in the API's form; None: they are not asked for. id: of which the items' are made.
        encrypts: reasoning has its opaque form too."""
        self.items: list[dict[str, Any]] = []  # finished ones, then the open one as it began
        self._message = message
        self._write = write
        self._id = id
        self._encrypts = encrypts
        self._open: str | None = None  # type of the last item, while more of it comes
        self._call = -1  # index of the last call
        self._text: list[str] = []  # of the open item
        self._scores: Scores = []
        self._unsaid: Scores = []  # of tokens whose text is held back

    @property
    def num_reasoning_tokens(self) -> int:
        return self._message.num_reasoning_tokens

    def push(self, delta: Delta) -> list[Event]:
        """With the last delta of the choice every item is finished."""
        reasoned = self.num_reasoning_tokens
        pieces = self._message.pieces(delta)
        if self._write is not None and self._call < 0:  # neither reasoning nor calls are scored
            self._unsaid += self._write(delta.logprobs[self.num_reasoning_tokens - reasoned :])
        events: list[Event] = []
        for news in pieces:
            if news.reasoning:
                events += self._say("reasoning", news.reasoning)
            if news.content:
                events += self._say("message", news.content)
            for part in news.tool_calls:
                events += self._argue(part)
        if delta.finish_reason is not None:
            cut = delta.finish_reason in (FinishReason.LENGTH, FinishReason.ABORT)
            events += self._close("incomplete" if cut else "completed")
        return events

    def _say(self, kind: str, text: str) -> list[Event]:
        """More of a reasoning or a message item, which is begun where the last item is another."""
        events: list[Event] = []
        if self._open != kind:
            events = self._close("completed")
            item = {"content": [], "summary": []} if kind == "reasoning" else {"role": "assistant", "content": []}
            events += [self._begin(kind, item), self._event("content_part.added", content_index=0, part=self._part(""))]
        self._text.append(text)
        event = self._event(f"{_PART[kind]}.delta", content_index=0, delta=text)
        if kind == "message":
            event["logprobs"] = self._unsaid
            self._scores += self._unsaid
            self._unsaid = []
        return [*events, event]

    def _argue(self, part: ToolCallDelta) -> list[Event]:
        events: list[Event] = []
        if part.index != self._call:
            events = self._close("completed")
            self._call = part.index
            events.append(self._begin("function_call", {"call_id": part.id, "name": part.name, "arguments": ""}))
        if part.arguments:
            self._text.append(part.arguments)
            events.append(self._event("function_call_arguments.delta", delta=part.arguments))
        return events

    def _begin(self, kind: str, members: dict[str, Any]) -> Event:
        self._open = kind
        id = f"{_PREFIX[kind]}_{self._id}{len(self.items):02x}"
        self.items.append({"id": id, "type": kind, "status": "in_progress", **members})
        return {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": self.items[-1]}

    def _close(self, status: str) -> list[Event]:
        """Finish the open item, if there is one."""
        if self._open is None:
            return []
        kind, text = self._open, "".join(self._text)
        item = {**self.items[-1], "status": status}
        if kind == "function_call":
            item["arguments"] = text
            events = [self._event("function_call_arguments.done", name=item["name"], arguments=text)]
        else:
            part = self._part(text)
            item["content"] = [part]
            if kind == "reasoning" and self._encrypts:
                item["encrypted_content"] = encoded(text)
            scores = {"logprobs": self._scores} if kind == "message" else {}
            events = [
                self._event(f"{_PART[kind]}.done", content_index=0, text=text, **scores),
                self._event("content_part.done", content_index=0, part=part),
            ]
        self.items[-1] = item
        done = {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}
        self._open, self._text, self._scores = None, [], []
        return [*events, done]

    def _part(self, text: str) -> dict[str, Any]:
        if self._open == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(self._scores)}

    def _event(self, name: str, /, **members: Any) -> Event:
        place = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        return {"type": f"response.{name}", **place, **members}


_PREFIX = {"reasoning": "rs", "message": "msg", "function_call": "fc"}
_PART = {"reasoning": "reasoning_text", "message": "output_text"}
"""Type of an item -> that of its part."""
