"""Tools and reasoning over HTTP, against real server processes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import jsonschema
import ollama
import openai
import pytest

from tests.clients.run import SHOWN, llm
from tests.clients.run import TOOL as CITY_TOOL
from tests.serving import Server
from tests.thinker import END, START, thinking_server

CHAT = "/v1/chat/completions"
CITY = {"type": "string", "maxLength": 8}
PARAMETERS = {
    "type": "object",
    "properties": {"city": CITY, "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
HELLO = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def server(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A tiny model whose tokenizer has the tags of reasoning."""
    with thinking_server(data, tmp_path_factory.mktemp("model")) as running:
        yield running


def ask(server: Server, **fields: Any) -> dict[str, Any]:
    body = {"messages": HELLO, "max_tokens": 120, "seed": 1, **fields}
    response = server.post(CHAT, body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def joined(chunks: list[dict[str, Any]], index: int) -> dict[str, Any]:
    """The choice that the chunks of a stream add up to, in the form of a whole answer."""
    message: dict[str, Any] = {"role": "assistant", "content": "", "refusal": None}
    choice: dict[str, Any] = {"index": index, "message": message, "logprobs": None, "token_ids": []}
    for part in (chunk["choices"][0] for chunk in chunks if chunk["choices"] and chunk["choices"][0]["index"] == index):
        delta = part["delta"]
        message["content"] += delta.get("content", "")
        if "reasoning_content" in delta:
            message["reasoning_content"] = message.get("reasoning_content", "") + delta["reasoning_content"]
        for call in delta.get("tool_calls", []):
            calls = message.setdefault("tool_calls", [])
            if call["index"] == len(calls):
                calls.append({"id": call["id"], "type": call["type"], "function": {"name": call["function"]["name"]}})
            function = calls[call["index"]]["function"]
            function["arguments"] = function.get("arguments", "") + call["function"]["arguments"]
        if part["logprobs"]:
            choice["logprobs"] = choice["logprobs"] or {"content": [], "refusal": None}
            choice["logprobs"]["content"] += part["logprobs"]["content"]
        choice["token_ids"] += part.get("token_ids", [])
        choice.update({key: part[key] for key in ("finish_reason", "stop_reason") if key in part})
    if message.get("tool_calls") and not message["content"]:
        message["content"] = None
    return choice


def without_ids(choice: dict[str, Any]) -> dict[str, Any]:
    for call in choice["message"].get("tool_calls", []):
        assert call.pop("id").startswith("call_")
    choice.pop("prompt_token_ids", None)
    return choice


CASES: list[dict[str, Any]] = [
    {"tools": [WEATHER, NOW], "tool_choice": "required", "n": 2},
    {"tools": [WEATHER], "tool_choice": "required", "logprobs": True, "top_logprobs": 1, "max_tokens": 25},
    {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "get_weather"}}, "stop": ["unit"]},
    {"tools": [WEATHER], "tool_choice": "required", "stop": ["tool_call>", '": "'], "include_stop_str_in_output": True},
    {"tools": [WEATHER], "parallel_tool_calls": False, "temperature": 0.5},
    {
        "tools": [WEATHER],
        "thinking_token_budget": 9,
        "tool_choice": "required",
        "chat_template_kwargs": {"thinking": True},
    },
    {"thinking_token_budget": 5, "chat_template_kwargs": {"thinking": True}, "n": 2, "logprobs": True},
    {"thinking_token_budget": 5, "chat_template_kwargs": {"thinking": True}, "include_reasoning": False},
    {
        "structured_outputs": {"regex": "[a-c]{4}"},
        "chat_template_kwargs": {"thinking": True},
        "thinking_token_budget": 3,
    },
    {"tools": [WEATHER], "response_format": {"type": "json_object"}, "max_tokens": 40},
]


@pytest.mark.parametrize("fields", CASES, ids=lambda fields: "+".join(fields))
def test_stream_equals_whole(server: Server, fields: dict[str, Any]) -> None:
    body = {"messages": HELLO, "max_tokens": 90, "seed": 1, "return_token_ids": True, **fields}
    whole = ask(server, **body)
    chunks = server.events(CHAT, {**body, "stream_options": {"include_usage": True}})
    usage = {key: value for key, value in whole["usage"].items() if key != "prompt_tokens_details"}
    assert {key: value for key, value in chunks[-1]["usage"].items() if key in usage} == usage
    for choice in whole["choices"]:
        assert without_ids(joined(chunks, choice["index"])) == without_ids(choice)


def test_stop_strings_cut_calls_anywhere(server: Server) -> None:
    """Streamed or not, whatever the place, and never a part of the stop string."""
    body = {"messages": HELLO, "tools": [WEATHER], "tool_choice": "required", "seed": 3, "max_tokens": 120}
    raw = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "'
    for start in range(0, len(raw) - 4, 5):
        stop = raw[start : start + 4]
        cut = {**body, "stop": [stop]}
        whole = ask(server, **cut)["choices"][0]
        assert without_ids(joined(server.events(CHAT, cut), 0))["message"] == without_ids(whole)["message"]
        assert whole["stop_reason"] == stop
        told = json.dumps(whole["message"].get("tool_calls")) + str(whole["message"]["content"])
        assert stop not in told or stop == "get_"[:4]


def test_required_calls_are_valid(server: Server) -> None:
    """Also behind thinking, within which the model must not end."""
    tools = {"tools": [WEATHER, NOW], "tool_choice": "required", "thinking_token_budget": 30}
    for seed in range(6):
        answer = ask(server, **tools, seed=seed, max_tokens=400)["choices"][0]
        calls = answer["message"]["tool_calls"]
        assert len({call["id"] for call in calls}) == len(calls) > 0
        for call in calls if answer["finish_reason"] == "tool_calls" else calls[:-1]:
            arguments = json.loads(call["function"]["arguments"])
            jsonschema.validate(
                arguments, PARAMETERS if call["function"]["name"] == "get_weather" else {"type": "object"}
            )
    one = ask(server, **tools, parallel_tool_calls=False)["choices"][0]
    assert (len(one["message"]["tool_calls"]), one["finish_reason"]) == (1, "tool_calls")


def test_thinking_ends_within_its_budget(server: Server) -> None:
    fields: dict[str, Any] = {"return_token_ids": True, "max_tokens": 40, "ignore_eos": True, "top_k": 50}
    opened = ask(server, **fields, thinking_token_budget=7, chat_template_kwargs={"thinking": True})
    choice = opened["choices"][0]
    assert choice["token_ids"].index(END) <= 7
    assert opened["usage"]["completion_tokens_details"]["reasoning_tokens"] == choice["token_ids"].index(END) + 1
    hidden = ask(
        server, **fields, thinking_token_budget=7, chat_template_kwargs={"thinking": True}, include_reasoning=False
    )
    expected = {key: value for key, value in choice["message"].items() if key != "reasoning_content"}
    assert hidden["choices"][0]["message"] == expected
    assert hidden["usage"]["completion_tokens_details"] == opened["usage"]["completion_tokens_details"]
    none = ask(server, **fields, thinking_token_budget=0, chat_template_kwargs={"thinking": True})["choices"][0]
    assert none["token_ids"][0] == END and "reasoning_content" not in none["message"]
    by_itself = ask(server, **fields, thinking_token_budget=4, logit_bias={START: 100})["choices"][0]
    assert by_itself["token_ids"][0] == START and END in by_itself["token_ids"][:6]


def test_a_prefill_is_continued(server: Server) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "The answer is"}]
    fields: dict[str, Any] = {"messages": messages, "return_token_ids": True, "temperature": 0, "max_tokens": 8}
    ids = ask(server, **fields, continue_final_message=True)["choices"][0]["prompt_token_ids"]
    body = {"prompt": ids, "temperature": 0, "max_tokens": 8}
    assert (
        ask(server, **fields, continue_final_message=True)["choices"][0]["message"]["content"]
        == (server.complete(**body)["choices"][0]["text"])
    )
    assert ids != ask(server, **fields)["choices"][0]["prompt_token_ids"]


CALL = {"id": "a", "type": "function", "function": {"name": "now", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"tools": "x"}, "tools", "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "tools[0].function.name must be"),
        ({"tool_choice": "required"}, "tool_choice", "tool_choice needs tools"),
        ({"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "names 'x'"),
        ({"functions": [{"name": "f"}]}, "functions", "use tools"),
        ({"function_call": {"name": "f"}}, "function_call", "use tool_choice"),
        ({"chat_template": "{{ x }}"}, "chat_template", "operator"),
        ({"documents": [{"text": "x"}]}, "documents", "takes no documents"),
        ({"reasoning_effort": "max"}, "reasoning_effort", "must be one of none, minimal"),
        ({"thinking_token_budget": -1}, "thinking_token_budget", "0"),
        ({"continue_final_message": True}, "continue_final_message", "needs a final message of the assistant"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", "has tools, a field of its own"),
        ({"messages": [{"role": "function", "content": "x", "name": "f"}]}, "messages", "give results with role tool"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages", "messages[0].tool_call_id is required"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]}, "messages", "only for role assistant"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{**CALL, "id": 1}]}]},
            "messages",
            "tool_calls[0].id must be",
        ),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "{"}}]}
                ]
            },
            "messages",
            "tool_calls[0].function.arguments must be a JSON object as text",
        ),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages", "messages[0].content must be"),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"minContains": 1}}}
                ]
            },
            "tools",
            "minContains",
        ),
        ({"tools": [NOW], "tool_choice": "required", "grammar": 'root ::= "x"'}, "grammar", "cannot be combined"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals_name_the_field(
    server: Server, fields: dict[str, Any], param: str, message: str, stream: bool
) -> None:
    response = server.post(CHAT, {"messages": HELLO, "max_tokens": 4, "stream": stream, **fields})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["param"], message in error["message"]) == (param, True), error


def test_template_variables_that_nothing_reads_are_told(server: Server) -> None:
    body = {"messages": HELLO, "max_tokens": 1, "chat_template_kwargs": {"mood": "good", "thinking": False}}
    assert server.post(CHAT, body).headers["x-octavo-ignored"] == "chat_template_kwargs.mood"


def test_a_model_whose_template_is_none_serves_completions(data: Path, tmp_path: Path) -> None:
    shutil.copytree(data / "arch" / "llama", tmp_path / "model")
    (tmp_path / "model/chat_template.jinja").write_text("{% for message in %}")
    with Server(tmp_path / "model", "--num-threads", "1") as server:
        assert any("no template: line 1: " in line for line in server.printed)
        assert server.complete(prompt="Hello", max_tokens=2)["usage"]["completion_tokens"] == 2
        answer = server.post(CHAT, {"messages": HELLO, "max_tokens": 2})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "messages")
    assert "the model's chat template is no template: line 1: " in error["message"]


def test_a_template_that_is_nowhere_ends_the_start(data: Path) -> None:
    with pytest.raises(RuntimeError, match=r"error: chat_template is neither a template nor a file: nowhere\.jinja"):
        Server(data / "arch" / "llama", "--chat-template", "nowhere.jinja")


@pytest.fixture(scope="module")
def demo_server(demo: Path) -> Iterator[Server]:
    with Server(demo, "--served-model-name", "demo") as running:
        yield running


QUESTION = [{"role": "user", "content": "What is the weather in Paris, in celsius?"}]


def check_round(message: Any, finish_reason: str) -> list[dict[str, Any]]:
    """The messages that follow a call of the weather."""
    assert finish_reason == "tool_calls"
    (call,) = message.tool_calls
    assert call.function.name == "get_weather"
    arguments = json.loads(call.function.arguments)
    jsonschema.validate(arguments, PARAMETERS)
    assert arguments["city"] == "Paris"
    result = {"role": "tool", "tool_call_id": call.id, "content": json.dumps({"temperature": 21})}
    return [*QUESTION, message.model_dump(exclude_none=True), result]


TOOL: dict[str, Any] = {
    "model": "demo", "messages": QUESTION, "tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False,
    "temperature": 0, "max_tokens": 80,
}  # fmt: skip


def test_a_round_with_the_openai_client(demo_server: Server) -> None:
    with openai.OpenAI(base_url=f"{demo_server.url}/v1", api_key="none", max_retries=0) as client:
        choice = client.chat.completions.create(**TOOL).choices[0]
        messages = check_round(choice.message, choice.finish_reason)
        answer = client.chat.completions.create(
            model="demo",
            messages=messages,
            tools=[WEATHER],
            temperature=0,
            max_tokens=40,  # type: ignore[arg-type, list-item]
        ).choices[0]
        assert "21" in str(answer.message.content)
        with client.chat.completions.stream(**TOOL) as stream:
            parts = [event for event in stream if event.type == "tool_calls.function.arguments.delta"]
            streamed = stream.get_final_completion().choices[0]
        assert "".join(part.arguments_delta for part in parts) == streamed.message.tool_calls[0].function.arguments  # type: ignore[index]
        assert len(parts) > 3
        check_round(streamed.message, streamed.finish_reason)


def test_a_round_with_the_ollama_client(demo_server: Server) -> None:
    """It cannot demand a call: the model decides."""
    messages: list[Any] = [{"role": "user", "content": SHOWN}]
    options = {"temperature": 0, "num_predict": 64, "stop": ["\nQ:"], "repeat_penalty": 1.0}
    with closing(ollama.Client(host=demo_server.url)) as client:
        message = client.chat("demo", messages, tools=[CITY_TOOL], options=options).message
        (call,) = message.tool_calls or ()
        assert (call.function.name, call.function.arguments) == ("get_weather", {"city": "Paris"})
        parts = client.chat("demo", messages, tools=[CITY_TOOL], options=options, stream=True)
        assert [part.message.tool_calls for part in parts if part.message.tool_calls] == [message.tool_calls]
        result = {"role": "tool", "tool_name": call.function.name, "content": "18 degrees"}
        assert client.chat("demo", [*messages, message, result], options=options).message.content


def test_a_round_with_llm(demo_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLM_USER_PATH", "")  # is set, and then as it was
    assert llm(demo_server.url)
