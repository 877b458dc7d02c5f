"""Pooled: vectors of the prompts of one HTTP request, and the fields that the routes on them share."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta

from octavo.engine.client import EngineDead, Stream
from octavo.engine.messages import Add, Progress, pooled
from octavo.engine.overload import Overloaded
from octavo.pooling import Pooling
from octavo.request import FinishReason, ParameterError, Terms
from octavo.server.calls import Call
from octavo.server.errors import ApiError, bad_request
from octavo.server.fields import MAX_PRIORITY, Name, RequestBody, about
from octavo.server.service import Service, new_id

if TYPE_CHECKING:
    from octavo.pooled import F64

MAX_PROMPTS = 2048
"""Texts of one request, as OpenAI has it."""


class PooledRequest(RequestBody, kw_only=True):
    """Fields that the routes share."""

    model: Annotated[
        str | None, about("A name in /v1/models: of the model, or of a LoRA adapter; another is a 404.")
    ] = None
    add_special_tokens: Annotated[bool | None, about("Add what the tokenizer asks for, as BOS, to a text.")] = None
    cache_salt: Annotated[Name | None, about("Only requests of one salt share cached blocks.")] = None
    pooling: Annotated[
        Literal["last", "mean", "cls", "pooler"] | None,
        about(
            "The states that make the vector: of the last token, the mean of all, of the first, or what a pooler of the "
            "model's own makes of the first. Default: as the model's files say; else last, and mean of encoders. Others "
            "than last compute what is cached again."
        ),
    ] = None
    priority: Annotated[
        Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None, about("Lower is served earlier.")
    ] = None
    truncate_prompt_tokens: Annotated[
        Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None,
        about(
            "Keep the last so many tokens of a text; -1: what fits. Of encoders the first, special tokens apart; of a pair "
            "that is scored together, the second text loses its end."
        ),
    ] = None
    user: Annotated[Name | None, about("Who asks: shares the machine fairly with other users.")] = None


class Pooled:
    """Raises ApiError at birth where a prompt does not fit the model."""

    def __init__(
        self, service: Service, request: PooledRequest, call: Call, kind: str,
        prompts: Sequence[str | list[int] | tuple[str, str]], fields: Sequence[str],
    ) -> None:  # fmt: skip
        """kind: of the answer's id. prompts: texts, token ids, or pairs of texts that a classifier scores.
        fields: which field gave each of them."""
        self.model, adapter = service.served(request.model)
        if len(prompts) > MAX_PROMPTS:
            raise bad_request(f"these are {len(prompts)} texts; one request may have {MAX_PROMPTS}", fields[-1])
        bounds = service.client.bounds
        assert bounds is not None
        pairs = bool(prompts) and isinstance(prompts[0], tuple)
        self.pooling: Pooling = "scores" if pairs else request.pooling or bounds.abilities.pooling
        self.id = new_id(kind)
        self.created = int(time.time())
        self.num_cached = 0
        self._service = service
        self._call = call
        self._terms = service.terms_of(call, request.priority, request.user, request.cache_salt)
        self._adds = [
            _add(service, request, f"{self.id}-{i}", prompt, field, self.pooling, self._terms, adapter)
            for i, (prompt, field) in enumerate(zip(prompts, fields, strict=True))
        ]
        for add, field in zip(self._adds, fields, strict=True):
            try:
                bounds.check(add)
            except ParameterError as e:
                raise bad_request(str(e), "pooling" if e.param == "pooling" else field) from None
        call.answer_id = self.id

    async def vectors(self) -> list[F64]:
        """One of each prompt, not normalised. Raises ApiError. Cancelled, it aborts what is left."""
        import numpy as np  # a server that embeds nothing starts without

        metrics, call = self._service.metrics, self._call
        stream = self._submit()
        call.num_prompt_tokens = sum(len(add.prompt_ids) for add in self._adds)  # what is refused takes no quota
        metrics.begin(len(self._adds), call.num_prompt_tokens)
        started, reasons = time.monotonic(), [FinishReason.ABORT for _ in self._adds]
        try:
            ended: dict[int, F64] = {}
            async for i, progress in stream:
                if progress.finish_reason is None:
                    continue
                reasons[i] = progress.finish_reason
                self._check(progress)
                self.num_cached += progress.num_cached
                metrics.looked_up(
                    len(self._adds[i].prompt_ids), progress.num_cached - progress.num_disk, progress.num_disk
                )
                ended[i] = np.frombuffer(progress.pooled, np.float64)
            return [ended[i] for i in range(len(self._adds))]
        except EngineDead as e:
            call.error = str(e)
            raise ApiError(500, str(e), code="engine_dead") from None
        except ApiError as e:
            call.error = e.message
            raise
        finally:
            await stream.aclose()
            call.finish_reasons = [str(reason) for reason in reasons]
            call.num_cached_tokens = self.num_cached
            metrics.served(self._terms.tenant, call.num_prompt_tokens)
            metrics.end(reasons, self.num_cached, time.monotonic() - started)

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object; nothing is drawn."""
        num_tokens = self._call.num_prompt_tokens
        details = {"cached_tokens": self.num_cached}
        return {"prompt_tokens": num_tokens, "total_tokens": num_tokens, "prompt_tokens_details": details}

    def _submit(self) -> Stream:
        """Raises ApiError, 429 where too many wait."""
        client = self._service.client
        try:
            client.check_backlog(self._adds[0])
            return client.submit(*self._adds)
        except Overloaded as e:
            self._service.metrics.refused(e.bound)
            raise ApiError(429, str(e), code="overloaded", retry_after=e.retry_after) from None
        except EngineDead as e:
            raise ApiError(500, str(e), code="engine_dead") from None

    def _check(self, progress: Progress) -> None:
        if progress.finish_reason is FinishReason.LENGTH:
            return
        message = progress.error or "the request was aborted"
        if progress.finish_reason is FinishReason.TIMEOUT:
            raise ApiError(504, message, code="timeout")
        raise bad_request(message, progress.param) if progress.param else ApiError(500, message, code="engine_error")


def _add(
    service: Service, request: PooledRequest, id: str, prompt: str | list[int] | tuple[str, str], param: str,
    pooling: Pooling, terms: Terms, adapter: str,
) -> Add:  # fmt: skip
    """Raises ApiError."""
    tokenizer, bounds = service.tokenizer, service.client.bounds
    assert tokenizer is not None and bounds is not None
    most = request.truncate_prompt_tokens
    if most is not None and most < 0:
        most = bounds.max_model_len
    if isinstance(prompt, tuple):
        for text in prompt:
            service.tokens(text, param, lambda _: [])  # of a length that is read
        (pair,) = tokenizer.encode_pairs([prompt])
        pair = pair if most is None else pair.cut(most)
        service.check_length(pair.ids, param)
        return pooled(id, pair.ids, pooling, terms, pair.num_first, adapter)
    ending = 0
    if isinstance(prompt, str):
        encode = partial(tokenizer.encode, add_special_tokens=request.add_special_tokens is not False)
        prompt = service.tokens(prompt, param, encode)
        ending = 0 if request.add_special_tokens is False else tokenizer.num_ending
    if most is not None and most < len(prompt):
        prompt = prompt[len(prompt) - most :] if bounds.abilities.generates else _shortened(prompt, most, ending)
    service.check_length(prompt, param)
    return pooled(id, prompt, pooling, terms, adapter=adapter)


def _shortened(ids: list[int], most: int, ending: int) -> list[int]:
    """The first tokens, and the last `ending` ones."""
    ending = min(ending, most)
    return ids[: most - ending] + ids[len(ids) - ending :]
