"""The grammar of an answer that must call tools, or may: in llguidance's Lark dialect.

Marks that are special tokens of the model stand in it by their ids, all else as text. Arguments follow the tool's JSON
schema; in families that write them as tagged texts, property by property.
"""

from __future__ import annotations

import json
import keyword
import re
from typing import Any

from octavo.request import ParameterError, Structured
from octavo.text.tokenizer import Tokenizer
from octavo.text.tools.offer import Offer, Tool
from octavo.text.tools.shape import Shape

MAX_TEXT = 2**16
"""Characters of a tagged text whose length a schema bounds."""

_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""As `tojson` writes the calls of the conversation: no room for endless whitespace."""

_TAGS = {
    "glm": ("<arg_key>KEY</arg_key>\n<arg_value>", "</arg_value>\n"),
    "qwen_xml": ("<parameter=KEY>\n", "\n</parameter>\n"),
}
_OBJECT = frozenset({"properties", "required", "additionalProperties", "$defs", "definitions"})
_JSON_PARTS = re.compile(r'"[^"]*"|[:,] |[{}]|[^"{}]')
"""Where no mark tells a call from JSON that is the answer, both are read by the same parts until they differ."""

_ANNOTATIONS = frozenset({"type", "title", "description", "default", "examples", "$comment"})


MAX_PARALLEL = 32
"""Calls of one answer: small models that must call something would go on for ever."""


def answer_grammar(
    shape: Shape, offer: Offer, tokenizer: Tokenizer, structured: Structured | None = None
) -> Structured:
    """The answer is a call of an allowed tool, several where they may be parallel; in mode auto text as well.

    structured: what that text must be. Raises ParameterError naming `tools` for schemas that the shape's arguments
    cannot be held to.
    """
    text = _Grammar(shape, offer, tokenizer, None if structured is None else _expression(structured)).text
    return Structured("lark", text, "tools" if structured is None else structured.field)


def _expression(structured: Structured) -> str:
    if structured.kind == "json_schema":
        return _json(json.loads(structured.text))
    if structured.kind == "choice":
        return " | ".join(map(_quoted, json.loads(structured.text)))
    if structured.kind == "regex":
        return "/" + re.sub(r"(?<!\\)/", r"\/", structured.text) + "/"
    raise ParameterError(structured.field, f"a {structured.kind} grammar cannot be combined with tools or channels")


class _Grammar:
    def __init__(self, shape: Shape, offer: Offer, tokenizer: Tokenizer, answer: str | None) -> None:
        """answer: expression for an answer without calls; None: any text."""
        self._shape = shape
        specials = {token for i in tokenizer.special_ids if (token := tokenizer.id_to_token(i))}
        self._specials = re.compile("|".join(sorted(map(re.escape, specials), key=len, reverse=True)) or "(?!)")
        self._tokenizer = tokenizer
        self._rules = ["TEXT: /(.|\\n)*/"]
        if answer is not None:
            self._rules.append(f"answer: {answer}")
        start = self._start(offer, "TEXT" if answer is None else "answer")
        self.text = f"%llguidance {{}}\nstart: {start}\n" + "\n".join(self._rules) + "\n"

    def _start(self, offer: Offer, answer: str) -> str:
        shape = self._shape
        if shape.thought is not None:
            before, after = map(self._literal, shape.thought)
            thought = f"({before} TEXT {after})?"
            said = [] if offer.mode == "required" else [f"{self._literal(shape.answer)} {answer}"]
            called = [] if offer.mode == "none" else [self._calls(offer)]
            return f"{thought} ({' | '.join(called + said)})"
        if offer.mode == "required":
            return self._calls(offer)
        if answer != "TEXT":
            return f"{self._calls(offer)} | {answer}"
        if not shape.trigger:  # what begins otherwise is no call
            self._rules.append(r"OTHER: /([^\[{\s](.|\n)*)?/")
            return f"{self._calls(offer)} | OTHER"
        trigger = self._literal(shape.trigger)
        if self._specials.match(shape.trigger):
            return f"TEXT | TEXT {self._calls(offer)}"
        self._rules.append(f"trigger[lazy]: TEXT {trigger}")
        return f"TEXT | trigger {self._calls(offer, without=shape.trigger)}"

    def _calls(self, offer: Offer, without: str = "") -> str:
        """Rules of the calls; the expression for all of them. without: what the first begins with and was read before."""
        shape = self._shape
        arguments = [self._arguments(i, tool) for i, tool in enumerate(offer.allowed)]
        tools = list(zip(offer.allowed, arguments, strict=True))
        after = self._literal(shape.after)

        def call(tool: Tool, arguments: str, prefix: str = "", without: str = "") -> str:
            begin = (prefix + shape.before.replace("NAME", tool.name)).removeprefix(without)
            parts = [begin] if shape.trigger else _JSON_PARTS.findall(begin)
            return f"{' '.join(map(self._literal, parts))} {arguments} {after}"

        self._rules.append("first: " + " | ".join(call(*tool, shape.open, without) for tool in tools))
        parts = ["first"]
        if offer.parallel and not shape.one:
            self._rules.append("more: " + " | ".join(call(*tool, shape.between) for tool in tools))
            parts.append(f"more{{0,{MAX_PARALLEL - 1}}}")
        return " ".join([*parts, self._literal(shape.close)])

    def _arguments(self, index: int, tool: Tool) -> str:
        """Rules of a tool's arguments; the name of the first."""
        name = f"arguments_{index}"
        if self._shape.arguments == "json":
            self._rules.append(f"{name}: {_json(tool.schema)}")
        else:
            self._rules.append(f"{name}: {self._properties(name, tool)}")
        return name

    def _properties(self, name: str, tool: Tool) -> str:
        """Property by property, in the schema's order; what is not required may be left out. The name of the first rule."""
        properties = tool.schema.get("properties", {})
        required = tool.schema.get("required", [])
        other = set(tool.schema) - _ANNOTATIONS - _OBJECT
        if other or not isinstance(properties, dict) or not _texts(required) or not set(required) <= set(properties):
            raise _not_enforced(tool, sorted(other) or ["properties"])
        commas = {"begin": "", "rest": '", " '} if self._shape.arguments == "python" else {"begin": ""}
        later = list(commas)[-1]  # of the rules for the properties behind one that is there
        for i, (key, schema) in enumerate(properties.items()):
            whole = self._property(f"{name}_value_{i}", tool, key, schema)
            for rule, comma in commas.items():
                left_out = "" if key in required else f" | {name}_{rule}_{i + 1}"
                self._rules.append(f"{name}_{rule}_{i}: {comma}{whole} {name}_{later}_{i + 1}{left_out}")
        self._rules += [f'{name}_{rule}_{len(properties)}: ""' for rule in commas]
        return f"{name}_begin_0"

    def _property(self, name: str, tool: Tool, key: str, schema: Any) -> str:
        """Expression for one argument, key and value. Adds the rule `name`."""
        if self._shape.arguments == "python":
            if not key.isidentifier() or keyword.iskeyword(key):
                raise _not_enforced(tool, [f"the property {key}"])
            self._rules.append(f"{name}: {_json(schema, tool.schema)}")
            return f"{self._literal(key + '=')} {name}"
        if not key or key != key.strip() or any(mark in key for mark in "<>\n"):
            raise _not_enforced(tool, [f"the property {key}"])
        begin, end = (part.replace("KEY", key) for part in _TAGS[self._shape.arguments])
        is_text = isinstance(schema, dict) and schema.get("type") == "string"
        self._rules.append(f"{name}: {self._text(tool, key, schema) if is_text else _json(schema, tool.schema)}")
        if is_text and "enum" not in schema and not self._specials.match(end):
            self._rules[-1] = self._rules[-1].replace(":", f"[suffix={_quoted(end)}]:", 1)
            end = ""
        return f"{self._literal(begin)} {name} {self._literal(end)}"

    def _text(self, tool: Tool, key: str, schema: dict[str, Any]) -> str:
        other = set(schema) - _ANNOTATIONS - ({"enum"} if "enum" in schema else {"minLength", "maxLength"})
        if other:
            raise _not_enforced(tool, [f"{key}: {name}" for name in sorted(other)])
        if "enum" in schema:
            if not _texts(schema["enum"]) or not schema["enum"]:
                raise _not_enforced(tool, [f"{key}: an enum of a string that is no list of texts"])
            return " | ".join(map(self._literal, schema["enum"]))
        low, high = schema.get("minLength", 0), schema.get("maxLength", MAX_TEXT)
        if type(low) is not int or type(high) is not int or not 0 <= low <= high <= MAX_TEXT:
            raise _not_enforced(tool, [f"{key}: lengths that are not 0 <= minLength <= maxLength <= {MAX_TEXT}"])
        return "/(.|\\n)*/" if (low, high) == (0, MAX_TEXT) else f"/(.|\\n){{{low},{high}}}/"

    def _literal(self, text: str) -> str:
        """Expression for a text: its special tokens by id, the rest quoted."""
        parts, end = [], 0
        for match in self._specials.finditer(text):
            parts += [_quoted(text[end : match.start()]), f"<[{self._tokenizer.token_to_id(match[0])}]>"]
            end = match.end()
        parts.append(_quoted(text[end:]))
        return " ".join(part for part in parts if part != '""') or '""'


def _json(schema: Any, root: dict[str, Any] | None = None) -> str:
    """root: the schema that this one is a part of, and whose definitions it may refer to."""
    if not isinstance(schema, dict):
        schema = {} if schema is True else {"not": {}}
    shared = {key: root[key] for key in ("$defs", "definitions") if root and key in root}
    return f"%json {json.dumps({'x-guidance': _SPACING, **shared, **schema})}"


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _not_enforced(tool: Tool, what: list[str]) -> ParameterError:
    return ParameterError(
        "tools",
        f"the parameters of {tool.name} use {', '.join(what)}, to which calls in this model's tool format cannot be held; "
        "leave it out, or let the model choose freely (tool_choice auto without strict)",
    )
