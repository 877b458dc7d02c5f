"""A model for the commands that need one: found or fetched, its engine started, its answers those of a server."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import sys
from collections.abc import Callable, Coroutine, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import msgspec

from octavo.bars import LoadingBar
from octavo.cli.source import OnChunk, read_chunk, refusal
from octavo.config import ConfigError, EngineConfig, ServerConfig
from octavo.engine.client import EngineClient

if TYPE_CHECKING:
    from octavo.server.answer import Answer

C = TypeVar("C", bound=EngineConfig)
T = TypeVar("T")


def resolve(config: C) -> tuple[C, str]:
    """The config with `model` as a path on this machine, and a name for the model. Says on standard error what it fetches."""
    from octavo.weights.locate import locate

    path = locate(config.model, tell)
    name = config.model if "/" in config.model and not Path(config.model).exists() else path.name.removesuffix(".gguf")
    return dataclasses.replace(config, model=str(path)), name


def tell(line: str) -> None:
    """On standard error: standard output belongs to the answer."""
    print(line, file=sys.stderr, flush=True)


class LocalModel:
    """The routes of a server without HTTP: an engine process, and what turns bodies into answers in this one."""

    def __init__(self, config: EngineConfig) -> None:
        """Raises EngineError, CheckpointError or ConfigError with one line for the user."""
        config, self.name = resolve(config)
        if len(config.adapters) > 1:
            raise ConfigError("name one adapter with lora: it answers everything")
        self._answers_as = config.adapters[0][0] if config.adapters else self.name
        options = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
        served = ServerConfig(**options, strict=True)  # a field that nobody knows is a mistake
        bar = LoadingBar()
        self._client = EngineClient.launch(config, on_loading=bar.show)
        self._runner = asyncio.Runner()
        try:
            from octavo.server.service import Service  # while the engine loads
            from octavo.text.tokenizer import load_tokenizer

            self._service = Service(served, self._client, self.name)
            self._service.loaded(load_tokenizer(Path(config.model)), None)
            with bar:
                self._runner.run(self._client.ready())
        except BaseException:
            self.close()
            raise

    def check(self, path: str, body: dict[str, Any]) -> None:
        """Raises ParameterError where the answer to `body` would be refused."""
        self._prepared(path, body)

    def stream(self, path: str, body: dict[str, Any], on_chunk: OnChunk) -> None:
        """Answer a body piece by piece. An interrupt ends the answer and is raised on.

        Raises ParameterError where it is refused, EngineError where it fails.
        """
        from octavo.server.answer import events

        answer = self._prepared(path, {**body, "stream": True})

        async def follow() -> None:
            async with aclosing(events(answer)) as stream:
                async for event in stream:
                    for line in event.splitlines():
                        if (chunk := read_chunk(line)) is not None:
                            on_chunk(chunk)
                    await asyncio.sleep(0)  # an interrupt is heard here, where the engine is faster than the screen

        self._run(follow())

    def answer_all(
        self, requests: Sequence[tuple[str, dict[str, Any]]], on_answer: Callable[[dict[str, Any]], None]
    ) -> None:
        """Answer (path, body) pairs together, and hand over the answers in their order.

        Raises ParameterError, naming the number of the request, before anything is computed.
        """
        from octavo.request import ParameterError

        answers = []
        for number, (path, body) in enumerate(requests, 1):
            try:
                answers.append(self._prepared(path, body))
            except ParameterError as e:
                raise ParameterError(e.param, f"prompt {number}: {e}" if len(requests) > 1 else str(e)) from None

        async def answer_each() -> None:
            tasks = [asyncio.ensure_future(answer.body()) for answer in answers]
            try:
                for task in tasks:
                    on_answer(await task)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

        self._run(answer_each())

    def close(self) -> None:
        self._runner.run(self._client.close())
        self._runner.close()

    def _prepared(self, path: str, body: dict[str, Any]) -> Answer:
        from octavo.server.access import Caller
        from octavo.server.calls import Call
        from octavo.server.errors import ApiError
        from octavo.server.routes import ANSWERS

        try:
            body = {"model": self._answers_as, **body}
            return ANSWERS[path](self._service, msgspec.json.encode(body), Call(os.urandom(12).hex(), Caller()))[0]
        except ApiError as e:
            raise refusal(e.status, e.message, e.param) from None

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        from octavo.server.errors import ApiError

        try:
            return self._runner.run(work)
        except ApiError as e:
            raise refusal(e.status, e.message, e.param) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
