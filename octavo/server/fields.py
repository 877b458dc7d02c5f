"""The fields that OpenAI's completions and chat APIs share, and those that no request may give.

Sources: the types of OpenAI's Python client, and the extra fields of vLLM's and llama.cpp's servers. docs/API.md is made
of these descriptions.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, NamedTuple

import msgspec
from msgspec import Meta

from octavo.request import LIMITS, ParameterError, Retention, SamplingParams
from octavo.server.errors import bad_request
from octavo.server.structured import StructuredFields

MAX_PRIORITY = 2**31 - 1
"""Of either sign."""

MAX_SECONDS = 7 * 86400
"""Of a limit on time: longer ones are mistakes of the unit."""

Name = Annotated[str, Meta(max_length=512)]
"""Of a user or a salt: it is kept with what is counted and cached for them."""

_LABEL = "Identifies a caller: accepted, without effect."


class Refused(NamedTuple):
    """A known field that cannot be honoured."""

    why: str
    neutral: tuple[Any, ...] = ()  # values beside null that ask for nothing, and pass


def about(text: str, **limits: Any) -> Meta:
    """The description of a field, and JSON schema limits on its value."""
    return Meta(description=text, **limits)


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: Annotated[bool | None, about("A last chunk with the usage of all choices.")] = None
    continuous_usage_stats: Annotated[bool | None, about("The usage so far in every chunk.")] = None
    include_obfuscation: Annotated[bool | None, about("Only false: chunks are not padded.")] = None


class RequestBody(msgspec.Struct, kw_only=True):
    """The fields of a route. Null means the same as absent."""

    REFUSED: ClassVar[dict[str, Refused]] = {}
    """Known fields that are refused by name."""

    ALIASES: ClassVar[dict[str, str]] = {}
    """Other names of fields."""

    def check(self) -> None:
        """Raises ApiError 400 for fields that do not go together."""


class GenerationRequest(StructuredFields, RequestBody, kw_only=True):
    """Fields that both APIs share."""

    ALIASES: ClassVar[dict[str, str]] = {
        "repeat_penalty": "repetition_penalty",
        "typ_p": "typical_p",
    }
    """Other names that clients of llama.cpp use."""

    model: Annotated[
        str | None, about("A name in /v1/models: of the model, or of a LoRA adapter; another is a 404.")
    ] = None
    add_special_tokens: Annotated[bool | None, about("Add what the tokenizer asks for, as BOS, to a text.")] = None
    allowed_token_ids: Annotated[list[int] | None, about("Nothing but these tokens is drawn.")] = None
    bad_words: Annotated[list[str] | None, about("Texts that the output must not have, at most 64.")] = None
    best_of: Annotated[
        int | None, about("Candidates, of which the n best by logprob per token return. Beam search: its width.")
    ] = None
    cache_salt: Annotated[Name | None, about("Only requests of one salt share cached blocks.")] = None
    dry_allowed_length: Annotated[int | None, about("Tokens that may be repeated without penalty.")] = None
    dry_base: Annotated[float | None, about("Growth of the DRY penalty per repeated token. Default: 1.75.")] = None
    dry_multiplier: Annotated[float | None, about("Penalty on going on with a repetition (DRY); 0: none.")] = None
    dry_penalty_last_n: Annotated[int | None, about("Tokens that DRY looks back; -1: all.")] = None
    dry_sequence_breakers: Annotated[
        list[str] | None, about('Texts over which no repetition reaches. Default: newline, ":", quote, "*".')
    ] = None
    dynatemp_exponent: Annotated[float | None, about("How entropy maps to temperature.")] = None
    dynatemp_range: Annotated[float | None, about("Temperature from -range, sure, to +range, open.")] = None
    early_stopping: Annotated[bool | str | None, about('Beam search: true, false or "never".')] = None
    explain: Annotated[bool | None, about("Tell for each choice what came from the cache, and what it waited for.")] = (
        None
    )
    frequency_penalty: Annotated[float | None, about("-2 to 2, times the occurrences in the output.")] = None
    ignore_eos: Annotated[bool | None, about("The end of sequence does not end the output.")] = None
    include_stop_str_in_output: Annotated[bool | None, about("Keep the stop string in the text.")] = None
    length_penalty: Annotated[float | None, about("Beam search: exponent of the length.")] = None
    logit_bias: Annotated[dict[str, float] | None, about("Token id -> what its logit gains, -100 to 100.")] = None
    max_tokens: Annotated[int | None, about("Most tokens of an output.")] = None
    min_p: Annotated[float | None, about("Least probability, as a share of the greatest.")] = None
    min_tokens: Annotated[int | None, about("No end before so many tokens.")] = None
    mirostat_eta: Annotated[float | None, about("Of mirostat, which is refused: no effect.")] = None
    mirostat_tau: Annotated[float | None, about("Of mirostat, which is refused: no effect.")] = None
    n: Annotated[int | None, about("Choices per prompt, 1 to 128.")] = None
    n_predict: Annotated[int | None, about("As max_tokens; -1: the rest of the context.")] = None
    presence_penalty: Annotated[float | None, about("-2 to 2, for tokens that the output has.")] = None
    priority: Annotated[
        Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None, about("Lower is served earlier.")
    ] = None
    prompt_logprobs: Annotated[int | None, about("Score the prompt's tokens, with so many alternatives.")] = None
    prompt_cache_key: Annotated[str | None, about(_LABEL)] = None
    repeat_last_n: Annotated[int | None, about("Tokens that the penalties look back; -1: all, 0: none.")] = None
    repetition_penalty: Annotated[float | None, about("Divides positive logits of tokens that were there.")] = None
    request_id: Annotated[
        str | None, about("Becomes part of the answer's id: letters, digits, '.', '_', '-', at most 64.")
    ] = None
    resumable: Annotated[
        bool | None, about("A stream that may be taken up again at /v1/streams/{id} after the connection broke.")
    ] = None
    retention: Annotated[
        Retention | None,
        about("How long cached blocks are worth keeping: seconds, priority, num_tokens (of the prompt's head)."),
    ] = None
    return_progress: Annotated[bool | None, about("Stream how much of the prompt is computed.")] = None
    return_sampling_params: Annotated[bool | None, about("Tell the values that were used for sampling.")] = None
    return_token_ids: Annotated[bool | None, about("Tell the token ids of prompt and output.")] = None
    return_tokens_as_token_ids: Annotated[bool | None, about('Write tokens in logprobs as "token_id:5".')] = None
    safety_identifier: Annotated[str | None, about(_LABEL)] = None
    samplers: Annotated[
        list[str] | None,
        about(
            "The samplers that apply, in their order: penalties, dry, top_n_sigma, top_k, typ_p, top_p, min_p, xtc, "
            "temperature. Default: penalties, dry, temperature, top_n_sigma, top_k, min_p, typ_p, top_p, xtc."
        ),
    ] = None
    seed: Annotated[int | None, about("The same seed gives the same output. Default: drawn at random.")] = None
    skip_special_tokens: Annotated[bool | None, about("Special tokens do not appear in the text.")] = None
    stop: Annotated[str | list[str] | None, about("Texts that end the output, at most 64.")] = None
    stop_token_ids: Annotated[list[int] | None, about("Tokens that end the output, at most 64.")] = None
    stream: Annotated[bool | None, about("Answer with server-sent events.")] = None
    stream_options: Annotated[StreamOptions | None, about("Only with stream.")] = None
    temperature: Annotated[float | None, about("0: greedy. Default: 1.")] = None
    timeout: Annotated[
        Annotated[float, Meta(gt=0, le=MAX_SECONDS)] | None,
        about("Seconds to the end of the answer; then it is ended with 408."),
    ] = None
    top_k: Annotated[int | None, about("Keep the k most likely tokens; 0 or -1: all.")] = None
    top_n_sigma: Annotated[float | None, about("Keep logits within n deviations of the greatest.")] = None
    top_p: Annotated[float | None, about("Keep the most likely tokens that have this probability.")] = None
    truncate_prompt_tokens: Annotated[
        Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None,
        about("Keep the last so many tokens of a prompt; -1: what fits."),
    ] = None
    ttft_timeout: Annotated[
        Annotated[float, Meta(gt=0, le=MAX_SECONDS)] | None,
        about("Seconds to the first token; then, or as soon as it cannot be held, the request is ended with 408."),
    ] = None
    typical_p: Annotated[float | None, about("Keep the tokens of the most usual surprise with this probability.")] = (
        None
    )
    use_beam_search: Annotated[bool | None, about("Search the most likely outputs instead of drawing them.")] = None
    user: Annotated[Name | None, about("Who asks: shares the machine fairly with other users.")] = None
    xtc_probability: Annotated[float | None, about("How often the likely tokens but the last are cut (XTC).")] = None
    xtc_threshold: Annotated[float | None, about("From which probability on a token is likely.")] = None

    def output_limit(self, name: str = "max_tokens", default: int | None = None) -> int | None:
        """Most tokens to generate; None: the rest of the context. `name`: the field that says it, beside n_predict."""
        given: int | None = getattr(self, name)
        if self.n_predict is not None and given is not None:
            raise ParameterError("n_predict", f"give {name} or n_predict, not both")
        if self.n_predict == -1:
            return None
        low, high = LIMITS["max_tokens"]
        bounds = f"between {low} and {high}"
        if self.n_predict is not None:
            name, given, bounds = "n_predict", self.n_predict, f"{bounds}, or -1"
        if given is not None and not low <= given <= high:
            raise ParameterError(name, f"{name} must be {bounds}, got {given}")
        return default if given is None else given

    def wanted_logprobs(self) -> int | None:
        """Alternatives per output token; None: no logprobs at all."""
        raise AssertionError("each API has its own form")

    def sampling_params(self, defaults: dict[str, Any] | None = None) -> SamplingParams:
        """`defaults`: of the model, for fields that are not given. Raises ParameterError naming the field."""
        given = {name: value for name in _SAMPLING_FIELDS if (value := getattr(self, name)) is not None}
        if self.logit_bias is not None:
            given["logit_bias"] = {_token_id(key): bias for key, bias in self.logit_bias.items()}
        if isinstance(self.stop, str):
            given["stop"] = [self.stop]
        if self.stream and self.use_beam_search:
            raise ParameterError(
                "stream", "a beam search cannot be streamed: what its answer begins with is known last"
            )
        if self.stream and (self.best_of or 0) > (self.n or 1):
            raise ParameterError("best_of", "best_of above n cannot be streamed: which choices are best is known last")
        return SamplingParams(
            **(defaults or {}) | given,
            max_tokens=self.output_limit(),
            logprobs=self.wanted_logprobs(),
            prompt_logprobs=self.wanted_prompt_logprobs(),
            structured=self.structured(),
        )

    def wanted_retention(self) -> Retention | None:
        """How long cached blocks are worth keeping, by whatever field says it. Raises ApiError 400."""
        return self.retention

    def wanted_prompt_logprobs(self) -> int | None:
        """Alternatives per prompt token."""
        return self.prompt_logprobs

    def check(self) -> None:
        """Raises ApiError 400 for fields that ask for nothing without another."""
        options = self.stream_options
        if not self.stream:
            for name in ("stream_options", "return_progress", "resumable"):
                if getattr(self, name):
                    raise bad_request(f"{name} is only allowed when stream is true", name)
        if options is not None and options.include_obfuscation:
            raise bad_request(
                "stream_options.include_obfuscation is not supported: chunks are not padded", "stream_options"
            )
        if self.request_id is not None and not re.fullmatch("[A-Za-z0-9._-]{1,64}", self.request_id):
            raise bad_request(
                f"request_id must have 1 to 64 letters, digits, '.', '_' or '-'; got {self.request_id[:80]!r}",
                "request_id",
            )


_SAMPLING_FIELDS = tuple(
    name for name in GenerationRequest.__struct_fields__
    if name in SamplingParams.__struct_fields__ and name not in ("logit_bias", "max_tokens", "prompt_logprobs")
)  # fmt: skip

_USE_STRUCTURED = "not supported; use response_format"
_NO_CODE = "no code of a request is run"

REFUSED: dict[str, Refused] = {
    "cache_prompt": Refused("the prefix cache is exact and always on; cache_salt keeps requests apart", (True,)),
    "id_slot": Refused("there are no slots to choose", (-1,)),
    "kv_transfer_params": Refused("KV blocks are not sent between servers"),
    "logits_processors": Refused(_NO_CODE, ([],)),
    "lora": Refused("no adapters are loaded", ([],)),
    "min_keep": Refused("each sampler keeps at least one token, and is exact otherwise", (0, 1)),
    "mirostat": Refused(
        "its state follows from earlier draws and not from the tokens, so an output could not be resumed", (0,)
    ),
    "n_discard": Refused("the context is never shifted", (0,)),
    "n_keep": Refused("the context is never shifted", (0, -1)),
    "n_probs": Refused("use logprobs", (0,)),
    "penalize_nl": Refused("newlines are penalised as other tokens are", (True,)),
    "post_sampling_probs": Refused("logprobs are of the model's own distribution", (False,)),
    "repetition_detection": Refused("use dry_multiplier"),
    "response_fields": Refused("answers have all of their fields", ([],)),
    "return_tokens": Refused("use return_token_ids", (False,)),
    "spaces_between_special_tokens": Refused("special tokens are joined as they are", (True,)),
    "structural_tag": Refused(_USE_STRUCTURED),
    "t_max_predict_ms": Refused("use max_tokens", (0, -1)),
    "tfs_z": Refused("use typical_p", (1,)),
    "timings_per_token": Refused("times are measured at /metrics", (False,)),
    "vllm_xargs": Refused(_NO_CODE, ({},)),
}


def _token_id(key: str) -> int:
    if not re.fullmatch("0|[1-9][0-9]{0,9}", key):
        raise ParameterError("logit_bias", f"logit_bias has the key {key[:40]!r}; its keys are token ids")
    return int(key)
