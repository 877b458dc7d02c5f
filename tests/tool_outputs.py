"""Raw answers of the families of tool calls, as models write them, and what they mean.

The writers say how a family writes its calls; they are written from its documentation, not from Octavo's own shapes.
`BROKEN` holds answers that are cut off, or no calls although they begin like some.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

SCHEMAS: dict[str, Any] = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "where": {"type": "object"}},
        "required": ["city"],
    },
    "search": {"type": "object", "properties": {"query": {"type": "string"}, "tags": {"type": "array"}}},
    "now": {"type": "object", "properties": {}},
}

Call = tuple[str, dict[str, Any]]

PARIS: Call = ("get_weather", {"city": "Paris"})
NESTED: Call = ("get_weather", {"city": "Köln", "days": 3, "where": {"lat": 50.9, "tags": ["a", {"b": [True, None]}]}})
QUOTES: Call = ("search", {"query": 'say "hi" \\ {now} ]} and \n\t"}', "tags": ["}", "]", '"', "{[("]})
UNICODE: Call = ("search", {"query": "日本語 🎈 é\u200d ｜", "tags": []})
MARKS: Call = ("search", {"query": "</tool> <|end [ARGS ]] ```json function= <tool_ </arg"})
NOW: Call = ("now", {})

CALLS: list[list[Call]] = [
    [PARIS],
    [NOW],
    [NESTED],
    [QUOTES],
    [UNICODE],
    [MARKS],
    [PARIS, NOW, QUOTES],
    [NESTED, NESTED],
]

TEXTS = [
    "",
    "The capital of France is Paris.",
    'An example: {"a": [1, 2, {"b": "}"}]} and f(x) <b>bold</b> < tool >.',
    "  \n a < b, c > d, [1], <tool> ▁ 🎈\n",
    "<",
    "I need [brackets] and `code`: {name}; done.\n\n",
]


def _json(call: Call, key: str = "arguments") -> str:
    return json.dumps({"name": call[0], key: call[1]}, ensure_ascii=False)


def _arguments(call: Call) -> str:
    return json.dumps(call[1], ensure_ascii=False)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _glm(calls: list[Call]) -> str:
    def pairs(call: Call) -> str:
        return "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{_text(v)}</arg_value>\n" for k, v in call[1].items())

    return "\n".join(f"<tool_call>{call[0]}\n{pairs(call)}</tool_call>" for call in calls)


def _qwen_xml(calls: list[Call]) -> str:
    def pairs(call: Call) -> str:
        return "".join(f"<parameter={k}>\n{_text(v)}\n</parameter>\n" for k, v in call[1].items())

    return "\n".join(f"<tool_call>\n<function={c[0]}>\n{pairs(c)}</function>\n</tool_call>" for c in calls)


def _pythonic(calls: list[Call]) -> str:
    return "[" + ", ".join(f"{c[0]}({', '.join(f'{k}={v!r}' for k, v in c[1].items())})" for c in calls) + "]"


def _deepseek(calls: list[Call]) -> str:
    each = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{c[0]}\n```json\n{_arguments(c)}\n```<｜tool▁call▁end｜>"
        for c in calls
    )
    return f"<｜tool▁calls▁begin｜>{each}<｜tool▁calls▁end｜>"


def _deepseek31(calls: list[Call]) -> str:
    each = "".join(f"<｜tool▁call▁begin｜>{c[0]}<｜tool▁sep｜>{_arguments(c)}<｜tool▁call▁end｜>" for c in calls)
    return f"<｜tool▁calls▁begin｜>{each}<｜tool▁calls▁end｜>"


def _harmony(calls: list[Call]) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{c[0]} <|constrain|>json<|message|>{_arguments(c)}<|call|>" for c in calls
    )


class Family(NamedTuple):
    write: Callable[[list[Call]], str]
    leads: tuple[str, ...] = ("", "I will look that up.\n")  # content that may stand before calls
    tails: tuple[str, ...] = ("",)  # and behind them
    text: Callable[[str], str] = str  # an answer without calls


_HERMES = Family(
    lambda calls: "\n".join(f"<tool_call>\n{_json(c)}\n</tool_call>" for c in calls), tails=("", "\n", "\nDone.")
)

FAMILIES: dict[str, Family] = {
    "hermes": _HERMES,
    "generic": _HERMES._replace(write=lambda calls: "".join(f"<tool_call>{_json(c)}</tool_call>" for c in calls)),
    "llama3": Family(
        lambda calls: "; ".join(_json(c, "parameters") for c in calls),
        leads=("", "<|python_tag|>", "\n", "<|python_start|>"),
    ),
    "pythonic": Family(_pythonic, leads=("", "<|python_start|>"), tails=("", "<|python_end|>")),
    "mistral": Family(lambda calls: "[TOOL_CALLS] [" + ", ".join(map(_json, calls)) + "]"),
    "mistral-named": Family(lambda calls: "".join(f"[TOOL_CALLS]{c[0]}[ARGS]{_arguments(c)}" for c in calls)),
    "granite": Family(lambda calls: "<|tool_call|>[" + ", ".join(map(_json, calls)) + "]"),
    "deepseek": Family(_deepseek),
    "deepseek-v3.1": Family(_deepseek31),
    "glm": Family(_glm),
    "qwen-xml": Family(_qwen_xml),
    "harmony": Family(
        _harmony,
        leads=("", "<|channel|>commentary<|message|>I will look that up.<|end|><|start|>assistant"),
        text=lambda text: f"<|channel|>final<|message|>{text}",
    ),
}


class Answer(NamedTuple):
    raw: str
    content: str
    calls: list[Call]


def answers(family: str) -> Iterator[Answer]:
    """Whole answers of a family."""
    form = FAMILIES[family]
    for text in TEXTS:
        yield Answer(form.text(text), text.lstrip() if family == "harmony" else text, [])
    for i, calls in enumerate(CALLS):
        lead, tail = form.leads[i % len(form.leads)], form.tails[i % len(form.tails)]
        said = "I will look that up." if "look" in lead else ""
        yield Answer(lead + form.write(calls) + tail, said + tail.strip().replace("<|python_end|>", ""), calls)


class Broken(NamedTuple):
    raw: str
    content: str = ""
    calls: tuple[tuple[str, str], ...] = ()  # name and arguments as far as they came


BROKEN: dict[str, list[Broken]] = {
    "hermes": [
        Broken("<tool_call>oops</tool_call> x", "<tool_call>oops</tool_call> x"),
        Broken('<tool_call>\n{"name": 3}\n</tool_call>', '<tool_call>\n{"name": 3}\n</tool_call>'),
        Broken('<tool_call>\n{"name": "now', '<tool_call>\n{"name": "now'),
        Broken('<tool_call>{"name": "search", "arguments": {"query": "a', calls=(("search", '{"query": "a'),)),
        Broken('<tool_call>{"name": "search", "arguments": {"query": "a\\', calls=(("search", '{"query": "a\\'),)),
        Broken('<tool_call>{"name": "now", "arguments": {}}}</tool_call>', calls=(("now", "{}"),)),
        Broken('<tool_call>{"name": "now", "arguments": {}}</tool_', calls=(("now", "{}"),)),
        Broken('<tool_call>{"name": "now"}</tool_call>', calls=(("now", "{}"),)),
        Broken('<tool_call>{"name": "now", "arguments": null}</tool_call>', calls=(("now", "{}"),)),
        Broken('<tool_call>{"arguments": {"a": 1}, "name": "now"}</tool_call>', calls=(("now", '{"a": 1}'),)),
        Broken('<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}</tool_call>', calls=(("now", '{"a": 1}'),)),
        Broken('<tool_call>{"name": "s", "arguments": {"q": "a\nb"}}</tool_call>', calls=(("s", '{"q": "a\\nb"}'),)),
        Broken('<tool_call>{"name": "s", "arguments": {bad: 1}}</tool_call>', calls=(("s", "{bad: 1}"),)),
        Broken(
            '<tool_call>{"type": "function", "function": {"name": "s", "parameters": {"a": 1}}}</tool_call>',
            calls=(("s", '{"a": 1}'),),
        ),
        Broken(
            '<tool_call>{"name": "a", "arguments": {}}\n{"name": "b", "arguments": {}}</tool_call>',
            calls=(("a", "{}"), ("b", "{}")),
        ),
        Broken(
            '<tool_call>{"name": "a", "arguments": {}}<tool_call>{"name": "b", "arguments": {}}</tool_call>',
            calls=(("a", "{}"), ("b", "{}")),
        ),
        Broken("a <tool_call", "a <tool_call"),
        Broken("</tool_call>", "</tool_call>"),
    ],
    "llama3": [
        Broken('{"name": "unknown", "parameters": {}}', '{"name": "unknown", "parameters": {}}'),
        Broken('{"name": "now"}', '{"name": "now"}'),
        Broken('{"name": "now", "parameters": {"a": [1', calls=(("now", '{"a": [1'),)),
        Broken('{"answer": 42}', '{"answer": 42}'),
        Broken("<|python_tag|>print(1)", "<|python_tag|>print(1)"),
        Broken('<|python_start|>{"name": "now", "parameters": {}}<|python_end|>', calls=(("now", "{}"),)),
        Broken('[{"name": "now", "parameters": {}}]', calls=(("now", "{}"),)),
        Broken('{"name": "now", "parameters": {}} and text', "and text", (("now", "{}"),)),
    ],
    "pythonic": [
        Broken("[1, 2, 3]", "[1, 2, 3]"),
        Broken("[unknown(a=1)]", "[unknown(a=1)]"),
        Broken("[now(), search(query=", ", search(query=", (("now", "{}"),)),
        Broken("[search(query=x)]", "[search(query=x)]"),
        Broken('[search("positional")]', '[search("positional")]'),
        Broken('[search(query="a", tags=[true, null])]', calls=(("search", '{"query": "a", "tags": [true, null]}'),)),
        Broken('[search(query="\\ud83c\\udf88")]', calls=(("search", '{"query": "\\ud83c\\udf88"}'),)),
    ],
    "mistral": [
        Broken("[TOOL_CALLS] nothing", "[TOOL_CALLS] nothing"),
        Broken('[TOOL_CALLS][{"name": "now", "arguments": {}}', calls=(("now", "{}"),)),
        Broken('[TOOL_CALLS][{"name": "now", "arguments": {}}, {"na', '{"na', (("now", "{}"),)),
        Broken('[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{"a": 1', calls=(("now", '{"a": 1'),)),
        Broken("[TOOL_CALLS]now", "[TOOL_CALLS]now"),
    ],
    "granite": [
        Broken("<|tool_call|>none", "<|tool_call|>none"),
        Broken('<tool_call>[{"name": "now", "arguments": {"a": "', calls=(("now", '{"a": "'),)),
        Broken("<|tool_call|>[]", "<|tool_call|>[]"),
    ],
    "deepseek": [
        Broken("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function", "<｜tool▁call▁begin｜>function"),
        Broken(
            '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{"a": 1',
            calls=(("now", '{"a": 1'),),
        ),
    ],
    "glm": [
        Broken("<tool_call>two words\n</tool_call>", "<tool_call>two words\n</tool_call>"),
        Broken("<tool_call>search\n<arg_key>query</arg_key>\n<arg_value>ab", calls=(("search", '{"query": "ab'),)),
        Broken("<tool_call>now\n", "<tool_call>now\n"),
        Broken(
            "<tool_call>x\n<arg_key>n</arg_key><arg_value>[1, </arg_value></tool_call>", calls=(("x", '{"n": "[1, "}'),)
        ),
        Broken(
            "<tool_call>x<arg_key>n</arg_key><arg_value>True</arg_value></tool_call>", calls=(("x", '{"n": true}'),)
        ),
    ],
    "qwen-xml": [
        Broken("<tool_call>\nx</tool_call>", "<tool_call>\nx</tool_call>"),
        Broken("<function=now>\n</function>", calls=(("now", "{}"),)),
        Broken("<function=search><parameter=query>\nab\n</param", calls=(("search", '{"query": "ab\\n</param'),)),
    ],
    "harmony": [
        Broken("<|channel|>commentary to=functions.now <|message|>{", calls=(("now", "{"),)),
        Broken("no channel at all", "no channel at all"),
        Broken("<|channel|>fin", ""),
    ],
}
