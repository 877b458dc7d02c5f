"""What the API refuses, and how it says so; what it does when its engine or itself comes to an end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import uvicorn
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from uvicorn.server import ServerState

from octavo.cli.serve import _bind
from octavo.config import ConfigError
from octavo.server import protocol
from octavo.server.chat_fields import ChatRequest
from octavo.server.completion_fields import CompletionRequest
from octavo.server.protocol import Protocol
from tests.serving import Server, events
from tests.waiting import SECONDS, busy_share, until

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello there"}]


@pytest.fixture(scope="module")
def server(data: Path) -> Iterator[Server]:
    with Server(data / "arch" / "llama", "--served-model-name", "tiny") as running:
        yield running


BAD_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [320]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": {"text": "a"}}, "prompt"),
    ({"prompt": [1] * 512}, "prompt"),
    ({"prompt": [[1]] * 129, "n": 128}, "prompt"),
    ({"prompt": [[1] * 400] * 40, "prompt_logprobs": 32}, "prompt_logprobs"),
    ({"prompt": [[1] * 400] * 40, "echo": True, "logprobs": 32}, "logprobs"),
    ({"prompt": [[1] * 400] * 11, "echo": True, "n": 128}, "echo"),
    ({"prompt": [[1] * 400] * 11, "return_token_ids": True, "n": 128}, "return_token_ids"),
    ({"max_tokens": 512}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 5.5}, "max_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 1e9}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"n": 0}, "n"),
    ({"n": 1000}, "n"),
    ({"n": True}, "n"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 1e-45}, "repetition_penalty"),
    ({"prompt": "a b" * 400_000}, "prompt"),
    ({"seed": 2**64}, "seed"),
    ({"priority": 2**64 - 1}, "priority"),
    ({"user": "x" * 513}, "user"),
    ({"cache_salt": "x" * 513}, "cache_salt"),
    ({"grammar": "\n" * 2**20}, "grammar"),
    ({"priority": -(10**30), "stream": True}, "priority"),
    ({"logprobs": 33}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"logit_bias": {"320": 1}}, "logit_bias"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"01": 1}}, "logit_bias"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["a"] * 65}, "stop"),
    ({"stop": 5}, "stop"),
    ({"stop_token_ids": [320]}, "stop_token_ids"),
    ({"min_tokens": 20, "max_tokens": 10}, "min_tokens"),
    ({"stream_options": {}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_use": True}}, "stream_options"),
    ({"best_of": 1, "n": 2}, "best_of"),
    ({"best_of": 2, "stream": True}, "best_of"),
    ({"suffix": "end"}, "suffix"),
    ({"guided_json": 5}, "guided_json"),
    ({"use_beam_search": True, "stream": True}, "stream"),
    ({"use_beam_search": True, "top_p": 0.5}, "top_p"),
    ({"use_beam_search": True, "n": 32}, "n"),
    ({"length_penalty": 2}, "length_penalty"),
    ({"early_stopping": "always"}, "early_stopping"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), BAD_COMPLETIONS, ids=lambda value: str(value)[:40])
def test_bad_completion(server: Server, fields: dict[str, Any], param: str) -> None:
    body = {"prompt": "Hello", **fields} if fields else {}
    _refused(server.post(COMPLETIONS, body), 400, param)


BAD_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "Hello"}, "messages"),
    ({"messages": [{"content": "Hello"}]}, "messages"),
    ({"messages": [{"role": "pirate", "content": "Hello"}]}, "messages"),
    ({"messages": [{"role": "x" * 100_000, "content": "Hello"}]}, "messages"),
    ({"messages": [{"role": [], "content": "Hello"}]}, "messages"),
    ({"messages": [{"role": {"a": 1}, "content": "Hello"}]}, "messages"),
    ({"messages": [{"role": "user", "content": "a b" * 400_000}]}, "messages"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"add_generation_prompt": False}}, "chat_template_kwargs"),
    ({"messages": [{"role": "user", "content": None}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages"),
    ({"messages": [{"role": "tool", "content": "5"}]}, "messages"),
    ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{"id": "a"}]}]}, "messages"),
    ({"max_tokens": 1, "max_completion_tokens": 1}, "max_tokens"),
    ({"max_completion_tokens": 512}, "max_tokens"),
    ({"logprobs": 2}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 33}, "top_logprobs"),
    ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools"),
    ({"response_format": {"type": "yaml"}}, "response_format"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"store": True}, "store"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), BAD_CHATS, ids=lambda value: str(value)[:60])
def test_bad_chat(server: Server, fields: dict[str, Any], param: str) -> None:
    _refused(server.post(CHAT, {"messages": HELLO, **fields}), 400, param)


def test_whole_numbers_may_be_written_with_a_point(server: Server) -> None:
    """As JSON has it, and clients write them whose numbers are all alike."""
    plain = server.complete(prompt=[5, 6], max_tokens=2, seed=1, stop_token_ids=[7])
    pointed = server.complete(prompt=[5.0, 6], max_tokens=2.0, seed=1.0, stop_token_ids=[7.0])
    assert pointed["choices"] == plain["choices"]


def test_bad_bodies(server: Server) -> None:
    for body in (b"", b"{", b"[]", b"5", b"null", b'{"prompt": NaN}', b"\xff", b'{"prompt": "\\ud800"}', b"[" * 5000):
        _refused(server.http.post(COMPLETIONS, content=body), 400, None if body != b'{"prompt": "\\ud800"}' else ...)
    _refused(server.http.post(COMPLETIONS, content=b" " * (32 * 2**20 + 1)), 413, None)
    closing = {"connection": "close"}  # here only a body read to its end lets the client see the answer
    for path in (COMPLETIONS, "/v1/abort", "/v1/batches"):
        _refused(server.http.post(path, content=b" " * (34 * 2**20), headers=closing), 413, None)
    _refused(server.http.post(COMPLETIONS, content=b"x", headers={"content-encoding": "gzip"}), 415, None)


def test_what_is_no_http(server: Server) -> None:
    for data in (b"\x16\x03\x01\x02\x00\x01\x00", b"FOO / HTTP/1.1\r\n\r\n", b"GET /\xff HTTP/1.1\r\n\r\n",
                 b"CONNECT x:1 HTTP/1.1\r\n\r\n"):  # fmt: skip
        with server.connected() as client, client.makefile("rb") as answer:
            client.sendall(data)
            head, _, body = answer.read().partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n")
            assert msgspec.json.decode(body)["error"]["type"] == "invalid_request_error"


def test_heads_without_end(server: Server) -> None:
    for endless in (
        b"GET /" + b"a" * 2**18,
        b"GET / HTTP/1.1\r\nx: " + b"a" * 2**18,
        b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 2**16,
    ):
        with server.connected() as client, client.makefile("rb") as answer:
            client.sendall(endless)
            assert answer.readline() == b"HTTP/1.1 431 Request Header Fields Too Large\r\n"


def test_a_head_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(sent: bytes) -> bytes:
        loop = asyncio.get_running_loop()
        config = uvicorn.Config(lambda *_: None, http=Protocol)
        listener = await loop.create_server(lambda: Protocol(config, ServerState(), {}), "127.0.0.1", 0)
        async with listener:
            reader, writer = await asyncio.open_connection(*listener.sockets[0].getsockname())
            writer.write(sent)
            got = await reader.read()
            writer.close()
            return got

    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.5)
    assert asyncio.run(answer(b"")) == b""
    assert asyncio.run(answer(b"GET / HTTP/1.1\r\nhost: x\r\n")).startswith(b"HTTP/1.1 408 Request Timeout\r\n")


def test_other_protocols_are_not_taken_up(server: Server) -> None:
    """Java's client offers HTTP/2 with every request."""
    offer = {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "http2-settings": "AAEAAEAAAAIAAAAB"}
    for _ in range(2):
        answer = server.http.post(COMPLETIONS, json={"prompt": "Hello", "max_tokens": 1}, headers=offer)
        assert answer.status_code == 200, answer.text
    assert server.http.get("/version", headers={"connection": "upgrade", "upgrade": "websocket"}).status_code == 200


def test_routes_that_are_read_answer_head(server: Server) -> None:
    for path in ("/", "/health", "/v1/models", "/docs"):
        got, head = server.http.get(path), server.http.head(path)
        assert (head.status_code, head.content) == (got.status_code, b"")
    assert server.http.head("/").headers["location"] == "/docs"
    _refused(server.http.get("/v1/nothing"), 404, None)
    assert server.http.head("/v1/nothing").status_code == 404


def test_names_of_template_variables_are_free(server: Server) -> None:
    variables = dict.fromkeys(("self", "tokenizer", "args", "kwargs", "context", ""), 1)
    assert server.post(CHAT, {"messages": HELLO, "max_tokens": 1, "chat_template_kwargs": variables}).is_success


def test_client_that_leaves_while_it_sends(data: Path) -> None:
    with Server(data / "arch" / "llama") as server:
        with server.connected() as client:
            client.sendall(f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{{".encode())
            server.wait_for("octavo_http_requests_open", 1)
        server.wait_for("octavo_http_requests_open", 0)
        assert server.end()[1] == ""


def test_no_such_route(server: Server) -> None:
    _refused(server.http.get("/v1/nothing"), 404, None)
    _refused(server.http.get(COMPLETIONS), 405, None)
    assert server.http.put("/v1/files").headers["allow"] == "GET, HEAD, POST"
    _refused(server.http.get("/v1/models/other"), 404, "model")
    _refused(server.post(CHAT, {"messages": HELLO, "model": "other"}), 404, "model")


def test_too_long_names_the_numbers(server: Server) -> None:
    error = server.post(COMPLETIONS, {"prompt": [1] * 500, "max_tokens": 20}).json()["error"]
    for number in ("500", "20", "512", "12"):
        assert number in error["message"]
    assert error["code"] == "context_length_exceeded"
    assert server.post(COMPLETIONS, {"prompt": [512]}).json()["error"]["code"] is None  # no token has this id


def test_every_field_of_the_openai_client_is_known() -> None:
    completion = completion_create_params.CompletionCreateParamsBase.__annotations__
    chat = chat_create_params.CompletionCreateParamsBase.__annotations__
    assert set(completion) <= {*CompletionRequest.__struct_fields__, *CompletionRequest.REFUSED}
    assert set(chat) <= {*ChatRequest.__struct_fields__, *ChatRequest.REFUSED}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_fields_that_are_not_built_are_refused_by_name(server: Server, path: str) -> None:
    """Unless they ask for nothing."""
    base: dict[str, Any] = {"prompt": "a"} if path == COMPLETIONS else {"messages": HELLO}
    base["max_tokens"] = 1
    table = CompletionRequest.REFUSED if path == COMPLETIONS else ChatRequest.REFUSED
    for name, refused in table.items():
        _refused(server.post(path, {**base, name: {"any": "thing"}}), 400, name)
        for value in (None, *refused.neutral):
            answer = server.post(path, {**base, name: value})
            assert answer.status_code == 200, answer.text
            assert "x-octavo-ignored" not in answer.headers


def test_unknown_fields_are_named(server: Server, data: Path) -> None:
    body = {"prompt": "a", "max_tokens": 1, "temprature": 0, "user": "me"}
    answer = server.post(COMPLETIONS, body)
    assert (answer.status_code, answer.headers["x-octavo-ignored"]) == (200, "temprature")
    for name, shown in (("a\x00\r\nb: c\x7f\té", r"a\x00\r\nb: c\x7f\t\xe9"), ("x" * 9000, "x" * 2000 + "...")):
        assert server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1, name: 0}).headers["x-octavo-ignored"] == shown
    messages = [{"role": "user", "content": "a", "mood": "good"}]
    assert server.post(CHAT, {"messages": messages, "max_tokens": 1}).headers["x-octavo-ignored"] == "messages[0].mood"
    part = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
    call = {"id": "c", "type": "function", "index": 0, "function": {"name": "f", "arguments": "{}", "output": "x"}}
    nested = [{"role": "user", "content": [part]}, {"role": "assistant", "tool_calls": [call]}]
    assert server.post(CHAT, {"messages": nested, "max_tokens": 1}).headers["x-octavo-ignored"] == (
        "messages[0].content[0].cache_control, messages[1].tool_calls[0].index, messages[1].tool_calls[0].function.output"
    )
    with Server(data / "arch" / "llama", "--strict") as strict:
        _refused(strict.post(COMPLETIONS, body), 400, "temprature")
        _refused(strict.post(CHAT, {"messages": messages}), 400, "messages")
        assert strict.post(COMPLETIONS, {"prompt": "a", "user": "me"}).status_code == 200


def test_bad_requests_harm_no_neighbour(server: Server) -> None:
    body = {"prompt": "Hello", "max_tokens": 200, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    alone = server.complete(**body)["choices"][0]["token_ids"]
    with ThreadPoolExecutor(8) as pool:
        good = [pool.submit(server.complete, **body) for _ in range(4)]
        bad = [pool.submit(server.post, COMPLETIONS, {"prompt": "a", **fields}) for fields, _ in BAD_COMPLETIONS]
        assert all(answer.result().status_code == 400 for answer, (f, _) in zip(bad, BAD_COMPLETIONS, strict=True) if f)
        assert all(answer.result()["choices"][0]["token_ids"] == alone for answer in good)


def test_messages_in_parts(server: Server) -> None:
    def ids(content: Any, role: str = "user") -> list[int]:
        body = {"messages": [{"role": role, "content": content}], "max_tokens": 1, "return_token_ids": True}
        found: list[int] = server.post(CHAT, body).json()["choices"][0]["prompt_token_ids"]
        return found

    parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": "there"}]
    assert ids(parts) == ids("Hello\nthere")
    assert ids("Be kind", "developer") == ids("Be kind", "system")


def test_engine_death_ends_streams_and_server(data: Path) -> None:
    with Server(data / "arch" / "llama") as server:
        os.kill(server.engine_pid, signal.SIGSTOP)
        with server.http.stream("POST", CHAT, json={"messages": HELLO, "stream": True}) as response:
            lines = response.iter_lines()
            assert '"role":"assistant"' in next(lines)
            os.kill(server.engine_pid, signal.SIGKILL)
            last = [line for line in lines if line]
        error = msgspec.json.decode(last[-1].removeprefix("data: "))["error"]
        assert (error["type"], error["code"]) == ("server_error", "engine_dead")
        assert "SIGKILL" in error["message"]
        assert server.process.wait(SECONDS) == 1
        assert server.end()[1].strip().endswith("error: the engine process was ended by signal SIGKILL")


def test_sigterm_drains(data: Path) -> None:
    with Server(data / "arch" / "llama") as server:
        engine = server.engine_pid
        os.kill(engine, signal.SIGSTOP)
        body = {"messages": HELLO, "stream": True, "max_tokens": 5, "ignore_eos": True}
        with server.http.stream("POST", CHAT, json=body) as response:
            server.process.send_signal(signal.SIGTERM)
            with httpx.Client(base_url=server.url, timeout=SECONDS) as other:
                until(lambda: other.get("/health/ready").status_code == 503)
                assert other.get("/health").status_code == 200
                _refused(other.post(CHAT, json={"messages": HELLO}), 503, None)
            os.kill(engine, signal.SIGCONT)
            assert events(response)[-1]["choices"][0]["finish_reason"] == "length"
        assert server.process.wait(SECONDS) == 0


def test_drain_waits_for_a_request_that_is_being_read(data: Path) -> None:
    body = msgspec.json.encode({"prompt": "Hello", "max_tokens": 3})
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    with Server(data / "arch" / "llama") as server:
        with server.connected() as slow:
            slow.sendall(head.encode() + body[:5])
            server.wait_for("octavo_http_requests_open", 1)
            server.process.send_signal(signal.SIGTERM)
            until(lambda: server.http.get("/health/ready").status_code == 503)
            time.sleep(0.2)  # some looks of the drain
            slow.sendall(body[5:])
            assert slow.makefile("rb").readline().split()[1] == b"200"
        assert server.process.wait(SECONDS) == 0


def test_drain_has_an_end(data: Path) -> None:
    with Server(data / "arch" / "llama", "--drain-seconds", "0.2") as server:
        engine = server.engine_pid
        os.kill(engine, signal.SIGSTOP)
        with server.http.stream("POST", CHAT, json={"messages": HELLO, "stream": True}) as response:
            server.process.send_signal(signal.SIGTERM)
            last = [line for line in response.iter_lines() if line][-1]
            os.kill(engine, signal.SIGCONT)
        error = msgspec.json.decode(last.removeprefix("data: "))["error"]
        assert (error["type"], "was shut down" in error["message"]) == ("server_error", True)
        assert server.process.wait(SECONDS) == 0
        assert server.end()[1].startswith("ending: open requests have 0.2 s to finish")


def test_port_in_use(data: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(RuntimeError, match=r"Address already in use; choose .* --port"):
            Server(data / "arch" / "llama", "--port", str(taken.getsockname()[1]))


def test_a_port_is_taken_before_the_model_is_loaded() -> None:
    """Two servers that start at once: the second is told so."""
    with _bind("127.0.0.1", 0) as first, pytest.raises(ConfigError, match="Address already in use"):
        _bind("127.0.0.1", first.getsockname()[1])


def test_idle_costs_nothing(server: Server) -> None:
    """Under 1 % of a processor, both processes together."""
    server.complete(prompt="Hello")
    until(lambda: busy_share(server.process.pid, server.engine_pid) < 0.01)


def _refused(response: httpx.Response, status: int, param: Any) -> None:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert 0 < len(error["message"]) < 1010
    assert error["type"] == ("invalid_request_error" if status < 500 else "server_error")
    if param is not ...:
        assert error["param"] == param, error
