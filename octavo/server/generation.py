"""Generation: all choices of one HTTP request, prompts × n, as one stream of deltas.

Choices are numbered as OpenAI numbers them: choice c of prompt p is p * n + c.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple

from octavo.engine.admission import Bounds, ContextLengthError
from octavo.engine.client import EngineClient, EngineDead, SlowReader, Stream
from octavo.engine.messages import Add, Progress
from octavo.engine.overload import Overloaded
from octavo.request import PLAIN, FinishReason, ParameterError, SamplingParams, Terms, TokenLogprobs
from octavo.server.calls import Call
from octavo.server.errors import ApiError, bad_request
from octavo.server.explained import Explanations, by_prompt, prompt_details, written
from octavo.server.metrics import Metrics
from octavo.text.output import ChoiceOutput, Delta, best_of
from octavo.text.tokenizer import Tokenizer

MAX_CHOICES = 2**14
"""Choices of one HTTP request: each takes 1.5 kB here before it has a token, so all of them 25 MB."""


MAX_MERGED = 64
"""Items of several streams that wait for their reader together; the rest waits in its own stream, which is bounded."""


class Prompt(NamedTuple):
    token_ids: list[int]
    text: str | None  # None: given as token ids


class Served(NamedTuple):
    """What a request names as its model."""

    name: str
    adapter: str = ""  # digest of a LoRA adapter; "": the model itself


_PROGRESS = Delta("", [], [], None, None, is_progress=True)


class Generation:
    """Raises ApiError 400 at birth when a prompt or a parameter does not fit the model."""

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer,
        bounds: Bounds,
        metrics: Metrics,
        call: Call,
        id: str,
        prompts: list[Prompt],
        params: SamplingParams,
        seeds: list[int],
        live: dict[str, Generation],
        terms: Terms = PLAIN,
        *,
        served: Served,
        continues: bool,
        keep: frozenset[int] = frozenset(),
        own_limits: frozenset[str] = frozenset(),
    ) -> None:
        """seeds: one per prompt. live: where it stands by its id while it runs. continues: the text goes on where the prompt ends, it is no answer to it. keep: special
        tokens whose text stays. own_limits: limits of time in `terms` that the request set, not the server."""
        self._asked = params.candidates()
        width = self._asked.n
        if len(prompts) * width > MAX_CHOICES:
            raise bad_request(
                f"{len(prompts)} prompts with {'n' if params.best_of is None else 'best_of'} {width} are "
                f"{len(prompts) * width} choices; one request may have {MAX_CHOICES}",
                "prompt",
            )
        self.id = id
        self.model = served.name
        self._client = client
        self._metrics = metrics
        self._call = call
        call.answer_id = id
        self.tokenizer = tokenizer
        self.prompts = prompts
        self.params = params
        self.seeds = seeds
        self._adds = [
            Add(f"{id}-{p}", prompt.token_ids, self._asked, seed, terms, adapter=served.adapter)
            for p, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True))
        ]
        for add in self._adds:
            try:
                bounds.check(add)
            except ParameterError as e:
                code = "context_length_exceeded" if isinstance(e, ContextLengthError) else None
                raise bad_request(str(e), e.param, code) from None
        self.outputs = [
            ChoiceOutput(tokenizer, params, prompt.token_ids if continues else (), keep)
            for prompt in prompts
            for _ in range(width)
        ]
        if call.wants_text:
            call.prompts = [p.text if p.text is not None else tokenizer.decode(p.token_ids) for p in prompts]
            call.outputs = ["" for _ in self.outputs]
        self.prompt_logprobs: dict[int, list[TokenLogprobs]] = {}  # prompt -> scores of its tokens 1..
        self.num_cached = [0] * len(prompts)
        self.num_computed = [0] * len(prompts)  # where terms ask for it, until the first token
        self.explanations: Explanations = {}  # of all candidates, where `explain` was called
        self._chosen: Sequence[int] = range(len(self.outputs))  # candidates that are the answer
        self.caller = call.caller.name
        self._aborted = False
        self._live = live
        self._own_limits = own_limits
        self._tenant = terms.tenant
        self._streams: list[Stream] = []
        self.may_be_refused = params.structured is not None or (terms.ttft_seconds or terms.total_seconds) is not None
        """By the engine: then the status is known with the first delta only."""

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.params.n

    def prompt_of(self, choice: int) -> int:
        return choice // self.params.n

    def begin(self) -> None:
        """Send the prompts to the engine. Raises ApiError, 429 where too many wait. By itself with the first delta."""
        if self._streams:
            return
        try:
            self._client.check_backlog(self._adds[0])
            self._streams = [self._client.submit(add) for add in self._adds]
        except Overloaded as e:
            self._metrics.refused(e.bound)
            raise ApiError(429, str(e), code="overloaded", retry_after=e.retry_after) from None
        except EngineDead as e:
            raise ApiError(500, str(e), code="engine_dead") from None
        except ValueError as e:  # the last use of the id has not quite ended
            raise bad_request(str(e), "request_id") from None
        # Only now: what is refused takes nothing of a quota.
        self._call.num_prompt_tokens = sum(len(prompt.token_ids) for prompt in self.prompts)

    def deltas(self) -> AsyncGenerator[tuple[int, Delta], None]:
        """(choice, delta) as they come; the last delta of a choice has a finish_reason.

        Raises ApiError when the request fails or the engine dies. Ending the iteration early aborts what is left.
        """
        return self._arriving() if self._asked.n == self.params.n else self._best()

    async def _best(self) -> AsyncGenerator[tuple[int, Delta], None]:
        """Deltas of the best candidates, once all have ended."""
        kept: list[list[Delta]] = [[] for _ in self.outputs]
        async with aclosing(self._arriving()) as arriving:
            async for candidate, delta in arriving:
                kept[candidate].append(delta if self.params.logprobs is not None else delta._replace(logprobs=[]))
        chosen = [
            first + i
            for first in range(0, len(kept), self._asked.n)
            for i in best_of(self.outputs[first : first + self._asked.n], self.params.n)
        ]
        self._chosen = chosen
        self.outputs = [self.outputs[candidate] for candidate in chosen]
        for choice, candidate in enumerate(chosen):
            for delta in kept[candidate]:
                yield choice, delta

    async def _arriving(self) -> AsyncGenerator[tuple[int, Delta], None]:
        """(index in `outputs`, delta) as they come, of all candidates."""
        started = time.monotonic()
        seen = [0.0] * len(self.outputs)
        queued: dict[int, float] = {}  # by prompt, with the first token of its first choice
        firsts: dict[int, float] = {}
        reason = FinishReason.ABORT
        num_open = len(self.outputs)
        if self.id in self._live:
            raise bad_request(f"a request with the id {self.id} is being served", "request_id")
        self.begin()
        self._live[self.id] = self
        self._metrics.begin(len(self.prompts), self._call.num_prompt_tokens)
        try:
            async with aclosing(_merge(self._streams)) as steps:
                async for p, progress in steps:
                    choice = p * self._asked.n + progress.choice
                    output = self.outputs[choice]
                    if output.finish_reason is not None:
                        continue
                    if progress.choice == 0 and not seen[choice]:
                        self.num_cached[p] = progress.num_cached
                        self.num_computed[p] = progress.num_computed
                        self.prompt_logprobs[p] = progress.prompt_logprobs
                    if not progress.token_ids and progress.finish_reason is None:
                        if progress.choice == 0:
                            yield choice, _PROGRESS
                        continue
                    delta = output.push(progress)
                    if self._call.outputs is not None:
                        self._call.outputs[choice] += delta.text
                    now = time.monotonic()
                    self._call.num_output_tokens += len(delta.token_ids)
                    if progress.choice == 0 and not seen[choice] and delta.token_ids:
                        self._metrics.looked_up(
                            len(self.prompts[p].token_ids), progress.num_cached - progress.num_disk, progress.num_disk
                        )
                        queued[p], firsts[p] = progress.queue_seconds, now
                    if self._call.first_token is None and delta.token_ids:
                        self._call.first_token, self._call.queue_seconds = now, progress.queue_seconds
                    self._metrics.tokens(len(delta.token_ids), now - (seen[choice] or started), not seen[choice])
                    seen[choice] = now
                    if delta.finish_reason is FinishReason.TIMEOUT:
                        raise self._timed_out(delta.error or "", progress.param or "")
                    if progress.param is not None:
                        raise bad_request(delta.error or "the request was refused by the engine", progress.param)
                    if delta.finish_reason is FinishReason.ERROR or (
                        delta.finish_reason is FinishReason.ABORT and not self._aborted
                    ):
                        raise ApiError(500, delta.error or "the request was aborted by the engine", code="engine_error")
                    if delta.finish_reason is not None and progress.choice == 0 and p in firsts:
                        waited = started + queued[p]
                        self._metrics.phases(queued[p], max(0.0, firsts[p] - waited), now - firsts[p])
                    num_open -= delta.finish_reason is not None
                    if delta.finish_reason is not None and progress.finish_reason is None and num_open:  # a stop string
                        self._client.abort(self._adds[p].id, progress.choice)
                    yield choice, delta
                    if not num_open:  # not waiting for the engine, which may be in a long step
                        break
            reason = FinishReason.STOP
        except SlowReader as e:
            raise ApiError(500, str(e), code="slow_reader") from None
        except EngineDead as e:
            reason = FinishReason.ERROR
            self._call.error = str(e)
            raise ApiError(500, str(e), code="engine_dead") from None
        except ApiError as e:
            reason = FinishReason.ERROR
            self._call.error = e.message
            raise
        finally:
            del self._live[self.id]
            reasons = [output.finish_reason or reason for output in self.outputs]
            self._call.finish_reasons = [str(r) for r in reasons]
            self._call.num_cached_tokens = sum(self.num_cached)
            self._metrics.served(self._tenant, self._call.num_prompt_tokens + self._call.num_output_tokens)
            self._metrics.end(reasons, sum(self.num_cached), time.monotonic() - started)

    async def explain(self) -> None:
        """After the last delta: fetch the explanations. Raises ApiError."""
        try:
            self.explanations = by_prompt(await self._client.explain(self.id))
        except EngineDead as e:
            raise ApiError(500, str(e), code="engine_dead") from None

    def explained(self) -> list[dict[str, Any]]:
        """Of each choice, after `explain`. Of very many choices the engine remembers only the last."""
        entries = []
        for choice, candidate in enumerate(self._chosen):
            explanation = self.explanations.get(divmod(candidate, self._asked.n))
            if explanation is not None:
                state = str(self.outputs[choice].finish_reason)  # stop strings are found here
                entries.append({"index": choice, **written(explanation), "state": state})
        return entries

    def _timed_out(self, message: str, limit: str) -> ApiError:
        """408 for a limit of the request's own, 504 for one of the server's."""
        own = limit in self._own_limits
        field = {"ttft_seconds": "ttft_timeout", "total_seconds": "timeout"}[limit]
        self._metrics.refused(field)
        return ApiError(408 if own else 504, message, param=field if own else None, code=field)

    def abort(self) -> None:
        """End the choices that are open: the last delta of each has the finish reason "abort"."""
        self._aborted = True
        for add in self._adds:
            self._client.abort(add.id)

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object: each prompt counts once; tokens behind a stop string do not count, nor do candidates
        that are not returned."""
        details: dict[str, Any] = {"cached_tokens": sum(self.num_cached)}
        if self.explanations:
            details |= prompt_details(self.explanations, len(self.prompts))
        prompt_tokens = sum(len(prompt.token_ids) for prompt in self.prompts)
        completion_tokens = sum(output.num_tokens for output in self.outputs)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": details,
        }


async def _merge(streams: Sequence[Stream]) -> AsyncGenerator[tuple[int, Progress], None]:
    """Items of all streams with the stream's index, in order of arrival. Ends when all have ended."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for progress in only:
                yield 0, progress
        return
    arrived: asyncio.Queue[tuple[int, Progress | Exception | None]] = asyncio.Queue(MAX_MERGED)

    async def pump(index: int, stream: Stream) -> None:
        try:
            async for progress in stream:
                await arrived.put((index, progress))
        except Exception as e:
            await arrived.put((index, e))
        else:
            await arrived.put((index, None))

    pumps = [asyncio.create_task(pump(i, stream)) for i, stream in enumerate(streams)]
    try:
        num_open = len(streams)
        while num_open:
            index, item = await arrived.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield index, item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
        for stream in streams:
            await stream.aclose()
