"""`octavo`: how commands begin and end, and how their errors are told."""

from __future__ import annotations

import os
import sys

from octavo.engine.spawn import Spawned


def main() -> None:
    """Console entry. Exit code 0: done; 1: it could not be done; 2: it was asked for wrongly."""
    _open_closed_streams()
    serves = sys.argv[1:2] == ["serve"] and not {"-h", "--help"} & set(sys.argv)
    spawned = Spawned() if serves else None  # loads its modules while this process loads its own
    try:
        from octavo.cli.app import make_app

        make_app(sys.argv[1:2], spawned)()
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
    finally:
        if spawned is not None:
            spawned.abandon()


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
