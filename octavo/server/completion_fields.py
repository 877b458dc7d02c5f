"""The fields of POST /v1/completions."""

from __future__ import annotations

from typing import Annotated, ClassVar

from octavo.server.errors import bad_request
from octavo.server.fields import REFUSED, GenerationRequest, Refused, about


class CompletionRequest(GenerationRequest, kw_only=True):
    """POST /v1/completions."""

    REFUSED: ClassVar[dict[str, Refused]] = REFUSED | {
        "prompt_embeds": Refused("prompts are text or token ids"),
    }

    prompt: Annotated[
        str | list[str | int | list[int]], about("A text, token ids, or a list of either, each with its choices.")
    ]
    echo: Annotated[bool | None, about("The text begins with the prompt; its tokens are scored as the output's.")] = (
        None
    )
    suffix: Annotated[
        str | None, about("The output goes between prompt and suffix: for models with tokens for infilling.")
    ] = None
    logprobs: Annotated[int | None, about("Score the output's tokens, with so many alternatives, at most 32.")] = None

    def output_limit(self, name: str = "max_tokens", default: int | None = 16) -> int | None:
        return super().output_limit(name, default)

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
