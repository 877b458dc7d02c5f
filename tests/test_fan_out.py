"""One prompt, many answers: what is common is computed once and stored once (P4)."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from octavo.backends.base import BLOCK_SIZE
from octavo.config import EngineConfig
from octavo.engine.core import Engine
from octavo.engine.messages import Add, Stats
from octavo.request import SamplingParams
from tests.random_model import WINDOWS, random_model, save
from tests.serving import Server

VOCAB = range(3, 320)
"""Token ids of the tiny model that do not end an answer."""


class FanOut:
    """An engine, and what it held while it computed."""

    def __init__(self, model: Path) -> None:
        config = EngineConfig(model=str(model), max_model_len=1200, kv_cache_memory=64 << 20, num_threads=1)
        self.engine = Engine(dataclasses.replace(config, target_itl=3600.0))  # nobody falls behind on a slow machine
        self.num_cached: dict[tuple[str, int], int] = {}
        self.num_scores: Counter[str] = Counter()
        self.waste: list[float] = []  # slots per sequence, step by step
        self.most_held = 0

    def run(self, adds: list[Add]) -> None:
        """All of them arrive before the next step."""
        for add in adds:
            self.engine.add(add)
        while (output := self.engine.step()) is not None:
            for progress in output.progress:
                assert progress.error is None
                self.num_cached[progress.id, progress.choice] = progress.num_cached
                self.num_scores[progress.id] += len(progress.prompt_logprobs)
            stats = self.engine.stats()
            self.most_held = max(self.most_held, stats.kv_blocks_held)
            if stats.num_running:
                self.waste.append((stats.kv_blocks_held * BLOCK_SIZE - stats.kv_slots_filled) / stats.num_running)
        self.engine.loaded.scheduler.check()


def tokens(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.choice(VOCAB) for _ in range(count)]


@pytest.fixture
def tiny(data: Path) -> Path:
    return data / "gguf" / "tiny-llama-q4_0.gguf"


@pytest.mark.parametrize("together", [True, False])
def test_fifty_tails_of_one_system_prompt(tiny: Path, together: bool) -> None:
    stats = check_tails(FanOut(tiny), together)
    assert stats.kv_tiles_saved > stats.kv_tiles_read


def test_fifty_tails_are_told_what_was_cached(tiny: Path) -> None:
    """Over HTTP, all at once: at least 99 % of the system prompt for each but the first."""
    system = tokens(1000, 0)
    with Server(tiny, "--max-model-len", "1200", "--num-threads", "1", "--kv-cache-memory", "64MiB") as server:

        def cached(i: int) -> int:
            usage = server.complete(prompt=system + tokens(20 + i % 7, i + 1), max_tokens=4, ignore_eos=True)["usage"]
            return int(usage["prompt_tokens_details"]["cached_tokens"])

        with ThreadPoolExecutor(50) as clients:
            assert sum(n >= 990 for n in clients.map(cached, range(50))) >= 49


def test_fifty_tails_in_a_window(tmp_path: Path) -> None:
    """The end of the system prompt has left the window of those who began long ago; later ones still find it."""
    fan_out = FanOut(save(random_model(**WINDOWS, vocab_size=320), tmp_path / "windows"))
    stats = check_tails(fan_out, together=False)
    assert stats.kv_tiles_saved > stats.kv_tiles_read / 2  # one layer of three sees it all


def check_tails(fan_out: FanOut, together: bool) -> Stats:
    system = tokens(1000, 0)
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    adds = [Add(f"r{i}", system + tokens(20 + i % 7, i + 1), params, seed=i) for i in range(50)]
    for batch in [adds] if together else [adds[:1], adds[1:]]:
        fan_out.run(batch)
    assert sum(n >= 990 for n in fan_out.num_cached.values()) >= 49
    stats = fan_out.engine.stats()
    assert stats.prompt_tokens <= sum(len(add.prompt_ids) for add in adds) - 49 * 990
    assert max(fan_out.waste) < BLOCK_SIZE * len(fan_out.engine.loaded.cache.groups)  # of each table at each step
    return stats


def test_eight_answers_hold_their_prompt_once(tiny: Path) -> None:
    fan_out = FanOut(tiny)
    fan_out.run([Add("a", tokens(1000, 0), SamplingParams(n=8, max_tokens=100, ignore_eos=True), seed=1)])
    assert len(fan_out.num_cached) == 8
    assert fan_out.most_held <= (1000 + 8 * 100) / BLOCK_SIZE + 11
    stats = fan_out.engine.stats()
    assert stats.prompt_tokens == 1000 + 7
    assert stats.kv_tiles_saved > stats.kv_tiles_read  # 7 of 8 tokens of a step read the prompt's whole tiles along


def test_fifty_equal_prompts_are_computed_once(tiny: Path) -> None:
    fan_out, prompt = FanOut(tiny), tokens(1000, 0)
    fan_out.run([Add(f"r{i}", prompt, SamplingParams(max_tokens=4, ignore_eos=True), seed=i) for i in range(50)])
    stats = fan_out.engine.stats()
    assert stats.prompt_tokens == 1000 + 49  # each of the others computes the last token, to draw from
    assert stats.cached_tokens == 49 * 999


def test_many_continuations_are_scored_for_the_price_of_one_prompt(tiny: Path) -> None:
    """As evaluation harnesses do: echo, no output. Each continuation computes itself and the token before it."""
    fan_out, prompt = FanOut(tiny), tokens(500, 0)
    params = SamplingParams(max_tokens=0, prompt_logprobs=1)
    fan_out.run([Add(f"r{i}", prompt + tokens(10, i + 1), params, seed=i) for i in range(20)])
    assert fan_out.engine.stats().prompt_tokens <= 510 + 19 * 12
    assert set(fan_out.num_scores.values()) == {509}
    stats = fan_out.engine.stats()
    assert 500 * 4 * 4 <= stats.kv_score_bytes <= stats.kv_blocks_cached * BLOCK_SIZE * 4 * 4
