"""What an assistant's answer is made of: content, reasoning and tool calls, as they arrive and as a whole."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A part of one tool call. The first part of a call brings id and name; the parts' arguments join to a JSON text."""

    index: int
    id: str | None
    name: str | None
    arguments: str


class MessageDelta(NamedTuple):
    """What some text added to the message. Joined over all texts each field is the whole message, however it was cut."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls)

    def followed_by(self, other: MessageDelta) -> MessageDelta:
        """Both in one. Parts of one call become one part."""
        calls = list(self.tool_calls)
        for part in other.tool_calls:
            if calls and calls[-1].index == part.index:
                calls[-1] = replace(calls[-1], arguments=calls[-1].arguments + part.arguments)
            else:
                calls.append(part)
        return MessageDelta(self.content + other.content, self.reasoning + other.reasoning, tuple(calls))


@dataclass
class ToolCall:
    id: str
    name: str
    arguments: str  # JSON text, as the model wrote it


@dataclass
class AssistantMessage:
    """The sum of deltas."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)

    def add(self, delta: MessageDelta) -> None:
        self.content += delta.content
        self.reasoning += delta.reasoning
        for part in delta.tool_calls:
            if part.index == len(self.tool_calls):
                assert part.id is not None and part.name is not None
                self.tool_calls.append(ToolCall(part.id, part.name, ""))
            self.tool_calls[part.index].arguments += part.arguments
