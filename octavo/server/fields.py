"""The fields that OpenAI's completions and chat APIs share, and those that no request may give.

Sources: the types of OpenAI's Python client, and the extra fields of vLLM's and llama.cpp's servers.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar

import msgspec

from octavo.request import ParameterError, SamplingParams
from octavo.server.errors import bad_request

MAX_PRIORITY = 2**31 - 1
"""Of either sign."""


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # only false can be honoured: chunks are not padded
    continuous_usage_stats: bool | None = None


class GenerationRequest(msgspec.Struct, kw_only=True):
    """Fields that both APIs share. Null means the same as absent."""

    NOT_BUILT: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """Known fields that are refused, and the values beside null that ask for nothing."""

    model: str | None = None
    best_of: int | None = None
    cache_salt: str | None = None
    early_stopping: bool | str | None = None
    frequency_penalty: float | None = None
    ignore_eos: bool | None = None
    length_penalty: float | None = None
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
    use_beam_search: bool | None = None
    user: str | None = None
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
        if self.stream and self.use_beam_search:
            raise ParameterError("stream", "a beam search cannot be streamed: what its answer begins with is known last")
        if self.stream and (self.best_of or 0) > (self.n or 1):
            raise ParameterError("best_of", "best_of above n cannot be streamed: which choices are best is known last")
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


_SAMPLING_FIELDS = tuple(
    name for name in GenerationRequest.__struct_fields__
    if name in SamplingParams.__struct_fields__ and name not in ("logit_bias", "max_tokens", "prompt_logprobs")
)  # fmt: skip

# Labels of a request: they identify, store nothing and change no token.
LABELS = frozenset({"safety_identifier", "prompt_cache_key"})

# Known fields that are not built, and the values beside null that ask for nothing. Any other value is refused.
NOT_BUILT: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "kv_transfer_params": (),
    "logits_processors": ([],),
    "request_id": (),
    "response_format": ({"type": "text"},),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
    "vllm_xargs": ({},),
}


def _token_id(key: str) -> int:
    if not re.fullmatch("0|[1-9][0-9]{0,9}", key):
        raise ParameterError("logit_bias", f"logit_bias has the key {key[:40]!r}; its keys are token ids")
    return int(key)
