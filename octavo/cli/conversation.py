"""Conversation: what was said, how answers are drawn, and what they cost."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from octavo.cli.source import Source
from octavo.config import ConfigError

CHAT = "/v1/chat/completions"

OWN = ("messages", "stream", "stream_options", "n", "best_of", "use_beam_search", "tools", "tool_choice", "resumable")
"""Fields that are no settings: the conversation gives them, or could not show what they ask for."""


class Piece(NamedTuple):
    """What a chunk adds to an answer."""

    text: str
    reasoning: bool


@dataclass
class Stats:
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    first_seconds: float = 0.0  # to the first piece
    seconds: float = 0.0
    finish_reason: str | None = None

    def __str__(self) -> str:
        rest = self.seconds - self.first_seconds
        speed = f", {(self.num_output_tokens - 1) / rest:.1f} tokens/s" if self.num_output_tokens > 1 and rest else ""
        return (
            f"{self.num_prompt_tokens} prompt tokens ({self.num_cached_tokens} of them cached), "
            f"{self.num_output_tokens} output tokens; first after {self.first_seconds:.2f} s{speed}; "
            f"ended by {self.finish_reason or 'you'}"
        )


@dataclass
class Conversation:
    """`settings`: fields of the chat API. `system`: what the model is told first, not one of the messages."""

    source: Source
    settings: dict[str, Any] = field(default_factory=dict)
    system: str | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    stats: list[Stats] = field(default_factory=list)  # one per answer

    def ask(self, text: str, write: Callable[[Piece], None]) -> None:
        """Say `text` and have the answer written as it comes.

        Raises what the source raises; of a message that was refused or failed nothing is kept, of an answer that was
        interrupted what had come.
        """
        self.messages.append({"role": "user", "content": text})
        try:
            self.answer(write)
        except Exception:
            self.messages.pop()
            raise

    def answer(self, write: Callable[[Piece], None]) -> None:
        """Have the last message answered. It must be the user's."""
        parts: list[str] = []
        stats = Stats()
        started = time.perf_counter()

        def take(chunk: dict[str, Any]) -> None:
            if chunk.get("usage"):
                _count(stats, chunk["usage"])
            for choice in chunk.get("choices") or ():
                delta = choice.get("delta") or {}
                stats.finish_reason = choice.get("finish_reason") or stats.finish_reason
                reasoning, content = delta.get("reasoning_content"), delta.get("content")
                if (reasoning or content) and not stats.first_seconds:
                    stats.first_seconds = time.perf_counter() - started
                if reasoning:
                    write(Piece(reasoning, True))
                if content:
                    parts.append(content)
                    write(Piece(content, False))

        try:
            self.source.stream(CHAT, {**self._body(), "stream_options": {"include_usage": True}}, take)
        except KeyboardInterrupt:
            self._keep(parts, stats, started)
            raise
        self._keep(parts, stats, started)

    def regenerate(self, write: Callable[[Piece], None]) -> None:
        """Another answer to the last message. Raises ConfigError where there is none; a refusal changes nothing."""
        if not self.messages:
            raise ConfigError("nothing was said yet")
        before = list(self.messages)
        if self.messages[-1]["role"] == "assistant":
            self.messages.pop()
        try:
            self.answer(write)
        except Exception:
            self.messages = before
            raise

    def set(self, name: str, value: Any) -> None:
        """value None: back to the default. Raises ConfigError or ParameterError; then nothing changes."""
        if name in OWN:
            raise ConfigError(f"{name} cannot be set here")
        changed = {key: old for key, old in self.settings.items() if key != name}
        if value is not None:
            changed[name] = value
        before, self.settings = self.settings, changed
        try:
            self.source.check(CHAT, self._body())
        except Exception:
            self.settings = before
            raise

    def save(self, path: Path) -> None:
        said = {"system": self.system, "messages": self.messages, "settings": self.settings}
        path.write_text(json.dumps(said, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")

    def load(self, path: Path) -> None:
        """Raises OSError, or ConfigError where the file is no conversation; then nothing changes."""
        try:
            said = json.loads(path.read_text(encoding="utf-8"))
            system, messages, settings = said["system"], said["messages"], said["settings"]
            fits = isinstance(system, str | None) and isinstance(settings, dict) and isinstance(messages, list)
            fits = fits and not set(OWN) & set(settings) and all(_is_message(m) for m in messages)
        except (ValueError, LookupError, TypeError):
            fits = False
        if not fits:
            raise ConfigError(f"{path} is no conversation that /save has written")
        loaded = Conversation(self.source, settings, system, messages)
        self.source.check(CHAT, loaded._body())
        self.system, self.messages, self.settings = system, messages, settings

    def _body(self) -> dict[str, Any]:
        first = [{"role": "system", "content": self.system}] if self.system else []
        said = self.messages or [{"role": "user", "content": "Hello"}]  # only to be checked
        return {**self.settings, "messages": first + said}

    def _keep(self, parts: list[str], stats: Stats, started: float) -> None:
        stats.seconds = time.perf_counter() - started
        self.stats.append(stats)
        self.messages.append({"role": "assistant", "content": "".join(parts)})


def _count(stats: Stats, usage: dict[str, Any]) -> None:
    stats.num_prompt_tokens = usage.get("prompt_tokens") or 0
    stats.num_output_tokens = usage.get("completion_tokens") or 0
    stats.num_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def _is_message(message: Any) -> bool:
    return (
        isinstance(message, dict)
        and message.get("role") in ("user", "assistant")
        and isinstance(message.get("content"), str)
    )
