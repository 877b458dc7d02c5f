"""The fields of POST /v1/responses, and what they are as a chat request.

Source: the types of OpenAI's Python client; the sampling fields beside them are those of the chat route.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from octavo.request import MAX_LOGPROBS, ParameterError
from octavo.server.chat_fields import ChatRequest
from octavo.server.errors import bad_request
from octavo.server.fields import MAX_PRIORITY, MAX_SECONDS, REFUSED, Name, Refused, RequestBody, about
from octavo.server.structured import JsonSchema, ResponseFormat

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"
INCLUDED = (LOGPROBS, ENCRYPTED)
"""What `include` may ask for; the rest is of tools that there are none of."""

MAX_METADATA = 16
"""Pairs, with keys of up to 64 characters and values of up to 512."""

_LABEL = "Identifies a caller: accepted, without effect."
_AS_CHAT = "As of the chat route."


class TextFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None  # it is always strict


class TextOptions(msgspec.Struct, forbid_unknown_fields=True):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None  # the model has no other


class ReasoningOptions(msgspec.Struct, forbid_unknown_fields=True):
    effort: str | None = None
    summary: Literal["auto"] | None = None  # reasoning is given itself: there is nothing to sum up
    generate_summary: Literal["auto"] | None = None  # the older name of the same


class ResponseStreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_obfuscation: Annotated[bool | None, about("Only false: events are not padded.")] = None


class ResponsesRequest(RequestBody, kw_only=True):
    """POST /v1/responses."""

    REFUSED: ClassVar[dict[str, Refused]] = REFUSED | {
        "access_programs": Refused("there are none"),
        "background_options": Refused("background responses are made as soon as can be"),
        "context_management": Refused("the conversation is never cut", ([],)),
        "conversation": Refused("use previous_response_id"),
        "image": Refused("the model takes text"),
        "max_tokens": Refused("use max_output_tokens"),
        "messages": Refused("use input"),
        "moderation": Refused("nothing is moderated"),
        "n": Refused("a response is one answer", (1,)),
        "prompt": Refused("no prompts are kept; use instructions and input"),
        "prompt_cache_options": Refused("the prefix cache is always on"),
        "response_format": Refused("use text.format"),
        "service_tier": Refused("there is one tier; use priority", ("auto", "default")),
        "truncation": Refused("the conversation is never cut", ("disabled",)),
    }

    input: Annotated[
        str | list[dict[str, Any]],
        about("A text, or items: messages, function_call, function_call_output, reasoning."),
    ]
    background: Annotated[bool | None, about("Answer at once; the response is made meanwhile, and got by its id.")] = (
        None
    )
    cache_salt: Annotated[Name | None, about(_AS_CHAT)] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, about("Variables of the chat template.")] = None
    frequency_penalty: Annotated[float | None, about(_AS_CHAT)] = None
    ignore_eos: Annotated[bool | None, about(_AS_CHAT)] = None
    include: Annotated[
        list[str] | None,
        about(
            f"`{LOGPROBS}`: score the text's tokens. `{ENCRYPTED}`: the reasoning as one opaque text too, "
            "which is encoded, not encrypted."
        ),
    ] = None
    instructions: Annotated[str | None, about("A system message before all others, of this response only.")] = None
    logit_bias: Annotated[dict[str, float] | None, about(_AS_CHAT)] = None
    max_output_tokens: Annotated[
        Annotated[int, Meta(ge=0, le=2**31 - 1)] | None,
        about("Most tokens of the output, reasoning included. Default: the rest of the context."),
    ] = None
    max_tool_calls: Annotated[
        Annotated[int, Meta(ge=0, le=2**31 - 1)] | None,
        about("Of tools that the server itself has: there are none, so no call counts."),
    ] = None
    metadata: Annotated[
        dict[str, str] | None, about("Up to 16 labels, of 64 and 512 characters, that the response shows.")
    ] = None
    min_p: Annotated[float | None, about(_AS_CHAT)] = None
    min_tokens: Annotated[int | None, about(_AS_CHAT)] = None
    model: Annotated[
        str | None, about("A name in /v1/models: of the model, or of a LoRA adapter; another is a 404.")
    ] = None
    parallel_tool_calls: Annotated[bool | None, about("An answer may hold several calls. Default: true.")] = None
    presence_penalty: Annotated[float | None, about(_AS_CHAT)] = None
    previous_response_id: Annotated[
        str | None, about("The conversation goes on behind this response, which must be stored.")
    ] = None
    priority: Annotated[Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None, about(_AS_CHAT)] = None
    prompt_cache_key: Annotated[str | None, about(_LABEL)] = None
    prompt_cache_retention: Annotated[
        Literal["in_memory", "24h"] | None, about("24h: cached blocks are worth keeping so long.")
    ] = None
    reasoning: Annotated[
        ReasoningOptions | None, about("effort: for templates that take it. summary: only auto, without effect.")
    ] = None
    repetition_penalty: Annotated[float | None, about(_AS_CHAT)] = None
    request_id: Annotated[str | None, about("Becomes part of the response's id.")] = None
    safety_identifier: Annotated[str | None, about(_LABEL)] = None
    seed: Annotated[int | None, about(_AS_CHAT)] = None
    stop: Annotated[str | list[str] | None, about(_AS_CHAT)] = None
    store: Annotated[bool | None, about("Keep the response for later requests. Default: true.")] = None
    stream: Annotated[bool | None, about("Answer with server-sent events.")] = None
    stream_options: Annotated[ResponseStreamOptions | None, about("Only with stream.")] = None
    temperature: Annotated[float | None, about("0: greedy. Default: 1.")] = None
    text: Annotated[TextOptions | None, about("format: text, json_object, or json_schema (always strict).")] = None
    thinking_token_budget: Annotated[
        Annotated[int, Meta(ge=0, le=2**31 - 1)] | None, about("Most reasoning tokens; its end is forced then.")
    ] = None
    timeout: Annotated[Annotated[float, Meta(gt=0, le=MAX_SECONDS)] | None, about(_AS_CHAT)] = None
    tool_choice: Annotated[
        str | dict[str, Any] | None, about("none, auto, required, a function, or allowed_tools. Default: auto.")
    ] = None
    tools: Annotated[list[dict[str, Any]] | None, about("Functions that the model may call, at most 128.")] = None
    top_k: Annotated[int | None, about(_AS_CHAT)] = None
    top_logprobs: Annotated[
        Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None,
        about("Alternatives for each token, which asks for its score too; 0 asks for nothing."),
    ] = None
    top_p: Annotated[float | None, about("Keep the most likely tokens that have this probability.")] = None
    ttft_timeout: Annotated[Annotated[float, Meta(gt=0, le=MAX_SECONDS)] | None, about(_AS_CHAT)] = None
    user: Annotated[Name | None, about("Who asks: shares the machine fairly with other users.")] = None

    @property
    def stored(self) -> bool:
        return self.store is not False

    @property
    def scored(self) -> bool:
        return bool(self.top_logprobs) or LOGPROBS in (self.include or ())

    def check(self) -> None:
        if self.background and not self.stored:
            raise bad_request("background needs the response to be stored: store must not be false", "background")
        if self.stream_options is not None:
            if not self.stream:
                raise bad_request("stream_options is only allowed when stream is true", "stream_options")
            if self.stream_options.include_obfuscation:
                raise bad_request(
                    "stream_options.include_obfuscation is not supported: events are not padded", "stream_options"
                )
        for name in self.include or ():
            if name not in INCLUDED:
                raise bad_request(
                    f"include {name!r:.80} is not supported; it may have {', '.join(INCLUDED)}", "include",
                    "unsupported_parameter",
                )  # fmt: skip
        labels = self.metadata or {}
        if len(labels) > MAX_METADATA or any(len(key) > 64 or len(value) > 512 for key, value in labels.items()):
            raise bad_request(
                f"metadata may have {MAX_METADATA} pairs, with keys of up to 64 characters and values of up to 512",
                "metadata",
            )
        if self.request_id is not None and not re.fullmatch("[A-Za-z0-9._-]{1,64}", self.request_id):
            raise bad_request("request_id must have 1 to 64 letters, digits, '.', '_' or '-'", "request_id")

    def as_chat(self) -> ChatRequest:
        """Without the messages. Raises ApiError or ParameterError naming the field."""
        return ChatRequest(
            messages=[],
            max_completion_tokens=self.max_output_tokens,
            logprobs=self.scored,
            top_logprobs=self.top_logprobs if self.scored else None,
            reasoning_effort=None if self.reasoning is None else self.reasoning.effort,
            response_format=self._format(),
            tools=None if self.tools is None else [_tool(tool, f"tools[{i}]") for i, tool in enumerate(self.tools)],
            tool_choice=_choice(self.tool_choice),
            **{name: getattr(self, name) for name in _SAME},
        )

    def _format(self) -> ResponseFormat | None:
        format = None if self.text is None else self.text.format
        if format is None or format.type == "text":
            return None
        if format.type == "json_object":
            return ResponseFormat("json_object")
        if format.schema is None:
            raise bad_request("text.format.schema is required with the type json_schema", "text")
        return ResponseFormat("json_schema", JsonSchema(format.name, format.description, format.schema, format.strict))


_SAME = tuple(
    name for name in ResponsesRequest.__struct_fields__
    if name in ChatRequest.__struct_fields__
    and name not in ("stream", "stream_options", "tools", "tool_choice", "top_logprobs")
)  # fmt: skip
"""Fields that mean the same in a chat request."""

NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text",
    "reasoning_effort": "reasoning",
}
"""Fields of a chat request -> those that say the same here."""


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    kind = tool.get("type")
    if kind != "function":
        raise bad_request(
            f"{where}.type {kind!r:.80} is not supported: tools are functions", "tools", "unsupported_parameter"
        )
    members = {name: value for name, value in tool.items() if name != "type" and value is not None}
    return {"type": "function", "function": members}


def _choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    """In the form of the chat route, which checks it."""
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "allowed_tools":
        tools = choice.get("tools")
        named = [_reference(tool) for tool in tools] if isinstance(tools, list) else tools
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": named}}
    return _reference(choice)


def _reference(choice: Any) -> dict[str, Any]:
    if not isinstance(choice, dict) or choice.get("type") != "function":
        kind = choice.get("type") if isinstance(choice, dict) else choice
        raise ParameterError("tool_choice", f"tool_choice of type {kind!r:.80} is not supported: tools are functions")
    return {"type": "function", "function": {"name": choice.get("name")}}
