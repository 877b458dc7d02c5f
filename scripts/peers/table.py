"""What was measured, as a table for people, for Markdown, and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from peers.rows import OCTAVO, PEERS, Row, Size


class Outcome(NamedTuple):
    """Of one row."""

    row: Row
    size: Size
    bandwidth: list[float]  # bytes a second, before each round and after the last
    barrier: list[float]  # seconds
    runs: dict[str, list[float]]  # by engine, in the order of the rounds
    unable: dict[str, str]  # engine: why

    @property
    def medians(self) -> dict[str, float]:
        return {name: _median(runs) for name, runs in self.runs.items() if runs}

    @property
    def ratio(self) -> float | None:
        """How many times as fast as the best peer."""
        medians = self.medians
        others = [value for name, value in medians.items() if name != OCTAVO]
        if OCTAVO not in medians or not others:
            return None
        return min(others) / medians[OCTAVO] if self.row.is_time else medians[OCTAVO] / max(others)

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.row.name,
            "kind": self.row.kind,
            "model": self.row.model,
            "kv_dtype": self.row.kv_dtype,
            "size": self.size._asdict(),
            "unit": self.row.unit,
            "bandwidth_gb_s": [round(b / 1e9, 2) for b in self.bandwidth],
            "barrier_ns": [round(1e9 * b) for b in self.barrier],
            "runs": self.runs,
            "medians": self.medians,
            "ratio": self.ratio,
            "unable": self.unable,
        }


def _median(values: list[float]) -> float:
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def engines(outcomes: list[Outcome]) -> list[str]:
    """Those that measured something."""
    return [name for name in (OCTAVO, *PEERS) if any(outcome.runs.get(name) for outcome in outcomes)]


def head(names: list[str]) -> list[str]:
    return ["workload", "size", "unit", *names, "times the best peer", "GB/s", "barrier ns"]


def cells(outcome: Outcome, names: list[str]) -> list[str]:
    row, size = outcome.row, outcome.size
    medians = outcome.medians
    words = {
        "decode": f"{size.num_prompts} at {size.input_len}",
        "prefill": f"{size.input_len}",
        "prefix": f"{size.num_prompts} x ({size.shared_len} + {size.input_len} -> {size.output_len})",
        "start": "",
    }.get(row.kind, f"{size.num_prompts} x ({size.input_len} -> {size.output_len})")
    figures = [_figure(medians[name]) if name in medians else "-" for name in names]
    ratio = "" if outcome.ratio is None else f"{outcome.ratio:.2f}"
    return [
        row.name, words, row.unit, *figures, ratio, f"{_median(outcome.bandwidth) / 1e9:.1f}",
        f"{1e9 * _median(outcome.barrier):.0f}",
    ]  # fmt: skip


def _figure(value: float) -> str:
    return f"{value:,.2f}" if value < 20 else f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def markdown(outcomes: list[Outcome]) -> str:
    names = engines(outcomes)
    lines = [head(names), ["---"] * 3 + ["---:"] * (len(names) + 3), *(cells(outcome, names) for outcome in outcomes)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def notes(outcomes: list[Outcome]) -> list[str]:
    """Why figures are missing, each reason once."""
    found: dict[str, list[str]] = {}
    for outcome in outcomes:
        for name, why in outcome.unable.items():
            found.setdefault(f"{name}: {why}", []).append(outcome.row.name)
    return [f"{why} ({'; '.join(rows)})" for why, rows in found.items()]


def show(outcomes: list[Outcome], title: str) -> None:
    from rich.console import Console
    from rich.table import Table

    names = engines(outcomes)
    table = Table(title=title, title_justify="left")
    for i, name in enumerate(head(names)):
        table.add_column(name, justify="left" if i < 3 else "right")
    for outcome in outcomes:
        table.add_row(*cells(outcome, names))
    console = Console()
    console = console if console.is_terminal else Console(width=160)
    console.print(table)
    for note in notes(outcomes):
        console.print(note)


def plot(path: Path, outcomes: list[Outcome], title: str) -> None:
    """A line a workload: how many times as fast as the best peer, on a logarithmic axis; the peers beside it."""
    from matplotlib.figure import Figure

    shown = [outcome for outcome in outcomes if outcome.ratio is not None][::-1]
    figure = Figure(figsize=(8.5, 0.36 * len(shown) + 1.4), layout="constrained")
    axes = figure.add_subplot()
    colours = dict(zip((OCTAVO, *PEERS), ("#e45756", "#4c78a8", "#72b7b2", "#b279a2"), strict=True))
    for y, outcome in enumerate(shown):
        medians, is_time = outcome.medians, outcome.row.is_time
        others = [value for name, value in medians.items() if name != OCTAVO]
        best = min(others) if is_time else max(others)
        speeds = {name: best / value if is_time else value / best for name, value in medians.items()}
        axes.plot([min(speeds.values()), max(speeds.values())], [y, y], color="#dddddd", zorder=1)
        for name, speed in speeds.items():
            axes.scatter(speed, y, s=46, color=colours[name], zorder=2)
        axes.annotate(f"{outcome.ratio:.2f}", (speeds[OCTAVO], y), (6, -3), textcoords="offset points", fontsize=8)
    for name in (OCTAVO, *PEERS):
        if any(name in outcome.medians for outcome in shown):
            axes.scatter([], [], s=46, color=colours[name], label=name)
    axes.axvline(1, color="#888888", linewidth=0.8, zorder=0)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("times as fast as the best peer", fontsize=9)
    axes.set_yticks(range(len(shown)), [outcome.row.name for outcome in shown], fontsize=8)
    axes.legend(fontsize=8, loc="lower right")
    axes.set_title(title, fontsize=10)
    figure.savefig(path)
