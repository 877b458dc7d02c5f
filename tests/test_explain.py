"""What is told of a request: where its prompt came from and why no more of it did, what it waited for and lost."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.config import EngineConfig
from octavo.engine.core import Engine
from octavo.engine.messages import Add
from octavo.explain import Explanation, MatchEnd
from octavo.request import Terms
from tests.serving import Server
from tests.short_answer import after_a_short_answer

PROMPT = [random.Random(1).randrange(3, 300) for _ in range(70)]
OTHER = [random.Random(2).randrange(3, 300) for _ in range(70)]


@pytest.fixture
def engine(data: Path) -> Engine:
    return small(data)


def small(data: Path, **options: Any) -> Engine:
    return Engine(EngineConfig(model=str(data / "arch" / "llama"), max_model_len=160, num_threads=1, **options))


def add(engine: Engine, id: str, prompt: list[int], terms: Terms | None = None, **params: Any) -> None:
    params = {"max_tokens": 1, "ignore_eos": True, **params}
    engine.add(Add(id, prompt, SamplingParams(**params), 1, terms or Terms()))


def run(engine: Engine, id: str, prompt: list[int], terms: Terms | None = None, **params: Any) -> Explanation:
    add(engine, id, prompt, terms, **params)
    while engine.step() is not None:
        pass
    return engine.explain(id)[0]


def test_why_a_match_ended(engine: Engine) -> None:
    first = run(engine, "first", PROMPT)
    assert (first.cached_tokens, first.match_end) == (0, MatchEnd("unknown", 0))
    again = run(engine, "again", PROMPT)
    assert (again.cached_tokens, again.match_end) == (69, MatchEnd("complete", 69))
    fork = run(engine, "fork", PROMPT[:37] + OTHER)
    assert (fork.cached_tokens, fork.match_end) == (37, MatchEnd("differs", 37))
    longer = run(engine, "longer", PROMPT + OTHER)
    assert (longer.cached_tokens, longer.match_end) == (70, MatchEnd("too_short", 70))
    salted = run(engine, "salted", PROMPT, Terms(cache_salt="s"))
    assert (salted.cached_tokens, salted.match_end) == (0, MatchEnd("salt", 0))
    scored = run(engine, "scored", PROMPT, prompt_logprobs=1)
    assert (scored.cached_tokens, scored.match_end) == (0, MatchEnd("scores", 1))
    assert engine.flush() > 0
    flushed = run(engine, "flushed", PROMPT)
    assert (flushed.cached_tokens, flushed.match_end) == (0, MatchEnd("unknown", 0))


def test_what_was_evicted_is_told(data: Path) -> None:
    block_bytes = small(data).loaded.kv.block_bytes
    engine = small(data, kv_cache_memory=10 * block_bytes)
    run(engine, "first", PROMPT)
    run(engine, "other", OTHER, max_tokens=80)
    again = run(engine, "again", PROMPT)
    assert again.match_end is not None and again.match_end.reason == "evicted"
    assert again.match_end.position == again.cached_tokens < 69


def test_a_cache_that_is_off_says_so(data: Path) -> None:
    engine = small(data, prefix_caching=False)
    run(engine, "first", PROMPT)
    assert run(engine, "again", PROMPT).match_end == MatchEnd("disabled", 0)


def test_a_follower_tells_of_its_leader(data: Path) -> None:
    engine = small(data, max_num_seqs=4, max_num_batched_tokens=16)
    add(engine, "leader", PROMPT)
    engine.step()
    add(engine, "follower", PROMPT)
    engine.step()
    (waiting,) = engine.explain("follower")
    assert waiting.state == "waiting" and waiting.match_end == MatchEnd("not_yet_computed", 32)
    assert waiting.wait_seconds["leader"] > 0
    (leader,) = engine.explain("leader")
    assert leader.state == "running" and leader.match_end == MatchEnd("unknown", 0)
    while engine.step() is not None:
        pass
    (follower,) = engine.explain("follower")
    assert (follower.state, follower.cached_tokens, follower.match_end) == ("length", 69, MatchEnd("complete", 69))
    assert follower.wait_seconds["leader"] > 0


def test_an_id_that_is_used_again_tells_of_its_last_life(engine: Engine) -> None:
    assert run(engine, "mine", PROMPT, n=3).cached_tokens == 0
    assert run(engine, "mine", PROMPT).cached_tokens == 69
    assert len(engine.explain("mine")) == 1
    add(engine, "mine", PROMPT[:40])
    assert [(e.state, e.prompt_tokens) for e in engine.explain("mine")] == [("waiting", 40)]


def test_what_a_request_waited_for_and_lost(data: Path) -> None:
    block_bytes = small(data).loaded.kv.block_bytes
    engine = after_a_short_answer(small(data, max_num_seqs=2, kv_cache_memory=10 * block_bytes))
    for i in range(3):
        add(engine, f"r{i}", [i + 3] * 20, max_tokens=100)
    engine.step()
    (third,) = engine.explain("r2")
    assert third.state == "waiting" and third.cached_tokens == 0
    while engine.step() is not None:
        pass
    stories = [engine.explain(f"r{i}")[0] for i in range(3)]
    assert sum(story.preemptions for story in stories) == engine.stats().preemptions > 0
    assert sum(story.recomputed_tokens for story in stories) == engine.stats().recomputed_tokens
    assert {"slots", "blocks"} & stories[2].wait_seconds.keys()
    assert all(story.output_tokens == 100 and story.state == "length" for story in stories)


def test_ids_of_one_answer(engine: Engine) -> None:
    for id in ("a-0", "a-1", "a-10", "ab-0", "a-0-0"):
        add(engine, id, PROMPT[:5], n=2)
    while engine.step() is not None:
        pass
    assert [(e.id, e.choice) for e in engine.explain("a")] == [
        ("a-0", 0), ("a-0", 1), ("a-1", 0), ("a-1", 1), ("a-10", 0), ("a-10", 1),
    ]  # fmt: skip
    assert [e.id for e in engine.explain("a-0")] == ["a-0", "a-0"]
    assert engine.explain("nobody") == []


def test_offline(data: Path) -> None:
    with LLM(str(data / "arch" / "llama"), num_threads=1) as llm:
        params = SamplingParams(n=2, best_of=3, max_tokens=4, seed=1)
        first, again = llm.generate([{"prompt_token_ids": PROMPT}] * 2, params)
    assert [e.choice for e in first.explanations] == [0, 1, 2]
    assert [e.cached_tokens for e in again.explanations] == [69] * 3
    assert len(first.outputs) == 2


@pytest.fixture(scope="module")
def server(data: Path) -> Iterator[Server]:
    with Server(data / "arch" / "llama", "--num-threads", "1", "--max-num-seqs", "8") as running:
        yield running


def test_an_answer_explains_itself(server: Server) -> None:
    assert server.post("/cache/flush", {}).status_code == 200
    plain = server.complete(prompt=PROMPT, max_tokens=2)
    assert "octavo" not in plain and plain["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    answer = server.complete(prompt=[PROMPT, OTHER], max_tokens=2, n=2, best_of=3, seed=1, explain=True)
    choices = answer["octavo"]["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert choices[0]["cached_tokens"] == {"memory": 69, "disk": 0}
    assert choices[0]["match_end"] == {"reason": "complete", "position": 69}
    assert choices[0]["state"] == "length" and choices[0]["output_tokens"] == 2
    details = answer["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] == 69 == details["cached_tokens_by_tier"]["memory"]
    assert [end["position"] for end in details["match_ends"]] == [69, 0]
    told = server.http.get(f"/debug/requests/{answer['id']}").json()
    assert [(c["prompt"], c["choice"]) for c in told["choices"]] == [(p, c) for p in (0, 1) for c in range(3)]
    assert told["choices"][3]["match_end"]["position"] == 0


def test_streams_tell_it_with_the_usage(server: Server) -> None:
    body = {"prompt": "Hello there", "max_tokens": 3, "explain": True, "stream_options": {"include_usage": True}}
    last = server.events("/v1/completions", body)[-1]
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 3
    assert last["octavo"]["choices"][0]["output_tokens"] == 3
    del body["stream_options"]
    last = server.events("/v1/completions", body)[-1]
    assert "usage" not in last and last["octavo"]["choices"][0]["cached_tokens"]["memory"] > 0


def test_a_stop_string_ends_the_story(server: Server) -> None:
    whole = server.complete(prompt=PROMPT, max_tokens=12, temperature=0, ignore_eos=True)["choices"][0]["text"]
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "stop": whole[len(whole) // 2 :]}
    answer = server.complete(**body, explain=True)
    assert answer["octavo"]["choices"][0]["state"] == "stop" == answer["choices"][0]["finish_reason"]


def test_live_requests_and_unknown_ones(server: Server) -> None:
    body = {"prompt": "Hello", "max_tokens": 200, "ignore_eos": True, "stream": True, "request_id": "live"}
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()  # kept: the connection would end with it
        next(lines)
        told = server.http.get("/debug/requests/cmpl-live").json()
        assert [choice["state"] for choice in told["choices"]] in (["running"], ["length"])
        assert all("token" not in key or "tokens" in key for key in told["choices"][0])
    missing = server.http.get("/debug/requests/cmpl-never")
    assert missing.status_code == 404 and "cmpl-never" in missing.json()["error"]["message"]


def test_flush_forgets_what_is_cached(server: Server) -> None:
    server.complete(prompt=PROMPT, max_tokens=1)
    assert server.complete(prompt=PROMPT, max_tokens=1)["usage"]["prompt_tokens_details"]["cached_tokens"] == 69
    flushed = server.post("/cache/flush", {}).json()
    assert flushed["object"] == "cache.flush" and flushed["blocks"] >= 5
    assert server.complete(prompt=PROMPT, max_tokens=1)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert server.post("/cache/flush", {}).json()["blocks"] >= 5
    assert server.post("/cache/flush", {}).json()["blocks"] == 0
