"""200 JSON schemas of rising difficulty: 50 written by hand, each for a feature, and 150 made by a seeded generator."""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string", "maxLength": 24}
COUNT: Schema = {"type": "integer", "minimum": 0, "maximum": 1000}


def closed(required: bool = True, **properties: Any) -> Schema:
    """An object with these properties and no others."""
    schema: Schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return schema | ({"required": list(properties)} if required else {})


def array(items: Any, most: int = 3, least: int = 0) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


BY_HAND: list[Schema] = [
    {"type": "boolean"},
    {"type": "null"},
    COUNT,
    {"type": "number", "minimum": -1, "maximum": 1, "multipleOf": 0.001},
    TEXT,
    {"enum": ["red", "green", "blue"]},
    {"enum": [1, "two", None, True, {"three": [3]}]},
    {"const": {"fixed": [1, 2, 3]}},
    {"type": ["string", "null"], "maxLength": 10},
    {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
    {"type": "string", "pattern": "^(foo|bar)+$", "maxLength": 12},
    {"type": "string", "minLength": 5, "maxLength": 8},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "time"},
    {"type": "string", "format": "date-time"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "ipv4"},
    {"type": "string", "format": "email", "maxLength": 40},
    {"type": "string", "format": "duration"},
    {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 9},
    {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 700},
    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 10, "multipleOf": 0.25},
    closed(name=TEXT, age=COUNT),
    closed(required=False, a=TEXT, b=COUNT, c={"type": "boolean"}),
    closed(**{"a b": COUNT, 'quote"d': COUNT, "ünïcode": COUNT, "": COUNT}),
    array({"type": "boolean"}, most=5, least=2),
    array(array(COUNT)),
    {"type": "array", "prefixItems": [TEXT, COUNT], "items": False, "minItems": 2},
    {"type": "array", "prefixItems": [COUNT], "items": TEXT, "maxItems": 4},
    closed(point=closed(x=COUNT, y=COUNT), label=TEXT),
    {"anyOf": [closed(kind={"const": "circle"}, radius=COUNT), closed(kind={"const": "square"}, side=COUNT)]},
    {"oneOf": [closed(kind={"const": "a"}, a=COUNT), closed(kind={"const": "b"}, b=TEXT)]},
    {"oneOf": [{"type": "integer", "minimum": 0, "maximum": 99}, {"type": "string", "maxLength": 9}]},
    {"allOf": [{"type": "object", "properties": {"a": COUNT}, "required": ["a"]}, closed(a=COUNT, b=TEXT)]},
    {"$defs": {"id": {"type": "integer", "minimum": 1, "maximum": 9999}}, **closed(first={"$ref": "#/$defs/id"})},
    {"definitions": {"t": TEXT}, **closed(a={"$ref": "#/definitions/t"}, b={"$ref": "#/definitions/t"})},
    {
        "$defs": {"node": closed(value=COUNT, children=array({"$ref": "#/$defs/node"}, most=2))},
        "$ref": "#/$defs/node",
    },
    {
        "$defs": {"l": {"anyOf": [{"type": "null"}, closed(head=COUNT, tail={"$ref": "#/$defs/l"})]}},
        "$ref": "#/$defs/l",
    },
    {"type": "object", "additionalProperties": COUNT, "maxProperties": 3},
    {"type": "object", "additionalProperties": TEXT, "minProperties": 1, "maxProperties": 2},
    {
        "type": "object",
        "patternProperties": {"^x[a-z]{1,3}$": COUNT},
        "additionalProperties": False,
        "maxProperties": 3,
    },
    {"type": "object", "properties": {"id": COUNT}, "required": ["id"], "additionalProperties": {"type": "boolean"}},
    {"type": "object", "required": ["undeclared"], "additionalProperties": COUNT, "maxProperties": 2},
    closed(when={"type": "string", "format": "date-time"}, where={"type": "string", "format": "ipv4"}),
    closed(items=array(closed(sku={"type": "string", "pattern": "^[A-Z]{3}[0-9]{3}$"}, count=COUNT), least=1)),
    closed(
        status={"enum": ["open", "closed"]}, tags=array(TEXT), owner={"anyOf": [{"type": "null"}, closed(id=COUNT)]}
    ),
    closed(matrix=array(array(COUNT, most=2, least=2), most=2, least=2)),
    closed(a=closed(b=closed(c=closed(d=closed(e=closed(f=COUNT)))))),
    {"title": "with annotations", "description": "ignored", "examples": [1], "default": 3, **COUNT},
    closed(**{f"field{i}": {"type": "boolean"} for i in range(30)}),
]


def generated(seed: int, depth: int) -> Schema:
    """A schema of at most `depth` levels; the deeper, the more kinds of parts it may have."""
    return _any(random.Random(seed), depth)


def _any(rng: random.Random, depth: int) -> Schema:
    makers = [_scalar] if depth == 0 else [_object, _object, _array, _union, _map]
    return rng.choice(makers)(rng, depth)


def _part(rng: random.Random, depth: int) -> Schema:
    return _any(rng, depth - 1) if rng.random() < 0.6 else _scalar(rng, 0)


def _scalar(rng: random.Random, depth: int) -> Schema:
    low = rng.randrange(-500, 500)
    return rng.choice([
        {"type": "boolean"},
        {"type": "integer", "minimum": low, "maximum": low + rng.randrange(1000)},
        {"type": "number", "minimum": low, "maximum": low + 100, "multipleOf": rng.choice([0.1, 0.5, 0.01])},
        {"type": "string", "maxLength": rng.randrange(4, 30)},
        {"type": "string", "pattern": rng.choice(["^[a-z]{1,8}$", "^#[0-9a-f]{6}$", "^(yes|no)( please)?$", r"^\w+@\d$"])}
        | {"maxLength": 20},
        {"type": "string", "format": rng.choice(["date", "date-time", "uuid", "ipv4", "time"])},
        {"enum": rng.sample(["alpha", "beta", "gamma", 1, 2, None, False], 3)},
        {"type": [rng.choice(["integer", "boolean"]), "null"], "minimum": 0, "maximum": 99},
    ])  # fmt: skip


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(["id", "name", "kind", "size", "first-name", "größe", "a.b", "value", "next", "of"], 1 + depth)
    schema = closed(required=False, **{name: _part(rng, depth) for name in names})
    return schema | {"required": [name for name in names if rng.random() < 0.7]}


def _array(rng: random.Random, depth: int) -> Schema:
    least = rng.randrange(2)
    return array(_part(rng, depth), most=least + rng.randrange(1, 3), least=least)


def _union(rng: random.Random, depth: int) -> Schema:
    parts = [closed(kind={"const": kind}, data=_part(rng, depth)) for kind in rng.sample(["p", "q", "r", "s"], 2)]
    return {rng.choice(["anyOf", "oneOf"]): parts}


def _map(rng: random.Random, depth: int) -> Schema:
    return {"type": "object", "additionalProperties": _part(rng, depth), "maxProperties": rng.randrange(1, 3)}


SCHEMAS: list[Schema] = BY_HAND + [generated(i, i // 30) for i in range(150)]
"""Levels 0 to 4 of the generated ones, 30 each."""
