"""Tools for templates that do not show them: told in the system message, called in a form that the message describes.

Templates that know neither calls nor results get them as turns of the assistant, in Hermes' form, and of the user.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.text.tools.hermes import END, START
from octavo.text.tools.offer import Tool
from octavo.text.tools.shape import Shape

_INSTRUCTION = """\
You can call these functions. Each line is one of them, as JSON with its name, what it does and the JSON schema of its \
arguments:
{tools}
To call a function, answer with its name and arguments as JSON in this form, and nothing else:
{example}
The result will be given to you. Where no function helps, answer as usual."""


def instruct(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool], shape: Shape, *, system: bool = True
) -> list[dict[str, Any]]:
    """The messages with the tools, and with the form of their calls.

    system: the instruction is a system message, or part of one; otherwise part of the first message of the user.
    """
    lines = "\n".join(json.dumps(_card(tool), ensure_ascii=False) for tool in tools)
    call = shape.before.replace("NAME", "the function's name") + '{"an argument": "its value"}' + shape.after
    instruction = _INSTRUCTION.format(tools=lines, example=shape.open + call + shape.close)
    told = [dict(message) for message in messages]
    role = "system" if system else "user"
    if not told or told[0]["role"] != role:
        return [{"role": role, "content": instruction}, *told]
    content = told[0].get("content") or ""
    told[0]["content"] = f"{content}\n\n{instruction}" if system else f"{instruction}\n\n{content}"
    return told


def as_turns(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages without calls and results; the results of parallel calls are one turn."""
    turns: list[dict[str, Any]] = []
    for before, message in zip([None, *messages], messages, strict=False):
        told = _told(message)
        if before is not None and before["role"] == message["role"] == "tool":
            turns[-1]["content"] += "\n" + told["content"]
        else:
            turns.append(told)
    return turns


def _card(tool: Tool) -> dict[str, Any]:
    function = tool.given["function"]
    shown = {key: function[key] for key in ("name", "description") if function.get(key)}
    return {**shown, "parameters": tool.schema}


def _told(message: Mapping[str, Any]) -> dict[str, Any]:
    told = {key: value for key, value in message.items() if key not in ("tool_calls", "tool_call_id")}
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = [
        f'{START}\n{{"name": {json.dumps(call["function"]["name"])}, "arguments": {call["function"]["arguments"]}}}\n{END}'
        for call in message.get("tool_calls") or ()
    ]
    if calls:
        told["content"] = "\n".join([told["content"], *calls] if told.get("content") else calls)
    return told
