"""cache_control: how much of a prompt is worth keeping, and how Anthropic counts what the cache gave."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from octavo.request import ParameterError, Retention
from octavo.server.anthropic_messages import SECONDS, Breakpoint, Conversation, Turn, chat_form
from octavo.server.messages import chat_messages
from octavo.text.chat import ChatFormat, ChatOptions

_OTHER = "\ue000"
"""Stands where the prompt goes on behind a breakpoint: no prompt goes on like that."""


class Marked:
    """The leading tokens of a prompt that cache_control marks, by time to live."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self._tokens = tokens
        self.num_tokens = max(tokens.values(), default=0)

    def retention(self) -> Retention | None:
        """The longest time to live is for all that is marked: never less is kept than was asked for."""
        if not self.num_tokens:
            return None
        return Retention(seconds=max(SECONDS[ttl] for ttl in self._tokens), num_tokens=self.num_tokens)

    def usage(self, num_prompt: int, num_cached: int) -> dict[str, Any]:
        """Input tokens are those behind the last mark; those before it were read from the cache or written to it."""
        read = min(num_cached, self.num_tokens)
        written = self.num_tokens - read
        hour = max(0, self._tokens.get("1h", 0) - read)
        return {
            "input_tokens": num_prompt - self.num_tokens,
            "cache_creation_input_tokens": written,
            "cache_read_input_tokens": read,
            "cache_creation": {"ephemeral_5m_input_tokens": written - hour, "ephemeral_1h_input_tokens": hour},
        }


def mark(form: ChatFormat, conversation: Conversation, options: ChatOptions, text: str, num_tokens: int) -> Marked:
    """`text`: the prompt of the conversation, which has so many tokens.

    Where a breakpoint is in the prompt is seen from another one that differs behind it: what both begin with is marked.
    """
    last = {found.ttl: found for found in conversation.breakpoints}
    tokens = {}
    for ttl, found in last.items():
        messages = chat_messages(chat_form(_other(conversation, found)), [])
        plain = dataclasses.replace(options, continue_final_message=False, add_generation_prompt=False)
        try:
            other = form.prompt(messages, plain).text
        except ParameterError:  # the template takes no conversation that ends there
            other = text
        rest = text[_common(text, other) :]
        tokens[ttl] = max(0, num_tokens - len(form.tokenizer.encode(rest, add_special_tokens=False)))
    return Marked(tokens)


def _other(conversation: Conversation, found: Breakpoint) -> list[Turn]:
    """The conversation up to a breakpoint, and something else behind it."""
    text = {"type": "text", "text": _OTHER}
    if found.message is None:
        return [Turn("user", [text])]
    before, (role, blocks) = conversation.turns[: found.message], conversation.turns[found.message]
    kept = blocks[: found.block + 1]
    if role == "user":
        return [*before, Turn(role, [*kept, text])]
    return [*before, Turn(role, kept), Turn("user", [text])]


def _common(a: str, b: str) -> int:
    """Characters that both begin with."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[:middle] == b[:middle] else (low, middle - 1)
    return low
