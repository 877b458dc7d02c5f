"""`octavo chat`: a conversation in the terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli.commands import COMMANDS, Leave, run_command
from octavo.cli.conversation import Conversation, Piece
from octavo.cli.local import LocalModel
from octavo.cli.options import MaxTokens, TopK, TopP, with_config
from octavo.cli.screen import LineReader, Reader, TextWriter, Writer
from octavo.config import ConfigError, EngineConfig
from octavo.disk import state_home
from octavo.engine.client import EngineError

if TYPE_CHECKING:
    from octavo.cli.remote import RemoteModel

HISTORY = "octavo/chat-history in $XDG_STATE_HOME or ~/.local/state"

_NAMED = {"max_tokens", "temperature", "top_p", "top_k", "seed"}


@with_config(EngineConfig)
def chat(
    config: EngineConfig,
    system: Annotated[
        str | None, typer.Option("--system", metavar="TEXT", help="What the model is told first.")
    ] = None,
    max_tokens: MaxTokens = None,
    temperature: Annotated[
        float, typer.Option("--temperature", metavar="X", help="0 always takes the likeliest token.")
    ] = 0.7,
    top_p: TopP = 0.95,
    top_k: TopK = None,
    markdown: Annotated[
        bool, typer.Option("--markdown/--no-markdown", help="Format answers, where they go to a terminal.")
    ] = True,
    history: Annotated[bool, typer.Option("--history/--no-history", help=f"Remember what is typed: {HISTORY}.")] = True,
    api_key: Annotated[str | None, typer.Option("--api-key", metavar="KEY", help="Of the server behind a URL.")] = None,
) -> None:
    """Talk to a model in the terminal: MODEL, or the URL of a server. /help shows what else can be said.

    Example: octavo chat demo, or octavo chat http://127.0.0.1:8000
    """
    given = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": config.seed}
    settings = {name: value for name, value in given.items() if value is not None}
    with _source(config, api_key) as source:
        conversation = Conversation(source, {}, system)
        for name, value in settings.items():
            conversation.set(name, value)
        reader, writer = _terminal(markdown, history)
        if sys.stdin.isatty():
            print(f"{source.name}. /help shows commands, Ctrl-C stops an answer, Ctrl-D leaves.")
        _talk(conversation, reader, writer)


def _source(config: EngineConfig, api_key: str | None) -> LocalModel | RemoteModel:
    if not config.model.startswith(("http://", "https://")):
        if api_key is not None:
            raise ConfigError("--api-key goes with the URL of a server")
        return LocalModel(config)
    from octavo.cli.remote import RemoteModel

    changed = [
        name for name, default in vars(EngineConfig()).items()
        if name not in ("model", "seed") and getattr(config, name) != default
    ]  # fmt: skip
    if changed:
        raise ConfigError(f"{changed[0]} is a matter of the server at {config.model}")
    return RemoteModel(config.model, api_key)


def _terminal(markdown: bool, history: bool) -> tuple[Reader, Writer]:
    able = sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    writer: Writer = TextWriter()
    if able and markdown:
        from rich.console import Console

        from octavo.cli.screen import MarkdownWriter

        writer = MarkdownWriter(Console())
    if not sys.stdin.isatty():
        return LineReader(""), writer
    if not able:
        return LineReader("> " if sys.stdout.isatty() else ""), writer
    from octavo.cli.screen import TerminalReader

    return TerminalReader(list(COMMANDS), state_home() / "chat-history" if history else None), writer


def _talk(conversation: Conversation, reader: Reader, writer: Writer) -> None:
    """Until the user leaves. In a pipe an interrupt ends it all, at a terminal the answer."""
    while (line := reader.read()) is not None:
        if not line:
            continue
        begun: list[bool] = []

        def write(piece: Piece, begun: list[bool] = begun) -> None:
            begun.append(True)
            writer.write(piece)

        try:
            _say(conversation, line, write)
        except Leave:
            return
        except BrokenPipeError:  # nobody reads the answers any more
            raise
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
        except (ValueError, OSError, EngineError) as e:
            print(f"error: {e}", file=sys.stderr)
            if not begun:
                continue
        if begun or not line.startswith("/"):
            writer.end()


def _say(conversation: Conversation, line: str, write: Callable[[Piece], None]) -> None:
    if not line.startswith("/"):
        conversation.ask(line, write)
        return
    told = run_command(conversation, line, write)
    if told is not None:
        print(told)
