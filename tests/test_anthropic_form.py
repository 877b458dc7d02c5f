"""Anthropic's conversations in the form of chat, its content blocks, and what cache_control marks."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.request import FinishReason, ParameterError, Reasoning, Retention
from octavo.server.anthropic_answer import Blocks, whole
from octavo.server.anthropic_cache import Marked, mark
from octavo.server.anthropic_messages import Conversation, chat_form, read_conversation
from octavo.server.errors import ApiError
from octavo.server.messages import chat_messages
from octavo.text.assistant import MessageOutput
from octavo.text.chat import ChatFormat, ChatOptions, ChatPrompt
from octavo.text.output import Delta
from octavo.text.tokenizer import load_tokenizer
from octavo.text.tools.offer import read_offer
from tests.thinker import END, START, TEMPLATE, add_special_tokens

CACHED = {"type": "ephemeral"}
TOOL = {"name": "f", "input_schema": {"type": "object", "properties": {"x": {}}}}


@pytest.fixture(scope="module")
def form(data: Path) -> ChatFormat:
    return ChatFormat(load_tokenizer(data / "arch" / "llama"), TEMPLATE)


def read(messages: list[dict[str, Any]], **fields: Any) -> Conversation:
    fields = {"system": None, "tools": None, "cache_control": None, **fields}
    return read_conversation(messages, ignored=[], **fields)


def text(value: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **fields}


def test_turns_become_messages() -> None:
    call = {"type": "tool_use", "id": "a", "name": "f", "input": {"x": "é"}}
    turns = [
        {"role": "user", "content": "one"},
        {"role": "user", "content": [text("two")]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": ""}, text("so"), call]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "3"}, text("and?")]},
        {"role": "assistant", "content": [{**call, "id": "b"}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "b", "is_error": True}]},
    ]
    conversation = read(turns, system=[text("S"), text("T")])
    assert not conversation.continues
    assert chat_messages(chat_form(conversation.turns), []) == [
        {"role": "system", "content": "S\nT"},
        {"role": "user", "content": "one\ntwo"},
        {
            "role": "assistant",
            "content": "so",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": "é"}'}}],
        },
        {"role": "tool", "content": "3", "tool_call_id": "a", "name": "f"},
        {"role": "user", "content": "and?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "b", "type": "function", "function": {"name": "f", "arguments": '{"x": "é"}'}}],
        },
        {"role": "tool", "content": "Error: ", "tool_call_id": "b", "name": "f"},
    ]


def test_tools_become_functions() -> None:
    tools = [{**TOOL, "type": "custom", "description": "d", "strict": True, "eager_input_streaming": True}]
    assert read([{"role": "user", "content": "x"}], tools=tools).tools == [
        {
            "type": "function",
            "function": {"name": "f", "parameters": TOOL["input_schema"], "description": "d", "strict": True},
        }
    ]


def test_deep_input_is_refused() -> None:
    value: dict[str, Any] = {}
    for _ in range(100_000):
        value = {"a": value}
    call = {"type": "tool_use", "id": "a", "name": "f", "input": value}
    with pytest.raises(ApiError, match=r"messages\[0\].content\[0\].input is nested too deeply"):
        read([{"role": "assistant", "content": [call]}])


ANSWERS = [
    "<think>hm\n\n</think>\n\nSo: <tool_call>\n{'a'</tool_call> and more",
    'Let me see.\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>\nThen\n'
    '<tool_call>\n{"name": "f", "arguments": {"x": "<tool_call>"}}\n</tool_call> end <tool',
    '<think>a</think><tool_call>\n{"name": "f", "arguments": {"x": [1, {"y": "z',
    "<think>no end",
    " plain <b>text</b> ",
    "",
]


def events(prompt: ChatPrompt, form: ChatFormat, pieces: list[str]) -> Iterator[dict[str, Any]]:
    blocks = Blocks(MessageOutput(form.tokenizer, prompt), prompt)
    yield {"type": "message_start", "message": {"content": []}}
    for i, piece in enumerate(pieces):
        last = FinishReason.STOP if i == len(pieces) - 1 else None
        yield from blocks.push(Delta(piece, [], [], last, None))
    yield from blocks.close()


@pytest.mark.parametrize("answer", ANSWERS)
def test_blocks_do_not_depend_on_how_the_text_arrives(form: ChatFormat, answer: str) -> None:
    offer = read_offer(read([{"role": "user", "content": "x"}], tools=[TOOL]).tools)
    prompt = form.prompt([{"role": "user", "content": "x"}], ChatOptions(offer=offer))

    def told(pieces: list[str]) -> list[dict[str, Any]]:
        content: list[dict[str, Any]] = whole(list(events(prompt, form, pieces)))["content"]
        return [{name: value for name, value in block.items() if name != "id"} for block in content]

    expected = told([answer])
    rng = random.Random(answer)
    for cut in range(len(answer) + 1):
        assert told([answer[:cut], answer[cut:]]) == expected
    for _ in range(20):
        cuts = sorted(rng.choices(range(len(answer) + 1), k=5))
        assert told([answer[a:b] for a, b in zip([0, *cuts], [*cuts, len(answer)], strict=True)]) == expected
    assert [block["type"] for block in expected if block["type"] != "text"] == (
        ["thinking"] * ("<think>" in answer) + ["tool_use"] * answer.count('"name"')
    )


def test_calls_that_were_cut_off_have_what_is_complete(form: ChatFormat) -> None:
    offer = read_offer(read([{"role": "user", "content": "x"}], tools=[TOOL]).tools)
    prompt = form.prompt([{"role": "user", "content": "x"}], ChatOptions(offer=offer))
    for arguments, value in (
        ('{"x": [1, {"y": "z', {"x": [1, {}]}),
        ('{"x": 1, "y', {"x": 1}),
        ("{", {}),
        ('{"x": nothing}', {"arguments": '{"x": nothing}'}),
    ):
        answer = f'<tool_call>\n{{"name": "f", "arguments": {arguments}'
        assert whole(list(events(prompt, form, [answer])))["content"][0]["input"] == value


def marked(form: ChatFormat, conversation: Conversation) -> tuple[Marked, list[int]]:
    options = ChatOptions(offer=read_offer(conversation.tools), continue_final_message=conversation.continues)
    prompt = form.prompt(chat_messages(chat_form(conversation.turns), []), options).text
    ids = form.encode(prompt)
    return mark(form, conversation, options, prompt, len(ids)), ids


def test_breakpoints_are_found_in_the_prompt(form: ChatFormat) -> None:
    """The marked tokens end with the marked block."""
    first, second = "All about rivers.", "Brief, please."
    cases: list[tuple[Conversation, str]] = [
        (read([{"role": "user", "content": "x"}], system=[text(first, cache_control=CACHED), text(second)]), first),
        (read([{"role": "user", "content": [text(first), text(second, cache_control=CACHED)]}]), second),
        (read([{"role": "user", "content": [text(first, cache_control=CACHED), text(second)]}]), first + "\n"),
        (read([{"role": "user", "content": "x"}, {"role": "assistant", "content": [text(first, cache_control=CACHED)]}]), first),
        (read([{"role": "user", "content": first}], cache_control=CACHED), first),
    ]  # fmt: skip
    for conversation, end in cases:
        found, ids = marked(form, conversation)
        assert form.tokenizer.decode(ids[: found.num_tokens], skip_special_tokens=False).endswith(end)
        assert found.retention() == Retention(seconds=300, num_tokens=found.num_tokens)
    tools, ids = marked(form, read([{"role": "user", "content": "x"}], tools=[{**TOOL, "cache_control": CACHED}]))
    assert 0 < tools.num_tokens < len(ids)
    nothing, _ = marked(form, read([{"role": "user", "content": "x"}]))
    assert nothing.retention() is None


HELLO = [{"role": "user", "content": "x"}]
SWITCHED = TEMPLATE.replace("{% if thinking %}<think>", "{% if enable_thinking %}<think>")
OPENED = TEMPLATE.replace("{% if thinking %}<think>{% endif %}", "<think>")


def test_thinking_is_turned_on_and_off(data: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(data / "arch" / "llama", model)
    add_special_tokens(model, {"<think>": START, "</think>": END})
    tokenizer = load_tokenizer(model)
    for template in (TEMPLATE, SWITCHED):
        form = ChatFormat(tokenizer, template)
        assert form.prompt(HELLO, ChatOptions(thinking=True)).opened
        for thinking in (False, None):
            prompt = form.prompt(HELLO, ChatOptions(thinking=thinking))
            assert not prompt.opened and prompt.reasoning is not None
            assert prompt.reasoning.budget == (0 if thinking is False else None)
    always = ChatFormat(tokenizer, OPENED).prompt(HELLO, ChatOptions(thinking=False))
    assert always.opened and always.reasoning == Reasoning(start=None, end=END, budget=0)
    with pytest.raises(ParameterError, match="thinking cannot be disabled"):
        ChatFormat(tokenizer, TEMPLATE, tool_format="harmony").prompt(HELLO, ChatOptions(thinking=False))


def test_usage_adds_up() -> None:
    both = Marked({"1h": 60, "5m": 90})
    assert both.retention() == Retention(seconds=3600, num_tokens=90)
    for cached, read_tokens, hour, minutes in ((0, 0, 60, 30), (32, 32, 28, 30), (80, 80, 0, 10), (96, 90, 0, 0)):
        assert both.usage(100, cached) == {
            "input_tokens": 10,
            "cache_read_input_tokens": read_tokens,
            "cache_creation_input_tokens": hour + minutes,
            "cache_creation": {"ephemeral_1h_input_tokens": hour, "ephemeral_5m_input_tokens": minutes},
        }
    assert Marked({}).usage(100, 64)["input_tokens"] == 100
