"""The answer of POST /v1/messages: events, and the message that they add up to."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

import msgspec

from octavo.request import FinishReason
from octavo.server.anthropic_cache import Marked
from octavo.server.anthropic_fields import NAMES
from octavo.server.errors import ANTHROPIC, ApiError
from octavo.server.generation import Generation
from octavo.text.assistant import MessageOutput
from octavo.text.chat import ChatPrompt
from octavo.text.message import MessageDelta
from octavo.text.output import Delta

PING = b'event: ping\ndata: {"type":"ping"}\n\n'

Event = dict[str, Any]

_encode = msgspec.json.Encoder().encode

_STOP_REASONS: dict[str | None, str] = {
    "tool_calls": "tool_use",
    FinishReason.STOP: "end_turn",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.ABORT: "pause_turn",  # the client may send the answer back, and the model goes on
}


class MessagesAnswer:
    """One instance per HTTP request. The message is made of the events, so that the two are the same."""

    def __init__(
        self, generation: Generation, model: str, conversation: ChatPrompt, marked: Marked, *, shows_thinking: bool
    ) -> None:
        self.generation = generation
        self._model = model
        self._marked = marked
        self._message = MessageOutput(generation.tokenizer, conversation)
        self._blocks = Blocks(self._message, conversation, shows_thinking=shows_thinking)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events. Ending the iteration early aborts what is left.

        Raises ApiError where the engine refuses before anything came.
        """
        waits = self.generation.may_be_refused
        try:
            async with aclosing(self._events()) as events:
                async for event in events:
                    waits = False
                    yield _sse(event)
        except ApiError as e:
            if waits:
                raise
            yield e.event(ANTHROPIC)

    def written(self, choice: int, delta: Delta) -> bytes:
        """The events of a delta that is neither the first nor the last."""
        return b"".join(map(_sse, self._blocks.push(delta)))

    async def body(self) -> dict[str, Any]:
        """The whole message. Raises ApiError."""
        async with aclosing(self._events()) as events:
            return whole([event async for event in events])

    async def _events(self) -> AsyncGenerator[Event, None]:
        """Raises ApiError that names the fields as they are called here."""
        begun = False
        last: Delta | None = None
        try:
            async with aclosing(self.generation.deltas()) as deltas:
                async for _, delta in deltas:
                    if not begun:
                        begun = True
                        yield {"type": "message_start", "message": self._start()}
                    for event in self._blocks.push(delta):
                        yield event
                    last = delta
        except ApiError as e:
            raise e.renamed(NAMES) from None
        assert last is not None
        for event in self._blocks.close():
            yield event
        yield {"type": "message_delta", "delta": self._end(last), "usage": self._usage()}
        yield {"type": "message_stop"}

    def _start(self) -> dict[str, Any]:
        return {
            "id": self.generation.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(),
        }

    def _end(self, last: Delta) -> dict[str, Any]:
        if isinstance(last.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": last.stop_reason}
        return {"stop_reason": _STOP_REASONS[self._message.finish_reason(last)], "stop_sequence": None}

    def _usage(self) -> dict[str, Any]:
        generation = self.generation
        return {
            **self._marked.usage(len(generation.prompts[0].token_ids), generation.num_cached[0]),
            "output_tokens": generation.outputs[0].num_tokens,
            "output_tokens_details": {"thinking_tokens": self._message.num_reasoning_tokens},
            "service_tier": "standard",
        }


def _sse(event: Event) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), _encode(event))


class Blocks:
    """From what is added to an answer to the events of its content blocks, one block after the other."""

    def __init__(self, message: MessageOutput, conversation: ChatPrompt, *, shows_thinking: bool = True) -> None:
        self._message = message
        self._parses = conversation.parser is not None
        self._shows_thinking = shows_thinking
        self._index = -1
        self._open: str | None = None  # type of the block that the last event belongs to

    def push(self, delta: Delta) -> Iterator[Event]:
        """Character by character where a parser is at work: the order of text and calls is then that of the answer,
        however it arrived."""
        if self._parses:
            for character in delta.text:
                yield from self._add(self._message.push(Delta(character, [], [], None, None)))
            delta = delta._replace(text="")
        yield from self._add(self._message.push(delta))

    def _add(self, news: MessageDelta) -> Iterator[Event]:
        if news.reasoning:
            if self._open != "thinking":
                yield from self._begin({"type": "thinking", "thinking": "", "signature": ""})
            if self._shows_thinking:
                yield self._delta({"type": "thinking_delta", "thinking": news.reasoning})
        if news.content:
            if self._open != "text":
                yield from self._begin({"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": news.content})
        for call in news.tool_calls:
            if call.id is not None:
                yield from self._begin({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
            if call.arguments:
                yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})

    def close(self) -> Iterator[Event]:
        if self._open == "thinking":  # nothing is signed: thinking that comes back is read as it is
            yield self._delta({"type": "signature_delta", "signature": ""})
        if self._open is not None:
            yield {"type": "content_block_stop", "index": self._index}
        self._open = None

    def _begin(self, block: dict[str, Any]) -> Iterator[Event]:
        yield from self.close()
        self._index += 1
        self._open = block["type"]
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


def whole(events: list[Event]) -> dict[str, Any]:
    """The message that all events of a stream add up to."""
    message: dict[str, Any] = events[0]["message"]
    texts: list[list[str]] = []
    for event in events:
        if event["type"] == "content_block_start":
            message["content"].append(dict(event["content_block"]))
            texts.append([])
        elif event["type"] == "content_block_delta":
            texts[event["index"]] += (value for key, value in event["delta"].items() if key != "type")
        elif event["type"] == "message_delta":
            message |= {**event["delta"], "usage": event["usage"]}
    for block, parts in zip(message["content"], texts, strict=True):
        if block["type"] == "tool_use":
            block["input"] = _input("".join(parts))
        else:
            block[block["type"]] = "".join(parts)
    return message


def _input(arguments: str) -> dict[str, Any]:
    """Of a call that was cut off, what is complete. What is no JSON object at all is told as the text that it is."""
    from pydantic_core import from_json  # not at the start: few answers need it

    try:
        value = from_json(arguments or "{}", allow_partial=True)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"arguments": arguments}
