"""Tools for models whose template knows none: told in the system message, called in Hermes' form, answered by the user."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.text.tools.hermes import END, START
from octavo.text.tools.offer import Tool

_INSTRUCTION = """\
You can call these functions. Each line is one of them, as JSON with its name, what it does and the JSON schema of its \
arguments:
{tools}
To call a function, answer with its name and arguments as JSON between {start} and {end}, and nothing else:
{start}
{{"name": "the function's name", "arguments": {{"an argument": "its value"}}}}
{end}
The result will be given to you. Where no function helps, answer as usual."""


def instruct(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool], *, system: bool = True
) -> list[dict[str, Any]]:
    """The messages for a template that knows neither tools nor calls nor results.

    system: the instruction is a system message, or part of one; otherwise part of the first message of the user.
    """
    turns = _turns(messages)
    if not tools:
        return turns
    lines = "\n".join(json.dumps(_card(tool), ensure_ascii=False) for tool in tools)
    instruction = _INSTRUCTION.format(tools=lines, start=START, end=END)
    role = "system" if system else "user"
    if turns and turns[0]["role"] == role:
        content = turns[0].get("content") or ""
        text = f"{content}\n\n{instruction}" if system else f"{instruction}\n\n{content}"
        return [{**turns[0], "content": text}, *turns[1:]]
    return [{"role": role, "content": instruction}, *turns]


def _turns(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages without tools; the results of parallel calls are one turn."""
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
