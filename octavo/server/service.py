"""A model being served: what every route needs beside the fields of its request."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from octavo.config import ServerConfig
from octavo.engine.client import EngineClient
from octavo.request import ParameterError, SamplingParams, Terms
from octavo.server.access import Keys
from octavo.server.calls import Call
from octavo.server.errors import ApiError, bad_request
from octavo.server.fields import GenerationRequest
from octavo.server.generation import Generation, Prompt
from octavo.server.metrics import Metrics
from octavo.server.tracing import NoTracer, Tracer
from octavo.text.tokenizer import Tokenizer

MIN_TEXT = 2**20
CHARACTERS_PER_TOKEN = 128
"""Most characters of a text per token of the context, and MIN_TEXT at least. Tokenising takes a second and 120 MB per
million characters, so that a text that can never fit is refused before."""


@dataclass
class Service:
    """A model being served. `tokenizer` comes once it is loaded, `draining` when the server was told to end."""

    config: ServerConfig
    client: EngineClient
    model: str  # name in answers
    created: int = field(default_factory=lambda: int(time.time()))
    tokenizer: Tokenizer | None = None
    draining: bool = False
    keys: Keys = field(default_factory=lambda: Keys([]))
    tracer: Tracer = field(default_factory=NoTracer)

    def __post_init__(self) -> None:
        self.metrics = Metrics(lambda: self.client.stats, self.model, self.config.metric_names)

    @property
    def trouble(self) -> str | None:
        """Why no generation is accepted now."""
        if self.draining:
            return "the server is shutting down"
        if self.client.bounds is None or self.tokenizer is None:
            return "the model is still loading"
        return None if self.client.alive else "the engine has ended"

    def generation(
        self, id: str, prompts: list[Prompt], request: GenerationRequest, call: Call, *, continues: bool
    ) -> Generation:
        """Checked against the model, not begun. Raises ApiError 400."""
        tokenizer, bounds = self.tokenizer, self.client.bounds
        assert tokenizer is not None and bounds is not None
        params = _params(request)
        seeds = [self.seed() if params.seed is None else params.seed for _ in prompts]
        return Generation(
            self.client, tokenizer, bounds, self.metrics, call, id, prompts, params, seeds, _terms(request, call),
            continues=continues,
        )  # fmt: skip

    def seed(self) -> int:
        """For a prompt whose request brings none."""
        return int.from_bytes(os.urandom(8), "little") if self.config.seed is None else self.config.seed

    def encode(self, text: str, param: str, encode: Callable[[str], list[int]]) -> Prompt:
        """Token ids by `encode` of a text that may fit the context. Raises ApiError naming the field `param`."""
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
            ids = encode(text)
        except ValueError as e:  # text that is no Unicode
            raise bad_request(str(e), param) from None
        if len(ids) > bounds.max_model_len:  # before more texts are read
            raise bad_request(
                f"the prompt has {len(ids)} tokens; prompt and output together may have {bounds.max_model_len}",
                param, "context_length_exceeded",
            )  # fmt: skip
        return Prompt(ids, text)

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.model:
            raise ApiError(
                404, f"there is no model {name!r} here; this server has {self.model!r}",
                param="model", code="model_not_found",
            )  # fmt: skip


def _params(request: GenerationRequest) -> SamplingParams:
    try:
        return request.sampling_params()
    except ParameterError as e:
        raise bad_request(str(e), e.param) from None


def _terms(request: GenerationRequest, call: Call) -> Terms:
    """The tenant is the API key's; without keys, who calls itself `user`. A salt of the request is within the key's."""
    caller = call.caller
    return Terms(
        priority=-(request.priority or 0),
        tenant=caller.tenant or request.user or "",
        cache_salt=f"{caller.salt}\0{request.cache_salt}" if request.cache_salt else caller.salt,
    )


def new_id(kind: str) -> str:
    return f"{kind}-{os.urandom(12).hex()}"
