"""Answers of the two APIs: how a delta becomes a chunk, and how all deltas become a body.

The part of a chunk that never changes is encoded once per choice; a chunk then costs a few joins of bytes.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from msgspec import Raw

from octavo.request import TokenLogprobs
from octavo.server.errors import ApiError, bad_request
from octavo.server.fields import GenerationRequest, StreamOptions
from octavo.server.generation import Generation
from octavo.server.logprobs import prompt_tokens
from octavo.server.pace import Pace
from octavo.text.output import Delta

MAX_SCORES = 2**22
"""Scores of tokens, alternatives included, that an answer keeps until it is whole: 62 bytes each, 260 MB."""

_encode = msgspec.json.Encoder().encode


class Answer:
    """What both APIs share. One instance per HTTP request."""

    object = ""
    chunk_object = ""

    def __init__(self, generation: Generation, model: str, request: GenerationRequest) -> None:
        self.generation = generation
        self.request = request
        options = request.stream_options or StreamOptions()
        self._head = {"id": generation.id, "object": self.object, "created": int(time.time()), "model": model}
        self._include_usage = bool(options.include_usage)
        self._continuous_usage = bool(options.continuous_usage_stats)
        self._return_token_ids = bool(request.return_token_ids)
        self._shows_prompt_scores = request.prompt_logprobs is not None
        self.scores_prompts = generation.params.prompt_logprobs is not None
        self._pace = Pace()
        self._ready: set[int] = set()  # choices of which what they tell of their prompts is written
        self._prompt_tokens: dict[int, list[Raw]] = {}  # prompt -> what is told of its tokens 1..
        self._chunk_head = _encode({**self._head, "object": self.chunk_object})[:-1]
        self._starts = [
            b'data: %b,"choices":[{"index":%d,' % (self._chunk_head, choice) for choice in range(generation.num_choices)
        ]
        self._end = b'}],"usage":null}\n\n' if self._include_usage else b"}]}\n\n"
        self._goes_on = b',"finish_reason":null' + self._end
        self._is_plain = not (self._return_token_ids or self._continuous_usage)
        self._begun = [False] * generation.num_choices
        self._started = time.monotonic()

    def opening(self) -> list[bytes]:
        """Chunks before the first token."""
        if not self.request.return_sampling_params:
            return []
        return [self._bare({"sampling_params": sampling_values(self.generation)})]

    async def ready(self, choice: int) -> None:
        """Before the first chunk of a choice, where prompts are scored: write the scores of its prompt, in pieces between
        which others have their turn."""
        if choice not in self._ready:
            self._ready.add(choice)
            await self._write_prompt(choice)

    async def _write_prompt(self, choice: int) -> None:
        prompt = self.generation.prompt_of(choice)
        if self._shows_prompt_scores and prompt not in self._prompt_tokens:
            written: list[Raw] = []
            async for piece in self._pace.pieces(self._prompt_scores(choice)):
                written += prompt_tokens(self.generation.tokenizer, piece)
            self._prompt_tokens[prompt] = written

    def chunk(self, choice: int, delta: Delta) -> bytes:
        """One event; empty where the delta has nothing to tell yet."""
        needed = bool(delta.finish_reason or delta.logprobs or (self._return_token_ids and delta.token_ids))
        content = self._content(choice, delta, needed)
        if not content:
            return b""
        if self._is_plain and self._begun[choice] and delta.finish_reason is None:  # as nearly all are
            return b"".join((self._starts[choice], content, self._goes_on))
        parts = [self._starts[choice], content]
        if delta.finish_reason is None:
            parts.append(b',"finish_reason":null')
        else:
            ending = {"finish_reason": self._finish_reason(choice, delta), "stop_reason": delta.stop_reason}
            parts.append(b"," + _encode(ending)[1:-1])
        if self._return_token_ids:
            parts.append(b',"token_ids":' + _encode(delta.token_ids))
            if not self._begun[choice]:
                parts.append(b',"prompt_token_ids":' + _encode(self._prompt_ids(choice)))
        beside = {} if self._begun[choice] else self._first(choice)
        if self._continuous_usage:
            beside["usage"] = self._usage()
        self._begun[choice] = True
        parts.append(b"}]," + _encode(beside)[1:] + b"\n\n" if beside else self._end)
        return b"".join(parts)

    def progress(self, prompt: int) -> bytes:
        """How much of a prompt is computed, in the form of llama.cpp; of several prompts with the index."""
        generation = self.generation
        told: dict[str, Any] = {
            "total": len(generation.prompts[prompt].token_ids),
            "cache": generation.num_cached[prompt],
            "processed": generation.num_computed[prompt],
            "time_ms": round(1000 * (time.monotonic() - self._started)),
        }
        if len(generation.prompts) > 1:
            told["index"] = prompt
        return self._bare({"prompt_progress": told})

    async def closing(self) -> list[bytes]:
        """Usage and explanation, where asked for, and the end mark. Raises ApiError."""
        beside = await self._explained()
        if self._include_usage:
            beside["usage"] = self._usage()
        return [*([self._bare(beside)] if beside else []), b"data: [DONE]\n\n"]

    async def body(self) -> dict[str, Any]:
        """The whole answer, not streamed. Raises ApiError."""
        collected: list[list[Delta]] = [[] for _ in range(self.generation.num_choices)]
        num_scores, width = 0, 1 + (self.generation.params.logprobs or 0)
        async with aclosing(self.generation.deltas()) as arriving:
            async for choice, delta in arriving:
                num_scores += len(delta.logprobs) * width
                if num_scores > MAX_SCORES:
                    raise bad_request(
                        f"the answer has more than {MAX_SCORES} scores, alternatives included: stream it, or ask for fewer",
                        "logprobs",
                    )
                if self.scores_prompts:
                    await self.ready(choice)
                if delta.logprobs:
                    async for piece in self._pace.pieces(delta.logprobs):
                        self._note(choice, piece)
                    delta = delta._replace(logprobs=[])
                collected[choice].append(delta)
                await self._pace.did(1)
        choices: list[dict[str, Any]] = []
        beside: dict[str, Any] = {}
        for choice, deltas in enumerate(collected):
            await self._pace.did(len(deltas))
            whole = Delta(
                "".join(d.text for d in deltas),
                [token for d in deltas for token in d.token_ids],
                [],
                deltas[-1].finish_reason,
                deltas[-1].stop_reason,
            )
            beside |= self._first(choice)
            entry = {"index": choice, **self._whole(choice, whole)}
            entry |= {"finish_reason": self._finish_reason(choice, whole), "stop_reason": whole.stop_reason}
            if self._return_token_ids:
                entry |= {"token_ids": whole.token_ids, "prompt_token_ids": self._prompt_ids(choice)}
            choices.append(entry)
        beside |= await self._explained()
        body = {**self._head, "choices": choices, **beside, "usage": self._usage()}
        if self.request.return_sampling_params:
            body["sampling_params"] = sampling_values(self.generation)
        return body

    async def _explained(self) -> dict[str, Any]:
        if not self.request.explain:
            return {}
        await self.generation.explain()
        return {"octavo": {"choices": self.generation.explained()}}

    def _bare(self, beside: dict[str, Any]) -> bytes:
        """A chunk without choices."""
        return b'data: %b,"choices":[],%b\n\n' % (self._chunk_head, _encode(beside)[1:])

    def _content(self, choice: int, delta: Delta, needed: bool) -> bytes:
        """The JSON members that carry text and logprobs of a chunk; may be empty where it is not needed."""
        raise AssertionError("each API has its own")

    def _note(self, choice: int, scores: list[TokenLogprobs]) -> None:
        """Write scores of tokens for `_whole`."""
        raise AssertionError("each API has its own")

    def _whole(self, choice: int, delta: Delta) -> dict[str, Any]:
        """The same of a whole choice, as an object, with the scores that were noted."""
        raise AssertionError("each API has its own")

    def _finish_reason(self, choice: int, delta: Delta) -> str | None:
        return delta.finish_reason

    def _usage(self) -> dict[str, Any]:
        return self.generation.usage()

    def _first(self, choice: int) -> dict[str, Any]:
        """What stands once beside the choices, in the body or in the first chunk of the choice that it comes with."""
        return {}

    def _prompt_ids(self, choice: int) -> list[int]:
        return self.generation.prompts[self.generation.prompt_of(choice)].token_ids

    def _told_of_prompt(self, choice: int) -> list[Raw | None]:
        """vLLM's form of its scores, which begins with nothing for the first token."""
        return [None, *self._prompt_tokens[self.generation.prompt_of(choice)]]

    def _prompt_scores(self, choice: int) -> list[TokenLogprobs]:
        return self.generation.prompt_logprobs.get(self.generation.prompt_of(choice), [])


async def events(answer: Answer) -> AsyncGenerator[bytes, None]:
    """The answer as server-sent events. Ending the iteration early aborts what is left.

    Raises ApiError where the engine refuses before anything came.
    """
    opening = answer.opening()
    waits = answer.generation.may_be_refused
    try:
        while opening and not waits:
            yield opening.pop(0)
        async with aclosing(answer.generation.deltas()) as deltas:
            async for choice, delta in deltas:
                waits = False
                while opening:
                    yield opening.pop(0)
                if delta.is_progress:
                    yield answer.progress(answer.generation.prompt_of(choice))
                    continue
                if answer.scores_prompts:
                    await answer.ready(choice)
                if event := answer.chunk(choice, delta):
                    yield event
        for event in await answer.closing():
            yield event
    except ApiError as e:
        if waits:
            raise
        yield e.event()


def sampling_values(generation: Generation) -> dict[str, Any]:
    """The values that were used, by the names of the fields; the seed is the one that was drawn, of several prompts a
    list. What the server made of texts is left out."""
    seeds = generation.seeds
    values: dict[str, Any] = msgspec.to_builtins(generation.params)
    values["seed"] = seeds[0] if len(set(seeds)) == 1 else seeds
    return {name: value for name, value in values.items() if name not in ("bad_word_ids", "dry_breaker_ids")}
