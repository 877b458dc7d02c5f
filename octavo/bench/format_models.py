"""The table of whole models in docs/FORMATS.md: one stream of the 1B shape in every format, each in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from octavo.bench.models import FOLDERS, LARGE, made
from octavo.weights.gguf_file import read_gguf

BEGIN, END = "<!-- models, by scripts/format-speeds --end-to-end -->\n", "<!-- end of models -->\n"

_HEAD = (
    "| model | tensors of the file | packed | ratio | tokens/s | read at | share of a streaming read |\n"
    "|---|---|---|---|---|---|---|\n"
)
_RUNS = ("--input-len", "32", "--output-len", "49", "--repeat", "2")


class Row(NamedTuple):
    name: str
    file_mb: float  # of all tensors
    packed_mb: float
    speed: float  # tokens a second
    bandwidth: float  # GB/s of a streaming read, measured beside it
    share: float  # of that


def main(page: Path, names: list[str]) -> None:
    """Replaces lines between the two comments of the page, those of `names`; of all models where there are none."""
    before, rest = page.read_text().split(BEGIN)
    table, after = rest.split(END)
    lines = {line.split()[1]: line for line in table.splitlines(keepends=True)[2:]}
    for name in names or [*LARGE, *FOLDERS]:
        lines[name] = _line(measure(name))
        print(lines[name], end="", flush=True)
    kept = [lines[name] for name in (*LARGE, *FOLDERS) if name in lines]
    page.write_text(before + BEGIN + _HEAD + "".join(kept) + END + after)


def measure(name: str) -> Row:
    """The model is made, run and removed: a gigabyte or two."""
    with tempfile.TemporaryDirectory() as scratch:
        model = made(name, Path(scratch))
        command = [sys.executable, "-c", "from octavo.cli.main import main; main()", "bench", "latency", str(model)]
        done = subprocess.run(
            [*command, *_RUNS, "--weights-cache", "off", "--max-model-len", "256", "--json"],
            stdout=subprocess.PIPE,
            check=True,
        )
        (found,) = json.loads(done.stdout)["results"]
        details = found["details"]
        return Row(
            name,
            tensor_bytes(model) / 1e6,
            details["packed_mb"],
            found["median"],
            details["bandwidth_gb_s"],
            details["share_of_bandwidth"],
        )


def tensor_bytes(model: Path) -> int:
    """Of the file, or of the files of a folder, whose headers are nothing beside them."""
    if model.is_dir():
        return sum(file.stat().st_size for file in model.glob("*.safetensors"))
    return sum(tensor.stop - tensor.start for tensor in read_gguf(model).tensors.values())


def _line(row: Row) -> str:
    ratio = row.packed_mb / row.file_mb
    return (
        f"| {row.name} | {row.file_mb:,.0f} MB | {row.packed_mb:,.0f} MB | {ratio:.3f} | {row.speed:.1f} | "
        f"{row.bandwidth * row.share:.1f} GB/s | {row.share:.0%} |\n"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
