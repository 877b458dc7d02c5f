"""The answer of POST /v1/completions."""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.server.answer import Answer
from octavo.server.completion_fields import CompletionRequest
from octavo.server.generation import Generation
from octavo.server.logprobs import CompletionLogprobs, prompt_logprobs
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

    def _content(self, choice: int, delta: Delta, needed: bool) -> bytes:
        if not (needed or delta.text):
            return b""
        if self._begun[choice] and not self._scored:
            return b'"text":%b,"logprobs":null' % _encode(delta.text)
        text = self._prompt_text(choice) + delta.text if not self._begun[choice] else delta.text
        logprobs = self._scores(choice, delta, first=not self._begun[choice])
        content = b'"text":%b,"logprobs":%b' % (_encode(text), _encode(logprobs))
        if self.shows_prompt_scores and not self._begun[choice]:
            content += b',"prompt_logprobs":' + _encode(self._written_prompt_scores(choice))
        return content

    def _whole(self, choice: int, delta: Delta) -> dict[str, Any]:
        entry: dict[str, Any] = {
            "text": self._prompt_text(choice) + delta.text,
            "logprobs": self._scores(choice, delta, first=True),
        }
        if self.shows_prompt_scores:
            entry["prompt_logprobs"] = self._written_prompt_scores(choice)
        return entry

    def _written_prompt_scores(self, choice: int) -> list[dict[str, Any] | None]:
        return prompt_logprobs(self.generation.tokenizer, self._prompt_scores(choice))

    def _prompt_text(self, choice: int) -> str:
        if not self._echo:
            return ""
        prompt = self.generation.prompts[self.generation.prompt_of(choice)]
        return prompt.text if prompt.text is not None else self.generation.tokenizer.decode(prompt.token_ids)

    def _scores(self, choice: int, delta: Delta, first: bool) -> dict[str, Any] | None:
        if not self._scored:
            return None
        if self._echo and first:
            scores = [*self._prompt_scores(choice), *delta.logprobs]
            return self._logprobs[choice].write(scores, prompt_start=self._prompt_ids(choice)[0])
        return self._logprobs[choice].write(delta.logprobs)
