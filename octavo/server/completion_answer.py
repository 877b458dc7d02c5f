"""The answer of POST /v1/completions."""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.request import TokenLogprobs
from octavo.server.answer import Answer
from octavo.server.completion_fields import CompletionRequest
from octavo.server.generation import Generation
from octavo.server.logprobs import CompletionLogprobs, CompletionTokens
from octavo.text.output import Delta

_encode = msgspec.json.Encoder().encode


class CompletionAnswer(Answer):
    object = chunk_object = "text_completion"

    def __init__(self, generation: Generation, model: str, request: CompletionRequest) -> None:
        super().__init__(generation, model, request)
        self._echo = bool(request.echo)
        self._scored = generation.params.logprobs is not None
        skip, as_ids = generation.params.skip_special_tokens, bool(request.return_tokens_as_token_ids)
        self._logprobs = [
            CompletionLogprobs(generation.tokenizer, skip, as_ids=as_ids) for _ in range(generation.num_choices)
        ]
        self._tokens: dict[int, CompletionTokens] = {}  # by choice: written, not told yet

    async def _write_prompt(self, choice: int) -> None:
        await super()._write_prompt(choice)
        if self._echo and self._scored:
            self._tokens[choice] = echoed = self._logprobs[choice].write([], prompt_start=self._prompt_ids(choice)[0])
            async for piece in self._pace.pieces(self._prompt_scores(choice)):
                echoed.extend(self._logprobs[choice].write(piece))

    def _note(self, choice: int, scores: list[TokenLogprobs]) -> None:
        written = self._logprobs[choice].write(scores)
        if choice in self._tokens:
            self._tokens[choice].extend(written)
        else:
            self._tokens[choice] = written

    def _content(self, choice: int, delta: Delta, needed: bool) -> bytes:
        if not (needed or delta.text):
            return b""
        if self._begun[choice] and not self._scored:
            return b'"text":%b,"logprobs":null' % _encode(delta.text)
        text = self._prompt_text(choice) + delta.text if not self._begun[choice] else delta.text
        logprobs = None
        if self._scored:
            self._note(choice, delta.logprobs)
            logprobs = self._take(choice)
        content = b'"text":%b,"logprobs":%b' % (_encode(text), _encode(logprobs))
        if self._shows_prompt_scores and not self._begun[choice]:
            content += b',"prompt_logprobs":' + _encode(self._told_of_prompt(choice))
        return content

    def _whole(self, choice: int, delta: Delta) -> dict[str, Any]:
        entry: dict[str, Any] = {"text": self._prompt_text(choice) + delta.text, "logprobs": self._take(choice)}
        if self._shows_prompt_scores:
            entry["prompt_logprobs"] = self._told_of_prompt(choice)
        return entry

    def _prompt_text(self, choice: int) -> str:
        if not self._echo:
            return ""
        prompt = self.generation.prompts[self.generation.prompt_of(choice)]
        return prompt.text if prompt.text is not None else self.generation.tokenizer.decode(prompt.token_ids)

    def _take(self, choice: int) -> dict[str, Any] | None:
        """What is written and not told yet."""
        if not self._scored:
            return None
        return self._tokens.pop(choice, CompletionTokens([], [], [], []))._asdict()
