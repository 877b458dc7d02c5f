"""What a model's files tell of it: size, format, quantisation."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any, NamedTuple


class ModelFacts(NamedTuple):
    architecture: str
    format: str  # gguf or safetensors
    num_parameters: int  # elements of all tensors
    quantization: str  # of most parameters
    num_bytes: int
    modified: datetime
    digest: str  # hexadecimal SHA-256, of the names, sizes and times of the files: their content takes long to read
    config: dict[str, Any]  # as config.json of the Hugging Face layout


def read_facts(path: Path) -> ModelFacts:
    """Of the model at a path that is served. Reads headers, no tensor. Raises CheckpointError."""
    from octavo.weights.checkpoint import open_checkpoint  # numpy with it: few ask

    checkpoint = open_checkpoint(path)
    by_source: Counter[str] = Counter()
    for name in checkpoint.names():
        info = checkpoint.info(name)
        by_source[info.source] += prod(info.shape)
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    stats = [(file.name, file.stat()) for file in files]
    return ModelFacts(
        str(checkpoint.config.get("gguf_architecture") or checkpoint.config.get("model_type", "")),
        "gguf" if path.is_file() else "safetensors",
        by_source.total(),
        by_source.most_common(1)[0][0],
        sum(stat.st_size for _, stat in stats),
        datetime.fromtimestamp(max(stat.st_mtime for _, stat in stats), UTC),
        sha256(repr([(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]).encode()).hexdigest(),
        dict(checkpoint.config),
    )
