"""The fields of POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any, ClassVar

from octavo.request import MAX_LOGPROBS, ParameterError
from octavo.server.fields import NOT_BUILT, GenerationRequest


class ChatRequest(GenerationRequest, kw_only=True):
    """POST /v1/chat/completions."""

    NOT_BUILT: ClassVar[dict[str, tuple[Any, ...]]] = NOT_BUILT | {
        "audio": (),
        "best_of": (1,),
        "chat_template": (),
        "continue_final_message": (False,),
        "documents": ([],),
        "echo": (False,),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "include_reasoning": (True,),
        "metadata": ({},),
        "mm_processor_kwargs": ({},),
        "modalities": (["text"],),
        "moderation": (),
        "parallel_tool_calls": (True, False),  # about tool calls, and there are none
        "prediction": (),
        "prompt_cache_options": (),
        "prompt_cache_retention": ("in_memory",),
        "reasoning_effort": ("none",),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
        "verbosity": ("medium",),
        "web_search_options": (),
    }

    messages: list[dict[str, Any]]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def output_limit(self) -> int | None:
        if self.max_completion_tokens is not None and self.max_tokens is not None:
            raise ParameterError("max_tokens", "give max_completion_tokens or max_tokens, not both")
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def wanted_logprobs(self) -> int | None:
        if self.top_logprobs is not None and not self.logprobs:
            raise ParameterError("top_logprobs", "top_logprobs needs logprobs to be true")
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= MAX_LOGPROBS:
            raise ParameterError(
                "top_logprobs", f"top_logprobs must be between 0 and {MAX_LOGPROBS}, got {self.top_logprobs}"
            )
        return (self.top_logprobs or 0) if self.logprobs else None
