"""The fields of Ollama's /api/chat and /api/generate, and what they are as requests of the other routes.

Source: Ollama's API documentation and the types of its Python client.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from octavo.request import SamplingParams
from octavo.server.chat_fields import ChatRequest
from octavo.server.completion_fields import CompletionRequest
from octavo.server.errors import bad_request
from octavo.server.fields import Refused, RequestBody, about
from octavo.server.parse import convert
from octavo.server.structured import JsonSchema, ResponseFormat

DEFAULTS: dict[str, Any] = {
    "temperature": 0.8,
    "top_k": 40,
    "top_p": 0.9,
    "repetition_penalty": 1.1,
    "repeat_last_n": 64,
}
"""Ollama's own, for options that neither the request nor the model's generation_config.json gives."""

_SAMPLING = {
    "frequency_penalty": "frequency_penalty", "min_p": "min_p", "presence_penalty": "presence_penalty",
    "repeat_last_n": "repeat_last_n", "repeat_penalty": "repetition_penalty", "seed": "seed", "stop": "stop",
    "temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "typical_p": "typical_p",
}  # fmt: skip
"""Options -> the fields of the other routes that mean the same."""

_OF_THE_SERVER = "it is said when the server starts"
_NEVER_SHIFTED = "the context is never cut or shifted"
OPTIONS_REFUSED: dict[str, Refused] = {
    "embedding_only": Refused("the model generates", (False,)),
    "f16_kv": Refused(_OF_THE_SERVER),
    "logits_all": Refused("use logprobs", (False,)),
    "low_vram": Refused(_OF_THE_SERVER, (False,)),
    "main_gpu": Refused(_OF_THE_SERVER, (0,)),
    "mirostat": Refused("its state follows from earlier draws and not from the tokens", (0,)),
    "num_batch": Refused(_OF_THE_SERVER),
    "num_gpu": Refused(_OF_THE_SERVER, (0, -1)),
    "num_keep": Refused(_NEVER_SHIFTED, (0, -1)),
    "num_thread": Refused(_OF_THE_SERVER, (0,)),
    "numa": Refused(_OF_THE_SERVER, (False,)),
    "penalize_newline": Refused("newlines are penalised as other tokens are", (True,)),
    "tfs_z": Refused("use typical_p", (1,)),
    "use_mlock": Refused(_OF_THE_SERVER, (False,)),
    "use_mmap": Refused(_OF_THE_SERVER, (True,)),
    "vocab_only": Refused("the model generates", (False,)),
}

NAMES = {
    "max_completion_tokens": "num_predict",
    "max_tokens": "num_predict",
    "n_predict": "num_predict",
    "response_format": "format",
    "repetition_penalty": "repeat_penalty",
    "reasoning_effort": "think",
    "thinking": "think",
}
"""Fields of the other routes -> those that say the same here."""


class Options(msgspec.Struct):
    frequency_penalty: float | None = None
    min_p: float | None = None
    mirostat_eta: float | None = None  # of mirostat, which is refused
    mirostat_tau: float | None = None
    num_ctx: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    num_predict: Annotated[int, Meta(ge=-2, le=2**31 - 1)] | None = None
    presence_penalty: float | None = None
    repeat_last_n: int | None = None
    repeat_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    typical_p: float | None = None


_DURATION = re.compile(r"-?([0-9]+(\.[0-9]*)?|([0-9]+(\.[0-9]*)?(ns|us|µs|ms|s|m|h))+)")
"""Seconds, or a duration as Go writes it: 1h30m."""

_OPTIONS = (
    "frequency_penalty, min_p, num_ctx (refused where the server's context is smaller), num_predict (-1, -2: the rest of "
    "the context), presence_penalty, repeat_last_n, repeat_penalty, seed (-1: drawn at random), stop, temperature, top_k, "
    "top_p, typical_p. Defaults are Ollama's: temperature 0.8, top_k 40, top_p 0.9, repeat_penalty 1.1, repeat_last_n 64."
)
_SHARED: dict[str, Refused] = {
    "shift": Refused(_NEVER_SHIFTED, (False,)),
    "truncate": Refused(_NEVER_SHIFTED, (False,)),
}


class OllamaBody(RequestBody, kw_only=True):
    """What all routes share."""

    model: Annotated[str, about('The name in /api/tags, with or without ":latest"; another name is a 404.')]
    keep_alive: Annotated[
        float | str | None, about("The model stays loaded while the server runs: 0, which unloads it, is refused.")
    ] = None
    options: Annotated[dict[str, Any] | None, about(_OPTIONS)] = None

    def check(self) -> None:
        kept = str(0 if self.keep_alive == 0 else self.keep_alive or "-1")
        if not _DURATION.fullmatch(kept):
            raise bad_request(f"keep_alive {kept!r:.40} is no duration, as 5m or -1", "keep_alive")
        if not re.search("[1-9]", kept):
            raise bad_request(
                "keep_alive 0 is not supported: the model stays loaded", "keep_alive", "unsupported_parameter"
            )

    def known_options(self, max_model_len: int, ignored: list[str]) -> Options:
        """Unknown ones are added to `ignored`. Raises ApiError."""
        known: dict[str, Any] = {}
        for name, value in (self.options or {}).items():
            if name in Options.__struct_fields__:
                known[name] = value
            elif (refused := OPTIONS_REFUSED.get(name)) is None:
                ignored.append(f"options.{name}")
            elif value is not None and value not in refused.neutral:
                raise bad_request(f"options.{name} is not supported: {refused.why}", "options", "unsupported_parameter")
        try:
            options = convert(known, Options)
        except msgspec.ValidationError as e:
            what, _, where = str(e).partition(" - at `$.")
            raise bad_request(f"options.{where.rstrip('`')}: {what.replace('`', '')}", "options") from None
        if options.num_ctx is not None and options.num_ctx > max_model_len:
            raise bad_request(
                f"options.num_ctx is {options.num_ctx}; the context of this server is {max_model_len}", "options"
            )
        return options


class OllamaRequest(OllamaBody, kw_only=True):
    """What both routes that generate share."""

    format: Annotated[str | dict[str, Any] | None, about('"json", or a JSON schema.')] = None
    logprobs: Annotated[bool | None, about("Score the output's tokens.")] = None
    stream: Annotated[bool | None, about("Answer with a line of JSON per step. Default: true.")] = None
    think: Annotated[bool | str | None, about("Whether the model reasons first, or low, medium, high.")] = None
    top_logprobs: Annotated[int | None, about("Alternatives for each token. Needs logprobs.")] = None

    def check(self) -> None:
        super().check()
        if isinstance(self.think, str) and self.think not in ("low", "medium", "high"):
            raise bad_request(f"think must be true, false, low, medium or high; got {self.think!r:.40}", "think")

    def read_options(self, max_model_len: int, ignored: list[str]) -> dict[str, Any]:
        """As fields of the other routes, with what they share. Unknown options are added to `ignored`. Raises ApiError."""
        options = self.known_options(max_model_len, ignored)
        fields = {own: value for name, own in _SAMPLING.items() if (value := getattr(options, name)) is not None}
        if fields.get("seed") == -1:
            del fields["seed"]
        if options.num_predict is not None:
            fields["n_predict"] = max(-1, options.num_predict)
        return fields | {"response_format": self._format()}

    def _format(self) -> ResponseFormat | None:
        if isinstance(self.format, dict):
            return ResponseFormat("json_schema", JsonSchema(schema=self.format))
        if self.format not in (None, "", "json"):
            raise bad_request(f'format must be "json" or a JSON schema; got {self.format!r:.40}', "format")
        return ResponseFormat("json_object") if self.format == "json" else None


class OllamaChatRequest(OllamaRequest, kw_only=True):
    """POST /api/chat."""

    REFUSED: ClassVar[dict[str, Refused]] = _SHARED

    messages: Annotated[
        list[dict[str, Any]] | None,
        about("The conversation: role, content, thinking, tool_calls, tool_name. None: says that the model is loaded."),
    ] = None
    tool_choice: Annotated[
        str | dict[str, Any] | None, about("As of the chat route: Ollama itself has none. Default: auto.")
    ] = None
    tools: Annotated[list[dict[str, Any]] | None, about("Functions that the model may call, at most 128.")] = None


class OllamaGenerateRequest(OllamaRequest, kw_only=True):
    """POST /api/generate."""

    REFUSED: ClassVar[dict[str, Refused]] = _SHARED | {
        "context": Refused("use /api/chat with messages", ([],)),
        "height": Refused("the model gives text", (0,)),
        "images": Refused("the model takes text", ([],)),
        "steps": Refused("the model gives text", (0,)),
        "template": Refused("templates are code; the server's operator chooses one", ("",)),
        "width": Refused("the model gives text", (0,)),
    }

    prompt: Annotated[str | None, about("What the user says. Empty: says that the model is loaded.")] = None
    raw: Annotated[bool | None, about("The text goes on where the prompt ends, without a chat template.")] = None
    suffix: Annotated[str | None, about("The output goes between prompt and suffix, as of /v1/completions.")] = None
    system: Annotated[str | None, about("A system message before the prompt.")] = None


class ChatForm(ChatRequest, kw_only=True):
    """A chat request with Ollama's defaults."""

    def sampling_params(self, defaults: dict[str, Any] | None = None) -> SamplingParams:
        return super().sampling_params(DEFAULTS | (defaults or {}))


class CompletionForm(CompletionRequest, kw_only=True):
    """A completion request with Ollama's defaults: also as long as the context allows."""

    def sampling_params(self, defaults: dict[str, Any] | None = None) -> SamplingParams:
        return super().sampling_params(DEFAULTS | (defaults or {}))

    def output_limit(self, name: str = "max_tokens", default: int | None = None) -> int | None:
        return super().output_limit(name, default)


def model_name(name: str) -> str:
    """Ollama's clients add a tag."""
    return name.removesuffix(":latest")
