"""Result: what was measured, on what, and every run of it."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Container, Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from octavo.backends.ceilings import Ceilings, Machine
from octavo.bench.stolen import Stolen
from octavo.config import EngineConfig

if TYPE_CHECKING:
    from rich.table import Table

    from octavo.engine.core import Engine


class Result(NamedTuple):
    name: str
    workload: str  # in words, all that is needed to repeat it
    unit: str
    median: float
    runs: list[float]
    details: dict[str, Any]


def result(name: str, workload: str, unit: str, runs: list[float], **details: Any) -> Result:
    return Result(name, workload, unit, statistics.median(runs), runs, details)


class Runs:
    """Iterates over the numbers of `count` runs, with a progress bar where somebody looks on.

    Before each and after the last it looks at what the machine can do, for that changes while one measures.
    """

    def __init__(self, config: EngineConfig, count: int, what: str) -> None:
        self._config, self._count, self._what = config, count, what
        self._machine = Machine(config.num_threads)
        self._seen: list[Ceilings] = []
        self._stolen = Stolen()

    def __iter__(self) -> Iterator[int]:
        from rich.console import Console
        from rich.progress import track

        console = Console(stderr=True)
        for run in track(
            range(self._count), self._what, console=console, transient=True, disable=not console.is_terminal
        ):
            self.look()
            yield run
        self.look()

    def look(self) -> None:
        """Also for who does not iterate: before and after what is measured."""
        self._seen.append(self._machine.measure())

    @property
    def bandwidth(self) -> float:
        """Bytes a second: the median of what was seen."""
        return statistics.median(seen.bandwidth for seen in self._seen)

    def beside(self, engine: Engine | None = None) -> dict[str, Any]:
        """Details of a result: the machine, and how it is used. engine: of this process."""
        details: dict[str, Any] = {
            "bandwidth_gb_s": round(self.bandwidth / 1e9, 1),
            "barrier_ns": round(1e9 * statistics.median(seen.barrier for seen in self._seen)),
            "cpu": cpu_name(),
        }
        if (stolen := self._stolen.percent) is not None:
            details["stolen_percent"] = round(stolen, 1)
        if engine is not None:
            ready = engine.loaded.ready(0, 0.0)
            packed = engine.loaded.backend.weight_bytes(engine.loaded.graph)
            details |= {"isa": ready.isa, "threads": ready.threads, "packed_mb": round(packed / 1e6, 3)}
        return details | {"activations": self._config.activations, "kv_dtype": self._config.kv_dtype}

    def memory_bound(self, num_bytes: float, seconds: float) -> dict[str, Any]:
        """Details of work that has to read so much of memory: its share of the bandwidth, 1 being the ceiling."""
        return {
            "read_mb": round(num_bytes / 1e6, 1),
            "share_of_bandwidth": round(num_bytes / seconds / self.bandwidth, 3),
        }


RUNS = "runs_at"
"""A detail: what tells the runs of a result apart, where they are not the same again."""
_PIPED_WIDTH = 160


def as_table(model: str, results: list[Result]) -> None:
    """Results whose runs are of one kind are one table; what all of its rows have in common is said once, below."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=_PIPED_WIDTH)
    for names, group in groupby(results, key=lambda r: r.details.get(RUNS)):
        rows = list(group)
        first = rows[0].details
        common = {key: first[key] for key in first if all(r.details.get(key) == first[key] for r in rows)}
        title = f"octavo bench · {model}" + (f" · {rows[0].unit}" if names else "")
        console.print(_table(title, rows, names, common))
        for workload, same in groupby(rows, key=lambda r: r.workload):
            of = "" if len(rows) == 1 or names else f"{', '.join(r.name for r in same)}: "
            console.print(f"{of}{workload}", style="dim")
        console.print(_in_words(common, {RUNS}), style="dim")


def _table(title: str, rows: list[Result], names: list[str] | None, common: dict[str, Any]) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    table.add_column("what")
    for column in names or ("median", "unit", "runs"):
        table.add_column(column, justify="left" if column == "unit" else "right", no_wrap=bool(names))
    if own := any(r.details.keys() - common.keys() for r in rows):
        table.add_column("details")
    for r in rows:
        digits = 2 if r.median < 100 else 0
        runs = [f"{value:,.{1 if names else digits}f}" for value in r.runs]
        cells = runs if names else [f"{r.median:,.{digits}f}", r.unit, ", ".join(runs)]
        table.add_row(r.name, *cells, *([_in_words(r.details, common)] if own else []))
    return table


def _in_words(details: dict[str, Any], left_out: Container[str]) -> str:
    return "; ".join(f"{key} {value}" for key, value in details.items() if key not in left_out)


def cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as f:
            return next(line.split(":", 1)[1].strip() for line in f if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()
