"""A model being served: what every route needs beside the fields of its request."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from octavo.config import ServerConfig
from octavo.engine.client import EngineClient
from octavo.request import ParameterError, SamplingParams, Terms
from octavo.server.access import Keys
from octavo.server.batches import Batches
from octavo.server.calls import Call
from octavo.server.errors import ApiError, bad_request
from octavo.server.fields import GenerationRequest
from octavo.server.files import FileStore
from octavo.server.generation import Generation, Prompt, Served
from octavo.server.metrics import Metrics
from octavo.server.responses_store import ResponseStore
from octavo.server.resume import ResumableStreams
from octavo.server.tracing import NoTracer, Tracer
from octavo.text.chat import ChatFormat, ChatPrompt
from octavo.text.infill import Infill, find_infill
from octavo.text.tokenizer import Tokenizer
from octavo.text.words import resolve
from octavo.weights.generation_config import recommended_sampling
from octavo.weights.spec import CheckpointError

MIN_TEXT = 2**20
CHARACTERS_PER_TOKEN = 128
"""Most characters of a text per token of the context, and MIN_TEXT at least. Tokenising takes a second and 120 MB per
million characters, so that a text that can never fit is refused before."""

MAX_REPEATED = 2**19
"""Entries that an answer gives of its prompts, for each choice: token ids, and scores with their alternatives. 62 bytes
each as JSON, 32 MB; what the engine tells of so many is read in 0.08 s."""


@dataclass
class Service:
    """A model being served. `tokenizer` and `chat` come once it is loaded, `draining` when the server was told to end."""

    config: ServerConfig
    client: EngineClient
    model: str  # name in answers
    created: int = field(default_factory=lambda: int(time.time()))
    tokenizer: Tokenizer | None = None
    chat: ChatFormat | None = None  # comes with the tokenizer
    infill: Infill | None = None  # where the model has tokens for that; comes with the tokenizer
    draining: bool = False
    keys: Keys = field(default_factory=lambda: Keys([]))
    tracer: Tracer = field(default_factory=NoTracer)
    batches: Batches | None = None  # made at the first use
    sampling_defaults: dict[str, Any] = field(default_factory=dict)  # of the model, where the config asks for them
    open: dict[str, Generation] = field(default_factory=dict)  # by the id of the answer
    streams: ResumableStreams = field(default_factory=ResumableStreams)
    responses: ResponseStore = field(default_factory=ResponseStore)

    def __post_init__(self) -> None:
        self.metrics = Metrics(lambda: self.client.stats, self.model, self.config.metric_names)

    def loaded(self, tokenizer: Tokenizer, template: str | None) -> list[str]:
        """Lines for whoever starts the model. template: in place of the model's own. Raises CheckpointError."""
        config = self.config
        if config.generation_config == "auto":
            self.sampling_defaults = recommended_sampling(Path(config.model))
            try:
                SamplingParams(**self.sampling_defaults)
            except ParameterError as e:
                raise CheckpointError(f"generation_config.json: {e}") from None
        self.chat = ChatFormat(
            tokenizer, template, tool_format=config.tool_format, reasoning_format=config.reasoning_format
        )
        self.infill = find_infill(tokenizer)
        self.tokenizer = tokenizer
        return [*tokenizer.notices, *self.chat.notices]

    @cached_property
    def files(self) -> FileStore:
        """Made at the first use. Without `files_dir` it ends with the server."""
        if self.config.files_dir is not None:
            return FileStore(Path(self.config.files_dir))
        self._temporary = tempfile.TemporaryDirectory(prefix="octavo-files-")
        return FileStore(Path(self._temporary.name))

    async def close(self) -> None:
        """Stop what works in the background."""
        if self.batches is not None:
            await self.batches.close()

    @property
    def trouble(self) -> str | None:
        """Why no generation is accepted now."""
        if self.draining:
            return "the server is shutting down"
        if self.client.bounds is None or self.tokenizer is None:
            loading = self.client.loading
            far = f": {loading.what}, {loading.done / loading.total:.0%}" if loading else ""
            return f"the model is still loading{far}"
        return None if self.client.alive else "the engine has ended"

    def generation(
        self, id: str, prompts: list[Prompt], request: GenerationRequest, call: Call, chat: ChatPrompt | None = None
    ) -> Generation:
        """Checked against the model, not begun. chat: the prompt, where it is a conversation. Raises ApiError 400."""
        tokenizer, bounds = self.tokenizer, self.client.bounds
        assert tokenizer is not None and bounds is not None
        if id in self.open:
            raise bad_request(f"a request with the request_id {request.request_id!r} is being served", "request_id")
        params = self._params(request, chat)
        _check_repeated(prompts, request, params, 1 if chat is not None else params.n)
        seeds = [self.seed() if params.seed is None else params.seed for _ in prompts]
        return Generation(
            self.client, tokenizer, bounds, self.metrics, call, id, prompts, params, seeds, self.open, self._terms(request, call),
            served=self.served(request.model), continues=chat is None or chat.continues, keep=frozenset() if chat is None else chat.keep,
            own_limits=_own_limits(request, self.config),
        )  # fmt: skip

    def seed(self) -> int:
        """For a prompt whose request brings none."""
        return int.from_bytes(os.urandom(8), "little") if self.config.seed is None else self.config.seed

    def given(self, token_ids: list[int], request: GenerationRequest) -> Prompt:
        """A prompt of token ids."""
        return self._truncated(Prompt(token_ids, None), request)

    def encode(self, text: str, param: str, encode: Callable[[str], list[int]], request: GenerationRequest) -> Prompt:
        """Token ids by `encode` of a text that may fit the context. Raises ApiError naming the field `param`."""
        prompt = self._truncated(Prompt(self.tokens(text, param, encode), text), request)
        self.check_length(prompt.token_ids, param)  # before more texts are read
        return prompt

    def tokens(self, text: str, param: str, encode: Callable[[str], list[int]]) -> list[int]:
        """Token ids by `encode` of a text, unless it is longer than any that fits. Raises ApiError naming `param`."""
        bounds = self.client.bounds
        assert bounds is not None
        most = max(MIN_TEXT, CHARACTERS_PER_TOKEN * bounds.max_model_len)
        if len(text) > most:
            raise bad_request(
                f"the prompt has {len(text)} characters; at most {most} are read, "
                f"and prompt and output together may have {bounds.max_model_len} tokens",
                param, "context_length_exceeded",
            )  # fmt: skip
        try:
            return encode(text)
        except ValueError as e:  # text that is no Unicode
            raise bad_request(str(e), param) from None

    def check_length(self, token_ids: list[int], param: str) -> None:
        """Raises ApiError naming `param` where the tokens do not fit the context."""
        bounds = self.client.bounds
        assert bounds is not None
        if len(token_ids) > bounds.max_model_len:
            raise bad_request(bounds.too_long(len(token_ids)), param, "context_length_exceeded")

    def _truncated(self, prompt: Prompt, request: GenerationRequest) -> Prompt:
        """The last tokens, as many as the request says. Where it asks for what fits, that is with its output."""
        wanted = request.truncate_prompt_tokens
        if wanted is None:
            return prompt
        if wanted < 0:
            bounds = self.client.bounds
            assert bounds is not None
            wanted = max(1, bounds.max_model_len - (self._params(request).max_tokens or 1))
        return (
            prompt
            if len(prompt.token_ids) <= wanted
            else Prompt(prompt.token_ids[len(prompt.token_ids) - wanted :], None)
        )

    def _terms(self, request: GenerationRequest, call: Call) -> Terms:
        """The tenant is the API key's; without keys, who calls itself `user`. A salt of the request is within the key's."""
        config = self.config
        own = _own_limits(request, config)
        return msgspec.structs.replace(
            self.terms_of(call, request.priority, request.user, request.cache_salt),
            total_seconds=request.timeout if "total_seconds" in own else config.timeout_seconds,
            ttft_seconds=request.ttft_timeout if "ttft_seconds" in own else config.ttft_timeout_seconds,
            retention=request.wanted_retention(),
            reports_prefill=bool(request.return_progress),
        )

    def terms_of(self, call: Call, priority: int | None, user: str | None, cache_salt: str | None) -> Terms:
        """Of a request with these fields, within the server's limit of time."""
        caller = call.caller
        return Terms(
            priority=-(priority or 0),
            tenant=caller.tenant or user or "",
            total_seconds=self.config.timeout_seconds,
            cache_salt=f"{caller.salt}\0{cache_salt}" if cache_salt else caller.salt,
        )

    def _params(self, request: GenerationRequest, chat: ChatPrompt | None = None) -> SamplingParams:
        assert self.tokenizer is not None
        try:
            params = resolve(request.sampling_params(self.sampling_defaults), self.tokenizer)
            return params if chat is None else chat.params(params)
        except ParameterError as e:
            raise bad_request(str(e), e.param) from None

    @property
    def models(self) -> list[str]:
        """Names that requests may give: of the model, and of the adapters that are loaded."""
        return [self.model, *self.client.adapters]

    def served(self, name: str | None) -> Served:
        """What a request with this model is for. Raises ApiError 404 naming what there is."""
        if name is None or name == self.model:
            return Served(self.model)
        if name not in self.client.adapters:
            shown = ", ".join(map(repr, self.models[:10])) + (", ..." if len(self.models) > 10 else "")
            raise ApiError(
                404, f"there is no model {name!r} here; this server has {shown}", param="model", code="model_not_found"
            )
        return Served(name, self.client.adapters[name].digest)

    def card(self, name: str) -> dict[str, Any]:
        """Of a model or an adapter: what the clients of OpenAI and of Anthropic look for. Raises ApiError 404."""
        self.served(name)
        bounds, adapter = self.client.bounds, self.client.adapters.get(name)
        card = {
            "id": name,
            "object": "model",
            "type": "model",
            "display_name": name,
            "created": self.created,
            "created_at": datetime.fromtimestamp(self.created, UTC).isoformat(),
            "owned_by": "octavo",
            "max_model_len": bounds.max_model_len if bounds else None,
            "capabilities": bounds.abilities.names() if bounds else None,
        }
        return card | ({"parent": self.model, "root": adapter.path, "digest": adapter.digest} if adapter else {})


def _own_limits(request: GenerationRequest, config: ServerConfig) -> frozenset[str]:
    """Limits of `Terms` that are the request's: it may be stricter than the server, not more patient."""
    limits = {
        "ttft_seconds": (request.ttft_timeout, config.ttft_timeout_seconds),
        "total_seconds": (request.timeout, config.timeout_seconds),
    }
    return frozenset(name for name, (own, most) in limits.items() if own is not None and (most is None or own <= most))


def _check_repeated(prompts: list[Prompt], request: GenerationRequest, params: SamplingParams, num_scored: int) -> None:
    """num_scored: choices that tell the scores of their prompt. Raises ApiError where the answer would be too large."""
    each = {
        "prompt_logprobs": 0 if params.prompt_logprobs is None else (params.prompt_logprobs + 1) * num_scored,
        "echo": params.n if getattr(request, "echo", None) else 0,
        "return_token_ids": params.n if request.return_token_ids else 0,
    }
    num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
    total = num_tokens * sum(each.values())
    if total > MAX_REPEATED:
        most = max(each, key=lambda name: each[name])
        raise bad_request(
            f"{num_tokens} prompt tokens with n {params.n} make {total} entries of the answer, scores and their "
            f"alternatives included; {MAX_REPEATED} are given of the prompts of one request: "
            f"ask for less by prompt_logprobs, echo, return_token_ids or n, or send the prompts one by one",
            "logprobs" if most == "prompt_logprobs" and request.prompt_logprobs is None else most,
        )  # fmt: skip


def new_id(kind: str, wanted: str | None = None) -> str:
    """The id of an answer: a random one, or what the client wants behind the kind."""
    return f"{kind}-{wanted or os.urandom(12).hex()}"
