"""Adapters in an engine: same bits in any crowd (P1), blocks of their own, slots that come and go."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from octavo.config import ConfigError, EngineConfig
from octavo.engine.core import Engine
from octavo.engine.messages import Abort, Add, LoadAdapter, Reply, pooled
from octavo.graph.adapt import targets
from octavo.llm import LLM
from octavo.models import build_graph
from octavo.request import ParameterError, SamplingParams
from octavo.weights.adapter_config import AdapterError
from octavo.weights.checkpoint import open_checkpoint
from tests.random_adapter import random_adapter
from tests.short_answer import after_a_short_answer
from tests.test_same_bits import Answers

MODEL = "gguf/tiny-llama-q4_1.gguf"
NAMES = ("all", "attention", "down")


@pytest.fixture(scope="module")
def adapters(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three for the tiny model, of different modules and ranks."""
    found, path = targets(build_graph(open_checkpoint(data / MODEL))), tmp_path_factory.mktemp("adapters")
    return [
        random_adapter(path / "all", found, seed=1, rank=8),
        random_adapter(path / "attention", found, seed=2, rank=2, only=("q_proj", "v_proj"), stored="BF16"),
        random_adapter(path / "down", found, seed=3, rank=16, only=("down_proj",), stored="F16", size=2.0),
    ]


def config(data: Path, paths: Sequence[Path], **options: Any) -> EngineConfig:
    lora = tuple(f"{path.name}={path}" for path in paths)
    return EngineConfig(model=str(data / MODEL), lora=lora, max_lora_rank=16, max_model_len=400, **options)


def request_pool(engine: Engine) -> list[Add]:
    """Requests of each adapter and of none, that share beginnings of any length, with every kind of answer."""
    rng, vocab = random.Random(1), engine.bounds.vocab_size
    trunk = [rng.randrange(vocab) for _ in range(250)]
    digests = ["", *engine.loaded.named_adapters.values()]
    pool = []
    for i in range(20):
        ids = trunk[: rng.choice([5, 16, 40, 100, 250])] + [rng.randrange(vocab) for _ in range(rng.choice([1, 3, 20]))]
        width = {"n": 2, "use_beam_search": True} if i % 7 == 3 else {"n": rng.choice([1, 1, 2])}
        params = SamplingParams(
            temperature=0.0 if "use_beam_search" in width or i % 3 == 0 else 1.0, max_tokens=rng.choice([8, 70]),
            ignore_eos=True, logprobs=2, prompt_logprobs=1 if i % 5 == 0 else None, **width,
        )  # fmt: skip
        pool.append(Add(f"r{i}", ids, params, seed=i, adapter=digests[i % len(digests)]))
    return pool + [pooled(f"p{i}", trunk[:30], "mean", adapter=digest) for i, digest in enumerate(digests)]


def run(engine: Engine, adds: Sequence[Add]) -> Answers:
    answers = Answers()
    for add in adds:
        engine.add(add)
    while engine.has_work:
        output = engine.step()
        if output is not None:
            answers.take(output.progress)
        else:
            engine.wait(0.1)
    return answers


def test_bits_do_not_depend_on_the_crowd(data: Path, adapters: list[Path]) -> None:
    """Requests with and without adapters, alone with a cold cache, those without in an engine that has none: in crowds,
    with other slots, chunks, threads and passes, preempted and from the cache, every bit is the same."""
    plain = Engine(config(data, [], num_threads=1))
    pool = request_pool(Engine(config(data, adapters)))
    alone = Answers()
    with_adapters = Engine(config(data, adapters, num_threads=1))
    for add in pool:
        engine = with_adapters if add.adapter else plain
        alone.choices |= run(engine, [add]).choices
        engine.flush()
    by_adapter = {add.adapter: alone.choices[add.id, 0] for add in pool if add.pooling}
    assert len({answer[-1] for answer in by_adapter.values()}) == len(adapters) + 1, (
        "each adapter computes something else"
    )
    preemptions = hits = 0
    for case in range(4):
        rng = random.Random(case)
        options = config(
            data, rng.sample(adapters, len(adapters)), num_threads=1 + case % 2, max_loras=3 + case,
            max_num_batched_tokens=rng.choice([16, 40, 200]), max_num_seqs=16, fuse=case != 1, reuse=case != 2,
            poison=case % 2 == 0, kv_cache_memory=26 * plain.loaded.kv.block_bytes if case % 2 else None,
        )  # fmt: skip
        engine = after_a_short_answer(Engine(options))
        crowd = run(engine, rng.sample(pool, len(pool)))
        assert {key: crowd.choices[key] for key in alone.choices} == alone.choices, case
        stats = engine.stats()
        preemptions, hits = preemptions + stats.preemptions, hits + stats.cached_tokens
        assert stats.kv_blocks_held == 0 and set(stats.adapters.values()) == {0}
        engine.loaded.scheduler.check()
    assert preemptions > 0 and hits > 0


def test_blocks_are_of_one_adapter(data: Path, adapters: list[Path], tmp_path: Path) -> None:
    """An equal prompt is found in the cache of the same content alone, whatever it is called; on disk, too."""
    prompt, params = list(range(5, 105)), SamplingParams(max_tokens=1, temperature=0.0)
    copy = random_adapter(
        tmp_path / "copy", targets(build_graph(open_checkpoint(data / MODEL))), seed=1, rank=8
    )  # as the first
    engine = Engine(config(data, [*adapters, copy]))
    named = engine.loaded.named_adapters
    assert named["copy"] == named["all"] and len(engine.loaded.adapters.slots) == 3
    cached = []
    for i, digest in enumerate(["", named["all"], named["down"], "", named["copy"], named["down"]]):
        answers = run(engine, [Add(f"r{i}", prompt, params, 0, adapter=digest)])
        cached.append(answers.num_cached[f"r{i}", 0])
        (explanation,) = engine.explain(f"r{i}")
        assert explanation.adapter == digest
    assert cached == [0, 0, 0, 99, 99, 99]


def replies(engine: Engine) -> list[Reply]:
    while not (found := engine.replies()):
        engine.wait(5)
    return found


def test_adapters_come_and_go(data: Path, adapters: list[Path], tmp_path: Path) -> None:
    """One that is unloaded serves those that use it to their end; then its slot is free."""
    engine = Engine(config(data, [], max_loras=2))
    held = engine.loaded.adapters
    first = held.load(str(adapters[0]))
    engine.load_adapter(LoadAdapter(7, str(adapters[1])))
    (reply,) = replies(engine)
    assert reply.ticket == 7 and reply.error is None and set(held.slots) == {first, reply.adapter}
    long, short = (SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for n in (20, 1))
    engine.add(Add("a", [5, 6, 7], long, 0, adapter=first))
    begun = engine.step()
    assert begun is not None
    assert engine.stats().adapters == {first: 1, reply.adapter: 0}
    held.unload(first)
    engine.load_adapter(LoadAdapter(8, str(adapters[2])))
    (full,) = replies(engine)
    most = "2 adapters are loaded or still in use, the most that max_loras allows"
    assert full.error == f"{most}; one that is replaced keeps its slot until its last request has ended"
    tokens = [token for progress in begun.progress for token in progress.token_ids]
    while (output := engine.step()) is not None:
        tokens += [token for progress in output.progress for token in progress.token_ids]
    expected = run(Engine(config(data, adapters[:1])), [Add("a", [5, 6, 7], long, 0, adapter=first)])
    assert tokens == expected.choices["a", 0][0] and len(tokens) == 20
    third = held.load(str(adapters[2]))
    assert set(held.slots) == {reply.adapter, third}
    with pytest.raises(ParameterError, match=f"there is no adapter {first} here"):
        engine.add(Add("b", [5], short, 0, adapter=first))
    held.unload(third)
    held.unload(third)
    assert set(held.slots) == {reply.adapter}
    engine.load_adapter(LoadAdapter(9, str(tmp_path / "nothing")))
    (wrong,) = replies(engine)
    assert wrong.error is not None and "adapter_config.json is missing" in wrong.error
    engine.add(Add("c", [5], long, 0, adapter=reply.adapter))
    engine.abort(Abort("c"))
    held.unload(reply.adapter)
    assert not held.slots


def test_no_memory_is_refused(data: Path, adapters: list[Path]) -> None:
    engine = Engine(config(data, [], max_loras=1))
    reader = engine.loaded.adapters._reader
    assert reader is not None and reader.free() > 0
    reader.free = lambda: 1000
    with pytest.raises(AdapterError, match=r"the adapter takes .*, but 1000 B of memory are free beside the KV cache"):
        engine.loaded.adapters.load(str(adapters[0]))
    with pytest.raises(AdapterError, match="max_loras is 0"):
        Engine(config(data, [])).loaded.adapters.load(str(adapters[0]))


def test_options(data: Path, adapters: list[Path]) -> None:
    for options, message in (
        ({"lora": ("a",)}, "lora must be NAME=PATH; got 'a'"),
        ({"lora": ("a=b", "a=c")}, "lora names an adapter twice: a, a"),
        ({"lora": ("a=b", "c=d"), "max_loras": 1}, "max_loras is 1, but lora names 2 adapters"),
        ({"max_lora_rank": 2000}, "max_lora_rank must be at most 1024"),
    ):
        with pytest.raises(ConfigError, match=message):
            EngineConfig(**options)  # type: ignore[arg-type]
    with pytest.raises(AdapterError, match="has rank 8; this server takes adapters of rank 4 at most"):
        Engine(EngineConfig(model=str(data / MODEL), lora=(f"all={adapters[0]}",), max_lora_rank=4))


def test_the_offline_class(data: Path, adapters: list[Path]) -> None:
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    prompts: list[Any] = [{"prompt_token_ids": [5, 6, 7, 8]}] * 3
    with LLM(str(data / MODEL), lora=[f"all={adapters[0]}"], max_loras=2, max_lora_rank=16) as llm:
        llm.load_adapter("down", str(adapters[2]))
        outputs = llm.generate(prompts, params, adapter=["", "all", "down"])
        tokens = [out.outputs[0].token_ids for out in outputs]
        assert tokens[0] != tokens[1] != tokens[2] != tokens[0]
        assert llm.generate(prompts[:1], params, adapter="down")[0].outputs[0].token_ids == tokens[2]
        vectors = [llm.embed(prompts[0], adapter=name)[0].embedding for name in ("", "all")]
        assert not (vectors[0] == vectors[1]).all()
        for call in (lambda: llm.generate(prompts, params, adapter="x"), lambda: llm.unload_adapter("x")):
            with pytest.raises(ParameterError, match="there is no adapter 'x'; loaded: all, down"):
                call()
        with pytest.raises(ParameterError, match="it must be new"):
            llm.load_adapter("all", str(adapters[1]))
        llm.unload_adapter("down")
        llm.load_adapter("attention", str(adapters[1]))
        assert list(llm.adapters) == ["all", "attention"]
