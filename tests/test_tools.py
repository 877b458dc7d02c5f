"""Tool calls: raw answers of every family, cut at every position."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from octavo.text.message import AssistantMessage
from octavo.text.parser import MessageParser
from octavo.text.reasoning import FORMATS, ReasoningFormat
from octavo.text.tools import FAMILIES, detect
from tests import tool_outputs
from tests.tool_outputs import BROKEN, SCHEMAS

REASONING = {form.name: form for form in FORMATS}


def parse(
    family: str, pieces: list[str], reasoning: ReasoningFormat | None = None, opened: bool = False
) -> tuple[str, str, list[tuple[str, str]]]:
    """Content, reasoning and calls. Every delta must be well-formed."""
    parser: MessageParser = FAMILIES[family][0](reasoning, SCHEMAS, opened)
    message = AssistantMessage()
    begun = 0
    for delta in [*(parser.feed(piece) for piece in pieces), parser.finish()]:
        for part in delta.tool_calls:
            assert (part.id is None) == (part.name is None) == (part.index < begun)
            assert part.index <= begun
            begun = max(begun, part.index + 1)
        message.add(delta)
    assert begun == parser.num_calls == len({call.id for call in message.tool_calls})
    return message.content, message.reasoning, [(call.name, call.arguments) for call in message.tool_calls]


def check_cuts(family: str, raw: str, *form: Any) -> tuple[str, str, list[tuple[str, str]]]:
    """What the whole answer says; it must say the same when cut at any position, at all of them, and at random."""
    whole = parse(family, [raw], *form)
    for cut in range(1, len(raw)):
        assert parse(family, [raw[:cut], raw[cut:]], *form) == whole, raw[:cut]
    assert parse(family, list(raw), *form) == whole
    draw = random.Random(raw)
    for _ in range(2):
        cuts = sorted(draw.sample(range(len(raw) + 1), min(len(raw), 6)))
        assert parse(family, [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)], *form) == whole
    return whole


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_cut_anywhere(family: str) -> None:
    for answer in tool_outputs.answers(family):
        content, reasoning, calls = check_cuts(family, answer.raw)
        assert (content, reasoning) == (answer.content, "")
        assert [(name, json.loads(arguments)) for name, arguments in calls] == answer.calls


@pytest.mark.parametrize("family", BROKEN)
def test_broken_answers_cut_anywhere(family: str) -> None:
    """What is no call is content, to the last character; what is cut off is told as far as it came."""
    for broken in BROKEN[family]:
        assert check_cuts(family, broken.raw) == (broken.content, "", list(broken.calls)), broken.raw


@pytest.mark.parametrize("family", ["hermes", "qwen-xml"])
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize("opened", [False, True])
def test_calls_behind_reasoning(family: str, form: ReasoningFormat, opened: bool) -> None:
    thought = 'Should I call <tool_call> or [TOOL_CALLS]{"name": "now"}?\n< </thi'
    before = "" if opened else form.starts[0]
    for answer in [*tool_outputs.answers(family)][1::5]:
        raw = f"{before}\n{thought}\n{form.ends[0]}\n\n{answer.raw}"
        content, reasoning, calls = check_cuts(family, raw, form, opened)
        assert reasoning == thought
        assert content == answer.content.lstrip()
        assert [(name, json.loads(arguments)) for name, arguments in calls] == answer.calls


@pytest.mark.parametrize("family", FAMILIES)
def test_any_text_is_read_the_same_however_cut(family: str) -> None:
    """Text made of the marks themselves, in any order."""
    draw = random.Random(family)
    parts = [
        *FAMILIES[family][0].markers, '{"name": "now", "arguments": {', '{"name": "now", "parameters": {}}', "now", '"', "}",
        "]", "[", "{", "\n", " ", ":", ",", "\\", "é", "functions.now", "```json", "query", "(", ")", "=", "<", "</", "final",
    ]  # fmt: skip
    for _ in range(150):
        raw = "".join(draw.choices(parts, k=draw.randint(1, 14)))
        whole = parse(family, [raw])
        assert parse(family, list(raw)) == whole, raw
        cut = draw.randint(0, len(raw))
        assert parse(family, [raw[:cut], raw[cut:]]) == whole, (raw, cut)


@pytest.mark.parametrize(
    ("template", "family"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "generic"),
        ("For each call return a json object within <tool_call></tool_call>", "hermes"),
        ("<tool_call>\n<function=example_function_name>", "qwen-xml"),
        ("<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>", "glm"),
        ("[AVAILABLE_TOOLS]{{ tools }}[TOOL_CALLS][", "mistral"),
        ("[TOOL_CALLS]{{ name }}[ARGS]{{ arguments }}", "mistral-named"),
        ("<|start_of_role|>assistant<|end_of_role|><|tool_call|>[", "granite"),
        ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>\n```json\n", "deepseek"),
        ("<｜tool▁call▁begin｜>{{ name }}<｜tool▁sep｜>", "deepseek-v3.1"),
        ("<|start|>assistant<|channel|>final<|message|>", "harmony"),
        ("<|python_tag|>{{ tool_call.name }}.call(", "llama3"),
        ('{"name": function name, "parameters": dictionary of argument name and its value}', "llama3"),
        ('<|python_start|>{"name": function name, "parameters": dictionary of argument name and its value}', "llama3"),
        ("[func_name1(params_name1=params_value1)] {{ '<|python_start|>' }}", "pythonic"),
        ("<|python_start|>{{ code }}<|python_end|>", "pythonic"),
    ],
)
def test_family_is_found_in_the_template(template: str, family: str) -> None:
    assert detect(template) == family
