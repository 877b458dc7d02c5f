"""How a model was trained to make vectors of texts: what sentence-transformers keeps beside it, or GGUF metadata."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from octavo.weights.hf_config import read_json, read_json_if_present
from octavo.weights.spec import Checkpoint, CheckpointError

Mode = Literal["last", "mean", "cls"]

_MODES: dict[str, Mode] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
_SERVED = ("Transformer", "Pooling", "Normalize")


_OF_GGUF: dict[int, Mode] = {1: "mean", 2: "cls", 3: "last"}


def read_pooling(checkpoint: Checkpoint) -> Mode | None:
    """The pooling of a model; None where it says nothing. CheckpointError where what it says is not served."""
    kind = checkpoint.config.get("pooling_type")
    if kind:
        if type(kind) is not int or kind not in _OF_GGUF:
            raise CheckpointError(f"{checkpoint.path}: pooling_type {kind!r} is not supported; supported: {_OF_GGUF}")
        return _OF_GGUF[kind]
    folder = Path(checkpoint.path)
    if not (folder / "modules.json").is_file():
        return None
    modules = read_json_list(folder / "modules.json")
    kinds = {str(module.get("type", "")).rpartition(".")[2]: str(module.get("path", "")) for module in modules}
    for kind in kinds:
        if kind not in _SERVED:
            raise CheckpointError(
                f"{folder / 'modules.json'}: module {kind} is not supported; supported: {', '.join(_SERVED)}"
            )
    file = folder / kinds.get("Pooling", "1_Pooling") / "config.json"
    config = read_json_if_present(file)
    modes = [key for key, value in config.items() if key.startswith("pooling_mode") and value is True]
    if modes and (len(modes) > 1 or modes[0] not in _MODES):
        raise CheckpointError(f"{file}: {' and '.join(modes)} are not supported; supported: one of {', '.join(_MODES)}")
    return _MODES[modes[0]] if modes else None


def read_json_list(file: Path) -> list[dict[str, Any]]:
    """A list of objects. CheckpointError where it is none."""
    found: list[dict[str, Any]] = read_json(file, list)
    if not all(isinstance(entry, dict) for entry in found):
        raise CheckpointError(f"{file}: expected a list of objects")
    return found
