"""The commands of `octavo`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Annotated, Any

import typer

import octavo
from octavo.engine.spawn import Spawned

COMMANDS = {
    "serve": "serve",
    "generate": "generate",
    "chat": "chat",
    "batch": "batch",
    "show": "files",
    "diff": "files",
    "pull": "files",
    "quantize": "quantize",
    "bench": "bench",
    "cache": "cache",
}
"""And the modules that they are in."""


def make_app(arguments: Sequence[str] = (), spawned: Spawned | None = None) -> typer.Typer:
    """With the command that the first of the arguments names, which loads less, or else with all.

    spawned: an engine's process for `serve`.
    """
    app = typer.Typer(
        name="octavo",
        help="Serve large language models from a plain CPU. Begin with `octavo serve` or `octavo chat`.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # plain help: whole flag names at any width
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options)
    for name in [argument for argument in arguments[:1] if argument in COMMANDS] or COMMANDS:
        app.command(name)(_command(name, spawned))
    return app


def _command(name: str, spawned: Spawned | None) -> Callable[..., Any]:
    module = import_module(f"octavo.cli.{COMMANDS[name]}")
    command: Callable[..., Any] = module.command(spawned) if name == "serve" else getattr(module, name)
    return command


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"octavo {octavo.__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass
