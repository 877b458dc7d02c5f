"""The requests of OpenAI's completions and chat APIs: every field known, each honoured or refused by name.

Sources: the types of OpenAI's Python client, and the extra fields of vLLM's server.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Generic, NamedTuple, TypeVar

import msgspec

from octavo.request import MAX_LOGPROBS, ParameterError, SamplingParams
from octavo.server.errors import bad_request

MAX_PRIORITY = 2**31 - 1
"""Of either sign."""


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # only false can be honoured: chunks are not padded
    continuous_usage_stats: bool | None = None


class GenerationRequest(msgspec.Struct, kw_only=True):
    """Fields that both APIs share. Null means the same as absent."""

    model: str | None = None
    frequency_penalty: float | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    logit_bias: dict[str, float] | None = None
    max_tokens: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    n: int | None = None
    presence_penalty: float | None = None
    priority: Annotated[int, msgspec.Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None  # lower: served earlier
    prompt_logprobs: int | None = None
    repetition_penalty: float | None = None
    return_token_ids: bool | None = None
    seed: int | None = None
    skip_special_tokens: bool | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    add_special_tokens: bool | None = None

    def output_limit(self) -> int | None:
        """Most tokens to generate; None: the rest of the context."""
        raise AssertionError("each API has its own default")

    def wanted_logprobs(self) -> int | None:
        """Alternatives per output token; None: no logprobs at all."""
        raise AssertionError("each API has its own form")

    def sampling_params(self) -> SamplingParams:
        """Raises ParameterError, naming the field, for a value out of its bounds."""
        given = {name: value for name in _SAMPLING_FIELDS if (value := getattr(self, name)) is not None}
        if self.logit_bias is not None:
            given["logit_bias"] = {_token_id(key): bias for key, bias in self.logit_bias.items()}
        if isinstance(self.stop, str):
            given["stop"] = [self.stop]
        if self.prompt_logprobs is not None and self.stream:
            raise ParameterError("prompt_logprobs", "prompt_logprobs cannot be streamed: set stream to false")
        return SamplingParams(
            **given,
            max_tokens=self.output_limit(),
            logprobs=self.wanted_logprobs(),
            prompt_logprobs=self.wanted_prompt_logprobs(),
        )

    def wanted_prompt_logprobs(self) -> int | None:
        """Alternatives per prompt token."""
        return self.prompt_logprobs

    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def check_stream_options(self) -> None:
        options = self.stream_options
        if options is None:
            return
        if not self.stream:
            raise bad_request("stream_options is only allowed when stream is true", "stream_options")
        if options.include_obfuscation:
            raise bad_request("stream_options.include_obfuscation is not supported", "stream_options")
        if options.continuous_usage_stats:
            raise bad_request("stream_options.continuous_usage_stats is not supported", "stream_options")


class CompletionRequest(GenerationRequest, kw_only=True):
    """POST /v1/completions."""

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


class ChatRequest(GenerationRequest, kw_only=True):
    """POST /v1/chat/completions."""

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


T = TypeVar("T", bound=GenerationRequest)


class Parsed(NamedTuple, Generic[T]):
    request: T
    ignored: list[str]  # unknown fields


_SAMPLING_FIELDS = tuple(
    name for name in GenerationRequest.__struct_fields__
    if name in SamplingParams.__struct_fields__ and name not in ("logit_bias", "max_tokens", "prompt_logprobs")
)  # fmt: skip

# Labels of a request: they identify, store nothing and change no token.
LABELS = frozenset({"user", "safety_identifier", "prompt_cache_key"})

# Known fields that are not built, and the values beside null that ask for nothing. Any other value is refused.
NOT_BUILT: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "cache_salt": (),
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "request_id": (),
    "response_format": ({"type": "text"},),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
}
NOT_BUILT_COMPLETION = NOT_BUILT | {"best_of": (1,), "prompt_embeds": (), "suffix": ("",)}
NOT_BUILT_CHAT = NOT_BUILT | {
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


def parse_completion(body: bytes, strict: bool) -> Parsed[CompletionRequest]:
    return _parse(body, CompletionRequest, NOT_BUILT_COMPLETION, strict)


def parse_chat(body: bytes, strict: bool) -> Parsed[ChatRequest]:
    return _parse(body, ChatRequest, NOT_BUILT_CHAT, strict)


def _parse(body: bytes, schema: type[T], not_built: dict[str, tuple[Any, ...]], strict: bool) -> Parsed[T]:
    """Raises ApiError 400 naming the field for anything that cannot be honoured."""
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise bad_request(f"the body is not valid JSON: {e}") from None
    except RecursionError:
        raise bad_request("the body is nested too deeply") from None
    if not isinstance(fields, dict):
        raise bad_request("the body must be a JSON object")
    known, unknown = {}, []
    for name, value in fields.items():
        if name in schema.__struct_fields__:
            known[name] = value
        elif name in not_built:
            if value is not None and not any(_equal(value, neutral) for neutral in not_built[name]):
                raise bad_request(f"{name} is not supported yet", name, "unsupported_parameter")
        elif name not in LABELS:
            unknown.append(name)
    if unknown and strict:
        raise bad_request(f"unknown field: {', '.join(unknown)}", unknown[0], "unknown_parameter")
    try:
        request = msgspec.convert(known, schema)
    except msgspec.ValidationError as e:
        raise _validation_error(e) from None
    request.check_stream_options()
    return Parsed(request, unknown)


def _equal(value: Any, neutral: Any) -> bool:
    return (type(value) is type(neutral) and bool(value == neutral)) or (value == neutral and type(value) is float)


def _validation_error(error: msgspec.ValidationError) -> Exception:
    """`Expected `int`, got `str` - at `$.max_tokens``, with the field named first."""
    text = str(error)
    what, _, where = text.partition(" - at `$.")
    if where:
        path = where.rstrip("`")
        return bad_request(f"{path}: {what.replace('`', '')}", path.split(".")[0].split("[")[0])
    if "missing required field" in text:
        name = text.rsplit("field `", 1)[1].rstrip("`")
        return bad_request(f"{name} is required", name, "missing_required_parameter")
    return bad_request(text)


def _token_id(key: str) -> int:
    if not re.fullmatch("0|[1-9][0-9]{0,9}", key):
        raise ParameterError("logit_bias", f"logit_bias has the key {key[:40]!r}; its keys are token ids")
    return int(key)
