"""The fields of POST /v1/completions."""

from __future__ import annotations

from typing import Any, ClassVar

from octavo.server.errors import bad_request
from octavo.server.fields import NOT_BUILT, GenerationRequest


class CompletionRequest(GenerationRequest, kw_only=True):
    """POST /v1/completions."""

    NOT_BUILT: ClassVar[dict[str, tuple[Any, ...]]] = NOT_BUILT | {
        "best_of": (1,),
        "prompt_embeds": (),
        "suffix": ("",),
    }

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None

    def output_limit(self) -> int | None:
        return 16 if self.max_tokens is None else self.max_tokens

    def wanted_logprobs(self) -> int | None:
        return self.logprobs

    def wanted_prompt_logprobs(self) -> int | None:
        """An echoed prompt is scored like the output."""
        return self.logprobs if self.prompt_logprobs is None and self.echo else self.prompt_logprobs

    def prompts(self) -> list[str | list[int]]:
        """The prompts one by one. Raises ApiError for an empty list and for ids beside texts."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise bad_request("prompt is an empty list: give text, token ids, or a list of either", "prompt")
        if all(type(item) is int for item in prompt):
            return [prompt]  # type: ignore[list-item]
        if not any(type(item) is int for item in prompt):
            return prompt  # type: ignore[return-value]
        raise bad_request("prompt mixes token ids with other forms: give texts, token ids, or lists of ids", "prompt")
