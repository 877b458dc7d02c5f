"""What is to be written: a format by name, and what it is applied to."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from octavo.graph.ir import Graph
from octavo.quantize import blocks, compressed
from octavo.quantize.at_load import FLOATS
from octavo.quantize.compressed_output import CompressedOutput
from octavo.quantize.convert import Output
from octavo.quantize.gguf_copy import GgufCopy
from octavo.quantize.gguf_output import GgufOutput
from octavo.quantize.roles import Role, roles
from octavo.weights.spec import Checkpoint, CheckpointError, base_name

FORMATS = (*compressed.FORMATS, *(name.lower() for name in blocks.FORMATS))


class RequestError(ValueError):
    """An option has a bad value; the message names it and what it takes."""


class Request(NamedTuple):
    format: str  # one of FORMATS
    group_size: int | None = None  # of w4a16 and w8a16; None: the format's own
    asymmetric: bool = False  # with zero points: w4a16
    keep: tuple[str, ...] = ()  # modules that stay as they are: names, with * and ?
    fallback: str | None = None  # GGUF: of matrices whose rows the format cannot hold
    embeddings: str | None = None  # GGUF: of embeddings and head; None: they stay as they are

    @property
    def is_gguf(self) -> bool:
        return self.format.upper() in blocks.FORMATS

    def check(self) -> Request:
        """Itself. Raises RequestError."""
        if self.format not in FORMATS:
            raise RequestError(f"format must be one of {', '.join(FORMATS)}; got {self.format!r}")
        if self.group_size is not None and (
            self.format not in ("w4a16", "w8a16") or self.group_size not in (32, 64, 128)
        ):
            raise RequestError(
                f"group_size is 32, 64 or 128, for w4a16 and w8a16; got {self.group_size} for {self.format}"
            )
        if self.asymmetric and self.format != "w4a16":
            raise RequestError("asymmetric is for w4a16")
        for name, value in (("fallback", self.fallback), ("embeddings", self.embeddings)):
            if value is not None and not (self.is_gguf and value.upper() in blocks.FORMATS):
                raise RequestError(f"{name} is a GGUF type, for GGUF formats; got {value!r} for {self.format}")
        return self


def open_output(checkpoint: Checkpoint, graph: Graph, path: Path, request: Request) -> Output:
    """Writes a model to `path`, a file for GGUF, else a directory that is there. graph: with float32 activations.

    Raises CheckpointError naming a tensor that the format cannot hold, RequestError where it is for other models.
    """
    from_file = checkpoint.path.endswith(".gguf")
    if from_file and not request.is_gguf:
        raise RequestError(
            f"{checkpoint.path}: of a GGUF file GGUF types are made; {request.format} is made of a directory in Hugging Face layout"
        )
    found = {name: Role.KEPT if _is_kept(name, request.keep) else role for name, role in roles(graph).items()}
    if request.is_gguf:
        write = GgufCopy if from_file else GgufOutput
        return write(checkpoint, graph, path, _sources(checkpoint, found, request, from_file), request.format.upper())
    form = compressed.FORMATS[request.format]
    form = form._replace(group=request.group_size or form.group, symmetric=not request.asymmetric)
    return CompressedOutput(checkpoint, graph, found, path, form)


@contextmanager
def written_beside(out: Path, is_folder: bool) -> Iterator[Path]:
    """A place beside `out` that takes its name when all is written; nothing is left where it is not.

    Raises RequestError where something has that name.
    """
    if out.exists():
        raise RequestError(f"{out} is there already; nothing is overwritten")
    out.parent.mkdir(parents=True, exist_ok=True)
    scratch = out.with_name(f".{out.stem}.{os.getpid()}{out.suffix}")
    try:
        if is_folder:
            scratch.mkdir()
        yield scratch
        scratch.rename(out)
    finally:
        shutil.rmtree(scratch) if scratch.is_dir() else scratch.unlink(missing_ok=True)


def _is_kept(part: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(base_name(part).removesuffix(".weight"), pattern) for pattern in patterns)


def _sources(checkpoint: Checkpoint, found: dict[str, Role], request: Request, again: bool) -> dict[str, str]:
    """GGUF type of each matrix that is quantised. again: also those that are already."""
    sources = {}
    for part, role in found.items():
        layers = role in (Role.LINEAR, Role.EXPERT)
        wanted = request.format if layers else request.embeddings if role is not Role.KEPT else None
        name = base_name(part)
        info = checkpoint.info(name)
        if info.source not in FLOATS and not again:
            raise CheckpointError(f"{info.file}: {name} is quantised already ({info.source})")
        if wanted is not None:
            sources[name] = _type_for(name, info.shape[-1], info.file, wanted.upper(), request)
    return sources


def _type_for(name: str, cols: int, file: str, wanted: str, request: Request) -> str:
    if cols % blocks.FORMATS[wanted].cols == 0:
        return wanted
    other = request.fallback.upper() if request.fallback else None
    if other is not None and cols % blocks.FORMATS[other].cols == 0:
        return other
    raise CheckpointError(
        f"{file}: {name} has rows of {cols} weights, no multiple of the {blocks.FORMATS[wanted].cols} of a {wanted} block: "
        f"name a type for such matrices (--fallback q5_0), or keep it (--keep '{name.removesuffix('.weight')}')"
    )
