"""JSON files of the Hugging Face layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from octavo.weights.spec import CheckpointError


class ModelConfig(dict[str, Any]):
    """A model's config. Indexing a key that is not there raises CheckpointError naming key and file."""

    def __init__(self, values: dict[str, Any], file: str) -> None:
        super().__init__(values)
        self.file = file

    def __missing__(self, key: str) -> Any:
        raise CheckpointError(f"{self.file}: key {key!r} is missing")


def read_json(path: Path, kind: type = dict) -> Any:
    """The JSON object, or list, in a file; CheckpointError if it is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # ValueError: of JSON, UTF-8, numbers of thousands of digits
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(value, kind):
        expected = "a list" if kind is list else "a JSON object"
        raise CheckpointError(f"{path}: expected {expected}, found {type(value).__name__}")
    return value


def read_json_if_present(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = read_json(path) if path.is_file() else {}
    return found
