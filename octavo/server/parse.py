"""From a request's body to its schema: every field is honoured, refused by name, or listed as unknown."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from octavo.server.errors import ApiError, bad_request
from octavo.server.fields import RequestBody

T = TypeVar("T", bound=RequestBody)
C = TypeVar("C")

MAX_DIGITS = 400
"""Of a whole number that is looked at to name its field: float64 ends at 10^308."""

MAX_IGNORED = 2000
"""Characters of the header that names ignored fields: clients refuse large ones."""


class Parsed(NamedTuple, Generic[T]):
    request: T
    ignored: list[str]  # unknown fields


def parse(body: bytes, schema: type[T], strict: bool) -> Parsed[T]:
    """Raises ApiError 400 naming the field for anything that cannot be honoured."""
    return checked(decode(body), schema, strict)


def checked(fields: Mapping[str, Any], schema: type[T], strict: bool, *, as_texts: bool = False) -> Parsed[T]:
    """The same of members. as_texts: numbers and truth values are written as texts."""
    known: dict[str, Any] = {}
    unknown = []
    for name, value in fields.items():
        target = schema.ALIASES.get(name, name)
        if target in schema.__struct_fields__:
            if target in known:
                raise bad_request(f"{target} is given twice, once as {name}", name)
            known[target] = value
        elif name in schema.REFUSED:
            refused = schema.REFUSED[name]
            if value is not None and not any(_equal(value, neutral) for neutral in refused.neutral):
                raise bad_request(f"{name} is not supported: {refused.why}", name, "unsupported_parameter")
        else:
            unknown.append(name)
    if unknown and strict:
        raise bad_request(f"unknown field: {', '.join(unknown)}", unknown[0], "unknown_parameter")
    try:
        request = msgspec.convert(known, schema, strict=False) if as_texts else convert(known, schema)
    except msgspec.ValidationError as e:
        raise _validation_error(e) from None
    request.check()
    return Parsed(request, unknown)


def convert(value: Any, kind: type[C]) -> C:
    """`msgspec.convert`, to which 2.0 is a whole number as it is in JSON. Raises msgspec.ValidationError."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as e:
        try:
            value = _with_whole_numbers(value)
        except RecursionError:
            raise e from None
        return msgspec.convert(value, kind)


def _with_whole_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _with_whole_numbers(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_with_whole_numbers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value


def ignored_header(names: list[str]) -> dict[str, str]:
    """The header that names ignored fields, whatever their names: printable ASCII of bounded length. None: no header."""
    text = ", ".join(names)[: MAX_IGNORED + 1].encode("unicode_escape").decode()
    return {"x-octavo-ignored": text if len(text) <= MAX_IGNORED else text[:MAX_IGNORED] + "..."} if names else {}


def decode(body: bytes) -> dict[str, Any]:
    """The members of a JSON object. Raises ApiError 400, which names the member at fault where there is one."""
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise _fault_in(body) or bad_request(f"the body is not valid JSON: {e}") from None
    except RecursionError:
        name = _deepest(body)
        where = "the body" if name is None else name
        raise bad_request(f"{where} is nested too deeply", name) from None
    if not isinstance(fields, dict):
        raise bad_request("the body must be a JSON object")
    return fields


def _fault_in(body: bytes) -> ApiError | None:
    """The error of the member that has a number out of range or bytes that are no UTF-8; None: it is something else."""
    try:
        fields = json.loads(body.decode("utf-8", "surrogateescape"), parse_constant=_no_constant, parse_int=_whole)
    except (ValueError, RecursionError):
        return None
    for name, value in fields.items() if isinstance(fields, dict) else ():
        text = json.dumps([name, value], ensure_ascii=False)
        if "Infinity" in text and _has_infinity(value):
            return bad_request(f"{name} has a number out of range", name)
        if re.search("[\ud800-\udfff]", text):
            shown = name.encode("utf-8", "replace").decode()
            return bad_request(f"{shown} is not valid Unicode", shown)
    return None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _whole(digits: str) -> int | float:
    return int(digits) if len(digits) <= MAX_DIGITS else float("inf")


def _has_infinity(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_infinity, value.values()))
    if isinstance(value, list):
        return any(map(_has_infinity, value))
    return isinstance(value, float) and value in (float("inf"), float("-inf"))


def _deepest(body: bytes) -> str | None:
    """The member of a JSON object within which its nesting is first too deep."""
    depth, name, last = 0, None, b""
    for found in re.finditer(rb'"(?:[^"\\]|\\.)*"|[\[\]{}:]', body):
        token = found.group()
        if token in b"[{":
            depth += 1
            if depth > 256 and name is not None:
                try:
                    return str(json.loads(name))
                except ValueError:
                    return None
        elif token in b"]}":
            depth -= 1
        elif token == b":" and depth == 1:
            name = last
        last = token
    return None


def _equal(value: Any, neutral: Any) -> bool:
    return (type(value) is type(neutral) and bool(value == neutral)) or (value == neutral and type(value) is float)


def _validation_error(error: msgspec.ValidationError) -> ApiError:
    """`Expected `int`, got `str` - at `$.max_tokens``, with the field named first."""
    text = str(error)
    what, _, where = text.replace(" - at `key` in `$.", " (a key) - at `$.").partition(" - at `$.")
    if where:
        path = where.rstrip("`")
        return bad_request(f"{path}: {what.replace('`', '')}", path.split(".")[0].split("[")[0])
    if "missing required field" in text:
        name = text.rsplit("field `", 1)[1].rstrip("`")
        return bad_request(f"{name} is required", name, "missing_required_parameter")
    return bad_request(text)
