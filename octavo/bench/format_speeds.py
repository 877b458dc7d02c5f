"""The table of speeds in docs/FORMATS.md, from `octavo bench kernels`."""

from __future__ import annotations

import sys
from pathlib import Path

from octavo.bench.kernels import ROWS, measure
from octavo.bench.report import Result
from octavo.config import EngineConfig

BEGIN, END = "<!-- speeds, by scripts/format-speeds -->\n", "<!-- end of speeds -->\n"


def main(page: Path) -> None:
    """Replaces what is between the two comments of the page."""
    text = page.read_text()
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    results = [r for r in measure(EngineConfig(), 3) if "attention" not in r.name]
    tables = [table([r for r in results if r.name.endswith(threads)], threads) for threads in _threads(results)]
    page.write_text(before + BEGIN + "\n".join(tables) + END + after)


def table(results: list[Result], threads: str) -> str:
    """One line a kernel."""
    said = results[0].details
    bandwidth = [r.details["bandwidth_gb_s"] for r in results]
    lines = [
        f"{said['cpu']}, {said['isa']}, {threads}; memory was read at {min(bandwidth)} to {max(bandwidth)} GB/s.\n\n",
        f"| weights x inputs | bits | 1 row: GB/s | share | {' | '.join(map(str, [*ROWS][1:]))} rows: GOP/s | share |\n",
        "|---" * (len(ROWS) + 5 - 1) + "|\n",
    ]
    for r in results:
        shares = [f"{share:.0f} %" for share in r.runs]
        cells = [r.name.partition(",")[0], f"{r.details['bits']:.4g}", f"{r.details['gb_s'][0]}", *shares[:-1]]
        lines.append(f"| {' | '.join([*cells, format(r.details['gop_s'][-1], '.0f'), shares[-1]])} |\n")
    return "".join(lines)


def _threads(results: list[Result]) -> list[str]:
    return list(dict.fromkeys(r.name.partition(", ")[2] for r in results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
