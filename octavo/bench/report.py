"""Result: what was measured, on what, and every run of it."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeVar

from octavo.config import EngineConfig

T = TypeVar("T")


class Result(NamedTuple):
    name: str
    workload: str  # in words, all that is needed to repeat it
    unit: str
    median: float
    runs: list[float]
    details: dict[str, Any]


def result(name: str, workload: str, unit: str, runs: list[float], **details: Any) -> Result:
    return Result(name, workload, unit, statistics.median(runs), runs, details)


def machine(config: EngineConfig, isa: str, threads: int) -> dict[str, Any]:
    return {
        "cpu": _cpu_name(),
        "isa": isa,
        "threads": threads,
        "activations": config.activations,
        "kv_dtype": config.kv_dtype,
    }


def track(runs: Iterable[T], what: str) -> Iterable[T]:
    """`runs` with a progress bar, where somebody looks on."""
    from rich.console import Console
    from rich.progress import track as with_bar

    console = Console(stderr=True)
    return with_bar(runs, what, console=console, transient=True, disable=not console.is_terminal)


def as_table(model: str, results: list[Result]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"octavo bench · {model}", title_justify="left")
    for column in ("what", "median", "unit", "runs", "workload"):
        table.add_column(column, justify="right" if column in ("median", "runs") else "left")
    for r in results:
        digits = 2 if r.median < 100 else 0
        runs = ", ".join(f"{value:,.{digits}f}" for value in r.runs)
        details = "; ".join(f"{key} {value}" for key, value in r.details.items())
        table.add_row(r.name, f"{r.median:,.{digits}f}", r.unit, runs, f"{r.workload}\n{details}")
    Console().print(table)


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as f:
            return next(line.split(":", 1)[1].strip() for line in f if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()
