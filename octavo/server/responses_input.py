"""Input items of the Responses API, checked, and the chat messages that they are.

Source: the input items of OpenAI's Python client. Reasoning belongs to the assistant's message behind it; a message of
the assistant and the calls behind it are one message of a chat.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from typing import Any

from octavo.server.errors import ApiError, bad_request
from octavo.server.messages import chat_messages

_KNOWN = {
    "message": {"type", "role", "content", "id", "status", "phase"},
    "function_call": {"type", "call_id", "name", "arguments", "id", "status"},
    "function_call_output": {"type", "call_id", "output", "id", "status"},
    "reasoning": {"type", "summary", "content", "encrypted_content", "id", "status"},
}
_PARTS = {
    "input_text": {"type", "text"},
    "output_text": {"type", "text", "annotations", "logprobs", "parsed"},
    "reasoning_text": {"type", "text"},
    "summary_text": {"type", "text"},
}

Item = dict[str, Any]


def read_items(given: str | Sequence[Any], ignored: list[str]) -> list[Item]:
    """The items of a request; a text is a message of the user. Unknown members are added to `ignored`. Raises ApiError 400
    naming the item and its member for what cannot be honoured."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": given}]}]
    if not given:
        raise bad_request("input is empty: give a text, or at least one item", "input")
    return [_item(item, f"input[{i}]", ignored) for i, item in enumerate(given)]


def as_messages(context: Sequence[Item], items: Sequence[Item], instructions: str | None) -> list[dict[str, Any]]:
    """The messages of a conversation: of the responses before, `context`, and of a request's own items. Raises ApiError 400
    naming the item."""
    told: list[dict[str, Any]] = []
    origins: list[int] = []  # of each message, its first item as an index into `items`
    if instructions is not None:
        told.append({"role": "system", "content": instructions})
        origins.append(0)
    open_turn = False  # the last message is the assistant's, and may get calls
    for i, item in enumerate([*context, *items]):
        kind, role = item["type"], item.get("role")
        if kind == "function_call_output":
            told.append({"role": "tool", "tool_call_id": item["call_id"], "content": _text(item["output"])})
            open_turn = False
        elif kind == "message" and role != "assistant":
            told.append({"role": role, "content": _text(item["content"])})
            open_turn = False
        else:
            turn = told[-1] if open_turn else None
            if turn is None or not _follows(turn, kind):
                turn = {"role": "assistant", "content": None}
                told.append(turn)
            _add(turn, item)
            open_turn = True
        origins.extend([max(0, i - len(context))] * (len(told) - len(origins)))
    for turn in told:
        if turn["content"] is None and "tool_calls" not in turn:  # reasoning that led to nothing
            turn["content"] = ""
    try:
        return chat_messages(told, [])
    except ApiError as e:
        message = re.sub(r"^messages\[(\d+)\]", lambda found: f"input[{origins[int(found[1])]}]", e.message)
        raise bad_request(message, "input", e.code) from None


def encoded(reasoning: str) -> str:
    """`encrypted_content` of a reasoning item: opaque, not secret."""
    return base64.b64encode(reasoning.encode()).decode()


def _follows(turn: dict[str, Any], kind: str) -> bool:
    """Whether an item of this kind belongs to the assistant's message."""
    if kind == "reasoning":
        return False
    return kind == "function_call" or (turn["content"] is None and "tool_calls" not in turn)


def _add(turn: dict[str, Any], item: Item) -> None:
    if item["type"] == "reasoning":
        turn["reasoning_content"] = _reasoning(item)
    elif item["type"] == "message":
        turn["content"] = _text(item["content"])
    else:
        function = {"name": item["name"], "arguments": item["arguments"]}
        turn.setdefault("tool_calls", []).append({"id": item["call_id"], "type": "function", "function": function})


def _reasoning(item: Item) -> str:
    if item.get("content") or not item.get("encrypted_content"):
        return _text(item.get("content") or item["summary"])
    return base64.b64decode(item["encrypted_content"]).decode()


def _text(content: str | list[Item]) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _item(item: Any, where: str, ignored: list[str]) -> Item:
    if not isinstance(item, dict):
        raise bad_request(f"{where} must be an item, a JSON object", "input")
    kind = item.get("type", "message" if "role" in item else None)
    if not isinstance(kind, str) or kind not in _KNOWN:
        instead = ": give the item itself, or previous_response_id" if kind == "item_reference" else ""
        raise _refused(f"{where}.type {kind!r:.80} is not supported{instead}")
    ignored.extend(f"{where}.{name}" for name, value in item.items() if name not in _KNOWN[kind] and value is not None)
    checked: Item = {name: item[name] for name in ("id", "status") if item.get(name) is not None}
    checked["type"] = kind
    if kind == "message":
        role = item.get("role")
        if role not in ("system", "developer", "user", "assistant"):
            raise bad_request(
                f"{where}.role must be one of system, developer, user, assistant; got {role!r:.80}", "input"
            )
        own = "output_text" if role == "assistant" else "input_text"
        return checked | {"role": role, "content": _content(item.get("content"), f"{where}.content", ignored, own)}
    if kind == "reasoning":
        return checked | _checked_reasoning(item, where, ignored)
    checked["call_id"] = _string(item, "call_id", where)
    if kind == "function_call":
        return checked | {name: _string(item, name, where) for name in ("name", "arguments")}
    output = item.get("output")
    return checked | {
        "output": output if isinstance(output, str) else _content(output, f"{where}.output", ignored, "input_text")
    }


def _checked_reasoning(item: Item, where: str, ignored: list[str]) -> Item:
    checked: Item = {"summary": _content(item.get("summary") or [], f"{where}.summary", ignored, "summary_text")}
    if item.get("content"):
        checked["content"] = _content(item["content"], f"{where}.content", ignored, "reasoning_text")
    elif item.get("encrypted_content"):
        opaque = _string(item, "encrypted_content", where)
        try:
            base64.b64decode(opaque, validate=True).decode()
        except ValueError:
            raise bad_request(f"{where}.encrypted_content was not written by this server", "input") from None
        checked["encrypted_content"] = opaque
    return checked


def _content(content: Any, where: str, ignored: list[str], own: str) -> list[Item]:
    """Parts of text. own: the type that a text by itself stands for."""
    if isinstance(content, str):
        return [{"type": own, "text": content} | _beside(own)]
    if not isinstance(content, list):
        raise bad_request(f"{where} must be a text or a list of parts", "input")
    parts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str) or kind not in _PARTS:
            raise _refused(f"{where}[{i}]: parts of type {kind!r:.80} are not supported, only text")
        ignored.extend(f"{where}[{i}].{name}" for name in part if name not in _PARTS[kind])
        parts.append({"type": kind, "text": _string(part, "text", f"{where}[{i}]")} | _beside(kind))
    return parts


def _beside(kind: str) -> Item:
    return {"annotations": []} if kind == "output_text" else {}


def _string(item: Item, name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise bad_request(f"{where}.{name} must be a string", "input")
    return value


def _refused(message: str) -> ApiError:
    return bad_request(message, "input", "unsupported_parameter")
