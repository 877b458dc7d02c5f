"""Blocks on disk outlive the engine: what comes back after a restart, what never does, and what happens where it fails."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from octavo.cache import tiers
from octavo.cache.transfers import NICENESS
from octavo.config import ConfigError, EngineConfig
from octavo.engine.client import EngineClient
from octavo.engine.core import Engine
from octavo.engine.messages import Abort, Add, Progress
from octavo.graph.adapt import targets
from octavo.models import build_graph
from octavo.request import SamplingParams, Terms, TokenLogprobs
from octavo.weights.checkpoint import open_checkpoint
from tests.random_adapter import random_adapter
from tests.waiting import SECONDS, until, until_async

PARAMS = SamplingParams(temperature=0.0, max_tokens=4, logprobs=3, ignore_eos=True)
LENGTH = 700  # of a prompt that is kept at once, 43 blocks and a rest
NUM_BLOCKS = LENGTH // 16

Answer = list[tuple[list[int], list[TokenLogprobs]]]


@pytest.fixture
def model(data: Path) -> Path:
    return data / "gguf" / "tiny-llama-q4_1.gguf"


def engine(model: Path, disk: Path | None, **options: Any) -> Engine:
    """With its disk tier open, which prefers loading to computing: a tiny model computes faster than any disk loads."""
    options = {"max_model_len": 1200, "kv_cache_memory": 2**22, "num_threads": 1, **options}
    config = EngineConfig(model=str(model), disk_cache=disk and str(disk), **options)
    made = Engine(config)
    if (tier := made.loaded.tier) is not None:
        tier.rates.compute_seconds = lambda start, stop: 60.0
        until(lambda: made.stats().disk_open or tier._transfers.failed)
    return made


def prompt(seed: int, length: int = LENGTH) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(320) for _ in range(length)]


def run(engine: Engine, *adds: Add) -> dict[str, tuple[Answer, int]]:
    """(answer, cached tokens) of each request, all added at once."""
    for add in adds:
        engine.add(add)
    progress: list[Progress] = []
    while engine.has_work:
        output = engine.step()
        if output is None:
            engine.wait(1.0)
        else:
            progress += output.progress
    assert all(p.error is None for p in progress)
    engine.loaded.scheduler.check()
    return {
        add.id: (
            [(p.token_ids, p.logprobs) for p in progress if p.id == add.id],
            max(p.num_cached for p in progress if p.id == add.id),
        )
        for add in adds
    }


def ask(engine: Engine, ids: list[int], **more: Any) -> tuple[Answer, int]:
    return run(engine, Add("a", ids, PARAMS, 0, **more))["a"]


def files(disk: Path) -> list[Path]:
    return sorted(disk.rglob("*.kv"))


@pytest.fixture
def disk(tmp_path: Path, model: Path) -> Path:
    """Holds the blocks of prompt(1), written by an engine that has ended."""
    first = engine(model, tmp_path / "kv")
    ask(first, prompt(1))
    first.close(SECONDS)
    return tmp_path / "kv"


def alone(model: Path, ids: list[int]) -> Answer:
    answer, num_cached = ask(engine(model, None), ids)
    assert num_cached == 0
    return answer


def test_a_prompt_comes_back_after_a_restart(disk: Path, model: Path) -> None:
    assert len(files(disk)) == NUM_BLOCKS
    again = engine(model, disk)
    answer, num_cached = ask(again, prompt(1))
    assert num_cached == NUM_BLOCKS * 16 and again.stats().disk_blocks_loaded == NUM_BLOCKS
    assert answer == alone(model, prompt(1))
    (explanation,) = again.explain("a")
    assert explanation.cached_tokens == explanation.cached_tokens_disk == NUM_BLOCKS * 16
    answer, num_cached = ask(again, prompt(1))  # now from memory
    assert num_cached == LENGTH - 1 and again.stats().disk_blocks_loaded == NUM_BLOCKS
    (explanation,) = again.explain("a")[-1:]
    assert explanation.cached_tokens_disk == 0
    again.close()
    assert again.stats().disk_blocks_written == 0


@pytest.mark.parametrize("end", ["killed when idle", "told to end at once"])
def test_a_process_leaves_its_blocks(tmp_path: Path, model: Path, end: str) -> None:
    async def main() -> None:
        config = EngineConfig(model=str(model), max_model_len=1200, num_threads=1, disk_cache=str(tmp_path))
        client = EngineClient.launch(config)
        await client.ready()
        await until_async(lambda: client.stats.disk_open)
        assert [p async for _, p in client.submit(Add("a", prompt(1), PARAMS, 0))]
        if end == "killed when idle":
            await until_async(lambda: len(files(tmp_path)) == NUM_BLOCKS)
            os.kill(client.process.pid, signal.SIGKILL)
            await client.wait_dead()
        await client.close(SECONDS)

    asyncio.run(main())
    assert len(files(tmp_path)) == NUM_BLOCKS
    assert ask(engine(model, tmp_path), prompt(1)) == (alone(model, prompt(1)), NUM_BLOCKS * 16)


def test_reuse_is_exact_to_the_token(disk: Path, model: Path) -> None:
    """All of a prompt but its last token, where it ends with a block; and a prompt that differs within one."""
    again = engine(model, disk)
    whole = prompt(1)[: NUM_BLOCKS * 16]
    assert ask(again, whole) == (alone(model, whole), len(whole) - 1)
    fresh = engine(model, disk)
    other = [*prompt(1)[:325], *prompt(2)]
    answer, num_cached = ask(fresh, other)
    assert num_cached == 320  # the block that differs is not known by its name
    assert answer == alone(model, other)


def test_short_prompts_are_kept_when_they_are_reused(tmp_path: Path, model: Path) -> None:
    first = engine(model, tmp_path)
    for seed in (1, 2, 3):
        ask(first, prompt(seed, 200))
    ask(first, [*prompt(2, 160), *prompt(4, 20)])
    first.close(SECONDS)
    assert len(files(tmp_path)) == 10
    again = engine(model, tmp_path)
    assert [ask(again, prompt(seed, 200))[1] for seed in (1, 2)] == [0, 160]


def test_followers_share_a_load(disk: Path, model: Path) -> None:
    """Prompts of 100 to 600 shared tokens at once: each block comes once, and nobody waits for a prompt of its own."""
    again = engine(model, disk)
    ids = [[*prompt(1)[: n * 100], n] for n in range(1, 7)] + [prompt(7, 90)]
    answers = run(again, *(Add(str(i), each, PARAMS, 0) for i, each in enumerate(ids)))
    for each, (answer, num_cached) in zip(ids, answers.values(), strict=True):
        assert answer == alone(model, each)
        assert num_cached >= (len(each) // 100 * 100) // 16 * 16
    assert again.stats().disk_blocks_loaded == 600 // 16


def test_an_abort_ends_a_load(disk: Path, model: Path) -> None:
    """In whatever state it is; nothing stays behind, and the next request is served."""
    again = engine(model, disk)
    for steps in range(12):
        again.add(Add("gone", [*prompt(1), steps], PARAMS, 0))
        for _ in range(steps):
            again.step()
        again.abort(Abort("gone"))
        while again.has_work:
            again.step()
        again.loaded.scheduler.check()
        assert again.stats().kv_blocks_held == 0
        again.loaded.cache.flush()
    until(lambda: again.step() is None and not again.loaded.tier._loads)
    assert ask(again, prompt(1)) == (alone(model, prompt(1)), NUM_BLOCKS * 16)
    again.close()


def test_a_damaged_file_is_never_served(disk: Path, model: Path) -> None:
    """A byte of each file in turn: of header, token ids, payload or checksum. What is refused is computed and kept again."""
    expected = alone(model, prompt(1))
    again = engine(model, disk)
    found = []
    for i, path in enumerate(files(disk)):
        content = bytearray(path.read_bytes())
        place = (0, 8, 12, 16, 40, 70, 79, 85, 144, 700, len(content) - 17, len(content) - 1)[i % 12]
        content[place] ^= 1 << i % 8
        path.write_bytes(content)
        again.loaded.cache.flush()
        answer, num_cached = ask(again, prompt(1))
        assert answer == expected
        found.append(num_cached // 16)
        assert again.stats().disk_blocks_refused == i + 1
        until(lambda i=i: again.step() is None and again.stats().disk_blocks_written == i + 1)
        assert len(files(disk)) == NUM_BLOCKS
    assert sorted(found) == list(range(NUM_BLOCKS))  # as far as the damaged one
    again.loaded.cache.flush()
    assert ask(again, prompt(1)) == (expected, NUM_BLOCKS * 16)
    again.close()


def test_a_file_in_anothers_place_is_never_served(disk: Path, model: Path) -> None:
    expected = alone(model, prompt(1))
    names = files(disk)
    contents = [path.read_bytes() for path in names]
    for path, content in zip(names, contents[1:] + contents[:1], strict=True):  # whole files, each in another's place
        path.write_bytes(content)
    again = engine(model, disk)
    assert ask(again, prompt(1)) == (expected, 0)
    assert again.stats().disk_blocks_refused >= 1 and again.stats().disk_blocks_loaded == 0
    again.close()


def test_what_blocks_depend_on_keeps_them_apart(disk: Path, model: Path, data: Path) -> None:
    others = [
        engine(data / "gguf" / "tiny-llama-q8_0.gguf", disk),
        engine(model, disk, activations="bf16"),
        engine(model, disk, isa="generic"),
    ]
    for other in others:
        assert ask(other, prompt(1))[1] == 0
        other.close()
    salted = engine(model, disk)
    assert ask(salted, prompt(1), terms=Terms(cache_salt="mine"))[1] == 0
    salted.close()
    again = engine(model, disk, fuse=False, num_threads=2)  # these change no bit
    assert ask(again, prompt(1), terms=Terms(cache_salt="mine"))[1] == NUM_BLOCKS * 16
    assert ask(again, prompt(1)) == (alone(model, prompt(1)), NUM_BLOCKS * 16)
    again.close()


def test_blocks_of_an_adapter_are_of_its_content(tmp_path: Path, model: Path) -> None:
    """Whatever it is called and wherever it lies; not those of another one, nor of none, nor of what took its place."""
    found = targets(build_graph(open_checkpoint(model)))

    def with_adapter(name: str, seed: int, disk: Path | None = tmp_path / "kv") -> tuple[Engine, str]:
        path = random_adapter(tmp_path / name, found, seed)
        made = engine(model, disk, lora=(f"{name}={path}",))
        return made, made.loaded.named_adapters[name]

    first, adapter = with_adapter("mine", seed=1)
    own = ask(first, prompt(1), adapter=adapter)[0]
    plain = ask(first, prompt(1))[0]
    assert own != plain == alone(model, prompt(1))
    first.close(SECONDS)
    renamed, same = with_adapter("renamed", seed=1)
    assert same == adapter
    assert ask(renamed, prompt(1), adapter=same) == (own, NUM_BLOCKS * 16)
    assert ask(renamed, prompt(1)) == (plain, NUM_BLOCKS * 16)
    renamed.close()
    replaced, other = with_adapter("mine", seed=2)
    answer, num_cached = ask(replaced, prompt(1), adapter=other)
    assert other != adapter and num_cached == 0
    assert answer == ask(with_adapter("fresh", 2, None)[0], prompt(1), adapter=other)[0] != own
    replaced.close()
    again = engine(model, tmp_path / "kv")  # one that serves no adapters
    assert ask(again, prompt(1)) == (plain, NUM_BLOCKS * 16)
    again.close()


def test_a_bound_of_bytes(tmp_path: Path, model: Path) -> None:
    size = 2 * 2**20
    first = engine(model, tmp_path, disk_cache_size=size)
    for seed in range(8):
        ask(first, prompt(seed))
    first.close(SECONDS)
    assert first.stats().disk_blocks_written == 8 * NUM_BLOCKS
    total = sum(path.stat().st_size for path in files(tmp_path))
    assert 0.5 * size < total <= size and first.stats().disk_blocks_removed > 0
    again = engine(model, tmp_path, disk_cache_size=size)
    assert ask(again, prompt(7))[1] == NUM_BLOCKS * 16 and ask(again, prompt(0))[1] == 0


def test_what_is_left_is_written_at_the_priority_of_who_waits(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the engine ends, at a lower one. A write that was begun then is ended first."""
    first = engine(model, tmp_path)
    transfers, niceness = first.loaded.tier._transfers, list[int]()
    writer, write = transfers._writer, transfers.store.write

    def watched(*args: Any) -> None:
        niceness.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        if len(niceness) == 1:
            until(lambda: transfers._writer is not writer)
        write(*args)

    monkeypatch.setattr(transfers.store, "write", watched)
    ask(first, prompt(1))
    first.close(SECONDS)
    ours = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    assert niceness == [min(19, ours + NICENESS)] + [ours] * (NUM_BLOCKS - 1)
    assert len(files(tmp_path)) == NUM_BLOCKS


@pytest.mark.parametrize("fault", ["directory gone", "file in its place", "no files can be made"])
def test_a_directory_that_fails_closes_the_tier_only(
    tmp_path: Path, model: Path, fault: str, capfd: pytest.CaptureFixture[str]
) -> None:
    disk = tmp_path / "kv"
    broken = engine(model, disk)
    (space,) = disk.iterdir()
    shutil.rmtree(disk)
    if fault == "file in its place":
        disk.write_text("")
    if fault == "no files can be made":
        disk.mkdir()
        space.symlink_to("/proc")
    for seed in range(3):
        assert ask(broken, prompt(seed))[0] == alone(model, prompt(seed))
        until(lambda: broken.step() is None and not broken.loaded.tier._candidates)
    until(lambda: not broken.stats().disk_open)
    assert ask(broken, prompt(0))[1] == LENGTH - 1  # the memory is as good as ever
    broken.close()
    notices = [line for line in capfd.readouterr().err.splitlines() if "disk cache" in line]
    assert len(notices) == 1 and "closed" in notices[0]


def test_a_directory_that_cannot_be_used_from_the_start(
    tmp_path: Path, model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="no directory"):
        engine(model, tmp_path / "file")
    closed = engine(model, Path("/proc/octavo"))
    assert ask(closed, prompt(1)) == (alone(model, prompt(1)), 0)
    assert "disk cache is closed" in capfd.readouterr().err
    closed.close()
    with pytest.raises(ConfigError, match="disk_cache_size=262144 would work"):
        engine(model, tmp_path, disk_cache_size=2**17)
    with pytest.raises(ConfigError, match="needs prefix_caching"):
        engine(model, tmp_path, prefix_caching=False)


def test_flush_forgets_the_files_too(disk: Path, model: Path) -> None:
    again = engine(model, disk)
    assert ask(again, prompt(2))[1] == 0
    until(lambda: again.step() is None and again.stats().disk_blocks_written == NUM_BLOCKS)
    again.flush()
    assert again.stats().disk_blocks_written == NUM_BLOCKS  # a counter, whatever is there now
    assert ask(again, prompt(1, 300))[1] == 0
    until(lambda: not files(disk))
    again.close()


def test_a_disk_that_never_answers_is_waited_for_once(disk: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where nobody knows yet what computing costs."""
    monkeypatch.setattr(tiers, "UNMEASURED_SECONDS", 0.2)
    again, answers = engine(model, disk), threading.Event()
    store = again.loaded.tier._transfers.store
    monkeypatch.setattr(store, "read", lambda *args: answers.wait(SECONDS) and None)
    again.loaded.tier.rates.compute_seconds = lambda start, stop: 0.0
    assert ask(again, prompt(1)) == (alone(model, prompt(1)), 0)
    answers.set()
    again.close()


def test_a_slow_disk_is_not_waited_for(disk: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load that takes longer than computing is given up, and not tried again."""
    again, given_up, count = engine(model, disk), threading.Event(), itertools.count()
    store = again.loaded.tier._transfers.store
    read = store.read
    monkeypatch.setattr(store, "read", lambda *args: (next(count) < 2 or given_up.wait(SECONDS), read(*args))[1])
    again.loaded.tier.rates.compute_seconds = lambda start, stop: 0.1
    again.loaded.tier.rates.seconds_per_byte = 1e-12
    answer, num_cached = ask(again, prompt(1))
    assert num_cached <= 2 * 16 and answer == alone(model, prompt(1))
    given_up.set()
    assert not again.loaded.tier.rates.worth_loading(8192, 0.1)
    again.close()
