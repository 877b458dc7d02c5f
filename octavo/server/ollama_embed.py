"""Ollama's /api/embed and the older /api/embeddings, on the path of /v1/embeddings."""

from __future__ import annotations

import time
from typing import Annotated, Any, ClassVar

from octavo.pooled import embedding
from octavo.server.calls import Call
from octavo.server.fields import Refused, about
from octavo.server.ollama_fields import OllamaBody, Options, model_name
from octavo.server.parse import Parsed, parse
from octavo.server.pooled import Pooled, PooledRequest
from octavo.server.service import Service

_EFFECTLESS = frozenset(Options.__struct_fields__) - {"num_ctx"}
"""Options of drawing, where nothing is drawn."""


class _Body(OllamaBody, kw_only=True):
    """What both routes share."""

    options: Annotated[
        dict[str, Any] | None,
        about(
            "num_ctx (refused where the server's context is smaller). Nothing is drawn: the others are named in "
            "x-octavo-ignored."
        ),
    ] = None


class EmbedRequest(_Body, kw_only=True):
    """POST /api/embed."""

    REFUSED: ClassVar[dict[str, Refused]] = {
        "dimensions": Refused("the model was not trained for vectors that are cut")
    }

    input: Annotated[
        str | list[str] | None, about("A text, or several, at most 2048. None: says that the model is loaded.")
    ] = None
    truncate: Annotated[
        bool | None,
        about("Only what fits of a text that is too long, as of /v1/embeddings. Default: false, it is refused."),
    ] = None

    def texts(self) -> list[str]:
        given = self.input or []
        return [given] if isinstance(given, str) else given


class OldEmbedRequest(_Body, kw_only=True):
    """POST /api/embeddings."""

    prompt: Annotated[str | None, about("A text. Empty: says that the model is loaded.")] = None
    truncate: ClassVar[bool] = False

    def texts(self) -> list[str]:
        return [self.prompt] if self.prompt else []


class EmbedAnswer:
    """Of one request, not begun."""

    def __init__(self, request: EmbedRequest | OldEmbedRequest, pooled: Pooled | None) -> None:
        """pooled: None where there are no texts."""
        self._request = request
        self._pooled = pooled
        self._started = time.monotonic()

    async def body(self) -> dict[str, Any]:
        """Raises ApiError."""
        is_old = isinstance(self._request, OldEmbedRequest)
        states = [] if self._pooled is None else await self._pooled.vectors()
        vectors = [embedding(state, normalize=not is_old).tolist() for state in states]
        if is_old:
            return {"embedding": vectors[0] if vectors else []}
        return {
            "model": self._request.model,
            "embeddings": vectors,
            "total_duration": round(1e9 * (time.monotonic() - self._started)),
            "load_duration": 0,  # the model is loaded before requests are taken
            "prompt_eval_count": 0 if self._pooled is None else self._pooled.usage()["prompt_tokens"],
        }


def embed(service: Service, body: bytes, call: Call) -> tuple[EmbedAnswer, Parsed[EmbedRequest]]:
    """The answer, not begun. Raises ApiError."""
    parsed = parse(body, EmbedRequest, service.config.strict)
    return _answer(service, parsed.request, parsed.ignored, call, "input"), parsed


def embed_old(service: Service, body: bytes, call: Call) -> tuple[EmbedAnswer, Parsed[OldEmbedRequest]]:
    """The same of /api/embeddings."""
    parsed = parse(body, OldEmbedRequest, service.config.strict)
    return _answer(service, parsed.request, parsed.ignored, call, "prompt"), parsed


def _answer(
    service: Service, request: EmbedRequest | OldEmbedRequest, ignored: list[str], call: Call, field: str
) -> EmbedAnswer:
    bounds = service.client.bounds
    assert bounds is not None
    name = model_name(request.model)
    service.served(name)
    options = request.known_options(bounds.max_model_len, ignored)
    ignored.extend(f"options.{option}" for option in sorted(_EFFECTLESS) if getattr(options, option) is not None)
    texts = request.texts()
    if not texts:
        return EmbedAnswer(request, None)
    wanted = PooledRequest(model=name, truncate_prompt_tokens=-1 if request.truncate else None)
    return EmbedAnswer(request, Pooled(service, wanted, call, "ollama", texts, [field] * len(texts)))
