"""Messages, system prompt and tools of Anthropic's API, checked block by block, in the form of chat."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NamedTuple

from octavo.server.errors import ApiError, bad_request
from octavo.server.messages import MAX_CALLS

Block = dict[str, Any]

BILLING = "x-anthropic-billing-header:"
"""Claude Code begins its system prompt with a block about itself, other in every request: no prefix would be equal."""

SECONDS = {"5m": 300, "1h": 3600}
"""Times to live of a cache_control."""

_KEYS = {
    "text": ("text", "citations"),
    "thinking": ("thinking", "signature"),
    "tool_use": ("id", "name", "input", "caller", "toolset_name"),
    "tool_result": ("tool_use_id", "content", "is_error", "toolset_name"),
}
"""Blocks that are read, and their members beside type and cache_control."""

_ROLES = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "tool_use"),
    "system": ("text",),
}
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "citations": ([],),
    "caller": ({"type": "direct"},),
    "toolset_name": (),
    "allowed_callers": ([], ["direct"]),
    "defer_loading": (False,),
    "eager_input_streaming": (True,),
    "input_examples": ([],),
}
"""Members that cannot be honoured -> the values beside null that ask for nothing."""

_TOOL_KEYS = (
    "type", "name", "description", "input_schema", "strict", "cache_control", "allowed_callers", "defer_loading",
    "eager_input_streaming", "input_examples",
)  # fmt: skip


class Breakpoint(NamedTuple):
    """A cache_control: what the prompt has up to here is worth keeping."""

    ttl: str
    message: int | None  # in `Conversation.messages`; None: the tools
    block: int = 0


class Turn(NamedTuple):
    role: str
    blocks: list[Block]


class Conversation(NamedTuple):
    """Checked. The system prompt is the first turn."""

    turns: list[Turn]
    tools: list[dict[str, Any]]  # in the form of chat
    breakpoints: list[Breakpoint]  # in the order of the prompt
    continues: bool  # the answer goes on in the last turn


def read_conversation(
    messages: list[dict[str, Any]],
    system: str | list[Block] | None,
    tools: list[dict[str, Any]] | None,
    cache_control: Any,
    ignored: list[str],
) -> Conversation:
    """Unknown members are added to `ignored`. Raises ApiError 400 naming the block."""
    found: list[Breakpoint] = []
    offered = [_tool(tool, f"tools[{i}]", found, ignored) for i, tool in enumerate(tools or ())]
    turns = []
    if system:
        blocks = _blocks("system", system, "system", _Reader(found, ignored, 0))
        turns.append(Turn("system", blocks))
    if not messages:
        raise bad_request("messages is empty: give at least one", "messages")
    calls: set[str] = set()
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        role = message.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise bad_request(f"{where}.role must be user, assistant or system; got {role!r:.80}", "messages")
        ignored.extend(f"{where}.{name}" for name in message if name not in ("role", "content"))
        blocks = _blocks(role, message.get("content"), f"{where}.content", _Reader(found, ignored, len(turns)))
        for j, block in enumerate(blocks):
            if block["type"] == "tool_use":
                calls.add(block["id"])
            elif block["type"] == "tool_result" and block["tool_use_id"] not in calls:
                raise bad_request(
                    f"{where}.content[{j}].tool_use_id is {block['tool_use_id']!r:.80}, which is the id of no tool_use "
                    "block before it", "messages",
                )  # fmt: skip
        turns.append(Turn(role, blocks))
    last = turns[-1]
    if any(block["type"] == "tool_use" for block in last.blocks):
        raise bad_request(
            f"messages[{len(messages) - 1}] has a tool_use block without a tool_result after it", "messages"
        )
    if cache_control is not None:
        ttl = _ttl(cache_control, "cache_control", "cache_control", ignored)
        found.append(Breakpoint(ttl, len(turns) - 1, max(0, len(last.blocks) - 1)))
    return Conversation(turns, offered, found, last.role == "assistant")


def chat_form(turns: Iterable[Turn]) -> list[dict[str, Any]]:
    """The messages of chat: adjacent turns of one role are one, results of tools are messages of their own."""
    told: list[dict[str, Any]] = []

    def entry(role: str) -> dict[str, Any]:
        if not told or told[-1]["role"] != role:
            told.append({"role": role, "content": []})
        return told[-1]

    for role, blocks in turns:
        if not blocks:
            entry(role)
        for block in blocks:
            if block["type"] == "text":
                entry(role)["content"].append({"type": "text", "text": block["text"]})
            elif block["type"] == "thinking":
                own = entry(role)
                before = own.get("reasoning_content")
                own["reasoning_content"] = block["thinking"] if before is None else f"{before}\n{block['thinking']}"
            elif block["type"] == "tool_use":
                function = {"name": block["name"], "arguments": block["arguments"]}
                calls = entry(role).setdefault("tool_calls", [])
                calls.append({"id": block["id"], "type": "function", "function": function})
            else:
                told.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": block["content"]})
    for own in told:
        if not own["content"] and own.get("tool_calls"):
            own["content"] = None
    return told


class _Reader(NamedTuple):
    """Where the findings of one turn go."""

    breakpoints: list[Breakpoint]
    ignored: list[str]
    turn: int


def _blocks(role: str, content: Any, where: str, to: _Reader) -> list[Block]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise bad_request(f"{where} must be a string or a list of blocks", where.split("[")[0])
    blocks: list[Block] = []
    for j, block in enumerate(content):
        at = f"{where}[{j}]"
        read = _block(role, block, at, to.ignored)
        if role == "system" and j == 0 and read["text"].startswith(BILLING):
            to.ignored.append(at)
            continue
        blocks.append(read)
        if block.get("cache_control") is not None:
            ttl = _ttl(block["cache_control"], f"{at}.cache_control", where.split("[")[0], to.ignored)
            to.breakpoints.append(Breakpoint(ttl, to.turn, len(blocks) - 1))
    if sum(block["type"] == "tool_use" for block in blocks) > MAX_CALLS:
        raise bad_request(f"{where} has more than {MAX_CALLS} tool_use blocks", "messages")
    return blocks


def _block(role: str, block: Any, where: str, ignored: list[str]) -> Block:
    field = where.split("[")[0]
    kind = block.get("type") if isinstance(block, dict) else None
    if kind not in _ROLES[role] or not isinstance(kind, str):
        if isinstance(kind, str) and kind in _KEYS:
            raise bad_request(f"{where}: a message of role {role} has no blocks of type {kind}", field)
        takes = " and ".join(_ROLES[role])
        raise _refused(f"{where}: blocks of type {kind!r:.80} are not supported, only {takes}", field)
    _check_members(block, (*_KEYS[kind], "type", "cache_control"), where, field, ignored)

    def text(name: str) -> str:
        if not isinstance(block.get(name), str):
            raise bad_request(f"{where}.{name} must be a string", field)
        value: str = block[name]
        return value

    if kind == "text":
        return {"type": kind, "text": text("text")}
    if kind == "thinking":
        return {"type": kind, "thinking": text("thinking")}
    if kind == "tool_use":
        arguments = block.get("input")
        if not isinstance(arguments, dict):
            raise bad_request(f"{where}.input must be an object", field)
        try:
            written = json.dumps(arguments, ensure_ascii=False)
        except RecursionError:
            raise bad_request(f"{where}.input is nested too deeply", field) from None
        return {"type": kind, "id": text("id"), "name": text("name"), "arguments": written}
    content = "" if block.get("content") is None else block["content"]
    if not isinstance(content, str):
        parts = _result_parts(content, f"{where}.content", ignored)
        content = "\n".join(parts)
    if not isinstance(block.get("is_error"), bool | None):
        raise bad_request(f"{where}.is_error must be true or false", field)
    if block.get("is_error"):  # templates know no other way to tell
        content = f"Error: {content}"
    return {"type": kind, "tool_use_id": text("tool_use_id"), "content": content}


def _result_parts(content: Any, where: str, ignored: list[str]) -> list[str]:
    if not isinstance(content, list):
        raise bad_request(f"{where} must be a string or a list of blocks", "messages")
    return [_block("system", part, f"{where}[{j}]", ignored)["text"] for j, part in enumerate(content)]


def _tool(tool: dict[str, Any], where: str, breakpoints: list[Breakpoint], ignored: list[str]) -> dict[str, Any]:
    """The name and the schema are checked where those of chat are."""
    if tool.get("type", "custom") not in ("custom", None):
        raise _refused(f"{where}: tools of type {tool['type']!r:.80} are not supported, only the client's own", "tools")
    if tool.get("input_schema") is None:
        raise bad_request(f"{where}.input_schema is required: a JSON schema of an object", "tools")
    _check_members(tool, _TOOL_KEYS, where, "tools", ignored)
    if tool.get("cache_control") is not None:
        ttl = _ttl(tool["cache_control"], f"{where}.cache_control", "tools", ignored)
        breakpoints.append(Breakpoint(ttl, None))
    function = {"name": tool.get("name"), "parameters": tool["input_schema"]}
    function |= {name: tool[name] for name in ("description", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _check_members(given: dict[str, Any], known: tuple[str, ...], where: str, field: str, ignored: list[str]) -> None:
    for name, value in given.items():
        if name not in known:
            ignored.append(f"{where}.{name}")
        elif name in _NEUTRAL and value is not None and value not in _NEUTRAL[name]:
            raise _refused(f"{where}.{name} is not supported", field)


def _ttl(control: Any, where: str, field: str, ignored: list[str]) -> str:
    if not isinstance(control, dict) or control.get("type") != "ephemeral":
        raise bad_request(f'{where} must be {{"type": "ephemeral"}}, with a ttl of 5m or 1h', field)
    ttl = control.get("ttl") or "5m"
    if not isinstance(ttl, str) or ttl not in SECONDS:
        raise bad_request(f"{where}.ttl must be 5m or 1h; got {ttl!r:.80}", field)
    ignored.extend(f"{where}.{name}" for name in control if name not in ("type", "ttl"))
    return str(ttl)


def _refused(message: str, field: str) -> ApiError:
    return bad_request(message, field, "unsupported_parameter")
