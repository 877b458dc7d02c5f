"""Messages as Ollama's clients send them, in the form of OpenAI's, which the path of chat checks."""

from __future__ import annotations

import json
from typing import Any

from octavo.server.errors import bad_request

_KNOWN = frozenset({"role", "content", "thinking", "images", "tool_calls", "tool_name", "tool_call_id", "name"})


def as_chat(messages: list[dict[str, Any]], ignored: list[str]) -> list[dict[str, Any]]:
    """Results that name no call belong to the first call of their tool that has none. Unknown members are added to
    `ignored`. Raises ApiError 400 naming the message for what cannot be honoured."""
    told: list[dict[str, Any]] = []
    open_calls: list[tuple[str, str]] = []  # tool, id; of those without a result
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        ignored.extend(f"{where}.{name}" for name, value in message.items() if name not in _KNOWN and value is not None)
        if message.get("images"):
            raise bad_request(f"{where}.images: the model takes text", "messages", "unsupported_parameter")
        entry: dict[str, Any] = {"role": message.get("role"), "content": message.get("content") or ""}
        if message.get("thinking"):
            entry["reasoning_content"] = message["thinking"]
        calls = message.get("tool_calls")
        if calls:
            if not isinstance(calls, list):
                raise bad_request(f"{where}.tool_calls must be a list", "messages")
            entry["tool_calls"] = [
                _call(call, f"{where}.tool_calls[{j}]", f"{i}_{j}", ignored) for j, call in enumerate(calls)
            ]  # fmt: skip
            open_calls += [(call["function"]["name"], call["id"]) for call in entry["tool_calls"]]
        if message.get("role") == "tool":
            _answer(entry, message, open_calls)
        told.append(entry)
    return told


def _answer(entry: dict[str, Any], message: dict[str, Any], open_calls: list[tuple[str, str]]) -> None:
    """Say which call a result is of."""
    name, id = message.get("tool_name", message.get("name")), message.get("tool_call_id")
    if id is None:
        id = next((own for tool, own in open_calls if name in (None, tool)), "call")
    open_calls[:] = [(tool, own) for tool, own in open_calls if own != id]
    entry["tool_call_id"] = id
    if name is not None:
        entry["name"] = name


def _call(call: Any, where: str, number: str, ignored: list[str]) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad_request(f"{where}.function is required: name and arguments", "messages")
    arguments = function.get("arguments") or {}
    if not isinstance(arguments, dict):
        raise bad_request(f"{where}.function.arguments must be a JSON object", "messages")
    ignored.extend(f"{where}.{name}" for name in call if name not in ("id", "type", "function"))
    ignored.extend(f"{where}.function.{name}" for name in function if name not in ("name", "arguments", "index"))
    return {
        "id": call.get("id") or f"call_{number}",
        "type": "function",
        "function": {"name": function["name"], "arguments": json.dumps(arguments, ensure_ascii=False)},
    }
