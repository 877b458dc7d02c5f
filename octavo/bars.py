"""Progress bars on standard error, where that is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self

from octavo.engine.messages import Loading

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class LoadingBar:
    """How far the start of an engine is. The end of the context takes it off the screen."""

    def __init__(self) -> None:
        self._bar: tuple[Progress, TaskID] | None = None

    def show(self, loading: Loading) -> None:
        if not sys.stderr.isatty():
            return
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

            columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
            bar = Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False)
            self._bar = bar, bar.add_task(loading.what)
            bar.start()
        bar, task = self._bar
        bar.update(task, description=loading.what, completed=loading.done, total=loading.total, refresh=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar[0].stop()
            self._bar = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


@contextmanager
def request_bar(total: int, show: bool) -> Iterator[Callable[[], None]]:
    """Of requests that are answered: the function counts one."""
    if not show or total < 2 or not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("requests", total=total)
        yield lambda: bar.advance(task)
