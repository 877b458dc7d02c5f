"""`octavo`: the commands, and how their errors are told."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

import octavo
import octavo.cli.batch as batch
import octavo.cli.bench as bench
import octavo.cli.cache as cache
import octavo.cli.chat as chat
import octavo.cli.files as files
import octavo.cli.generate as generate
import octavo.cli.quantize as quantize
import octavo.cli.serve as serve

app = typer.Typer(
    name="octavo",
    help="Serve large language models from a plain CPU. Begin with `octavo serve` or `octavo chat`.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: whole flag names at any width
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("serve")(serve.serve)
app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("batch")(batch.batch)
app.command("show")(files.show)
app.command("diff")(files.diff)
app.command("pull")(files.pull)
app.command("quantize")(quantize.quantize)
app.command("bench")(bench.bench)
app.command("cache")(cache.cache)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"octavo {octavo.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Console entry. Exit code 0: done; 1: it could not be done; 2: it was asked for wrongly."""
    _open_closed_streams()
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as e:
        code = _exit_code(e)
        if code is None:
            raise
        print(f"error: {e}", file=sys.stderr)
        sys.exit(code)


def _open_closed_streams() -> None:
    """Where the caller has closed standard streams: nothing is read from them, and what is written is lost."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):  # in the order of their descriptors
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115


def _exit_code(error: Exception) -> int | None:
    """None: a bug of ours, to be shown whole."""
    from octavo.config import ConfigError
    from octavo.engine.client import EngineDead, EngineError
    from octavo.graph.verify import GraphError
    from octavo.request import ParameterError
    from octavo.text.template import ChatTemplateError
    from octavo.weights.spec import CheckpointError

    if isinstance(error, ConfigError | ParameterError):
        return 2
    could_not = EngineError | EngineDead | GraphError | CheckpointError | ChatTemplateError | OSError | MemoryError
    return 1 if isinstance(error, could_not) else None


if __name__ == "__main__":
    main()
