"""What begins with a slash in a chat."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from octavo.cli.conversation import Conversation, Piece
from octavo.config import ConfigError


class Leave(Exception):
    """The user has said /exit."""


class Command(NamedTuple):
    takes: str  # as its help shows it
    about: str
    run: Callable[[Conversation, str, Callable[[Piece], None]], str | None]  # (.., argument, write) -> what to tell


def run_command(conversation: Conversation, line: str, write: Callable[[Piece], None]) -> str | None:
    """What to tell the user. Raises Leave, or what tells of a mistake: ConfigError, ParameterError, OSError."""
    name, _, argument = line.partition(" ")
    if name not in COMMANDS:
        raise ConfigError(f"there is no {name}; there are {', '.join(COMMANDS)}")
    command = COMMANDS[name]
    argument = argument.strip()
    if argument and not command.takes:
        raise ConfigError(f"{name} takes nothing behind it")
    if not argument and command.takes and not command.takes.startswith("["):
        raise ConfigError(f"{name} needs {command.takes}")
    return command.run(conversation, argument, write)


def _help(conversation: Conversation, argument: str, write: Callable[[Piece], None]) -> str:
    heads = {f"{name} {command.takes}".strip(): command.about for name, command in COMMANDS.items()}
    width = max(map(len, heads))
    lines = [f"{head:<{width}}  {about}" for head, about in heads.items()]
    return "\n".join([*lines, '""" begins and ends text of several lines; in a terminal Alt-Enter begins a line, too.'])


def _clear(conversation: Conversation, argument: str, write: Callable[[Piece], None]) -> None:
    conversation.messages.clear()


def _system(conversation: Conversation, argument: str, write: Callable[[Piece], None]) -> str | None:
    if not argument:
        return conversation.system or "no system message"
    conversation.system = None if argument == "none" else argument
    return None


def _save(conversation: Conversation, argument: str, write: Callable[[Piece], None]) -> str:
    path = Path(argument).expanduser()
    conversation.save(path)
    return f"{len(conversation.messages)} messages in {path}"


def _load(conversation: Conversation, argument: str, write: Callable[[Piece], None]) -> str:
    path = Path(argument).expanduser()
    conversation.load(path)
    return f"{len(conversation.messages)} messages from {path}"


def _set(conversation: Conversation, argument: str, write: Callable[[Piece], None]) -> str | None:
    name, _, text = argument.partition(" ")
    if not name:
        return (
            "\n".join(f"{key} = {json.dumps(value)}" for key, value in conversation.settings.items()) or "all default"
        )
    if not text.strip():
        return f"{name} = {json.dumps(conversation.settings.get(name))}"
    conversation.set(name, _value(text.strip()))
    return None


def _value(text: str) -> Any:
    """JSON, or else a text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _regenerate(conversation: Conversation, argument: str, write: Callable[[Piece], None]) -> None:
    conversation.regenerate(write)


def _stats(conversation: Conversation, argument: str, write: Callable[[Piece], None]) -> str:
    if not conversation.stats:
        return "nothing was answered yet"
    all = conversation.stats
    total = f"{sum(s.num_prompt_tokens for s in all)} prompt and {sum(s.num_output_tokens for s in all)} output tokens"
    return f"last: {all[-1]}\nall {len(all)}: {total} in {sum(s.seconds for s in all):.1f} s"


def _exit(conversation: Conversation, argument: str, write: Callable[[Piece], None]) -> None:
    raise Leave


COMMANDS = {
    "/help": Command("", "shows this", _help),
    "/clear": Command("", "forgets what was said", _clear),
    "/system": Command("[TEXT]", "shows or changes what the model is told first; none: nothing", _system),
    "/set": Command(
        "[NAME VALUE]", "shows or changes fields of the chat API: /set temperature 0; null: the default", _set
    ),
    "/regenerate": Command("", "answers the last message anew", _regenerate),
    "/save": Command("FILE", "writes the conversation as JSON", _save),
    "/load": Command("FILE", "goes on with a conversation that was saved", _load),
    "/stats": Command("", "shows tokens and times of the answers", _stats),
    "/exit": Command("", "leaves, as Ctrl-D does", _exit),
}
