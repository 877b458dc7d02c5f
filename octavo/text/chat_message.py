"""Chat messages in OpenAI's form, as templates of Hugging Face models take them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from octavo.text.template import ChatTemplateError

_ASKS_FOR_NONE = re.compile(r"content['\"\]]* is (not )?none")


class Arguments(dict[str, Any]):
    """Arguments of a call: a mapping for templates that read it, its JSON text for those that print or join it."""

    def __init__(self, text: str, value: dict[str, Any]) -> None:
        super().__init__(value)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: str) -> str:
        return self._text + other

    def __radd__(self, other: str) -> str:
        return other + self._text


def for_template(message: Any, template: str) -> dict[str, Any]:
    """One message. Parts of type text are joined by newlines. Raises ChatTemplateError for what no template takes."""
    if not isinstance(message, Mapping):
        raise ChatTemplateError(f'a message is {{"role": ..., "content": ...}}; got {message!r:.80}')
    told = dict(message)
    content = message.get("content")
    if isinstance(content, list):
        told["content"] = _joined(content)
    elif content is None and not _ASKS_FOR_NONE.search(template):
        told["content"] = ""
    if message.get("role") == "developer" and "developer" not in template:
        told["role"] = "system"
    calls = message.get("tool_calls")
    if calls:
        told["tool_calls"] = [_call(call) for call in calls]
    reasoning = told.pop("reasoning_content", None)
    if reasoning is not None:
        told["reasoning_content"] = reasoning
        if "message.thinking" in template:
            told["thinking"] = reasoning
    return told


def _joined(parts: list[Any]) -> str:
    texts = []
    for part in parts:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise ChatTemplateError(f"content parts must be of type text; got {kind!r}")
        texts.append(part["text"])
    return "\n".join(texts)


def _call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ChatTemplateError(
            f'a tool call is {{"id": ..., "function": {{"name": ..., "arguments": ...}}}}; got {call!r:.80}'
        )
    arguments = function.get("arguments")
    if isinstance(arguments, Mapping):
        text = json.dumps(arguments, ensure_ascii=False)
    else:
        text = arguments if isinstance(arguments, str) and arguments.strip() else "{}"
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ChatTemplateError(
            f"the arguments of the call of {function['name']} must be a JSON object; got {text!r:.80}"
        )
    return {**call, "type": "function", "function": {**function, "arguments": Arguments(text, value)}}
