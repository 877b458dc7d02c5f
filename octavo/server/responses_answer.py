"""ResponseAnswer: one response of the Responses API as it is made, whole or as events."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import msgspec

from octavo.request import FinishReason, TokenLogprobs
from octavo.server.errors import ApiError
from octavo.server.generation import Generation
from octavo.server.logprobs import chat_tokens
from octavo.server.responses_fields import ENCRYPTED, NAMES, ResponsesRequest
from octavo.server.responses_output import Event, ResponseOutput, Scores
from octavo.server.responses_store import StoredResponse
from octavo.text.assistant import MessageOutput
from octavo.text.chat import ChatPrompt
from octavo.text.output import Delta

_encode = msgspec.json.Encoder().encode


class ResponseAnswer:
    """Read once, by `events` or by `body`. `stored.body` is the response as far as it is made."""

    def __init__(
        self,
        generation: Generation,
        conversation: ChatPrompt,
        request: ResponsesRequest,
        stored: StoredResponse,
        on_end: Callable[[], None],
    ) -> None:
        """on_end: called when the response changes no more, before the last event."""
        self.generation = generation
        self.request = request
        self.stored = stored
        self._on_end = on_end
        message = MessageOutput(generation.tokenizer, conversation)
        encrypts = ENCRYPTED in (request.include or ())
        id = stored.id.partition("_")[2]
        self._output = ResponseOutput(message, self._scores if request.scored else None, id, encrypts)
        stored.body["output"] = self._output.items
        self._number = 0

    async def events(self) -> AsyncGenerator[bytes, None]:
        """As server-sent events; the last one tells how the response ended, or failed. Ending the iteration early aborts it.

        Raises ApiError where the engine refuses before anything came of a response that a client waits for.
        """
        body = self.stored.body
        waits = self.generation.may_be_refused and not self.request.background
        opening = ["created", "queued", "in_progress"] if self.request.background else ["created", "in_progress"]
        try:
            while opening and not waits:
                yield self._lifecycle(opening.pop(0))
            async with aclosing(self.generation.deltas()) as deltas:
                async for _, delta in deltas:
                    waits = False
                    while opening:
                        yield self._lifecycle(opening.pop(0))
                    for event in self._output.push(delta):
                        yield self._numbered(event)
                    if delta.finish_reason is not None:
                        self._end(delta.finish_reason)
        except ApiError as e:
            if waits:
                raise e.renamed(NAMES) from None
            self._fail(e.renamed(NAMES))
        self._on_end()
        kind: str = body["status"]
        yield self._lifecycle("incomplete" if kind == "cancelled" else kind)

    def written(self, choice: int, delta: Delta) -> bytes:
        """The events of a delta; empty where it has none yet."""
        return b"".join(map(self._numbered, self._output.push(delta)))

    async def body(self) -> dict[str, Any]:
        """The whole response. Raises ApiError."""
        try:
            async with aclosing(self.generation.deltas()) as deltas:
                async for _, delta in deltas:
                    self._output.push(delta)
                    if delta.finish_reason is not None:
                        self._end(delta.finish_reason)
        except ApiError as e:
            raise e.renamed(NAMES) from None
        self._on_end()
        return self.stored.body

    def _end(self, reason: FinishReason) -> None:
        body = self.stored.body
        body["status"] = "completed"
        if reason is FinishReason.LENGTH:
            body |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        elif reason is FinishReason.ABORT:
            body["status"] = "cancelled"
        else:
            body["completed_at"] = int(time.time())
        body["usage"] = self._usage()

    def _fail(self, error: ApiError) -> None:
        code = "server_error" if error.status >= 500 else error.code or "invalid_prompt"
        named = error.param is None or error.param in error.message
        message = error.message if named else f"{error.param}: {error.message}"
        self.stored.body |= {"status": "failed", "error": {"code": code, "message": message}}

    def _usage(self) -> dict[str, Any]:
        usage = self.generation.usage()
        prompt, cached = usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": prompt - cached},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._output.num_reasoning_tokens},
            "total_tokens": usage["total_tokens"],
        }

    def _scores(self, scores: list[TokenLogprobs]) -> Scores:
        return chat_tokens(self.generation.tokenizer, scores)

    def _lifecycle(self, kind: str) -> bytes:
        body = self.stored.body
        if kind == "queued":
            body["status"] = "queued"
        elif kind == "in_progress":
            body["status"] = "in_progress"
        return self._numbered({"type": f"response.{kind}", "response": body})

    def _numbered(self, event: Event) -> bytes:
        number, self._number = self._number, self._number + 1
        kind: str = event["type"]
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode({**event, "sequence_number": number}))


def new_body(id: str, model: str, request: ResponsesRequest, generation: Generation) -> dict[str, Any]:
    """The response object before anything is made."""
    params = generation.params
    reasoning = request.reasoning
    text = {"format": {"type": "text"}} if request.text is None else _given(request.text)
    return {
        "id": id,
        "object": "response",
        "created_at": int(time.time()),
        "status": "queued" if request.background else "in_progress",
        "background": bool(request.background),
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "metadata": request.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "prompt_cache_key": request.prompt_cache_key,
        "prompt_cache_retention": request.prompt_cache_retention,
        "reasoning": {"effort": None if reasoning is None else reasoning.effort, "summary": None},
        "safety_identifier": request.safety_identifier,
        "service_tier": "default",
        "store": request.stored,
        "temperature": params.temperature,
        "text": text,
        "tool_choice": "auto" if request.tool_choice is None else request.tool_choice,
        "tools": request.tools or [],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": request.user,
    }


def _given(text: msgspec.Struct) -> dict[str, Any]:
    """Without members that were not given."""
    members: dict[str, Any] = msgspec.to_builtins(text)
    format = members.get("format") or {"type": "text"}
    return {"format": {name: value for name, value in format.items() if value is not None}} | (
        {"verbosity": members["verbosity"]} if members["verbosity"] is not None else {}
    )
