"""The fields of POST /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from octavo.request import MAX_LOGPROBS, ParameterError, Retention
from octavo.server.errors import bad_request
from octavo.server.fields import REFUSED, GenerationRequest, Refused, about
from octavo.text.chat import ChatOptions
from octavo.text.tools.offer import read_offer


class ChatRequest(GenerationRequest, kw_only=True):
    """POST /v1/chat/completions."""

    REFUSED: ClassVar[dict[str, Refused]] = REFUSED | {
        "audio": Refused("the model has no audio"),
        "chat_template": Refused("templates are code; the server's operator chooses one"),
        "echo": Refused("the last message is not repeated", (False,)),
        "media_io_kwargs": Refused("the model takes text", ({},)),
        "chat_template_content_format": Refused("content is given as the template takes it", ("auto",)),
        "function_call": Refused("use tool_choice", ("none", "auto")),
        "functions": Refused("use tools", ([],)),
        "metadata": Refused("nothing is stored", ({},)),
        "mm_processor_kwargs": Refused("the model takes text", ({},)),
        "modalities": Refused("the model gives text", (["text"],)),
        "moderation": Refused("nothing is moderated"),
        "prediction": Refused("outputs are not predicted"),
        "prompt_cache_options": Refused("the prefix cache is always on"),
        "service_tier": Refused("there is one tier; use priority", ("auto", "default")),
        "store": Refused("nothing is stored", (False,)),
        "verbosity": Refused("the model has no verbosity", ("medium",)),
        "web_search_options": Refused("nothing is searched"),
    }

    messages: Annotated[list[dict[str, Any]], about("The conversation: roles, contents, names.")]
    add_special_tokens: Annotated[
        bool | None, about("Add what the tokenizer asks for, as BOS. Default: where the template wrote none.")
    ] = None
    logprobs: Annotated[bool | None, about("Score the output's tokens.")] = None
    top_logprobs: Annotated[int | None, about("Alternatives for each, at most 32. Needs logprobs.")] = None
    max_completion_tokens: Annotated[int | None, about("As max_tokens. Default: the rest of the context.")] = None
    add_generation_prompt: Annotated[bool | None, about("The prompt ends with the assistant's head.")] = None
    continue_final_message: Annotated[bool | None, about("The answer goes on in the last message.")] = None
    documents: Annotated[list[dict[str, Any]] | None, about("For templates that take documents.")] = None
    tools: Annotated[list[dict[str, Any]] | None, about("Functions that the model may call, at most 128.")] = None
    tool_choice: Annotated[
        str | dict[str, Any] | None, about("none, auto, required, a function, or allowed_tools. Default: auto.")
    ] = None
    parallel_tool_calls: Annotated[bool | None, about("An answer may hold several calls. Default: true.")] = None
    reasoning_effort: Annotated[str | None, about("For templates that take it: none, low, medium, high, ...")] = None
    include_reasoning: Annotated[bool | None, about("Show reasoning_content. Default: true.")] = None
    thinking_token_budget: Annotated[
        Annotated[int, Meta(ge=0, le=2**31 - 1)] | None, about("Most reasoning tokens; its end is forced then.")
    ] = None
    prompt_cache_retention: Annotated[
        Literal["in_memory", "24h"] | None, about("24h is retention of so many seconds.")
    ] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, about("Variables of the chat template.")] = None

    def wanted_retention(self) -> Retention | None:
        if self.prompt_cache_retention != "24h":
            return self.retention
        if self.retention is not None:
            raise bad_request("prompt_cache_retention says what retention says: give one", "prompt_cache_retention")
        return Retention(seconds=86_400)

    def chat_options(self) -> ChatOptions:
        """Raises ParameterError, naming the field."""
        return ChatOptions(
            offer=read_offer(self.tools, self.tool_choice, self.parallel_tool_calls),
            documents=self.documents,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=bool(self.continue_final_message),
            reasoning_effort=self.reasoning_effort,
            thinking_budget=self.thinking_token_budget,
            variables=self.chat_template_kwargs or {},
        )

    def output_limit(self, name: str = "max_tokens", default: int | None = None) -> int | None:
        if self.max_completion_tokens is not None and self.max_tokens is not None:
            raise ParameterError("max_tokens", "give max_completion_tokens or max_tokens, not both")
        return super().output_limit(name if self.max_completion_tokens is None else "max_completion_tokens", default)

    def wanted_logprobs(self) -> int | None:
        if self.top_logprobs is not None and not self.logprobs:
            raise ParameterError("top_logprobs", "top_logprobs needs logprobs to be true")
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= MAX_LOGPROBS:
            raise ParameterError(
                "top_logprobs", f"top_logprobs must be between 0 and {MAX_LOGPROBS}, got {self.top_logprobs}"
            )
        return (self.top_logprobs or 0) if self.logprobs else None
