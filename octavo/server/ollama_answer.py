"""The answers of Ollama's /api/chat and /api/generate: lines of JSON, or one object."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any

import msgspec

from octavo.request import FinishReason
from octavo.server.calls import Call
from octavo.server.errors import OLLAMA, ApiError
from octavo.server.generation import Generation
from octavo.server.logprobs import chat_tokens
from octavo.server.ollama_fields import NAMES
from octavo.text.assistant import MessageOutput
from octavo.text.chat import ChatPrompt
from octavo.text.message import AssistantMessage, MessageDelta
from octavo.text.output import Delta


class OllamaAnswer:
    """Read once, by `lines` or by `body`."""

    def __init__(
        self, generation: Generation, model: str, call: Call, conversation: ChatPrompt | None, *, is_chat: bool
    ) -> None:
        """model: its name as the client gave it. conversation: None for a text that goes on, or fills a gap."""
        self.generation = generation
        self._model = model
        self._call = call
        self._message = None if conversation is None else MessageOutput(generation.tokenizer, conversation)
        self._is_chat = is_chat
        self._calls = AssistantMessage()  # only the calls of it
        self._num_told = 0  # calls
        self._started = time.monotonic()

    async def lines(self) -> AsyncGenerator[bytes, None]:
        """Ending the iteration early aborts the answer. Raises ApiError where the engine refuses before anything came."""
        waits = self.generation.may_be_refused
        try:
            async with aclosing(self.generation.deltas()) as deltas:
                async for _, delta in deltas:
                    waits = False
                    if line := self.written(0, delta):
                        yield line
                    if delta.finish_reason is not None:
                        yield _line({**self._head(), **self._shaped({}), **self._ending(delta.finish_reason)})
        except ApiError as e:
            if waits:
                raise e.renamed(NAMES) from None
            yield _line(e.renamed(NAMES).body(OLLAMA))

    def written(self, choice: int, delta: Delta) -> bytes:
        """The line of a delta; empty where it has nothing to tell yet."""
        told = self._told(delta)
        if not (told or delta.logprobs):
            return b""
        return _line({**self._head(), **self._shaped(told), **self._scores(delta), "done": False})

    async def body(self) -> dict[str, Any]:
        """The whole answer. Raises ApiError."""
        whole: dict[str, Any] = {}
        scores: list[msgspec.Raw] = []
        ending: dict[str, Any] = {}
        try:
            async with aclosing(self.generation.deltas()) as deltas:
                async for _, delta in deltas:
                    for name, value in self._told(delta).items():
                        whole[name] = whole[name] + value if name in whole else value
                    scores += self._scores(delta).get("logprobs", [])
                    if delta.finish_reason is not None:
                        ending = self._ending(delta.finish_reason)
        except ApiError as e:
            raise e.renamed(NAMES) from None
        return {**self._head(), **self._shaped(whole), **({"logprobs": scores} if scores else {}), **ending}

    def _told(self, delta: Delta) -> dict[str, Any]:
        """What is new: content, thinking, whole calls. A call whose arguments are no JSON object is content, as written."""
        news = MessageDelta(delta.text) if self._message is None else self._message.push(delta)
        self._calls.add(MessageDelta(tool_calls=news.tool_calls))
        written = self._calls.tool_calls
        whole = written[self._num_told : len(written) if delta.finish_reason is not None else max(0, len(written) - 1)]
        self._num_told += len(whole)
        content, calls = news.content, []
        for call in whole:
            arguments = _object(call.arguments)
            if arguments is None:
                content += call.arguments
            else:
                calls.append({"id": call.id, "function": {"name": call.name, "arguments": arguments}})
        told: dict[str, Any] = {}
        if content:
            told["content"] = content
        if news.reasoning:
            told["thinking"] = news.reasoning
        if calls:
            told["tool_calls"] = calls
        return told

    def _head(self) -> dict[str, Any]:
        return {"model": self._model, "created_at": datetime.now(UTC).isoformat().replace("+00:00", "Z")}

    def _shaped(self, told: dict[str, Any]) -> dict[str, Any]:
        if self._is_chat:
            return {"message": {"role": "assistant", "content": "", **told}}
        return {"response": told.get("content", "")} | ({"thinking": told["thinking"]} if "thinking" in told else {})

    def _scores(self, delta: Delta) -> dict[str, Any]:
        if not delta.logprobs:
            return {}
        return {"logprobs": chat_tokens(self.generation.tokenizer, delta.logprobs)}

    def _ending(self, reason: FinishReason) -> dict[str, Any]:
        """Durations are in nanoseconds. A prompt's begins when its computation does: waiting is in the total alone."""
        usage = self.generation.usage()
        now = time.monotonic()
        first = self._call.first_token or now
        prompt = first - self._started - (self._call.queue_seconds or 0.0)
        return {
            "done": True,
            "done_reason": str(reason),
            "total_duration": _nanoseconds(now - self._started),
            "load_duration": 0,  # the model is loaded before requests are taken
            "prompt_eval_count": usage["prompt_tokens"],
            "prompt_eval_duration": _nanoseconds(prompt),
            "eval_count": usage["completion_tokens"],
            "eval_duration": _nanoseconds(now - first),
        }


def _nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e9))


def _object(arguments: str) -> dict[str, Any] | None:
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _line(content: dict[str, Any]) -> bytes:
    return msgspec.json.encode(content) + b"\n"
