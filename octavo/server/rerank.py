"""POST /v1/score and /v1/rerank: how near texts are, by a classifier's own score of them as a pair, or by the cosine of their
embeddings."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from msgspec import Meta

from octavo.pooled import logistic, similarities
from octavo.server.calls import Call
from octavo.server.errors import bad_request
from octavo.server.fields import Refused, about
from octavo.server.parse import Parsed, parse
from octavo.server.pooled import Pooled, PooledRequest
from octavo.server.service import Service

SCORE = "/v1/score"
RERANK = "/v1/rerank"


class ComparisonRequest(PooledRequest, kw_only=True):
    """Fields of both."""

    use_activation: Annotated[
        bool | None, about("Of classifiers. Default: true: scores are made 0 to 1, by the logistic function.")
    ] = None


class ScoreRequest(ComparisonRequest, kw_only=True):
    """POST /v1/score."""

    ALIASES: ClassVar[dict[str, str]] = {"queries": "text_1", "documents": "text_2"}

    text_1: Annotated[str | list[str], about("A text, or one for each of text_2.")]
    text_2: Annotated[str | list[str], about("The texts that it is compared with.")]

    def pairs(self) -> tuple[list[str], list[str]]:
        """Raises ApiError."""
        first, second = _listed(self.text_1, "text_1"), _listed(self.text_2, "text_2")
        if len(first) not in (1, len(second)):
            raise bad_request(
                f"text_1 has {len(first)} texts and text_2 has {len(second)}: give one, or one for each", "text_1"
            )
        return first, second


class RerankRequest(ComparisonRequest, kw_only=True):
    """POST /v1/rerank."""

    REFUSED: ClassVar[dict[str, Refused]] = {
        "max_chunks_per_doc": Refused("documents are not split"),
        "max_tokens_per_doc": Refused("use truncate_prompt_tokens"),
        "rank_fields": Refused("a document is its text"),
    }

    query: Annotated[str, about("What is looked for.")]
    documents: Annotated[list[str | dict[str, Any]], about("Texts, or objects with a text, at most 2047.")]
    top_n: Annotated[Annotated[int, Meta(ge=0, le=2**31 - 1)] | None, about("So many, the nearest. Default: all.")] = (
        None
    )
    return_documents: Annotated[bool | None, about("Tell the texts, too. Default: true.")] = None

    def texts(self, ignored: list[str]) -> list[str]:
        """Of the documents, whose other members are added to `ignored`. Raises ApiError."""
        texts = []
        for i, document in enumerate(self.documents):
            text = document if isinstance(document, str) else document.get("text")
            if not isinstance(text, str):
                raise bad_request(f"documents[{i}].text must be a string", "documents")
            texts.append(text)
            if isinstance(document, dict):
                ignored.extend(f"documents[{i}].{name}" for name in document if name != "text")
        return _listed(texts, "documents")


class _Compared:
    """Texts and those that they are compared with: `first` has one text, or one for each of `second`.

    A classifier reads each pair, unless the request asks for vectors (`pooling`)."""

    def __init__(
        self, service: Service, request: ComparisonRequest, call: Call, kind: str,
        first: tuple[str, list[str]], second: tuple[str, list[str]],
    ) -> None:  # fmt: skip
        """first, second: the field, and its texts. Raises ApiError."""
        self.texts = second[1]
        self._num_first = len(first[1])
        self._classifies = request.pooling is None and _num_scores(service) > 0
        self._activates = request.use_activation is not False
        if self._classifies:
            if (count := _num_scores(service)) != 1:
                raise bad_request(f"this classifier gives {count} numbers for a pair, a score is one", "model")
            pairs = list(zip(first[1] * (len(second[1]) if len(first[1]) == 1 else 1), second[1], strict=True))
            self.pooled = Pooled(service, request, call, kind, pairs, [second[0]] * len(pairs))
            return
        if request.use_activation is not None:
            raise bad_request("use_activation is of a classifier's scores, and these are cosines", "use_activation")
        fields = [first[0]] * len(first[1]) + [second[0]] * len(second[1])
        self.pooled = Pooled(service, request, call, kind, [*first[1], *second[1]], fields)

    async def scores(self) -> list[float]:
        """Of each of `texts`. Raises ApiError."""
        vectors = await self.pooled.vectors()
        if self._classifies:
            return [logistic(float(v[0])) if self._activates else float(v[0]) for v in vectors]
        return similarities(vectors[: self._num_first], vectors[self._num_first :])

    def how(self) -> dict[str, Any]:
        """What the scores are."""
        own = "the logistic function of the model's score" if self._activates else "the model's score"
        return {
            "scoring": own if self._classifies else "cosine of embeddings",
            "pooling": self.pooled.pooling,
        }


class ScoreAnswer(_Compared):
    """In the form of vLLM."""

    async def body(self) -> dict[str, Any]:
        """Raises ApiError."""
        scores = await self.scores()
        return {
            "id": self.pooled.id,
            "object": "list",
            "created": self.pooled.created,
            "model": self.pooled.model,
            "data": [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores)],
            "usage": self.pooled.usage(),
            "octavo": self.how(),
        }


class RerankAnswer(_Compared):
    """In the form of Jina and Cohere: the nearest first; of equals the one that was given first."""

    top_n: int | None = None
    shows_texts: bool = True

    async def body(self) -> dict[str, Any]:
        """Raises ApiError."""
        scores = await self.scores()
        order = sorted(range(len(scores)), key=lambda i: -scores[i])[: self.top_n or len(scores)]
        results: list[dict[str, Any]] = [{"index": i, "relevance_score": scores[i]} for i in order]
        for result in results if self.shows_texts else ():
            result["document"] = {"text": self.texts[result["index"]]}
        return {
            "id": self.pooled.id,
            "model": self.pooled.model,
            "results": results,
            "usage": self.pooled.usage(),
            "octavo": self.how(),
        }


def score(service: Service, body: bytes, call: Call) -> tuple[ScoreAnswer, Parsed[ScoreRequest]]:
    """The answer, not begun. Raises ApiError."""
    parsed = parse(body, ScoreRequest, service.config.strict)
    first, second = parsed.request.pairs()
    return ScoreAnswer(service, parsed.request, call, "score", ("text_1", first), ("text_2", second)), parsed


def rerank(service: Service, body: bytes, call: Call) -> tuple[RerankAnswer, Parsed[RerankRequest]]:
    """The answer, not begun. Raises ApiError."""
    parsed = parse(body, RerankRequest, service.config.strict)
    request = parsed.request
    query, documents = ("query", [request.query]), ("documents", request.texts(parsed.ignored))
    answer = RerankAnswer(service, request, call, "rerank", query, documents)
    answer.top_n, answer.shows_texts = request.top_n, request.return_documents is not False
    return answer, parsed


def _num_scores(service: Service) -> int:
    """That the model's classifier gives; 0 where it has none."""
    bounds = service.client.bounds
    return bounds.abilities.heads.get("scores", 0) if bounds else 0


def _listed(texts: str | list[str], field: str) -> list[str]:
    if not texts:
        raise bad_request(f"{field} is empty: give a text", field)
    return [texts] if isinstance(texts, str) else texts
