"""The answer of POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw

from octavo.request import TokenLogprobs
from octavo.server.answer import Answer
from octavo.server.chat_fields import ChatRequest
from octavo.server.generation import Generation
from octavo.server.logprobs import chat_tokens
from octavo.text.assistant import MessageOutput
from octavo.text.chat import ChatPrompt
from octavo.text.message import AssistantMessage, MessageDelta, ToolCallDelta
from octavo.text.output import Delta

_encode = msgspec.json.Encoder().encode


class ChatAnswer(Answer):
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, generation: Generation, model: str, request: ChatRequest, prompt: ChatPrompt) -> None:
        super().__init__(generation, model, request)
        self._shows_reasoning = request.include_reasoning is not False
        skip = generation.params.skip_special_tokens
        self._as_ids = bool(request.return_tokens_as_token_ids)
        self._tokens: list[list[Raw]] = [[] for _ in range(generation.num_choices)]  # noted
        self._messages = [MessageOutput(generation.tokenizer, prompt, skip) for _ in range(generation.num_choices)]

    def opening(self) -> list[bytes]:
        role = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
        return [*super().opening(), *(start + role + self._end for start in self._starts)]

    def _first(self, choice: int) -> dict[str, Any]:
        if choice or not self._shows_prompt_scores:
            return {}
        return {"prompt_logprobs": self._told_of_prompt(0)}

    def _content(self, choice: int, delta: Delta, needed: bool) -> bytes:
        news = self._messages[choice].push(delta)
        if not (needed or news.reasoning or news.tool_calls):  # as most are
            return b'"delta":{"content":%b},"logprobs":null' % _encode(news.content) if news.content else b""
        told = self._told(news)
        if not (needed or told):
            return b""
        return b'"delta":%b,"logprobs":%b' % (
            _encode(told),
            _encode(_scores(self._written(delta.logprobs))) if delta.logprobs else b"null",
        )

    def _note(self, choice: int, scores: list[TokenLogprobs]) -> None:
        self._tokens[choice] += self._written(scores)

    def _told(self, news: MessageDelta) -> dict[str, Any]:
        told: dict[str, Any] = {}
        if news.reasoning and self._shows_reasoning:
            told["reasoning_content"] = news.reasoning
        if news.content:
            told["content"] = news.content
        if news.tool_calls:
            told["tool_calls"] = _call_parts(news.tool_calls)
        return told

    def _whole(self, choice: int, delta: Delta) -> dict[str, Any]:
        whole = AssistantMessage()
        whole.add(self._messages[choice].push(delta))
        content = None if whole.tool_calls and not whole.content else whole.content
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if whole.reasoning and self._shows_reasoning:
            message["reasoning_content"] = whole.reasoning
        if whole.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in whole.tool_calls
            ]
        asked = self.generation.params.logprobs is not None
        return {"message": message, "logprobs": _scores(self._tokens[choice]) if asked else None}

    def _finish_reason(self, choice: int, delta: Delta) -> str | None:
        return self._messages[choice].finish_reason(delta)

    def _usage(self) -> dict[str, Any]:
        reasoning = sum(message.num_reasoning_tokens for message in self._messages)
        return {**super()._usage(), "completion_tokens_details": {"reasoning_tokens": reasoning}}

    def _written(self, scores: list[TokenLogprobs]) -> list[Raw]:
        return chat_tokens(self.generation.tokenizer, scores, self._as_ids)


def _scores(tokens: list[Raw]) -> dict[str, Any]:
    return {"content": tokens, "refusal": None}


def _call_parts(parts: tuple[ToolCallDelta, ...]) -> list[dict[str, Any]]:
    """One entry per call."""
    entries: dict[int, dict[str, Any]] = {}
    for part in parts:
        entry = entries.setdefault(part.index, {"index": part.index, "function": {"arguments": ""}})
        if part.name is not None:
            entry["id"], entry["type"] = part.id, "function"
            entry["function"] = {"name": part.name, "arguments": ""}
        entry["function"]["arguments"] += part.arguments
    return list(entries.values())
