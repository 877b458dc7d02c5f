"""Opening a checkpoint, whatever its file format."""

from __future__ import annotations

from pathlib import Path

from octavo.weights.address import Addressed
from octavo.weights.spec import Checkpoint, CheckpointError, reading
from octavo.weights.text_model import text_model


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Map the model at `path`: a directory in Hugging Face layout or a .gguf file. No tensor is read yet, and addresses
    (`weights.address`) name parts of tensors.

    Raises CheckpointError, one line naming file and cause, for whatever cannot be served.
    """
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or directory")
    if path.is_dir():
        from octavo.weights.safetensors_dir import SafetensorsDir

        with reading(path):
            return Addressed(text_model(SafetensorsDir(path)))
    if path.suffix == ".gguf":
        from octavo.weights.gguf_checkpoint import GgufCheckpoint

        with reading(path):
            return Addressed(GgufCheckpoint(path))
    raise CheckpointError(f"{path}: not a model: expected a directory with config.json, or a .gguf file")
