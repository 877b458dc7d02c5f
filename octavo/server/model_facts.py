"""What a model's files tell of it: size, format, quantisation."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
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
    return ModelFacts(
        str(checkpoint.config.get("model_type", "")),
        "gguf" if path.is_file() else "safetensors",
        by_source.total(),
        by_source.most_common(1)[0][0],
        sum(file.stat().st_size for file in files),
        datetime.fromtimestamp(max(file.stat().st_mtime for file in files), UTC),
        dict(checkpoint.config),
    )
