"""The engine in a process of its own: streams, refusals, aborts, death, leaks, idle load, peak memory."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import shutil
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from octavo.config import EngineConfig
from octavo.engine import core
from octavo.engine.client import EngineClient, EngineDead, EngineError
from octavo.engine.core import Engine
from octavo.engine.messages import Abort, Add, Progress
from octavo.engine.spawn import Spawned
from octavo.request import FinishReason, ParameterError, Request, SamplingParams
from tests.endless import CONTEXT, NUM_TOKENS
from tests.waiting import SECONDS, busy_share, until, until_async

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
"""In an engine of `CONTEXT`: whatever ends it, it does not end by itself."""


@pytest.fixture(scope="module")
def model(data: Path) -> Path:
    return data / "gguf" / "tiny-llama-q4_1.gguf"


@asynccontextmanager
async def running(model: Path, **options: Any) -> AsyncIterator[EngineClient]:
    client = EngineClient.launch(EngineConfig(model=str(model), **{"num_threads": 1, **options}))
    try:
        await asyncio.wait_for(client.ready(), SECONDS)
        yield client
    finally:
        await client.close()


async def collect(client: EngineClient, add: Add) -> list[Progress]:
    return [p async for _, p in client.submit(add)]


def tokens(progress: list[Progress], choice: int = 0) -> list[int]:
    return [t for p in progress if p.choice == choice for t in p.token_ids]


def test_stats_go_with_steps_in_which_something_changed(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a request has come or ended, and otherwise where time has passed."""
    engine = Engine(EngineConfig(model=str(model), num_threads=1))
    told = []
    for after in (0, 1e9):
        monkeypatch.setattr(core, "STATS_SECONDS", after)
        for number in range(16):
            if number in (0, 4):
                engine.add(Add(f"{after}-{number}", [number + 1, 2, 3], GREEDY, seed=1))
            output = engine.step()
            if output is None:
                break
            told.append((output.stats is not None, any(p.finish_reason for p in output.progress)))
            if output.stats is not None:
                assert output.stats == engine.stats()
    assert [stats for stats, _ in told] == [True] * 12 + [True] + [False] * 3 + [True] + [False] * 2 + [True] + [
        False
    ] * 3 + [True]
    assert [number for number, (_, ended) in enumerate(told) if ended] == [7, 11, 19, 23]


def test_streams_equal_the_engine_in_this_process(model: Path) -> None:
    adds = [Add(f"r{i}", list(range(i + 1, i + 20)), GREEDY, seed=i) for i in range(20)]
    engine = Engine(EngineConfig(model=str(model), num_threads=1))
    expected: dict[str, list[int]] = {}
    for add in adds:
        engine.add(add)
    while (output := engine.step()) is not None:
        for p in output.progress:
            expected.setdefault(p.id, []).extend(p.token_ids)

    async def main() -> None:
        async with running(model) as client:
            answers = await asyncio.gather(*(collect(client, add) for add in adds))
            for add, progress in zip(adds, answers, strict=True):
                assert tokens(progress) == expected[add.id]
                assert progress[-1].finish_reason is FinishReason.LENGTH
                assert [p.index for p in progress] == list(range(8))

    asyncio.run(main())


def test_a_process_that_is_told_nothing_ends() -> None:
    left, abandoned = Spawned(), Spawned()
    abandoned.abandon()
    abandoned.abandon()
    assert abandoned.popen.returncode == -signal.SIGKILL
    assert left.popen.stdin is not None
    left.popen.stdin.close()  # as the end of its parent does
    assert left.popen.wait(SECONDS) == 0 and os.read(left.lifeline, 1) == b""
    os.close(left.lifeline)


def test_ready_tells_what_was_loaded(model: Path) -> None:
    async def main() -> None:
        client = EngineClient.launch(EngineConfig(model=str(model), max_model_len=256, num_threads=2, max_num_seqs=4))
        try:
            ready = await client.ready()
            assert (ready.vocab_size, ready.max_model_len, ready.num_kv_blocks) == (320, 256, 64)
            assert {"python", "open", "graph", "pack", "kv", "compile"} <= ready.phases.keys()
            assert ready.threads in (1, 2) and ready.isa
            assert ready.notices[0].startswith("KV cache ")
            assert ready == await client.ready()
        finally:
            await client.close()
            await client.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "nowhere"}, "nowhere"),
        ({"num_threads": 257}, "num_threads must be in 1..256; got 257"),
        ({"kv_cache_memory": 20_000}, "would work"),
        ({"max_model_len": 10**9, "kv_cache_memory": 10**7}, "max_model_len=1000000000"),
    ],
)
def test_what_cannot_start_says_why(model: Path, options: dict[str, Any], message: str) -> None:
    async def main() -> None:
        client = EngineClient.launch(EngineConfig(**{"model": str(model), **options}))
        with pytest.raises(EngineError, match=message) as raised:
            await client.ready()
        assert "\n" not in str(raised.value)
        assert message in await client.wait_dead()
        assert not client.alive
        await client.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("prompt", "options", "param", "limit"),
    [
        ([], {}, "prompt", "at least one token"),
        ([320], {}, "prompt", "0 to 319"),
        ([-1], {}, "prompt", "0 to 319"),
        ([1] * 256, {"max_tokens": None}, "prompt", "256 tokens; prompt and output together may have 256"),
        ([1] * 200, {"max_tokens": 57}, "max_tokens", "max_tokens 56 would"),
        ([1], {"stop_token_ids": [320]}, "stop_token_ids", "0 to 319"),
        ([1], {"logit_bias": {400: 1.0}}, "logit_bias", "0 to 319"),
    ],
)
def test_bounds(model: Path, prompt: list[int], options: dict[str, Any], param: str, limit: str) -> None:
    engine = Engine(EngineConfig(model=str(model), max_model_len=256, num_threads=1))
    with pytest.raises(ParameterError, match=limit) as raised:
        engine.add(Add("r", prompt, SamplingParams(**options), seed=0))
    assert raised.value.param == param
    assert not engine.has_work


def test_no_more_alternatives_than_tokens() -> None:
    for field in ("logprobs", "prompt_logprobs"):
        SamplingParams(**{field: 20}).check_vocabulary(20)
        with pytest.raises(ParameterError, match=f"{field} is 21; the vocabulary has 20 tokens"):
            SamplingParams(**{field: 21}).check_vocabulary(20)


def test_bounds_are_exact(model: Path) -> None:
    config = EngineConfig(model=str(model), max_model_len=256, max_num_seqs=1, num_threads=1)
    for prompt_len, max_tokens, num_tokens in ((256, 0, 0), (255, None, 1), (200, 56, 56), (1, None, 255)):
        engine = Engine(config)
        engine.add(Add("r", [1] * prompt_len, SamplingParams(max_tokens=max_tokens, ignore_eos=True), seed=0))
        progress = []
        while (output := engine.step()) is not None:
            progress += output.progress
        assert (len(tokens(progress)), progress[-1].finish_reason) == (num_tokens, FinishReason.LENGTH)


def test_choices_share_the_prompt_and_differ(model: Path) -> None:
    async def main() -> None:
        async with running(model) as client:
            params = SamplingParams(n=4, max_tokens=12, ignore_eos=True, logprobs=1, prompt_logprobs=1)
            progress = await collect(client, Add("r", list(range(1, 65)), params, seed=7))
            answers = [tokens(progress, c) for c in range(4)]
            assert all(len(a) == 12 for a in answers) and len({tuple(a) for a in answers}) == 4
            assert sum(len(p.prompt_logprobs) for p in progress) == 63
            assert all(p.num_cached == 63 for p in progress if p.choice > 0)
            assert sum(p.finish_reason is not None for p in progress) == 4

    asyncio.run(main())


def test_leaving_a_stream_aborts(model: Path) -> None:
    async def main() -> None:
        async with running(model, max_model_len=CONTEXT) as client:
            async for _ in client.submit(Add("dropped", [1, 2, 3], ENDLESS, seed=0)):
                break
            await until_async(lambda: client.stats.num_running == 0 and client.stats.kv_blocks_held == 0)
            stream = client.submit(Add("closed", [1, 2, 3], ENDLESS, seed=0))
            await anext(stream)
            await stream.aclose()
            await until_async(lambda: client.stats.num_running == 0 and client.stats.kv_blocks_held == 0)
            assert [p async for p in stream] == []

    asyncio.run(main())


def test_one_choice_can_be_aborted(model: Path) -> None:
    async def main() -> None:
        async with running(model, max_model_len=CONTEXT) as client:
            params = SamplingParams(n=2, max_tokens=NUM_TOKENS, ignore_eos=True)
            ended: dict[int, FinishReason] = {}
            async for _, p in client.submit(Add("r", [1, 2, 3], params, seed=0)):
                if p.choice == 1 and p.index == 3:
                    client.abort("r", 1)
                if ended and p.token_ids:  # the other one goes on
                    assert p.choice == 0
                    client.abort("r")
                if p.finish_reason is not None:
                    ended[p.choice] = p.finish_reason
            assert list(ended.items()) == [(1, FinishReason.ABORT), (0, FinishReason.ABORT)]

    asyncio.run(main())


def test_an_id_is_used_once_at_a_time(model: Path) -> None:
    async def main() -> None:
        async with running(model, max_model_len=CONTEXT) as client:
            stream = client.submit(Add("r", [1], ENDLESS, seed=0))
            with pytest.raises(ValueError, match="in use"):
                client.submit(Add("r", [1], ENDLESS, seed=0))
            await stream.aclose()
            with pytest.raises(ValueError, match="in use"):  # the engine may still speak of the first
                client.submit(Add("r", [1], ENDLESS, seed=0))
            await until_async(lambda: not client._leaving)
            assert len(tokens(await collect(client, Add("r", [1], GREEDY, seed=0)))) == 8

    asyncio.run(main())


def test_a_killed_engine_ends_every_stream(model: Path) -> None:
    async def main() -> None:
        async with running(model, max_model_len=CONTEXT) as client:
            streams = [client.submit(Add(f"r{i}", [1, 2, i], ENDLESS, seed=0)) for i in range(8)]
            await anext(streams[0])
            os.kill(client.process.pid, signal.SIGKILL)
            for stream in streams:
                with pytest.raises(EngineDead, match="SIGKILL"):
                    async for _ in stream:
                        pass
            assert "SIGKILL" in await client.wait_dead()
            assert not client.alive
            with pytest.raises(EngineDead):
                client.submit(Add("late", [1], GREEDY, seed=0))
        assert not os.path.exists(client.process.directory)

    asyncio.run(main())


def _runs(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_the_engine_ends_with_its_parent(model: Path, tmp_path: Path) -> None:
    import subprocess
    import sys

    script = f"""
import asyncio, os
from octavo.config import EngineConfig
from octavo.engine.client import EngineClient
async def main():
    client = EngineClient.launch(EngineConfig(model={str(model)!r}, num_threads=1))
    await client.ready()
    print(client.process.pid, client.process.directory, flush=True)
    os._exit(0)
asyncio.run(main())
"""
    root = Path(__file__).parents[1]
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=root).stdout
    pid, directory = shown.split()
    until(lambda: not _runs(pid))  # it does not outlive its parent
    assert not os.path.exists(directory)


def test_signals_to_the_group_do_not_end_it(model: Path) -> None:
    async def main() -> None:
        async with running(model) as client:
            os.kill(client.process.pid, signal.SIGINT)
            os.kill(client.process.pid, signal.SIGTERM)
            assert len(tokens(await collect(client, Add("r", [1], GREEDY, seed=0)))) == 8

    asyncio.run(main())


def test_nothing_grows(model: Path) -> None:
    def open_files(pid: int) -> int:
        return len(os.listdir(f"/proc/{pid}/fd"))

    async def main() -> None:
        async with running(model, max_num_seqs=32) as client:
            pids = (os.getpid(), client.process.pid)
            params = SamplingParams(max_tokens=2, ignore_eos=True)

            async def one(i: int) -> None:
                assert len(tokens(await collect(client, Add(f"r{i}", [i % 320, 2, 3], params, seed=i)))) == 2

            for i in range(20):
                await one(i)
            gc.collect()  # what tests before this one left open
            before = [open_files(pid) for pid in pids]
            for i in range(1000):
                await one(i)
            await asyncio.gather(*(one(i) for i in range(200)))
            await until_async(lambda: client.stats.kv_blocks_held == 0)
            stats = client.stats
            assert (stats.num_running, stats.num_waiting, stats.kv_slots_filled) == (0, 0, 0)
            await until_async(lambda: [open_files(pid) for pid in pids] == before)
            assert len(client._readers) == len(client._leaving) == 0

    asyncio.run(main())


def test_idle_takes_under_one_percent(model: Path) -> None:
    async def main() -> None:
        async with running(model, num_threads=2) as client:
            await collect(client, Add("r", [1], GREEDY, seed=0))
            until(lambda: busy_share(client.process.pid) < 0.01)

    asyncio.run(main())


def with_nan_row(source: Path, target: Path, token: int) -> Path:
    """A copy of a bf16 model whose embedding of `token` is NaN."""
    shutil.copytree(source, target)
    file = target / "model.safetensors"
    raw = bytearray(file.read_bytes())
    header_bytes = int.from_bytes(raw[:8], "little")
    info = json.loads(raw[8 : 8 + header_bytes])["model.embed_tokens.weight"]
    assert info["dtype"] == "BF16"
    row_bytes = 2 * info["shape"][1]
    start = 8 + header_bytes + info["data_offsets"][0] + token * row_bytes
    raw[start : start + row_bytes] = b"\xc0\x7f" * info["shape"][1]
    file.write_bytes(raw)
    return target


def test_a_row_of_nan_fails_its_request_alone(data: Path, tmp_path: Path) -> None:
    model = with_nan_row(data / "arch" / "llama_rope_linear", tmp_path / "model", token=7)
    config = EngineConfig(model=str(model), num_threads=1, kv_cache_memory=300_000, max_model_len=256)
    good, bad = Add("good", [1, 2, 3] * 20, GREEDY, seed=0), Add("bad", [1, 2, 7] * 30, GREEDY, seed=0)

    alone = tokens(finished(Engine(config), good))
    engine = Engine(config)
    for order in ((bad, good), (good, bad), (good,)):  # the last in blocks that held NaN
        progress = finished(engine, *order)
        assert tokens([p for p in progress if p.id == "good"]) == alone
        failed = [p for p in progress if p.id == "bad"]
        assert [(p.finish_reason, p.token_ids) for p in failed] == [(FinishReason.ERROR, [])] * (bad in order)
        assert all(p.error for p in failed)
        assert engine.stats().kv_blocks_held == 0


@pytest.mark.parametrize("options", [{}, {"activations": "f32"}, {"kv_dtype": "int8"}], ids=["bf16", "f32", "int8"])
def test_nan_reaches_no_earlier_token(data: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    """Nor who goes on behind a prefix that was computed in one chunk with it."""
    model = with_nan_row(data / "arch" / "llama_rope_linear", tmp_path / "model", token=7)
    config = EngineConfig(model=str(model), num_threads=1, max_model_len=256, max_num_batched_tokens=64, **options)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2)
    prefix = [*[1, 2, 3, 4, 5] * 8, 1]  # the last token is in a tile of rows with what follows
    good, bad = Add("good", [*prefix, 6], params, seed=0), Add("bad", [*prefix, *[7, 8] * 40], params, seed=0)
    alone = finished(Engine(config), good)
    engine = Engine(config)
    assert [p.finish_reason for p in finished(engine, bad)] == [FinishReason.ERROR]
    after = finished(engine, good)
    assert [(p.token_ids, p.logprobs) for p in after] == [(p.token_ids, p.logprobs) for p in alone]
    assert after[0].num_cached == len(prefix)


def finished(engine: Engine, *adds: Add) -> list[Progress]:
    for add in adds:
        engine.add(add)
    progress = []
    while (output := engine.step()) is not None:
        progress += output.progress
    return progress


def test_end_tokens_outside_of_the_vocabulary_harm_nobody(data: Path, tmp_path: Path) -> None:
    """generation_config.json may name tokens that the model has no row for; min_tokens masks the end tokens."""
    model = shutil.copytree(data / "arch" / "llama", tmp_path / "model")
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 320, -1]}))
    engine = Engine(EngineConfig(model=str(model), num_threads=1))
    engine.add(Add("a", [1, 2, 3], SamplingParams(max_tokens=4, min_tokens=2), seed=0))
    progress: list[Progress] = []
    while (output := engine.step()) is not None:
        progress += output.progress
    assert len(tokens(progress)) >= 2


def test_abort_in_every_state(model: Path) -> None:
    engine = Engine(EngineConfig(model=str(model), num_threads=1, max_num_seqs=2, max_num_batched_tokens=16))
    for state in ("waiting", "prefill", "decode"):
        for i in range(3):
            engine.add(Add(f"r{i}", [i + 1] * 40, GREEDY, seed=0))
        steps = {"waiting": 0, "prefill": 1, "decode": 8}[state]
        progress = [p for _ in range(steps) if (output := engine.step()) for p in output.progress]
        for i in range(3):
            engine.abort(Abort(f"r{i}"))
            engine.loaded.scheduler.check()
        assert engine.stats().kv_blocks_held == 0
        output = engine.step()
        assert output is not None
        ended = {p.id: p.finish_reason for p in progress + output.progress if p.finish_reason}
        assert ended.keys() == {"r0", "r1", "r2"}
        assert FinishReason.ABORT in ended.values()
        assert not engine.has_work


class Door:
    """A gate that another thread opens."""

    reason = "door"

    def __init__(self) -> None:
        self.opened = threading.Event()

    def is_open(self) -> bool:
        return self.opened.is_set()


def test_a_gate_that_another_thread_opens_wakes_the_engine(model: Path) -> None:
    engine = Engine(EngineConfig(model=str(model), num_threads=1))
    door = Door()
    request = Request("r", 0, [1, 2, 3], GREEDY, seed=0)
    request.gates.append(door)
    engine.loaded.scheduler.add(request)
    assert engine.step() is None and engine.has_work
    engine.wait(0.0)

    def open_it() -> None:
        door.opened.set()
        engine.wake()

    opener = threading.Timer(0.05, open_it)
    opener.start()
    engine.wait(SECONDS)  # a wake that is not heard would take as long
    assert engine.step() is not None
    opener.join()
    while engine.step() is not None:
        pass
    assert len(request.output_ids) == 8


def test_the_idle_check_finds_what_is_wrong(model: Path) -> None:
    engine = Engine(EngineConfig(model=str(model), num_threads=1))
    engine.add(Add("r", list(range(1, 40)), GREEDY, seed=0))
    while engine.step() is not None:
        pass
    refcounts = engine.loaded.cache.groups[0].pool.refcounts
    engine.check(stop=lambda: True)  # somebody comes: it ends early, and is made up for
    refcounts[0] += 1
    with pytest.raises(AssertionError):
        engine.check()
    refcounts[0] -= 1
    engine.check()
    refcounts[0] += 1
    engine.check()  # nothing ran since
    engine.add(Add("s", [7], GREEDY, seed=0))
    while engine.step() is not None:
        pass
    with pytest.raises(AssertionError):
        engine.check()
