"""Chat messages as clients send them, checked field by field."""

from __future__ import annotations

import json
from collections.abc import Container
from typing import Any

from octavo.server.errors import ApiError, bad_request

_ROLES = ("system", "developer", "user", "assistant", "tool")
_ONLY_OF = {"tool_calls": "assistant", "reasoning_content": "assistant", "refusal": "assistant", "tool_call_id": "tool"}
_NOT_BUILT = ("audio", "function_call")
_KNOWN = frozenset({"role", "content", "name", *_ONLY_OF, *_NOT_BUILT})

MAX_CALLS = 128
"""Tool calls of one message."""


def chat_messages(messages: list[dict[str, Any]], ignored: list[str]) -> list[dict[str, Any]]:
    """The messages as `ChatFormat` takes them; unknown fields are added to `ignored`.

    Parts of type text are joined by newlines. A result that does not name its tool gets the name from its call.
    Raises ApiError 400 naming the message and the field for what cannot be honoured.
    """
    if not messages:
        raise bad_request("messages is empty: give at least one", "messages")
    checked = []
    names: dict[str, str] = {}  # id of a call -> its tool
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        entry = _message(message, where, ignored)
        for call in entry.get("tool_calls", ()):
            names[call["id"]] = call["function"]["name"]
        if entry["role"] == "tool" and entry["tool_call_id"] in names:
            entry.setdefault("name", names[entry["tool_call_id"]])
        checked.append(entry)
    return checked


def _message(message: dict[str, Any], where: str, ignored: list[str]) -> dict[str, Any]:
    role = message.get("role")
    if role == "function":
        raise _refused(f"{where}.role 'function' is not supported: give results with role tool")
    if not isinstance(role, str) or role not in _ROLES:
        raise bad_request(f"{where}.role must be one of {', '.join(_ROLES)}; got {role!r}", "messages")
    for field in _NOT_BUILT:
        if message.get(field) not in (None, []):
            instead = ": give tool_calls" if field == "function_call" else ""
            raise _refused(f"{where}.{field} is not supported{instead}")
    for field, owner in _ONLY_OF.items():
        if message.get(field) not in (None, []) and role != owner:
            raise bad_request(f"{where}.{field} is only for role {owner}; this message has role {role}", "messages")
    if message.get("refusal") is not None:
        raise _refused(f"{where}.refusal is not supported: give it as content")
    _name_unknown(message, _KNOWN, where, ignored)
    entry: dict[str, Any] = {"role": role}
    calls = message.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        raise bad_request(f"{where}.tool_calls must be a list", "messages")
    content = message.get("content")
    entry["content"] = None if content is None and calls else _text(content, where, ignored)
    for field in ("name", "reasoning_content"):
        if message.get(field) is not None:
            entry[field] = _string(message[field], f"{where}.{field}")
    if calls:
        if len(calls) > MAX_CALLS:
            raise bad_request(f"{where}.tool_calls has {len(calls)} calls; at most {MAX_CALLS} are read", "messages")
        entry["tool_calls"] = [_call(call, f"{where}.tool_calls[{j}]", ignored) for j, call in enumerate(calls)]
    if role == "tool":
        if message.get("tool_call_id") is None:
            raise bad_request(
                f"{where}.tool_call_id is required: the id of the call that this is the result of", "messages"
            )
        entry["tool_call_id"] = _string(message["tool_call_id"], f"{where}.tool_call_id")
    return entry


def _call(call: Any, where: str, ignored: list[str]) -> dict[str, Any]:
    if not isinstance(call, dict) or call.get("type", "function") != "function":
        raise bad_request(f"{where} must be of type function", "messages")
    function = call.get("function")
    if not isinstance(function, dict):
        raise bad_request(f"{where}.function is required: name and arguments", "messages")
    _name_unknown(call, ("id", "type", "function"), where, ignored)
    _name_unknown(function, ("name", "arguments"), f"{where}.function", ignored)
    name = _string(function.get("name"), f"{where}.function.name")
    arguments = _string(function.get("arguments") or "{}", f"{where}.function.arguments")
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise bad_request(
            f"{where}.function.arguments must be a JSON object as text; got {arguments[:80]!r}", "messages"
        )
    id = _string(call.get("id"), f"{where}.id")
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _string(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise bad_request(f"{where} must be a string", "messages")
    return value


def _refused(message: str) -> ApiError:
    return bad_request(message, "messages", "unsupported_parameter")


def _name_unknown(given: dict[str, Any], known: Container[str], where: str, ignored: list[str]) -> None:
    ignored.extend(f"{where}.{name}" for name, value in given.items() if name not in known and value not in (None, []))


def _text(content: Any, where: str, ignored: list[str]) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(f"{where}.content must be a string or a list of parts", "messages")
    texts = []
    for j, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise _refused(f"{where}.content[{j}]: parts of type {kind!r} are not supported, only text")
        _name_unknown(part, ("type", "text"), f"{where}.content[{j}]", ignored)
        texts.append(_string(part.get("text"), f"{where}.content[{j}].text"))
    return "\n".join(texts)
