"""Chat messages as clients send them, checked and in the form that templates take."""

from __future__ import annotations

from typing import Any

from octavo.server.errors import bad_request

_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
_NOT_BUILT = ("audio", "function_call", "tool_call_id", "tool_calls")


def chat_messages(messages: list[dict[str, Any]], ignored: list[str]) -> list[dict[str, str]]:
    """Role, content and name of each message; unknown fields are added to `ignored`.

    Parts of type text are joined by newlines; a developer message is a system message under its newer name.
    Raises ApiError 400 for what cannot be honoured.
    """
    if not messages:
        raise bad_request("messages is empty: give at least one", "messages")
    checked = []
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        role = message.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise bad_request(f"{where}.role must be one of {', '.join(sorted(_ROLES))}; got {role!r}", "messages")
        if role in ("tool", "function"):
            raise bad_request(f"{where}.role {role!r} is not supported yet", "messages", "unsupported_parameter")
        for field in _NOT_BUILT:
            if message.get(field) not in (None, []):
                raise bad_request(f"{where}.{field} is not supported yet", "messages", "unsupported_parameter")
        text = _text(message.get("content"), where)
        entry = {"role": "system" if role == "developer" else role, "content": text}
        name = message.get("name")
        if name is not None:
            if not isinstance(name, str):
                raise bad_request(f"{where}.name must be a string", "messages")
            entry["name"] = name
        known = ("role", "content", "name", "refusal", *_NOT_BUILT)
        ignored.extend(f"{where}.{field}" for field in message if field not in known)
        if message.get("refusal") is not None:
            raise bad_request(f"{where}.refusal is not supported yet", "messages", "unsupported_parameter")
        checked.append(entry)
    return checked


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(f"{where}.content must be a string or a list of parts", "messages")
    texts = []
    for j, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise bad_request(
                f"{where}.content[{j}]: parts of type {kind!r} are not supported, only text",
                "messages",
                "unsupported_parameter",
            )
        if not isinstance(part.get("text"), str):
            raise bad_request(f"{where}.content[{j}].text must be a string", "messages")
        texts.append(part["text"])
    return "\n".join(texts)
