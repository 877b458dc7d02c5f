"""Requests that end before their time: clients that leave, aborts, limits of time, streams that nobody takes up again.

The model answers without an end, so that whatever ended was ended.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.endless import NUM_TOKENS, endless_model
from tests.serving import Server
from tests.waiting import until

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
HELLO = [{"role": "user", "content": "Hello"}]
ENDLESS: dict[str, Any] = {"prompt": "Hello", "max_tokens": NUM_TOKENS, "seed": 1}
ABORTED = 'octavo_choices_finished_total{reason="abort"}'
DRAWN = "octavo_engine_output_tokens_total"


@pytest.fixture(scope="module")
def server(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = endless_model(data, tmp_path_factory.mktemp("model"))
    options = ("--served-model-name", "tiny", "--max-num-seqs", "16", "--num-threads", "1", "--sse-ping-seconds", "0.1")
    with Server(model, *options, "--kv-cache-memory", "256MiB", "--resume-seconds", "0.5") as running:
        yield running


@contextmanager
def aborts(server: Server, count: int) -> Iterator[None]:
    """So many choices are ended by it, and leave nothing behind."""
    before = server.metric(ABORTED)
    yield
    server.wait_for(ABORTED, before + count)
    server.wait_idle()


WAYS: dict[str, tuple[str, dict[str, Any], int]] = {
    "completion": (COMPLETIONS, {**ENDLESS, "n": 16}, 16),
    "prompts": (COMPLETIONS, {**ENDLESS, "prompt": ["Hello", "there"], "n": 2, "stream": True}, 4),
    "best of": (COMPLETIONS, {**ENDLESS, "n": 2, "best_of": 4}, 4),
    "beam search": (COMPLETIONS, {"prompt": "Hello", "max_tokens": NUM_TOKENS, "n": 8, "use_beam_search": True}, 8),
    "chat": (CHAT, {"messages": HELLO, "stream": True}, 1),
    "message": (MESSAGES, {"messages": HELLO, "max_tokens": NUM_TOKENS, "stream": True}, 1),
    "whole message": (MESSAGES, {"messages": HELLO, "max_tokens": NUM_TOKENS}, 1),
    "response": (RESPONSES, {"input": "Hello", "stream": True}, 1),
    "whole response": (RESPONSES, {"input": "Hello"}, 1),
    "ollama": ("/api/chat", {"model": "tiny", "messages": HELLO}, 1),
}


def test_a_client_that_leaves_with_requests_behind_one_another(server: Server) -> None:
    """What waits behind the first is never begun."""
    behind = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"
    with aborts(server, 1), server.asking(COMPLETIONS, ENDLESS) as connection:
        connection.sendall(behind)
        until(lambda: server.metric("octavo_requests_running") >= 1)


@pytest.mark.parametrize("way", WAYS)
def test_a_client_that_leaves_ends_its_answer(server: Server, way: str) -> None:
    """While it is computed; and before the engine has heard of it, which then computes nothing."""
    path, body, count = WAYS[way]
    with aborts(server, count), server.asking(path, body):
        until(lambda: server.metric("octavo_requests_running") >= (1 if way == "beam search" else count))
    prompts, drawn = server.metric("octavo_prompts_total"), server.metric(DRAWN)
    with aborts(server, count), server.frozen():
        with server.asking(path, body):
            server.wait_for("octavo_prompts_total", prompts + (2 if way == "prompts" else 1))
        server.wait_for("octavo_http_requests_open", 0)
    assert server.metric(DRAWN) == drawn


@pytest.mark.parametrize("stream", [True, False])
def test_who_waits_for_a_slot_leaves_too(server: Server, stream: bool) -> None:
    with aborts(server, 17), server.asking(COMPLETIONS, {**ENDLESS, "n": 16}):
        until(lambda: server.metric("octavo_requests_running") == 16)
        before = server.metric(ABORTED)
        with server.asking(COMPLETIONS, {**ENDLESS, "stream": stream}):
            until(lambda: server.metric("octavo_requests_waiting") == 1)
        server.wait_for(ABORTED, before + 1)


@pytest.mark.parametrize("stream", [True, False])
def test_abort_by_id_ends_with_what_there_is(server: Server, stream: bool) -> None:
    body = {**ENDLESS, "n": 3, "request_id": f"abort-{stream}", "return_token_ids": True, "stream": stream}
    id = f"cmpl-abort-{stream}"

    def abort() -> None:
        server.wait_for("octavo_requests_running", 3)
        assert server.http.post("/v1/abort", json={"id": id}).status_code == 200

    with aborts(server, 3), httpx.Client(base_url=server.url, timeout=server.http.timeout) as other:
        thread = threading.Thread(target=abort)
        thread.start()
        if stream:
            body["stream_options"] = {"include_usage": True}
            with other.stream("POST", COMPLETIONS, json=body) as response:
                lines = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
            usage = lines[-1]["usage"]
            choices = [choice for chunk in lines for choice in chunk["choices"]]
        else:
            answer = other.post(COMPLETIONS, json=body).json()
            usage, choices = answer["usage"], answer["choices"]
        thread.join()
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["abort"] * 3
    assert sum(len(choice["token_ids"]) for choice in choices) == usage["completion_tokens"]
    whole = server.complete(**{**ENDLESS, "max_tokens": 20}, n=3)["choices"]
    for index in range(3):
        text = "".join(choice["text"] for choice in choices if choice["index"] == index)
        assert text.startswith(whole[index]["text"][:-1]) or whole[index]["text"].startswith(text[:-1])


def test_abort_names_what_is_wrong(server: Server) -> None:
    for content, status in (
        (b'{"id": "cmpl-nobody"}', 404),
        (b"{}", 400),
        (b'{"id": 5}', 400),
        (b"[", 400),
        (b"", 400),
    ):
        assert server.http.post("/v1/abort", content=content).status_code == status


def test_request_ids_are_taken_over_and_not_given_twice(server: Server) -> None:
    assert server.complete(prompt="a", max_tokens=1, request_id="mine-1")["id"] == "cmpl-mine-1"
    with server.http.stream("POST", COMPLETIONS, json={**ENDLESS, "stream": True, "request_id": "twice"}) as response:
        assert response.status_code == 200
        again = server.post(COMPLETIONS, {"prompt": "a", "request_id": "twice"})
        assert (again.status_code, again.json()["error"]["param"]) == (400, "request_id")
    for bad in ("", "a b", "x" * 65, "a/b"):
        answer = server.post(COMPLETIONS, {"prompt": "a", "request_id": bad})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "request_id")


def test_responses_in_the_background_are_cancelled_and_deleted(server: Server) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        with aborts(server, 1):
            made = client.responses.create(model="tiny", input="Hello", background=True)
            assert client.responses.cancel(made.id).status == "cancelled"
            assert client.responses.retrieve(made.id).status == "cancelled"
        with aborts(server, 1):
            client.responses.delete(client.responses.create(model="tiny", input="Hello", background=True).id)


def test_a_limit_of_time_that_passes_in_the_middle_ends_the_stream(server: Server) -> None:
    body = {**ENDLESS, "n": 4, "timeout": 0.2, "stream": True}
    with server.http.stream("POST", COMPLETIONS, json=body) as answer:
        lines = [line for line in answer.iter_lines() if line]
    if answer.status_code == 200:  # tokens had come
        assert '"code":"timeout"' in lines[-1] and "[DONE]" not in lines[-1]
    else:
        assert answer.status_code == 408
    server.wait_idle()


def test_silence_is_filled_with_comments(server: Server) -> None:
    """A stream on which nothing comes says so by pings."""
    body = {"prompt": "Hello", "max_tokens": 4, "stream": True}
    with server.frozen():
        response = server.http.send(server.http.build_request("POST", COMPLETIONS, json=body), stream=True)
        lines = filter(None, response.iter_lines())
        assert [next(lines), next(lines)] == [": ping"] * 2
    rest = list(lines)
    assert rest[-1] == "data: [DONE]"
    assert all(line.startswith("data: ") or line == ": ping" for line in rest)


def test_a_stream_that_nobody_takes_up_is_aborted(server: Server) -> None:
    """And forgotten, as are those that ended."""
    body = {**ENDLESS, "n": 4, "stream": True, "resumable": True, "request_id": "left"}
    with aborts(server, 4), server.asking(COMPLETIONS, body):
        server.wait_for("octavo_requests_running", 4)
    assert server.post(COMPLETIONS, {**body, "request_id": "ended", "max_tokens": 2}).text.endswith("data: [DONE]\n\n")
    for name in ("left", "ended"):  # a look renews the time of grace
        until(lambda name=name: server.http.get(f"/v1/streams/cmpl-{name}").status_code == 404, every=1)
