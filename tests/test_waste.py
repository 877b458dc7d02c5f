"""P4: KV slots that are held and not written stay under one block per sequence."""

from __future__ import annotations

import random
from pathlib import Path

from octavo.backends.base import BLOCK_SIZE, Limits
from octavo.cache.blocks import GroupSpec
from octavo.cache.kv import KvCache
from octavo.config import EngineConfig
from octavo.engine.core import Engine
from octavo.engine.messages import Add
from octavo.request import Request, SamplingParams
from octavo.sched.batch import BatchBuilder
from octavo.sched.scheduler import Scheduler
from tests.paged_model import PagedModel


def test_waste_is_under_a_block_per_sequence() -> None:
    """64 sequences with lengths uniform in [32, 1024]: mean over all decode steps, by the exported metric."""
    rng = random.Random(0)
    scheduler = Scheduler(
        KvCache([GroupSpec(64 * 64)]), Limits(max_tokens=4096, max_rows=64, max_seqs=64, max_model_len=1025)
    )
    lengths = [rng.randint(32, 1024) for _ in range(64)]
    for i, length in enumerate(lengths):
        num_prompt = max(1, length - 24)  # the last 24 tokens are decoded: every place in a block, one and a half times
        prompt = [rng.randrange(50_000) for _ in range(num_prompt)]
        params = SamplingParams(max_tokens=length - num_prompt + 1, ignore_eos=True)
        scheduler.add(Request(f"r{i}", 0, prompt, params, seed=i))
    builder, model = BatchBuilder(Limits(4096, 64, 64, 1025), 1), PagedModel()
    waste = []
    while (step := scheduler.schedule()) is not None:
        decodes = all(work.num_tokens == 1 for work in step.work)
        scheduler.commit(step, model.run(builder.build(step)))
        stats = scheduler.stats()
        if decodes and stats["num_running"]:
            slots = stats["kv_blocks_held"] * BLOCK_SIZE - stats["kv_slots_filled"]
            waste.append(slots / stats["num_running"])
    assert len(waste) >= 10
    assert sum(waste) / len(waste) < BLOCK_SIZE
    assert max(waste) < BLOCK_SIZE


def test_waste_of_the_engine(data: Path) -> None:
    """The same lengths decoded by the engine from prompts of 16 tokens, by its stats after every step."""
    rng = random.Random(0)
    lengths = [rng.randint(32, 1024) for _ in range(64)]
    model = str(data / "gguf" / "tiny-llama-q4_0.gguf")
    engine = Engine(
        EngineConfig(model=model, max_model_len=1040, kv_cache_memory=64 << 20, max_num_batched_tokens=1024)
    )
    for i, length in enumerate(lengths):
        prompt = [rng.randrange(3, 320) for _ in range(16)]
        engine.add(Add(f"r{i}", prompt, SamplingParams(max_tokens=length - 16, ignore_eos=True), seed=i))
    waste, decoded = [], 0
    while (output := engine.step()) is not None:
        stats, decoded = engine.stats(), decoded + sum(len(p.token_ids) for p in output.progress)
        if stats.num_running:
            waste.append((stats.kv_blocks_held * BLOCK_SIZE - stats.kv_slots_filled) / stats.num_running)
    assert decoded == sum(lengths) - 64 * 16
    assert len(waste) >= max(lengths) - 17
    assert sum(waste) / len(waste) < BLOCK_SIZE
