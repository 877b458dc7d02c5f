"""`octavo cache`: what is kept on disk for later starts."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from octavo.config import ConfigError


def cache(
    action: Annotated[str, typer.Argument(metavar="[list|clear]", help="Show what is kept, or remove it.")] = "list",
    weights_cache: Annotated[
        str,
        typer.Option("--weights-cache", metavar="DIR", help="Packed weights. auto: where they are kept by default."),
    ] = "auto",
    disk_cache: Annotated[
        Path | None, typer.Option("--disk-cache", metavar="DIR", help="KV blocks, as of `octavo serve`. Default: none.")
    ] = None,
) -> None:
    """Show or remove packed weights, and KV blocks, that are kept on disk.

    Example: octavo cache list, or octavo cache clear --disk-cache ~/.cache/octavo/kv
    """
    from octavo.cache.store import stored_blocks
    from octavo.disk import StoredFile, remove
    from octavo.engine.memory import format_bytes
    from octavo.engine.packed import weights_directory
    from octavo.weights.images import stored_images

    if action not in ("list", "clear"):
        raise ConfigError(f"there is no `octavo cache {action}`; there are list and clear")

    def told(what: str, directory: Path, files: Iterable[StoredFile]) -> None:
        files = list(files)
        if action == "clear":
            remove(files)
        verb = "removed from" if action == "clear" else "in"
        print(f"{len(files)} {what} {verb} {directory}, {format_bytes(sum(file.num_bytes for file in files))}")

    directory = weights_directory(weights_cache)
    images = stored_images(directory)
    told("models' packed weights", directory, (image.file for image in images))
    for image in images:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(image.file.used_ns / 1e9))
        print(f"  {format_bytes(image.file.num_bytes):>12}  used {used}  {image.model}")
    if disk_cache is not None:
        directory = disk_cache.expanduser()
        told("KV blocks", directory, stored_blocks(directory))
