"""A model for the commands that need one: found or fetched, its engine started, its tokenizer loaded."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import sys
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Self, TypeVar

from octavo.config import EngineConfig
from octavo.engine.client import EngineClient
from octavo.engine.messages import Add, Ready
from octavo.request import SamplingParams

C = TypeVar("C", bound=EngineConfig)


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
    """An engine process and its tokenizer, for one conversation at a time."""

    def __init__(self, config: EngineConfig) -> None:
        """Raises EngineError, CheckpointError or ConfigError with one line for the user."""
        config, self.name = resolve(config)
        self._seed = config.seed
        self._count = 0
        self._client = EngineClient.launch(config)
        from octavo.text.tokenizer import load_tokenizer  # while the engine loads

        self._runner = asyncio.Runner()
        try:
            self.tokenizer = load_tokenizer(Path(config.model))
            self.ready: Ready = self._runner.run(self._client.ready())
        except BaseException:
            self.close()
            raise

    def generate(
        self, prompt_ids: list[int], params: SamplingParams, write: Callable[[str], None], *, continues: bool
    ) -> str:
        """Write the text as it comes; the whole of it. An interrupt ends the generation and is raised on.

        continues: the text goes on where the prompt ends, it is no answer to it.
        Raises ParameterError where the prompt does not fit.
        """
        from octavo.text.output import ChoiceOutput

        self._count += 1
        seed = self._seed if self._seed is not None else int.from_bytes(os.urandom(8), "little")
        add = Add(str(self._count), prompt_ids, params, seed)
        output = ChoiceOutput(self.tokenizer, params, prompt_ids if continues else ())
        parts: list[str] = []

        async def follow() -> None:
            async with aclosing(self._client.submit(add)) as stream:
                async for progress in stream:
                    delta = output.push(progress)
                    if delta.error:
                        raise RuntimeError(delta.error)
                    if delta.text:
                        parts.append(delta.text)
                        write(delta.text)
                    if output.finish_reason is not None:
                        return

        self._runner.run(follow())
        return "".join(parts)

    def close(self) -> None:
        self._runner.run(self._client.close())
        self._runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
