"""POST /v1/embeddings: vectors of texts, of the states of a decoder."""

from __future__ import annotations

import base64
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from octavo.pooled import embedding
from octavo.server.calls import Call
from octavo.server.errors import bad_request
from octavo.server.fields import Refused, about
from octavo.server.pace import Pace
from octavo.server.parse import Parsed, parse
from octavo.server.pooled import Pooled, PooledRequest
from octavo.server.service import Service

EMBEDDINGS = "/v1/embeddings"

NUMBERS = 16
"""Of a vector: they are written as fast as a score."""


class EmbeddingRequest(PooledRequest, kw_only=True):
    """POST /v1/embeddings."""

    REFUSED: ClassVar[dict[str, Refused]] = {
        "dimensions": Refused("the model was not trained for vectors that are cut"),
        "messages": Refused("give input; /tokenize makes token ids of a conversation"),
    }

    input: Annotated[
        str | list[str | int | list[int]], about("A text, token ids, or a list of either, at most 2048: a vector each.")
    ]
    encoding_format: Annotated[
        Literal["float", "base64"] | None, about("base64: of float32, little-endian. Default: float.")
    ] = None
    normalize: Annotated[bool | None, about("Vectors have length 1. Default: true.")] = None

    def inputs(self) -> list[str | list[int]]:
        """The texts one by one. Raises ApiError for an empty list and for ids beside texts."""
        given = self.input
        if isinstance(given, str):
            return [given]
        if not given:
            raise bad_request("input is an empty list: give text, token ids, or a list of either", "input")
        ids = [item for item in given if isinstance(item, int)]
        if len(ids) == len(given):
            return [ids]
        if ids:
            raise bad_request("input mixes token ids with other forms: give texts, token ids, or lists of ids", "input")
        return [item for item in given if not isinstance(item, int)]


class EmbeddingAnswer:
    """The answer to one request, not begun."""

    def __init__(self, pooled: Pooled, request: EmbeddingRequest) -> None:
        self.pooled = pooled
        self._as_text = request.encoding_format == "base64"
        self._normalize = request.normalize is not False

    async def body(self) -> dict[str, Any]:
        """Raises ApiError."""
        pace, written = Pace(), []
        for pooled in await self.pooled.vectors():
            vector = embedding(pooled, self._normalize)
            as_text = base64.b64encode(vector.astype("<f4").tobytes()).decode() if self._as_text else None
            written.append(msgspec.Raw(msgspec.json.encode(vector.tolist() if as_text is None else as_text)))
            await pace.did(len(vector) // NUMBERS)
        return {
            "id": self.pooled.id,
            "object": "list",
            "created": self.pooled.created,
            "model": self.pooled.model,
            "data": [{"object": "embedding", "index": i, "embedding": value} for i, value in enumerate(written)],
            "usage": self.pooled.usage(),
        }


def embeddings(service: Service, body: bytes, call: Call) -> tuple[EmbeddingAnswer, Parsed[EmbeddingRequest]]:
    """The answer, not begun. Raises ApiError."""
    parsed = parse(body, EmbeddingRequest, service.config.strict)
    request = parsed.request
    inputs = request.inputs()
    return EmbeddingAnswer(Pooled(service, request, call, "embd", inputs, ["input"] * len(inputs)), request), parsed
