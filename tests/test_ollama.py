"""Ollama's API, driven by its client against real servers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jsonschema
import ollama
import pytest

from octavo.server.ollama_fields import OPTIONS_REFUSED, OllamaChatRequest, OllamaGenerateRequest
from octavo.server.ollama_messages import as_chat
from octavo.weights.locate import locate
from tests.serving import Server
from tests.thinker import thinking_server

CHAT, GENERATE = "/api/chat", "/api/generate"
HELLO = [{"role": "user", "content": "Hi"}]
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Rome", "Oslo"]},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS, "strict": True}}
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}},
    "required": ["colour"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Its model may think."""
    with thinking_server(data, tmp_path_factory.mktemp("model")) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[ollama.Client]:
    with ollama.Client(host=server.url) as made:
        yield made


def lines(server: Server, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with server.http.stream("POST", path, json=body) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"] == "application/x-ndjson"
        return [json.loads(line) for line in answer.iter_lines()]


def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The answer that lines add up to. Only the last one is done."""
    assert [part["done"] for part in parts] == [False] * (len(parts) - 1) + [True]
    whole: dict[str, Any] = {}
    for part in parts:
        for name, value in (part.get("message") or part).items():
            if name in ("content", "response", "thinking", "tool_calls"):
                whole[name] = whole[name] + value if name in whole else value
        whole["logprobs"] = whole.get("logprobs", []) + part.get("logprobs", [])
    return whole | {name: parts[-1][name] for name in COUNTS}


COUNTS = ("done_reason", "prompt_eval_count", "eval_count")


def told(answer: dict[str, Any]) -> dict[str, Any]:
    members = answer.get("message") or {name: answer[name] for name in ("response", "thinking") if name in answer}
    members = {name: value for name, value in members.items() if name != "role"}
    return members | {name: answer[name] for name in COUNTS} | {"logprobs": answer.get("logprobs", [])}


def without_ids(answer: dict[str, Any]) -> dict[str, Any]:
    for call in answer.get("tool_calls", []):
        assert call.pop("id").startswith("call_")
    return answer


CASES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {}),
    (CHAT, {"options": {"num_predict": 12}, "logprobs": True, "top_logprobs": 2}),
    (CHAT, {"options": {"stop": ["e", "o"], "temperature": 1.2}}),
    (CHAT, {"format": SCHEMA, "think": False}),
    (CHAT, {"format": "json", "think": False}),
    (CHAT, {"tools": [WEATHER], "think": False}),
    (CHAT, {"tools": [WEATHER], "tool_choice": "required", "think": False}),
    (CHAT, {"tools": [WEATHER], "tool_choice": "required", "think": False, "options": {"num_predict": 25}}),
    (CHAT, {"think": True, "options": {"num_predict": 30}}),
    (GENERATE, {}),
    (GENERATE, {"system": "Be short.", "format": SCHEMA, "think": False}),
    (GENERATE, {"think": True}),
    (GENERATE, {"raw": True, "logprobs": True}),
]


@pytest.mark.parametrize(
    ("path", "fields"), CASES, ids=lambda value: value if isinstance(value, str) else "+".join(value)
)
def test_lines_equal_the_whole(server: Server, path: str, fields: dict[str, Any]) -> None:
    asked = {"messages": HELLO} if path == CHAT else {"prompt": "Hi"}
    body = {"model": "tiny", **asked, **fields, "options": {"num_predict": 80, "seed": 1, **fields.get("options", {})}}
    whole = server.post(path, {**body, "stream": False})
    assert whole.status_code == 200, whole.text
    assert without_ids(joined(lines(server, path, body))) == without_ids(told(whole.json()))
    for name in ("total_duration", "prompt_eval_duration", "eval_duration"):
        assert isinstance(whole.json()[name], int) and 0 < whole.json()[name] <= whole.json()["total_duration"]
    if whole.json()["done_reason"] == "length":
        assert whole.json()["eval_count"] == body["options"]["num_predict"]


def test_the_client_chats(client: ollama.Client) -> None:
    fields: dict[str, Any] = {"model": "tiny", "messages": HELLO, "options": {"seed": 2, "num_predict": 30}}
    whole = client.chat(**fields)
    assert whole.done and whole.message.role == "assistant"
    text = "".join(part.message.content or "" for part in client.chat(**fields, stream=True))
    assert text == whole.message.content
    generated = client.generate("tiny:latest", "Hi", options={"seed": 2, "num_predict": 30})
    assert generated.response == text  # the same template, one message


def test_formats(client: ollama.Client) -> None:
    options = {"seed": 1, "num_predict": 300}
    for answer in (
        client.chat("tiny", HELLO, format=SCHEMA, think=False, options=options).message.content,
        client.generate("tiny", "Hi", format=SCHEMA, think=False, options=options).response,
    ):
        jsonschema.validate(json.loads(answer or ""), SCHEMA)


def test_tool_round_trip(server: Server, client: ollama.Client) -> None:
    """The result goes back by the tool's name."""
    body = {"model": "tiny", "messages": HELLO, "tools": [WEATHER], "tool_choice": "required", "think": False}
    answer = server.post(CHAT, {**body, "stream": False, "options": {"seed": 1, "num_predict": 200}}).json()
    calls = answer["message"]["tool_calls"]
    for call in calls:
        jsonschema.validate(call["function"]["arguments"], PARAMETERS)
    results = [{"role": "tool", "tool_name": call["function"]["name"], "content": "20"} for call in calls]
    again = client.chat("tiny", [*HELLO, answer["message"], *results], options={"num_predict": 5})
    assert again.prompt_eval_count and again.prompt_eval_count > len(results)


def test_results_find_their_calls() -> None:
    calls = [{"function": {"name": name, "arguments": {"a": 1}}} for name in ("f", "g", "f")]
    results = [{"role": "tool", "tool_name": name, "content": name} for name in ("f", "f", "g")]
    told = as_chat([{"role": "assistant", "tool_calls": calls}, *results], [])
    assert [call["id"] for call in told[0]["tool_calls"]] == ["call_0_0", "call_0_1", "call_0_2"]
    assert [message["tool_call_id"] for message in told[1:]] == ["call_0_0", "call_0_2", "call_0_1"]


def test_thinking_is_kept_apart(client: ollama.Client) -> None:
    options = {"seed": 3, "num_predict": 400}
    thought = client.chat("tiny", HELLO, think=True, options=options)
    assert thought.message.thinking
    silent = client.chat("tiny", HELLO, think=False, options=options)
    assert not silent.message.thinking and silent.message.content


def test_what_is_told_of_the_model(client: ollama.Client, server: Server) -> None:
    (entry,) = client.list().models
    assert entry.model == "tiny" and entry.size and entry.size > 1000 and entry.details
    assert (entry.details.format, entry.details.family) == ("safetensors", "llama")
    assert entry.digest and len(entry.digest) == 64
    (loaded,) = client.ps().models
    assert loaded.model == "tiny" and loaded.context_length == 1024
    assert loaded.digest == entry.digest and loaded.expires_at and loaded.expires_at.year == 9999
    shown = client.show("tiny")
    assert shown.capabilities == ["completion", "tools", "thinking"] and shown.modelinfo
    assert shown.modelinfo["general.architecture"] == "llama" and shown.modelinfo["llama.context_length"] == 512
    assert shown.template and "<think>" in shown.template
    assert server.http.get("/api/version").json() == server.http.get("/version").json()
    with pytest.raises(ollama.ResponseError, match="there is no model 'other'"):
        client.show("other")


def test_the_demo_model() -> None:
    """A GGUF file: its facts, and its own words."""
    with ExitStack() as made:
        server = made.enter_context(Server(locate("demo"), "--served-model-name", "demo", "--num-threads", "1"))
        client = made.enter_context(ollama.Client(host=server.url))
        details = client.list().models[0].details
        assert details and (details.format, details.parameter_size) == ("gguf", "134.52M")
        assert details.quantization_level == "Q4_1"
        question = "What is the capital of Japan?"
        answer = client.generate("demo", question, options={"temperature": 0, "num_predict": 12})
        assert "Tokyo" in (answer.response or "")
        with pytest.raises(ollama.ResponseError, match="think: the model does not reason"):
            client.generate("demo", question, think=True)
        with pytest.raises(ollama.ResponseError, match="suffix needs a model that has tokens"):
            client.generate("demo", "a", suffix="b")


def test_nothing_to_answer_says_that_the_model_is_loaded(client: ollama.Client) -> None:
    assert client.generate("tiny", keep_alive="5m").done_reason == "load"
    assert client.chat("tiny", []).done_reason == "load"


BAD: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"model": "other"}, "other"),
    (CHAT, {"options": {"num_ctx": 4096}}, "options.num_ctx"),
    (CHAT, {"options": {"num_predict": 2000}}, "num_predict"),
    (CHAT, {"options": {"temperature": -1}}, "temperature"),
    (CHAT, {"options": {"repeat_penalty": -1}}, "repeat_penalty"),
    (CHAT, {"options": {"top_k": "x"}}, "options.top_k"),
    (CHAT, {"options": {"mirostat": 1}}, "options.mirostat"),
    (CHAT, {"keep_alive": 0}, "keep_alive"),
    (CHAT, {"keep_alive": "soon"}, "keep_alive"),
    (CHAT, {"keep_alive": "1" * 10_000 + "x"}, "keep_alive"),  # read once, not in all the ways that it could be split
    (CHAT, {"think": "hard"}, "think"),
    (CHAT, {"format": "xml"}, "format"),
    (CHAT, {"format": {"type": "odd"}}, "format"),
    (CHAT, {"format": {"type": "odd"}, "stream": False}, "format"),
    (CHAT, {"messages": [{"role": "user", "content": "x", "images": ["eA=="]}]}, "messages[0].images"),
    (CHAT, {"messages": [{"role": "nobody", "content": "x"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "x"}}]}]}, "arguments"),
    (CHAT, {"tools": [{"type": "web"}]}, "tools[0]"),
    (CHAT, {"top_logprobs": 2}, "top_logprobs"),
    (GENERATE, {"context": [1, 2]}, "context"),
    (GENERATE, {"template": "x"}, "template"),
    (GENERATE, {"images": ["eA=="]}, "images"),
    (GENERATE, {"raw": True, "system": "x"}, "system"),
    (GENERATE, {"suffix": "x"}, "suffix"),
    (GENERATE, {"truncate": True}, "truncate"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "fields", "name"), BAD, ids=lambda value: value if isinstance(value, str) else "")
def test_what_cannot_be_honoured_is_named(server: Server, path: str, fields: dict[str, Any], name: str) -> None:
    asked = {"messages": HELLO} if path == CHAT else {"prompt": "Hi"}
    answer = server.post(path, {"model": "tiny", **asked, **fields})
    assert answer.status_code == (404 if name == "other" else 400), answer.text
    assert name in answer.json()["error"]


def test_embeddings_are_those_of_openais_route(server: Server, client: ollama.Client) -> None:
    def vectors(**fields: Any) -> list[list[float]]:
        return [entry["embedding"] for entry in server.post("/v1/embeddings", fields).json()["data"]]

    answer = client.embed("tiny", ["Hi", "you"], keep_alive="5m")
    assert list(map(list, answer.embeddings)) == vectors(input=["Hi", "you"])
    assert (
        answer.prompt_eval_count
        == server.post("/v1/embeddings", {"input": ["Hi", "you"]}).json()["usage"]["prompt_tokens"]
    )
    assert client.embed("tiny", "Hi").embeddings == answer.embeddings[:1]
    assert list(client.embeddings("tiny:latest", "Hi").embedding) == vectors(input="Hi", normalize=False)[0]
    assert client.embed("tiny", []).embeddings == client.embeddings("tiny").embedding == []
    long = server.http.post("/api/embed", json={"model": "tiny", "input": "long " * 2000})
    assert long.status_code == 400 and "2000" not in long.json()["error"]
    assert len(client.embed("tiny", "long " * 2000, truncate=True).embeddings) == 1
    given = {"model": "tiny", "input": "Hi", "options": {"num_ctx": 64, "top_k": 3, "mood": 1}, "wing": 1}
    assert server.post("/api/embed", given).headers["x-octavo-ignored"] == "wing, options.mood, options.top_k"
    for fields, name in (({"dimensions": 8}, "dimensions"), ({"input": [1]}, "input"), ({"options": {"num_ctx": 10**6}}, "num_ctx"),
                         ({"keep_alive": 0}, "keep_alive"), ({"model": "other"}, "other"), ({"input": ["Hi", ""]}, "input")):  # fmt: skip
        refused = server.post("/api/embed", {"model": "tiny", "input": "Hi", **fields})
        assert refused.status_code in (400, 404) and name in refused.json()["error"], refused.text


SAMPLES: dict[str, Any] = {
    "format": "json", "keep_alive": "1h30m", "logprobs": True, "messages": HELLO, "options": {"num_ctx": 512, "seed": -1},
    "prompt": "Hi", "raw": True, "stream": False, "system": "So.", "think": True, "tools": [WEATHER], "tool_choice": "none",
    "model": "tiny",
}  # fmt: skip


@pytest.mark.parametrize(("path", "schema"), [(CHAT, OllamaChatRequest), (GENERATE, OllamaGenerateRequest)])
def test_every_field_is_honoured_or_refused(server: Server, path: str, schema: Any) -> None:
    base = {
        "model": "tiny",
        "options": {"num_predict": 2},
        **({"messages": HELLO} if path == CHAT else {"prompt": "x"}),
    }
    for name in schema.__struct_fields__:
        if name in ("suffix", "top_logprobs"):  # need what else is asked for
            continue
        answer = server.post(path, base | {name: SAMPLES[name]})
        assert answer.status_code == 200 and "x-octavo-ignored" not in answer.headers, (name, answer.text)
        wrong = server.post(path, base | {name: [[[1.5]]]})
        assert wrong.status_code == 400 and name in wrong.json()["error"], (name, wrong.text)
    for name, refused in schema.REFUSED.items():
        for neutral in (None, *refused.neutral):
            assert server.post(path, base | {name: neutral}).status_code == 200, name
        assert server.post(path, base | {name: "odd"}).status_code == 400
    for name, refused in OPTIONS_REFUSED.items():
        for neutral in (None, *refused.neutral):
            assert server.post(path, base | {"options": {"num_predict": 1, name: neutral}}).status_code == 200, name
        answer = server.post(path, base | {"options": {name: "odd"}})
        assert answer.status_code == 400 and f"options.{name}" in answer.json()["error"]
    answer = server.post(path, base | {"wing": 1, "options": {"num_predict": 1, "mood": 1}})
    assert answer.headers["x-octavo-ignored"] == "wing, options.mood"
