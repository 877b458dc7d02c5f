"""The answer of POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.server.answer import Answer
from octavo.server.generation import Generation
from octavo.server.logprobs import chat_logprobs, prompt_logprobs
from octavo.text.output import Delta

_encode = msgspec.json.Encoder().encode


class ChatAnswer(Answer):
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self, generation: Generation, id: str, model: str, *, prompt_scores: bool = False, **shared: Any
    ) -> None:
        super().__init__(generation, id, model, **shared)
        self._show_prompt_scores = prompt_scores

    def opening(self) -> list[bytes]:
        role = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
        return [start + role + self._end for start in self._starts]

    async def body(self) -> dict[str, Any]:
        body = await super().body()
        if self._show_prompt_scores:
            body["prompt_logprobs"] = prompt_logprobs(self.generation.tokenizer, self._prompt_scores(0))
        return body

    def _content(self, choice: int, delta: Delta) -> bytes:
        text = b'{"content":%b}' % _encode(delta.text) if delta.text else b"{}"
        return b'"delta":%b,"logprobs":%b' % (text, _encode(self._scores(delta)) if delta.logprobs else b"null")

    def _whole(self, choice: int, delta: Delta) -> dict[str, Any]:
        message = {"role": "assistant", "content": delta.text, "refusal": None}
        return {"message": message, "logprobs": self._scores(delta)}

    def _scores(self, delta: Delta) -> dict[str, Any] | None:
        if self.generation.params.logprobs is None:
            return None
        return chat_logprobs(self.generation.tokenizer, delta.logprobs)
