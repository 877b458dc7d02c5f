"""Structured output: the fields of OpenAI, vLLM and llama.cpp that say what the text must be, as one `Structured`.

OpenAI: response_format. vLLM: structured_outputs, and the older guided_*. llama.cpp: json_schema, grammar.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from octavo.request import ParameterError, Structured

_Schema = dict[str, Any] | bool

_OBJECT: dict[str, Any] = {"type": "object"}

_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
"""Of a text from anybody: each character is looked at a few times, whatever it is."""


class JsonSchema(msgspec.Struct, forbid_unknown_fields=True):
    name: str | None = None
    description: str | None = None
    schema: _Schema | None = None
    strict: bool | None = None  # it is always strict


class Tag(msgspec.Struct, forbid_unknown_fields=True):
    begin: str
    end: str
    schema: _Schema | None = None  # of the JSON between the two; null: any object


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    schema: _Schema | None = None  # llama.cpp: beside json_object
    structures: list[Tag] | None = None  # vLLM: beside structural_tag
    triggers: list[str] | None = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    json: str | _Schema | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None  # a ResponseFormat of that type, as JSON
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None


class StructuredFields(msgspec.Struct, kw_only=True):
    """Fields of a request; at most one of them may ask for something."""

    response_format: Annotated[
        ResponseFormat | None, Meta(description="JSON, or JSON of a schema (always strict).")
    ] = None
    structured_outputs: Annotated[StructuredOutputs | None, Meta(description="What the text must be.")] = None
    guided_json: Annotated[str | _Schema | None, Meta(description="JSON of a schema.")] = None
    guided_regex: Annotated[str | None, Meta(description="A regular expression that matches the whole text.")] = None
    guided_choice: Annotated[list[str] | None, Meta(description="The text is one of these.")] = None
    guided_grammar: Annotated[str | None, Meta(description="A grammar in Lark or GBNF.")] = None
    guided_whitespace_pattern: Annotated[str | None, Meta(description="Blanks between the parts of guided_json.")] = (
        None
    )
    guided_decoding_backend: Annotated[
        Literal["auto", "guidance"] | None, Meta(description="There is one, llguidance: no effect.")
    ] = None
    json_schema: Annotated[_Schema | None, Meta(description="JSON of a schema.")] = None
    grammar: Annotated[str | None, Meta(description="A grammar in GBNF or Lark.")] = None

    def structured(self) -> Structured | None:
        """Raises ParameterError naming the field."""
        found = [
            ("response_format", _of_format(self.response_format)),
            ("structured_outputs", _of_outputs(self.structured_outputs)),
            ("guided_json", self._guided_json()),
            ("guided_regex", _of_regex("guided_regex", self.guided_regex)),
            ("guided_choice", _of_choice("guided_choice", self.guided_choice)),
            ("guided_grammar", _of_grammar("guided_grammar", self.guided_grammar)),
            ("json_schema", _of_json("json_schema", self.json_schema)),
            ("grammar", _of_grammar("grammar", self.grammar)),
        ]
        return _only_one(found)

    def _guided_json(self) -> Structured | None:
        pattern = self.guided_whitespace_pattern
        if pattern is not None and self.guided_json is None:
            raise ParameterError("guided_whitespace_pattern", "guided_whitespace_pattern goes with guided_json")
        return _of_json("guided_json", self.guided_json, {} if pattern is None else {"whitespace_pattern": pattern})


def _only_one(found: list[tuple[str, Structured | None]]) -> Structured | None:
    asked = [(name, structured) for name, structured in found if structured is not None]
    if len(asked) > 1:
        (first, _), (second, _) = asked[:2]
        raise ParameterError(second, f"{first} and {second} both say what the text must be: give one")
    return asked[0][1] if asked else None


def _of_format(format: ResponseFormat | None, field: str = "response_format") -> Structured | None:
    if format is None:
        return None
    for name, owner in (
        ("json_schema", "json_schema"), ("schema", "json_object"),
        ("structures", "structural_tag"), ("triggers", "structural_tag"),
    ):  # fmt: skip
        if getattr(format, name) is not None and format.type != owner:
            raise ParameterError(field, f"{field}.{name} goes with the type {owner}, not {format.type}")
    if format.type == "text":
        return None
    if format.type == "json_object":
        return Structured.json_schema(_OBJECT if format.schema is None else format.schema, field)
    if format.type == "structural_tag":
        return Structured("lark", _tags_grammar(format.structures or [], format.triggers or [], field), field)
    if format.json_schema is None or format.json_schema.schema is None:
        raise ParameterError(field, f"{field}.json_schema.schema is required with the type json_schema")
    return Structured.json_schema(format.json_schema.schema, field)


def _of_outputs(outputs: StructuredOutputs | None) -> Structured | None:
    field = "structured_outputs"
    if outputs is None:
        return None
    options: dict[str, Any] = {}
    if outputs.disable_any_whitespace:
        options["whitespace_flexible"] = False
    if outputs.whitespace_pattern is not None:
        options["whitespace_pattern"] = outputs.whitespace_pattern
    closed = bool(outputs.disable_additional_properties)
    found = [
        ("json", _of_json(field, outputs.json, options, closed)),
        ("regex", _of_regex(field, outputs.regex)),
        ("choice", _of_choice(field, outputs.choice)),
        ("grammar", _of_grammar(field, outputs.grammar)),
        ("json_object", _of_json(field, _OBJECT, options) if outputs.json_object else None),
        ("structural_tag", _of_tag_text(outputs.structural_tag, field)),
    ]
    try:
        structured = _only_one(found)
    except ParameterError as error:
        raise ParameterError(field, f"in {field}, {error}") from None
    if structured is None:
        raise ParameterError(field, f"{field} says nothing of what the text must be")
    if (options or closed) and structured.kind != "json_schema":
        raise ParameterError(field, f"in {field}, whitespace and additional properties are matters of JSON only")
    return structured


def _of_json(
    field: str, schema: str | _Schema | None, options: Mapping[str, Any] | None = None, closed: bool = False
) -> Structured | None:
    if schema is None:
        return None
    given: _Schema
    if isinstance(schema, str):
        try:
            given = msgspec.json.decode(schema, type=_Schema)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ParameterError(field, f"{field} is not a JSON schema: {error}") from None
    else:
        given = schema
    if closed:
        try:
            given = _closed(given)
        except RecursionError:
            raise ParameterError(field, f"{field} is nested too deeply") from None
    if options:
        given = given if isinstance(given, dict) else {"allOf": [given]}
        given = {**given, "x-guidance": {**options, **given.get("x-guidance", {})}}
    return Structured.json_schema(given, field)


def _of_regex(field: str, regex: str | None) -> Structured | None:
    return None if regex is None else Structured("regex", regex, field)


def _of_choice(field: str, choices: list[str] | None) -> Structured | None:
    return None if choices is None else Structured.choice(choices, field)


def _of_grammar(field: str, grammar: str | None) -> Structured | None:
    """Lark, or GBNF, which alone defines by `::=`."""
    if grammar is None:
        return None
    return Structured("gbnf" if _GBNF_RULE.search(grammar) else "lark", grammar, field)


def _of_tag_text(text: str | None, field: str) -> Structured | None:
    if text is None:
        return None
    try:
        format = msgspec.json.decode(text, type=ResponseFormat)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ParameterError(field, f"{field}.structural_tag: {error}") from None
    if format.type != "structural_tag":
        raise ParameterError(field, f"{field}.structural_tag has the type {format.type}")
    return _of_format(format, field)


def _tags_grammar(tags: list[Tag], triggers: list[str], field: str) -> str:
    """Free text in which a trigger obliges to one of the tags that begin with it."""
    if not tags or not triggers:
        raise ParameterError(field, f"{field} needs structures and triggers with the type structural_tag")
    rules = [
        "%llguidance {}",
        f"start: ({' | '.join(f'tag_{i}' for i in range(len(tags)))})* rest",
        "rest: TEXT",
        r"TEXT: /(.|\n)*/",
    ]
    for i, tag in enumerate(tags):
        trigger = next((t for t in triggers if t and tag.begin.startswith(t)), None)
        if trigger is None:
            raise ParameterError(field, f"{field}.structures[{i}].begin does not begin with one of the triggers")
        body = json.dumps(_OBJECT if tag.schema is None else tag.schema, ensure_ascii=False)
        rules.append(f"tag_{i}_head[lazy]: TEXT {_literal(trigger)}")
        rules.append(f"tag_{i}: tag_{i}_head {_literal(tag.begin[len(trigger) :])} %json {body} {_literal(tag.end)}")
    return "\n".join(rules)


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _closed(schema: Any) -> Any:
    """`schema` with additionalProperties false wherever an object names its properties and does not say."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {
        name: value if name in ("const", "enum", "default", "examples") else _closed(value)
        for name, value in schema.items()
    }
    if "properties" in schema or "patternProperties" in schema:
        closed.setdefault("additionalProperties", False)
    return closed
