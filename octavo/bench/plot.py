"""The runs of each result as a picture."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from octavo.bench.report import Result
from octavo.config import ConfigError

KINDS = (".png", ".svg", ".pdf")


def check_plot(path: Path) -> None:
    """Raise ConfigError where nothing can be drawn to `path`: said before anything is measured."""
    if path.suffix not in KINDS:
        raise ConfigError(f"--plot {path}: the name must end in {', '.join(KINDS)}")
    if not path.resolve().parent.is_dir():
        raise ConfigError(f"--plot {path}: there is no such folder")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'octavo[plot]'")


def draw(path: Path, title: str, results: Sequence[Result]) -> None:
    """A panel a result, for their units differ: bars of the runs and a line at the median."""
    from matplotlib.figure import Figure

    columns = min(len(results), 8)
    lines = -(-len(results) // columns)
    figure = Figure(figsize=(2.6 * columns + 1, 3.2 * lines + 0.4), layout="constrained")
    figure.suptitle(f"octavo bench · {title}")
    for index, r in enumerate(results):
        axes = figure.add_subplot(lines, columns, index + 1)
        axes.bar(range(1, len(r.runs) + 1), r.runs, color="#4c78a8")
        axes.axhline(r.median, color="#e45756", linewidth=1)
        axes.set_title(f"{r.name}\n{r.median:,.4g} {r.unit}", fontsize=9)
        axes.set_xlabel("run", fontsize=8)
        axes.set_xticks(range(1, len(r.runs) + 1))
    figure.savefig(path)
