"""GGUF models in several files: NAME-00001-of-00003.gguf and so on, as llama.cpp's gguf-split writes them."""

from __future__ import annotations

import re
from pathlib import Path

from octavo.weights.gguf_file import GgufFile, read_gguf
from octavo.weights.spec import CheckpointError

_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


def read_model(path: Path) -> GgufFile:
    """The model of which `path` is the file, or any part: metadata of the first part, tensors of all.

    Raises CheckpointError where a part is missing, damaged or of another model.
    """
    given = read_gguf(path)
    count = given.metadata.get("split.count", 1)
    if type(count) is not int:
        raise CheckpointError(f"{path}: split.count must be a number; found {count!r:.100}")
    if count in (0, 1):
        return given
    name = _NAME.fullmatch(path.name)
    if name is None or int(name[3]) != count:
        raise CheckpointError(f"{path}: one of {count} parts, but it is not called NAME-00001-of-{count:05}.gguf")
    paths = part_names(path)
    missing = [part.name for part in paths if not part.is_file()]
    if missing:
        raise CheckpointError(f"{path}: one of {count} parts, of which {', '.join(missing[:3])} is not beside it")
    parts = [given if part == path else read_gguf(part) for part in paths]
    tensors = {name: tensor for part in parts for name, tensor in part.tensors.items()}
    for i, part in enumerate(parts):
        if (part.metadata.get("split.no"), part.metadata.get("split.count")) != (i, count):
            raise CheckpointError(f"{paths[i]}: its metadata does not say that it is part {i + 1} of {count}")
    said = parts[0].metadata.get("split.tensors.count", len(tensors))
    if not len(tensors) == sum(len(part.tensors) for part in parts) == said:
        raise CheckpointError(f"{paths[0]}: its {count} parts hold {len(tensors)} different tensors, not {said}")
    return GgufFile(parts[0].file, parts[0].metadata, tensors)


def part_names(path: Path) -> list[Path]:
    """All parts of the model that a part's name tells of, itself included; only itself where it tells of none."""
    name = _NAME.fullmatch(path.name)
    if name is None:
        return [path]
    return [path.with_name(f"{name[1]}-{i + 1:05}-of-{name[3]}.gguf") for i in range(int(name[3]))]
