"""Generation: all choices of one HTTP request, prompts × n, as one stream of deltas.

Choices are numbered as OpenAI numbers them: choice c of prompt p is p * n + c.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
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


class Prompt(NamedTuple):
    token_ids: list[int]
    text: str | None  # None: given as token ids


class Served(NamedTuple):
    """What a request names as its model."""

    name: str
    adapter: str = ""  # digest of a LoRA adapter; "": the model itself


_PROGRESS = Delta("", [], [], None, None, is_progress=True)

Sink = Callable[[int, Delta], None]
"""Takes a choice and its delta."""


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
        self._started = 0.0
        self._seen = [0.0] * len(self.outputs)  # when something came of each last
        self._firsts: dict[
            int, tuple[float, float]
        ] = {}  # by prompt: what its first choice waited, and its first token
        self._relay: tuple[Callable[[], bool], Sink] | None = None
        self._tenant = terms.tenant
        self._stream: Stream | None = None
        self.may_be_refused = params.structured is not None or (terms.ttft_seconds or terms.total_seconds) is not None
        """By the engine: then the status is known with the first delta only."""

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.params.n

    def prompt_of(self, choice: int) -> int:
        return choice // self.params.n

    def begin(self) -> None:
        """Send the prompts to the engine. Raises ApiError, 429 where too many wait. By itself with the first delta."""
        if self._stream is not None:
            return
        try:
            self._client.check_backlog(self._adds[0])
            self._stream = self._client.submit(*self._adds)
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
        """(choice, delta) as they come; the last delta of a choice has a finish_reason. Those that `relay` passed on are
        left out.

        Raises ApiError when the request fails or the engine dies. Ending the iteration early aborts what is left.
        """
        return self._arriving() if self._asked.n == self.params.n else self._best()

    def relay(self, ready: Callable[[], bool], sink: Sink) -> None:
        """Before `deltas` is iterated: most deltas go to `sink` as the engine's message is read, and who iterates is not
        woken. They are those between the first and the last of a choice that come while the iteration waits and `ready`
        says that `sink` can take them at once. None where a stop string may make any of them the last, where answers are
        chosen when all have ended, and where prompts are scored: that is written in pieces."""
        params = self.params
        if not (params.stop or self._asked.n != params.n or params.prompt_logprobs is not None):
            self._relay = ready, sink

    def end_relay(self) -> None:
        """`sink` is called no more, nor kept."""
        self._relay = None
        if self._stream is not None:
            self._stream.relay = None

    def _pass_on(self, p: int, progress: Progress) -> bool:
        """As `Stream.relay`."""
        assert self._relay is not None
        ready, sink = self._relay
        choice = p * self._asked.n + progress.choice
        if progress.finish_reason is not None or not progress.token_ids or not self._seen[choice] or not ready():
            return False
        sink(choice, self._taken(p, choice, progress))
        return True

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
        call, metrics, outputs = self._call, self._metrics, self.outputs
        self._started = time.monotonic()
        reason = FinishReason.ABORT
        num_open = len(outputs)
        if self.id in self._live:
            raise bad_request(f"a request with the id {self.id} is being served", "request_id")
        self.begin()
        assert self._stream is not None
        self._live[self.id] = self
        metrics.begin(len(self.prompts), call.num_prompt_tokens)
        if self._relay is not None:
            self._stream.relay = self._pass_on
        try:
            scored = self._asked.prompt_logprobs is not None
            async for p, progress in _behind_scores(self._stream) if scored else self._stream:
                choice = p * self._asked.n + progress.choice
                if outputs[choice].finish_reason is not None:
                    continue
                if not self._seen[choice] and progress.choice == 0:
                    self.num_cached[p] = progress.num_cached
                    self.num_computed[p] = progress.num_computed
                    self.prompt_logprobs[p] = progress.prompt_logprobs
                if not progress.token_ids and progress.finish_reason is None:
                    if progress.choice == 0:
                        yield choice, _PROGRESS
                    continue
                delta = self._taken(p, choice, progress)
                if delta.finish_reason is not None:
                    self._check(progress, delta)
                    if progress.choice == 0 and p in self._firsts:
                        queued, first = self._firsts[p]
                        metrics.phases(queued, max(0.0, first - self._started - queued), self._seen[choice] - first)
                    num_open -= 1
                    if progress.finish_reason is None and num_open:  # a stop string
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
            await self._stream.aclose()
            del self._live[self.id]
            reasons = [output.finish_reason or reason for output in self.outputs]
            self._call.finish_reasons = [str(r) for r in reasons]
            self._call.num_cached_tokens = sum(self.num_cached)
            self._metrics.served(self._tenant, self._call.num_prompt_tokens + self._call.num_output_tokens)
            self._metrics.end(reasons, sum(self.num_cached), time.monotonic() - self._started)

    def _taken(self, p: int, choice: int, progress: Progress) -> Delta:
        """Push what came of an open choice, and count it."""
        before = self._seen[choice]
        delta = self.outputs[choice].push(progress)
        count = len(delta.token_ids)
        self._seen[choice] = now = time.monotonic()
        self._call.num_output_tokens += count
        self._metrics.tokens(count, now - (before or self._started), not before)
        if self._call.outputs is not None:
            self._call.outputs[choice] += delta.text
        if not before and count:
            self._began(p, progress, now)
        return delta

    def _began(self, p: int, progress: Progress, now: float) -> None:
        """The first token of a choice of prompt `p` has come."""
        if progress.choice == 0:
            self._firsts[p] = progress.queue_seconds, now
            num_memory = progress.num_cached - progress.num_disk
            self._metrics.looked_up(len(self.prompts[p].token_ids), num_memory, progress.num_disk)
        if self._call.first_token is None:
            self._call.first_token, self._call.queue_seconds = now, progress.queue_seconds

    def _check(self, progress: Progress, delta: Delta) -> None:
        """Raise ApiError where a choice ended by a fault."""
        if delta.finish_reason is FinishReason.TIMEOUT:
            raise self._timed_out(delta.error or "", progress.param or "")
        if progress.param is not None:
            raise bad_request(delta.error or "the request was refused by the engine", progress.param)
        if delta.finish_reason is FinishReason.ERROR or (
            delta.finish_reason is FinishReason.ABORT and not self._aborted
        ):
            raise ApiError(500, delta.error or "the request was aborted by the engine", code="engine_error")

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


async def _behind_scores(
    steps: AsyncIterator[tuple[int, Progress]],
) -> AsyncGenerator[tuple[int, Progress], None]:
    """Other choices of a prompt follow the first token of its choice 0, which brings the scores of the prompt."""
    known: set[int] = set()
    held: dict[int, list[Progress]] = {}
    async for prompt, progress in steps:
        if prompt not in known and progress.choice:
            held.setdefault(prompt, []).append(progress)
            continue
        yield prompt, progress
        if prompt not in known and (progress.token_ids or progress.finish_reason is not None):
            known.add(prompt)
            for other in held.pop(prompt, ()):
                yield prompt, other
