"""P1: tokens and scores of a request are those of the request run alone, whatever happens around it.

A pool of requests is computed one by one, each with a cold cache. Then random schedules of them run
on random engines (threads, chunk sizes, KV sizes, fusion, memory reuse), and every bit must be the same. The test
asserts that the schedules reached what it is about.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from octavo.backends.base import KV_SPLIT, SMALL_T, StepBatch
from octavo.config import EngineConfig
from octavo.engine.core import Engine
from octavo.engine.messages import Abort, Add, Progress, pooled
from octavo.graph.adapt import targets
from octavo.models import build_graph
from octavo.pooling import Pooling
from octavo.request import FinishReason, Request, Retention, SamplingParams, Terms, TokenLogprobs
from octavo.weights.checkpoint import open_checkpoint
from tests.quantised_model import ACT_ORDER, GPTQ, save_latent_experts, save_quantised, sorted_alike, sorted_experts
from tests.random_adapter import random_adapter
from tests.random_blocks import MIXED, write_mixed
from tests.random_model import WINDOWS, random_model, save
from tests.waiting import SECONDS, until

MAX_MODEL_LEN = 1400
"""Past two KV splits of 512 tokens; more than the tiny models were made for, which no bit depends on."""

Answer = tuple[list[int], list[TokenLogprobs], list[TokenLogprobs], FinishReason | None, float | None, bytes]
"""Of one choice: tokens, scores, prompt scores, why it ended, the logprob of what a beam search found, pooled states."""


@dataclass
class Seen:
    """What the schedules reached."""

    preemptions: int = 0
    partial_hits: int = 0
    whole_hits: int = 0
    chunked: int = 0
    longest_context: int = 0
    small_steps: int = 0
    large_steps: int = 0
    mixed_steps: int = 0  # decodes and prefill chunks together
    largest_batch: int = 0
    aborts: int = 0
    forks: int = 0  # beams that share the blocks of another
    preempted_beams: int = 0  # by chance; test_beam_engine.py sees to it
    kept_scores: int = 0  # prompts of which scores came with cached blocks
    disk_blocks: int = 0  # loaded from disk
    pooled_hits: int = 0  # prompts whose last states were pooled, and the rest came from the cache
    shared_tiles: int = 0  # of KV that attention read for several sequences at once
    left_windows: int = 0  # sequences whose first blocks were given back
    adapters: int = 0  # the most of a step, none counted as one
    expert_rows: set[int] = field(default_factory=set)  # how many tokens of a step one expert had
    threads: set[int] = field(default_factory=set)
    mixed_draws: int = 0  # steps that stored logits of some rows, and drew others without
    salted_hits: int = 0  # of those under a salt
    hinted: int = 0  # requests with a wish for how long their blocks are kept
    flushes: int = 0  # while requests run

    def look(self, batch: StepBatch) -> None:
        lengths = [b - a for a, b in zip(batch.seq_starts[:-1], batch.seq_starts[1:], strict=True)]
        self.longest_context = max(self.longest_context, int(batch.context_lens.max()))
        self.small_steps += len(batch.token_ids) <= SMALL_T
        self.large_steps += len(batch.token_ids) > SMALL_T
        self.mixed_steps += min(lengths) == 1 and max(lengths) > 1
        self.largest_batch = max(self.largest_batch, len(lengths))
        self.adapters = max(self.adapters, len(np.unique(batch.adapters)))
        for table in batch.block_tables:
            self.left_windows += int(((table[:, :2] == 0).all(axis=1) & (batch.context_lens > 32)).sum())


class Watched:
    """The program of an engine; notes what each batch looks like on its way."""

    def __init__(self, program: Any, seen: Seen, readable: bool) -> None:
        self._program = program
        self._seen = seen
        self._routes = [node for node in program.graph.nodes if node.op == "route"] if readable else []

    def run(self, batch: StepBatch) -> Any:
        self._seen.look(batch)
        result = self._program.run(batch)
        if (batch.sampling.num_top >= 0).any():
            try:
                self._program.logits()
            except ValueError:
                self._seen.mixed_draws += 1
        for node in self._routes:
            ids = self._program.read(node.outs[0])[:, : node.attrs.top_k].astype(int)
            self._seen.expert_rows |= set(np.bincount(ids.ravel(), minlength=node.ins[0].cols).tolist())
        return result

    def output(self, name: str) -> Any:
        return self._program.output(name)


def config(path: Path, **options: Any) -> EngineConfig:
    return EngineConfig(model=str(path), max_model_len=MAX_MODEL_LEN, **options)


def request_pool(vocab_size: int, count: int) -> list[Add]:
    """Families of prompts that share beginnings of any length, short ones and long ones, and every way to sample."""
    rng = random.Random(1)
    trunks = [[rng.randrange(vocab_size) for _ in range(1200)] for _ in range(3)]
    pool = []
    for i in range(count):
        growing = i % 4 < 2  # short prompts with long answers: together they outgrow the cache
        shared = rng.choice([0, 20]) if growing else 1130 if i == 2 else rng.choice([5, 16, 31, 100, 250, 250, 600])
        own = rng.choice([1, 1, 3, 17, 64, 90])
        ids = trunks[i % 3][:shared] + [rng.randrange(vocab_size) for _ in range(own)]
        if i % 5 == 4:  # a conversation that goes on: the same prompt again, and more
            ids = pool[-1].prompt_ids + ids[-own:]
        options: dict[str, Any] = {}
        if rng.random() < 0.7:
            options = {
                "temperature": rng.choice([0.7, 1.0, 1.5]),
                "top_k": rng.choice([0, 0, 5, 40]),
                "top_p": rng.choice([1.0, 0.9, 0.5]),
                "min_p": rng.choice([0.0, 0.0, 0.05]),
                "repetition_penalty": rng.choice([1.0, 1.2]),
                "presence_penalty": rng.choice([0.0, 0.5]),
                "frequency_penalty": rng.choice([0.0, 0.3]),
                "n": rng.choice([1, 1, 2, 3]),
            }
        if options and i % 3 == 0:
            options |= {
                "typical_p": rng.choice([1.0, 0.8]),
                "top_n_sigma": rng.choice([-1.0, 1.5]),
                "xtc_probability": rng.choice([0.0, 0.5]),
                "dynatemp_range": rng.choice([0.0, 0.3]),
                "dry_multiplier": rng.choice([0.0, 0.8]),
                "repeat_last_n": rng.choice([-1, 30]),
                "bad_word_ids": rng.choice([[], [[3], [4, 5]]]),
                "allowed_token_ids": rng.choice([None, list(range(0, vocab_size, 2))]),
                "samplers": rng.choice(
                    [
                        None,
                        ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"],
                    ]
                ),
            }
        if i % 8 == 3:
            pool.append(Add(f"r{i}", ids[: MAX_MODEL_LEN - 140], beam_search(rng), seed=0))
            continue
        params = SamplingParams(
            **{"temperature": 0.0, **options},
            max_tokens=rng.choice([100, 140]) if growing else rng.choice([1, 8, 24]),
            ignore_eos=rng.random() < 0.8,
            min_tokens=rng.choice([0, 1]),
            logprobs=rng.choice([None, 0, 5]),
            prompt_logprobs=3 if i % 5 > 2 or rng.random() < 0.1 else None,  # also of the conversations that go on
            logit_bias={rng.randrange(vocab_size): 2.5} if rng.random() < 0.2 else None,
        )
        pool.append(Add(f"r{i}", ids[: MAX_MODEL_LEN - 140], params, seed=rng.getrandbits(63)))
    poolings: tuple[Pooling, ...] = ("last", "mean", "cls", "mean", "last")
    return pool + [pooled(f"p{i}", pool[2 * i].prompt_ids, pooling) for i, pooling in enumerate(poolings)]


def beam_search(rng: random.Random) -> SamplingParams:
    width = rng.choice([2, 3, 5])
    return SamplingParams(
        use_beam_search=True,
        temperature=0.0,
        n=rng.randint(1, width),
        best_of=width,
        length_penalty=rng.choice([1.0, 0.6]),
        early_stopping=rng.choice([True, False]),
        max_tokens=rng.choice([24, 60]),
        ignore_eos=rng.random() < 0.5,
        logprobs=rng.choice([None, 2]),
        prompt_logprobs=rng.choice([None, 1]),
    )


def random_terms(rng: random.Random, salt: str) -> Terms:
    """What may change when tokens come, and not which."""
    hint = Retention(seconds=rng.choice([0, 60]), priority=rng.choice([-5, 5])) if rng.random() < 0.2 else None
    return Terms(
        priority=rng.choice([0, 0, 0, 1, -1]),
        tenant=rng.choice(["", "", "a", "b"]),
        cache_salt=salt if rng.random() < 0.9 else "blue",
        ttft_seconds=rng.choice([None, 3600.0]),
        total_seconds=rng.choice([None, 3600.0]),
        retention=hint,
        reports_prefill=rng.random() < 0.1,
    )


class Answers:
    """Collects Progress, and checks that nothing is delivered twice or left out."""

    def __init__(self) -> None:
        self.choices: dict[tuple[str, int], Answer] = {}
        self.num_cached: dict[tuple[str, int], int] = {}

    def take(self, progress: list[Progress]) -> None:
        for p in progress:
            tokens, scores, prompt_scores, ended, *_ = self.choices.get((p.id, p.choice), ([], [], [], None, None, b""))
            assert ended is None and p.index == len(tokens) and p.error is None
            assert len(p.logprobs) in (0, len(p.token_ids))
            scores, prompt_scores = scores + p.logprobs, prompt_scores + p.prompt_logprobs
            found = (tokens + p.token_ids, scores, prompt_scores, p.finish_reason, p.logprob, p.pooled)
            self.choices[p.id, p.choice] = found
            self.num_cached[p.id, p.choice] = p.num_cached


def alone(path: Path, pool: list[Add], **options: Any) -> Answers:
    answers = Answers()
    engine = Engine(config(path, num_threads=1, **options))
    for add in pool:
        cached = engine.stats().cached_tokens
        engine.add(add)
        while (output := engine.step()) is not None:
            answers.take(output.progress)
        if add.params.n == 1:
            assert engine.stats().cached_tokens == cached
        engine.flush()
    return answers


def random_engine(
    path: Path, rng: random.Random, block_bytes: int, case: int, disk: Path, **options: Any
) -> EngineConfig:
    """What must be reached is dealt out by the number of the case; the rest is drawn."""
    crowded = case % 2 == 0
    chunks = [100, 512] if case % 4 in (0, 3) else [16, 40, 64]
    num_seqs = 40 if crowded else rng.choice([2, 5, 16, 40])
    num_blocks = -(-MAX_MODEL_LEN // 16) + (0 if crowded else rng.choice([0, 3, 20, 1000]))
    return config(
        path,
        num_threads=1 + case // 2 % 2,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=max(num_seqs, rng.choice(chunks)),
        kv_cache_memory=num_blocks * block_bytes,
        target_itl=3600.0 if crowded else None,  # so that all prompts begin at once, however slow the machine
        prefix_caching=(prefix_caching := rng.random() < 0.85),
        # The schedules share it, as engines do that follow one another. Case 2 is for preemptions: blocks from disk
        # come in their own time, and spread what would crowd.
        disk_cache=str(disk) if prefix_caching and case % 4 != 2 else None,
        fuse=rng.random() < 0.6 or case % 4 == 0,
        share=case % 4 != 1,
        reuse=rng.random() < 0.8 and case % 4 != 3,
        poison=rng.random() < 0.5,
        **options,
    )


def schedule(
    path: Path, pool: list[Add], rng: random.Random, block_bytes: int, case: int, seen: Seen, disk: Path, **more: Any
) -> Iterator[tuple[Add, int, Answer]]:
    """Runs a random selection in a random order of arrival; (request, choice, answer) of those not aborted.

    Every other case is crowded: the smallest cache, and all requests at once.
    """
    crowded = case % 2 == 0
    options = random_engine(path, rng, block_bytes, case, disk, **more)
    adds = rng.sample(pool, len(pool) if crowded else rng.randint(len(pool) // 2, len(pool)))
    adds += [msgspec.structs.replace(a, id=f"{a.id}-again") for a in rng.sample(adds, len(adds) // 3)]
    salts = {first: rng.choice(["", "red"]) for first in {a.prompt_ids[0] for a in adds}}  # of those that may share
    adds = [msgspec.structs.replace(a, terms=random_terms(rng, salts[a.prompt_ids[0]])) for a in adds]
    engine = Engine(options)
    engine._program = Watched(engine._program, seen, readable=not (options.reuse or options.lora))  # type: ignore[assignment]
    if (tier := engine.loaded.tier) is not None:
        tier.rates.compute_seconds = lambda start, stop: 60.0  # the tiny models compute faster than any disk loads
        until(lambda: engine.stats().disk_open)
    seen.threads.add(options.num_threads)
    count_forks(engine, seen)
    answers, aborted = Answers(), set()
    # Taken from the end. Those to be pooled come last, when their prompts are known.
    waiting = sorted(adds, key=lambda a: a.params.max_tokens or 0 if crowded else not a.pooling)
    rush, flush_at = 1.0 if crowded else rng.choice([0.02, 0.2, 1.0]), rng.randint(30, 120)
    while waiting or engine.has_work:
        while waiting and (not engine.has_work or rng.random() < rush):
            engine.add(waiting.pop())
        if rng.random() < 0.003:
            victim = rng.choice(adds)
            engine.abort(Abort(victim.id))
            aborted.add(victim.id)
        if engine.stats().steps == flush_at:
            engine.loaded.cache.flush()  # what is on disk stays: the next schedules are to find it
            seen.flushes += engine.has_work
        running = engine.loaded.scheduler._running
        if crowded and running and rng.random() < 0.02:  # beside those for whom there is no room
            engine.loaded.scheduler._preempt(rng.choice(running), time.monotonic())
        output = engine.step()
        if output is not None:
            answers.take(output.progress)
        else:
            engine.wait(0.1)
        if rng.random() < 0.1:
            engine.loaded.scheduler.check()
    stats = engine.stats()
    assert stats.kv_blocks_held == 0 and stats.num_running == stats.num_waiting == 0
    for add in adds:
        if add.params.use_beam_search and (told := engine.explain(add.id)):
            seen.preempted_beams += told[0].preemptions
    engine.close(SECONDS)  # so that the next finds what this one has to keep
    assert options.share or stats.kv_tiles_saved == 0
    seen.shared_tiles += stats.kv_tiles_saved
    seen.preemptions += stats.preemptions
    seen.disk_blocks += stats.disk_blocks_loaded
    seen.aborts += len(aborted)
    for add in adds:
        seen.chunked += len(add.prompt_ids) > options.max_num_batched_tokens
        for choice in range(add.params.n):
            cached = answers.num_cached.get((add.id, choice), 0)
            seen.partial_hits += cached % 16 != 0
            seen.whole_hits += cached >= 16
            seen.pooled_hits += cached > 0 and add.pooling == "last"
            seen.salted_hits += cached > 0 and add.terms.cache_salt != ""
            seen.hinted += add.terms.retention is not None
            seen.kept_scores += cached > 0 and choice == 0 and add.params.prompt_logprobs is not None
            if add.id not in aborted:
                yield add, choice, answers.choices[add.id, choice]


def count_forks(engine: Engine, seen: Seen) -> None:
    fork = engine.loaded.cache.fork

    def counted(parent: Request, child: Request) -> None:
        seen.forks += 1
        fork(parent, child)

    engine.loaded.cache.fork = counted  # type: ignore[method-assign]


def check_model(path: Path, num_requests: int, num_schedules: int, seed: int, **options: Any) -> Seen:
    """options: of all engines."""
    loaded = Engine(config(path, **options)).loaded
    pool = request_pool(loaded.bounds.vocab_size, num_requests)
    if loaded.named_adapters:  # prompts of one beginning mostly have one adapter, but not always
        digests = ["", *loaded.named_adapters.values()]
        pool = [
            msgspec.structs.replace(add, adapter=digests[(i % 3 + i // 9) % len(digests)]) for i, add in enumerate(pool)
        ]
    expected = alone(path, pool, **options)
    seen = Seen()
    with tempfile.TemporaryDirectory() as disk:
        for case in range(num_schedules):
            rng = random.Random(f"{path.name} {seed} {case}")
            for add, choice, answer in schedule(
                path, pool, rng, loaded.kv.block_bytes, case, seen, Path(disk), **options
            ):
                want = expected.choices[add.id.removesuffix("-again"), choice]
                assert answer == want, (path.name, seed, case, add.id, choice)
    return seen


def assert_reached(seen: Seen) -> None:
    print(seen)
    assert seen.preemptions > 0
    assert seen.partial_hits > 0 and seen.whole_hits > 0
    assert seen.chunked > 0
    assert seen.longest_context > 2 * KV_SPLIT
    assert seen.mixed_draws > 0
    assert seen.small_steps > 0 and seen.large_steps > 0 and seen.mixed_steps > 0
    assert seen.largest_batch > 4
    assert seen.threads >= {1, 2}
    assert seen.disk_blocks > 0
    assert seen.forks > 0
    assert seen.shared_tiles > 0
    assert seen.kept_scores > 0
    assert seen.pooled_hits > 0
    assert seen.salted_hits > 0 and seen.hinted > 0 and seen.flushes > 0


MODELS = [
    "gguf/tiny-llama-q4_1.gguf",
    "gguf/tiny-llama-q8_0.gguf",
    "gguf/tiny-llama-f16_bf16.gguf",
    "arch/llama",
    "arch/qwen2",
    "arch/stablelm_parallel",
]
"""The formats, biases behind a linear, norms of heads in blocks in parallel."""


@pytest.mark.parametrize("name", MODELS)
def test_bits_do_not_depend_on_the_schedule(data: Path, name: str) -> None:
    assert_reached(check_model(data / name, num_requests=16, num_schedules=4, seed=0))


def test_bits_of_sorted_columns(tmp_path: Path) -> None:
    """Weights of GPTQ with act-order, with and without zero points: their inputs are sorted."""
    path = save_quantised(tmp_path / "act-order", GPTQ, sorted_alike, **ACT_ORDER)
    assert_reached(check_model(path, num_requests=16, num_schedules=4, seed=0))


def test_bits_of_sorted_experts(tmp_path: Path) -> None:
    """Inputs are sorted in as many ways as there are experts."""
    path = save_latent_experts(tmp_path / "act-order", sorted_experts)
    seen = check_model(path, num_requests=16, num_schedules=1, seed=0)
    assert seen.mixed_steps > 0 and seen.chunked > 0 and seen.largest_batch > 4 and max(seen.expert_rows) > 16


def test_bits_of_int8_caches(data: Path) -> None:
    """Against int8 caches alone."""
    assert_reached(check_model(data / "gguf/tiny-llama-q8_0.gguf", 16, 4, seed=0, kv_dtype="int8"))


def test_bits_of_weights_quantised_at_load(data: Path) -> None:
    seen = check_model(data / "arch/llama", num_requests=16, num_schedules=1, seed=0, quantize="int4")
    assert seen.mixed_steps > 0 and seen.chunked > 0 and seen.largest_batch > 4


def test_bits_of_alibi_and_layer_norms(data: Path) -> None:
    """Of one layer: its blocks are too few to go to disk."""
    seen = check_model(data / "arch/mpt", 16, 4, seed=0)
    assert seen.preemptions > 0 and seen.partial_hits > 0 and seen.chunked > 0 and seen.forks > 0
    assert seen.longest_context > 2 * KV_SPLIT and seen.threads >= {1, 2}


def test_bits_of_adapters(data: Path, tmp_path: Path) -> None:
    """Of different modules and ranks, each request with one or none."""
    path = data / "gguf/tiny-llama-q4_1.gguf"
    found = targets(build_graph(open_checkpoint(path)))
    lora = (
        f"all={random_adapter(tmp_path / 'all', found, seed=1, rank=8)}",
        f"down={random_adapter(tmp_path / 'down', found, seed=2, rank=3, only=('down_proj',), stored='F16')}",
    )
    seen = check_model(path, 16, 4, seed=0, lora=lora, max_lora_rank=8)
    assert_reached(seen)
    assert seen.adapters == 3


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_bits_of_windows(tmp_path: Path, kv_dtype: str) -> None:
    """Two KV groups, one of which gives blocks back while a request runs."""
    path = save(random_model(**WINDOWS, vocab_size=320), tmp_path / "windows")
    seen = check_model(path, 16, 4, seed=0, kv_dtype=kv_dtype)
    assert_reached(seen)
    assert seen.left_windows > 0


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_bits_of_caps_and_sinks(fixtures: Path, name: str) -> None:
    """Capped scores and logits; sinks beside experts. Both have windows in every other layer."""
    seen = check_model(fixtures / "arch" / name, num_requests=16, num_schedules=1, seed=0)
    assert seen.mixed_steps > 0 and seen.chunked > 0 and seen.largest_batch > 4 and seen.left_windows > 0
    assert seen.longest_context > 2 * KV_SPLIT and seen.shared_tiles > 0


def test_bits_of_every_quantised_format(tmp_path: Path) -> None:
    """One model, each matrix in another of GGUF's formats."""
    assert_reached(check_model(write_mixed(tmp_path / "mixed.gguf", MIXED), 16, 4, seed=0))


OTHERS = {
    "awq/awq_g64": "w4z64",
    "fp8-block/llama_fp8_block": "f8",
    "gptq/gptq_4b_g32_asym_act0": "w4z",
    "compressed-tensors/w8a16_channel": "w8z64",
}
"""Quantised checkpoints and their packed formats: the last two share the product of the first, and are left to long runs."""


@pytest.mark.parametrize(
    "name", [*list(OTHERS)[:2], *(pytest.param(name, marks=pytest.mark.long) for name in list(OTHERS)[2:])]
)
def test_bits_of_other_packed_formats(fixtures: Path, name: str) -> None:
    """One schedule: the paths are those of the other formats."""
    seen = check_model(fixtures / "quant" / name, num_requests=16, num_schedules=1, seed=0)
    assert seen.mixed_steps > 0 and seen.chunked > 0 and seen.largest_batch > 4


@pytest.mark.parametrize("name", ["arch/minimax_m2", "arch/deepseek_v3_narrow"])
def test_bits_of_experts(data: Path, name: str) -> None:
    """Experts with no token of a step, with one and with many; the second model has latent attention, too."""
    seen = check_model(data / name, num_requests=16, num_schedules=4, seed=0)
    assert_reached(seen)
    assert {0, 1} <= seen.expert_rows and max(seen.expert_rows) > 16


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("seed", range(1, 9))
def test_bits_over_many_schedules(data: Path, name: str, seed: int) -> None:
    assert_reached(check_model(data / name, num_requests=30, num_schedules=25, seed=seed))


@pytest.mark.long
def test_bits_of_the_demo_model(demo: Path) -> None:
    assert_reached(check_model(demo, num_requests=16, num_schedules=4, seed=0))
