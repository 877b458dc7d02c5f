"""The fields of POST /v1/messages and /v1/messages/count_tokens, and what they are on the path of chat.

Source: the types of Anthropic's Python client, of its beta interface too.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from octavo.server.chat_fields import ChatRequest
from octavo.server.errors import bad_request
from octavo.server.fields import MAX_PRIORITY, MAX_SECONDS, Name, Refused, RequestBody, about
from octavo.server.structured import JsonSchema, ResponseFormat

NAMES = {
    "stop": "stop_sequences",
    "thinking_token_budget": "thinking.budget_tokens",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "continue_final_message": "messages",
    "function.name": "name",
    "function.description": "description",
    "function.parameters": "input_schema",
    "function.strict": "strict",
}
"""Fields of chat -> what they are called here, for errors."""

EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "xhigh", "max": "xhigh"}
"""Of output_config -> reasoning_effort, which has no "max"."""


class Thinking(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class JsonFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None


class Metadata(msgspec.Struct, forbid_unknown_fields=True):
    user_id: Name | None = None


class ToolChoice(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    def for_chat(self) -> str | dict[str, Any]:
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return "required" if self.type == "any" else self.type


class CountTokensRequest(RequestBody, kw_only=True):
    """POST /v1/messages/count_tokens: the fields that say what the model reads."""

    REFUSED: ClassVar[dict[str, Refused]] = {
        "compaction": Refused("a prompt is never shortened"),
        "container": Refused("no code is run here"),
        "mcp_servers": Refused("no other servers are called", ([],)),
        "speed": Refused("there is one speed", ("standard",)),
        "thread": Refused("nothing is stored"),
    }

    model: Annotated[
        str | None, about("A name in /v1/models: of the model, or of a LoRA adapter; another is a 404.")
    ] = None
    messages: Annotated[
        list[dict[str, Any]],
        about("The conversation: user and assistant in turn. The answer goes on in a last message of the assistant."),
    ]
    system: Annotated[
        str | list[dict[str, Any]] | None, about("The system prompt: a text, or blocks of type text.")
    ] = None
    tools: Annotated[
        list[dict[str, Any]] | None, about("Tools of the client that the model may call, at most 128.")
    ] = None
    tool_choice: Annotated[ToolChoice | None, about("auto, any, tool (with a name) or none. Default: auto.")] = None
    thinking: Annotated[
        Thinking | None,
        about(
            "enabled with budget_tokens, after which the end of thinking is forced; adaptive: the model decides; "
            "disabled. display omitted: not shown. Default: what the chat template does."
        ),
    ] = None
    output_config: Annotated[
        OutputConfig | None,
        about("effort, for templates that take a reasoning_effort; format: JSON of a schema, always kept."),
    ] = None
    cache_control: Annotated[
        dict[str, Any] | None, about("As in the last block: the whole conversation is worth keeping in the cache.")
    ] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, about("Variables of the chat template.")] = None

    def check(self) -> None:
        thinking, choice = self.thinking, self.tool_choice
        if thinking is not None and (thinking.type == "enabled") != (thinking.budget_tokens is not None):
            raise bad_request("thinking.budget_tokens goes with type enabled, which needs it", "thinking")
        if choice is not None and (choice.type == "tool") != (choice.name is not None):
            raise bad_request("tool_choice.name goes with type tool, which needs it", "tool_choice")
        if choice is not None and choice.type == "none" and choice.disable_parallel_tool_use is not None:
            raise bad_request("tool_choice.disable_parallel_tool_use does not go with type none", "tool_choice")

    def chat_request(self, tools: list[dict[str, Any]]) -> ChatRequest:
        """The same as a request of chat, without its messages. tools: in the form of chat."""
        thinking, choice, output = self.thinking, self.tool_choice, self.output_config
        disabled = None if choice is None else choice.disable_parallel_tool_use
        format = None if output is None else output.format
        return ChatRequest(
            model=self.model,
            messages=[],
            tools=tools,
            tool_choice=None if choice is None else choice.for_chat(),
            parallel_tool_calls=None if disabled is None else not disabled,
            reasoning_effort=None if output is None or output.effort is None else EFFORTS[output.effort],
            thinking_token_budget=None if thinking is None else thinking.budget_tokens,
            response_format=None
            if format is None
            else ResponseFormat("json_schema", json_schema=JsonSchema(schema=format.schema)),
            chat_template_kwargs=self.chat_template_kwargs,
        )


class MessagesRequest(CountTokensRequest, kw_only=True):
    """POST /v1/messages."""

    REFUSED: ClassVar[dict[str, Refused]] = CountTokensRequest.REFUSED | {
        "diagnostics": Refused("GET /debug/requests/{id} tells what came from the cache, and why it was not more"),
        "fallbacks": Refused("there is one model", ([],)),
        "inference_geo": Refused("requests are computed where the server is"),
        "service_tier": Refused("there is one tier; use priority", ("auto", "standard_only")),
    }

    resumable: ClassVar[bool] = False

    max_tokens: Annotated[Annotated[int, Meta(ge=0)], about("Most tokens of the answer, thinking included.")]
    metadata: Annotated[Metadata | None, about("user_id: who asks; shares the machine fairly with other users.")] = None
    stop_sequences: Annotated[list[str] | None, about("Texts that end the answer, at most 64.")] = None
    stream: Annotated[bool | None, about("Answer with server-sent events.")] = None
    temperature: Annotated[float | None, about("0: greedy. Default: 1.")] = None
    top_k: Annotated[int | None, about("Keep the k most likely tokens; 0 or -1: all.")] = None
    top_p: Annotated[float | None, about("Keep the most likely tokens that have this probability.")] = None
    # Octavo's own
    cache_salt: Annotated[Name | None, about("Only requests of one salt share cached blocks.")] = None
    priority: Annotated[
        Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None, about("Lower is served earlier.")
    ] = None
    request_id: Annotated[
        str | None, about("Becomes part of the answer's id: letters, digits, '.', '_', '-', at most 64.")
    ] = None
    seed: Annotated[int | None, about("The same seed gives the same output. Default: drawn at random.")] = None
    timeout: Annotated[
        Annotated[float, Meta(gt=0, le=MAX_SECONDS)] | None,
        about("Seconds to the end of the answer; then it is ended with 408."),
    ] = None
    ttft_timeout: Annotated[
        Annotated[float, Meta(gt=0, le=MAX_SECONDS)] | None,
        about("Seconds to the first token; then, or as soon as it cannot be held, the request is ended with 408."),
    ] = None

    def check(self) -> None:
        super().check()
        budget = None if self.thinking is None else self.thinking.budget_tokens
        if budget is not None and budget >= self.max_tokens:
            raise bad_request(
                f"thinking.budget_tokens must be less than max_tokens; got {budget} and {self.max_tokens}", "thinking"
            )

    def chat_request(self, tools: list[dict[str, Any]]) -> ChatRequest:
        request = super().chat_request(tools)
        for name in _OF_CHAT:
            setattr(request, name, getattr(self, name))
        request.stop = self.stop_sequences
        request.user = None if self.metadata is None else self.metadata.user_id
        request.check()
        return request


_OF_CHAT = (
    "max_tokens", "stream", "temperature", "top_k", "top_p", "cache_salt", "priority", "request_id", "seed", "timeout",
    "ttft_timeout",
)  # fmt: skip
"""Fields that chat has by the same name."""
