"""An engine of this process with random prompts, and what a step of it has to read."""

from __future__ import annotations

import random
from collections.abc import Iterator

from octavo.backends.base import BLOCK_SIZE
from octavo.config import ConfigError, EngineConfig, offline
from octavo.engine.core import Engine
from octavo.engine.messages import Add
from octavo.graph.ops import Embed
from octavo.request import SamplingParams
from octavo.weights.formats import packed_bytes


class Offline:
    """Prompts that differ in their first token, so that nothing can be taken from the prefix cache."""

    def __init__(self, config: EngineConfig) -> None:
        self.engine = Engine(offline(config))
        self._draw = random.Random(0)
        self._vocabulary = range(self.engine.bounds.vocab_size)
        self._firsts = iter(self._draw.sample(self._vocabulary, len(self._vocabulary)))
        self._count = 0

    def prompt(self, length: int) -> list[int]:
        """Raises ConfigError where all tokens have begun a prompt."""
        first = next(self._firsts, None)
        if first is None:
            raise ConfigError(
                f"the vocabulary has {len(self._vocabulary)} tokens: too few for so many prompts that all differ"
            )
        return [first, *self._draw.choices(self._vocabulary, k=length - 1)]

    def add(self, prompt: list[int], output_len: int) -> None:
        """Greedy, end tokens ignored. Raises ParameterError where it is longer than what the engine serves."""
        params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
        self.engine.add(Add(str(self._count), prompt, params, seed=0))
        self._count += 1

    def steps(self) -> Iterator[int]:
        """How many tokens came out of each step, until nothing is to be done."""
        while (step := self.engine.step()) is not None:
            yield sum(len(progress.token_ids) for progress in step.progress)

    @property
    def num_cached(self) -> int:
        """Prompt tokens that came from the cache, so far."""
        return self.engine.stats().cached_tokens

    @property
    def weight_bytes(self) -> int:
        """Of the packed matrices that every step reads as a whole: not of tables of embeddings, and of all experts."""
        parts = {
            (part, value.cols)
            for node in self.engine.loaded.graph.nodes
            if not isinstance(node.attrs, Embed)
            for value in node.ins
            if not value.vector
            for part in value.parts
        }
        return sum(packed_bytes(part.format, part.rows, cols) for part, cols in parts)

    def kv_bytes(self, context: float) -> float:
        """Of the keys and values that a token reads which is the last of so many."""
        loaded = self.engine.loaded
        return sum(
            block_bytes / BLOCK_SIZE * min(context, group.window or context)
            for block_bytes, group in zip(loaded.backend.block_bytes(loaded.graph), loaded.graph.groups, strict=True)
        )


def check(num_output: int, wanted: int, num_cached: int = 0) -> None:
    """Raise RuntimeError where a run did not compute what it says."""
    if num_output != wanted or num_cached:
        raise RuntimeError(
            f"{num_output} tokens came out of {wanted}, {num_cached} were cached: this run measures nothing"
        )
