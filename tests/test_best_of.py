"""best_of and beam search as clients see them: which choices return, and what is told of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from octavo import LLM, SamplingParams
from tests.serving import Server

BEAMS: dict[str, Any] = {"use_beam_search": True, "max_tokens": 8, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def server(data: Path) -> Iterator[Server]:
    with Server(data / "arch" / "llama", "--served-model-name", "tiny", "--num-threads", "1") as running:
        yield running


@pytest.fixture(scope="module")
def llm(data: Path) -> Iterator[LLM]:
    with LLM(str(data / "arch" / "llama"), num_threads=1) as made:
        yield made


def mean(choice: dict[str, Any]) -> float:
    logprobs = choice["logprobs"]["token_logprobs"]
    return sum(logprobs) / len(logprobs)


def test_the_best_of_the_candidates_return(server: Server) -> None:
    body = {"prompt": "Hello", "max_tokens": 12, "seed": 5, "logprobs": 0, "return_token_ids": True}
    candidates = server.complete(**body, n=6)["choices"]
    ranked = sorted(candidates, key=mean, reverse=True)
    best = server.complete(**body, n=2, best_of=6)
    assert [c["index"] for c in best["choices"]] == [0, 1]
    assert [c["token_ids"] for c in best["choices"]] == [c["token_ids"] for c in ranked[:2]]
    assert [c["logprobs"] for c in best["choices"]] == [c["logprobs"] for c in ranked[:2]]
    assert best["usage"]["completion_tokens"] == sum(len(c["token_ids"]) for c in best["choices"])
    assert best["usage"]["prompt_tokens"] == server.complete(**body)["usage"]["prompt_tokens"]


def test_candidates_end_at_stop_strings(server: Server) -> None:
    body = {"prompt": ["Hello", "The fox"], "max_tokens": 20, "seed": 5, "n": 1}
    texts = [c["text"] for c in server.complete(**body, best_of=4)["choices"]]
    stop = texts[0][2:5]
    cut = server.complete(**body, best_of=4, stop=stop)["choices"]
    assert len(cut) == 2 and all(stop not in c["text"] for c in cut)
    assert "logprobs" in cut[0] and cut[0]["logprobs"] is None  # asked for by the server, not by the client


def test_beams_over_http(server: Server, llm: LLM) -> None:
    answer = server.complete(prompt="Hello there", n=3, best_of=4, logprobs=2, **BEAMS)
    choices = answer["choices"]
    assert [c["index"] for c in choices] == [0, 1, 2]
    totals = [sum(c["logprobs"]["token_logprobs"]) for c in choices]
    assert totals == sorted(totals, reverse=True)
    assert len({tuple(c["token_ids"]) for c in choices}) == 3
    assert all(c["finish_reason"] == "length" and len(c["token_ids"]) == 8 for c in choices)
    assert answer["usage"]["completion_tokens"] == 24
    (offline,) = llm.generate("Hello there", SamplingParams(n=3, best_of=4, temperature=0, logprobs=2, max_tokens=8,
                                                            use_beam_search=True, ignore_eos=True))  # fmt: skip
    assert [out.token_ids for out in offline.outputs] == [c["token_ids"] for c in choices]
    assert [out.text for out in offline.outputs] == [c["text"] for c in choices]
    assert [out.cumulative_logprob for out in offline.outputs] == pytest.approx(totals, abs=1e-5)
    greedy = server.complete(prompt="Hello there", temperature=0, **{**BEAMS, "use_beam_search": False})
    assert (
        server.complete(prompt="Hello there", n=1, **BEAMS)["choices"][0]["token_ids"]
        == (greedy["choices"][0]["token_ids"])
    )


def test_beams_in_a_chat_with_openais_client(server: Server) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "Hi"}], n=2, max_tokens=5,
            extra_body={"use_beam_search": True, "best_of": 3, "length_penalty": 0.5, "early_stopping": "never"},
        )  # fmt: skip
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.usage is not None and answer.usage.completion_tokens <= 10


def test_a_search_explains_itself(server: Server) -> None:
    answer = server.complete(prompt="A prompt of its own", n=2, best_of=5, explain=True, **BEAMS)
    assert [c["output_tokens"] for c in answer["octavo"]["choices"]] == [8, 8]
    told = server.http.get(f"/debug/requests/{answer['id']}").json()["choices"]
    assert [(c["choice"], c["state"]) for c in told] == [(0, "length"), (1, "length")]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"use_beam_search": True, "stream": True}, "stream"), ({"best_of": 3, "stream": True}, "best_of"),
        ({"best_of": 1, "n": 2}, "best_of"), ({"use_beam_search": True, "stop": "x"}, "stop"),
        ({"use_beam_search": True, "temperature": 0.7}, "temperature"),
        ({"use_beam_search": True, "best_of": 32}, "best_of"), ({"use_beam_search": True, "dry_multiplier": 1}, "dry_multiplier"),
        ({"use_beam_search": True, "allowed_token_ids": [5]}, "allowed_token_ids"),
        ({"use_beam_search": True, "response_format": {"type": "json_object"}}, "response_format"),
        ({"early_stopping": True}, "early_stopping"), ({"best_of": 200}, "best_of"),
        ({"use_beam_search": True, "max_tokens": 0}, "max_tokens"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_by_name(server: Server, fields: dict[str, Any], param: str) -> None:
    response = server.post("/v1/completions", {"prompt": "Hello", **fields})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param, response.text


def test_offline_best_of(llm: LLM) -> None:
    params = SamplingParams(n=5, seed=3, max_tokens=10, logprobs=0)
    (all_five,) = llm.generate("Hello", params)
    (best,) = llm.generate("Hello", SamplingParams(n=2, best_of=5, seed=3, max_tokens=10))

    def score(out: Any) -> float:
        return float(out.cumulative_logprob / len(out.token_ids))

    ranked = sorted(all_five.outputs, key=score, reverse=True)
    assert [out.token_ids for out in best.outputs] == [out.token_ids for out in ranked[:2]]
    assert [out.index for out in best.outputs] == [0, 1]
    assert all(out.logprobs is None and out.cumulative_logprob is not None for out in best.outputs)
