"""Answers of the two APIs: how a delta becomes a chunk, and how all deltas become a body.

The part of a chunk that never changes is encoded once per choice; a chunk then costs a few joins of bytes.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

from octavo.request import TokenLogprobs
from octavo.server.generation import Generation
from octavo.text.output import Delta

_encode = msgspec.json.Encoder().encode


class Answer:
    """What both APIs share. One instance per HTTP request."""

    object = ""
    chunk_object = ""

    def __init__(
        self,
        generation: Generation,
        id: str,
        model: str,
        *,
        include_usage: bool = False,
        return_token_ids: bool = False,
    ) -> None:
        self.generation = generation
        self._head = {"id": id, "object": self.object, "created": int(time.time()), "model": model}
        self._include_usage = include_usage
        self._return_token_ids = return_token_ids
        chunk_head = _encode({**self._head, "object": self.chunk_object})[:-1]
        self._starts = [
            b'data: %b,"choices":[{"index":%d,' % (chunk_head, choice) for choice in range(generation.num_choices)
        ]
        self._end = b'}],"usage":null}\n\n' if include_usage else b"}]}\n\n"
        self._begun = [False] * generation.num_choices

    def opening(self) -> list[bytes]:
        """Chunks before the first token."""
        return []

    def chunk(self, choice: int, delta: Delta) -> bytes:
        """One event; empty where the delta has nothing to tell yet."""
        if not (delta.text or delta.finish_reason or delta.logprobs or (self._return_token_ids and delta.token_ids)):
            return b""
        parts = [self._starts[choice], self._content(choice, delta)]
        if delta.finish_reason is None:
            parts.append(b',"finish_reason":null')
        else:
            ending = {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
            parts.append(b"," + _encode(ending)[1:-1])
        if self._return_token_ids:
            parts.append(b',"token_ids":' + _encode(delta.token_ids))
            if not self._begun[choice]:
                parts.append(b',"prompt_token_ids":' + _encode(self._prompt_ids(choice)))
        self._begun[choice] = True
        parts.append(self._end)
        return b"".join(parts)

    def closing(self) -> bytes:
        """Usage, where asked for, and the end mark."""
        usage = b""
        if self._include_usage:
            content = {**self._head, "object": self.chunk_object, "choices": [], "usage": self.generation.usage()}
            usage = b"data: " + _encode(content) + b"\n\n"
        return usage + b"data: [DONE]\n\n"

    async def body(self) -> dict[str, Any]:
        """The whole answer, not streamed. Raises ApiError."""
        collected: list[list[Delta]] = [[] for _ in range(self.generation.num_choices)]
        async for choice, delta in self.generation.deltas():
            collected[choice].append(delta)
        choices = []
        for choice, deltas in enumerate(collected):
            whole = Delta(
                "".join(d.text for d in deltas),
                [token for d in deltas for token in d.token_ids],
                [score for d in deltas for score in d.logprobs],
                deltas[-1].finish_reason,
                deltas[-1].stop_reason,
            )
            entry = {"index": choice, **self._whole(choice, whole)}
            entry |= {"finish_reason": whole.finish_reason, "stop_reason": whole.stop_reason}
            if self._return_token_ids:
                entry |= {"token_ids": whole.token_ids, "prompt_token_ids": self._prompt_ids(choice)}
            choices.append(entry)
        return {**self._head, "choices": choices, "usage": self.generation.usage()}

    def _content(self, choice: int, delta: Delta) -> bytes:
        """The JSON members that carry text and logprobs of a chunk."""
        raise AssertionError("each API has its own")

    def _whole(self, choice: int, delta: Delta) -> dict[str, Any]:
        raise AssertionError("each API has its own")

    def _prompt_ids(self, choice: int) -> list[int]:
        return self.generation.prompts[self.generation.prompt_of(choice)].token_ids

    def _prompt_scores(self, choice: int) -> list[TokenLogprobs]:
        return self.generation.prompt_logprobs.get(self.generation.prompt_of(choice), [])
