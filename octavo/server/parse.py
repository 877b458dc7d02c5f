"""From a request's body to its schema: every field is honoured, refused by name, or listed as unknown."""

from __future__ import annotations

from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from octavo.server.errors import bad_request
from octavo.server.fields import LABELS, GenerationRequest

T = TypeVar("T", bound=GenerationRequest)


class Parsed(NamedTuple, Generic[T]):
    request: T
    ignored: list[str]  # unknown fields


def parse(body: bytes, schema: type[T], strict: bool) -> Parsed[T]:
    """Raises ApiError 400 naming the field for anything that cannot be honoured."""
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise bad_request(f"the body is not valid JSON: {e}") from None
    except RecursionError:
        raise bad_request("the body is nested too deeply") from None
    if not isinstance(fields, dict):
        raise bad_request("the body must be a JSON object")
    known, unknown = {}, []
    for name, value in fields.items():
        if name in schema.__struct_fields__:
            known[name] = value
        elif name in schema.NOT_BUILT:
            if value is not None and not any(_equal(value, neutral) for neutral in schema.NOT_BUILT[name]):
                raise bad_request(f"{name} is not supported yet", name, "unsupported_parameter")
        elif name not in LABELS:
            unknown.append(name)
    if unknown and strict:
        raise bad_request(f"unknown field: {', '.join(unknown)}", unknown[0], "unknown_parameter")
    try:
        request = msgspec.convert(known, schema)
    except msgspec.ValidationError as e:
        raise _validation_error(e) from None
    request.check_stream_options()
    return Parsed(request, unknown)


def _equal(value: Any, neutral: Any) -> bool:
    return (type(value) is type(neutral) and bool(value == neutral)) or (value == neutral and type(value) is float)


def _validation_error(error: msgspec.ValidationError) -> Exception:
    """`Expected `int`, got `str` - at `$.max_tokens``, with the field named first."""
    text = str(error)
    what, _, where = text.partition(" - at `$.")
    if where:
        path = where.rstrip("`")
        return bad_request(f"{path}: {what.replace('`', '')}", path.split(".")[0].split("[")[0])
    if "missing required field" in text:
        name = text.rsplit("field `", 1)[1].rstrip("`")
        return bad_request(f"{name} is required", name, "missing_required_parameter")
    return bad_request(text)
