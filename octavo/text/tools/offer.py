"""The tools that a request offers and how freely the model may use them, in OpenAI's form."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from octavo.request import ParameterError

MAX_TOOLS = 128
MAX_NESTING = 100
"""Levels of a schema. What reads JSON here gives up at several hundred."""
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True)
class Tool:
    name: str
    schema: dict[str, Any]  # of its parameters
    strict: bool
    given: dict[str, Any]  # as the client wrote it, for the template


@dataclass(frozen=True)
class Offer:
    """`tools` are shown to the model; it may call the `allowed` of them."""

    tools: tuple[Tool, ...] = ()
    allowed: tuple[Tool, ...] = ()
    mode: Literal["none", "auto", "required"] = "none"
    parallel: bool = True

    @property
    def guided(self) -> bool:
        """Whether a grammar must see to it that the answer is what was asked for."""
        if self.mode == "none":
            return False
        partly = len(self.allowed) < len(self.tools)
        return self.mode == "required" or not self.parallel or partly or any(tool.strict for tool in self.allowed)


def read_offer(tools: Any, choice: Any = None, parallel: bool | None = None) -> Offer:
    """Raises ParameterError naming the field at fault."""
    offered = _read_tools(tools or ())
    if not offered:
        if choice not in (None, "none", "auto"):
            raise ParameterError("tool_choice", "tool_choice needs tools")
        return Offer()
    mode, allowed = _read_choice("auto" if choice is None else choice, offered)
    return Offer(() if mode == "none" else offered, allowed, mode, parallel is not False)


def _read_tools(tools: Any) -> tuple[Tool, ...]:
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise ParameterError("tools", f"tools must be a list, got {tools!r:.80}")
    if len(tools) > MAX_TOOLS:
        raise ParameterError("tools", f"tools has {len(tools)} tools; at most {MAX_TOOLS} are read")
    offered = tuple(_read_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools))
    names = [tool.name for tool in offered]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise ParameterError("tools", f"tools[{i}].function.name {name!r} is there twice")
    return offered


def _read_tool(tool: Any, where: str) -> Tool:
    if not isinstance(tool, dict) or tool.get("type", "function") != "function":
        kind = tool.get("type") if isinstance(tool, dict) else tool
        raise ParameterError("tools", f"{where} must be of type function, got {kind!r:.80}")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise ParameterError("tools", f"{where}.function is required: name, description, parameters")
    name, schema, strict = (function.get(key) for key in ("name", "parameters", "strict"))
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ParameterError(
            "tools",
            f"{where}.function.name must be 1 to 64 letters, digits, underscores, dots or dashes; got {name!r:.80}",
        )
    if not isinstance(function.get("description"), str | None):
        raise ParameterError("tools", f"{where}.function.description must be a text")
    if not isinstance(schema, dict | None) or (schema or {}).get("type", "object") != "object":
        raise ParameterError(
            "tools", f"{where}.function.parameters must be a JSON schema of an object, got {schema!r:.80}"
        )
    if _depth(schema) > MAX_NESTING:
        raise ParameterError("tools", f"{where}.function.parameters is nested deeper than {MAX_NESTING} levels")
    if not isinstance(strict, bool | None):
        raise ParameterError("tools", f"{where}.function.strict must be true or false, got {strict!r:.80}")
    for field in (*tool, *function):
        if field not in ("type", "function", "name", "description", "parameters", "strict"):
            raise ParameterError("tools", f"{where} has {field!r:.80}, which is not known")
    return Tool(name, schema or {"type": "object", "properties": {}}, bool(strict), tool)


def _depth(value: Any) -> int:
    """Levels of lists and objects."""
    depth, level = 0, [value]
    while level := [v for v in level if isinstance(v, dict | list)]:
        depth += 1
        level = [item for v in level for item in (v.values() if isinstance(v, dict) else v)]
    return depth


def _read_choice(choice: Any, tools: tuple[Tool, ...]) -> tuple[Literal["none", "auto", "required"], tuple[Tool, ...]]:
    if choice in ("none", "auto", "required"):
        return choice, () if choice == "none" else tools
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "function":
        return "required", _named([choice], tools)
    if kind == "allowed_tools":
        allowed = choice.get("allowed_tools")
        mode = allowed.get("mode") if isinstance(allowed, dict) else None
        named = allowed.get("tools") if isinstance(allowed, dict) else None
        if mode not in ("auto", "required") or not isinstance(named, list) or not named:
            raise ParameterError("tool_choice", "tool_choice.allowed_tools needs a mode, auto or required, and tools")
        return mode, _named(named, tools)
    raise ParameterError(
        "tool_choice", f"tool_choice must be none, auto, required, or name a function; got {choice!r:.80}"
    )


def _named(references: list[Any], tools: tuple[Tool, ...]) -> tuple[Tool, ...]:
    by_name = {tool.name: tool for tool in tools}
    found = {}
    for reference in references:
        function = reference.get("function") if isinstance(reference, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or name not in by_name:
            raise ParameterError("tool_choice", f"tool_choice names {name!r:.80}; tools has {', '.join(by_name)}")
        found[name] = by_name[name]
    return tuple(found.values())
