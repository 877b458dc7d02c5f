"""What encoders share: their sizes and the classifier's."""

from __future__ import annotations

from typing import Any

from octavo.models.config import count
from octavo.weights.spec import CheckpointError


def head_dim(hidden: int, heads: int, path: str) -> int:
    """Of the attention. CheckpointError where it cannot be."""
    if hidden % heads or hidden // heads % 16 or not 16 <= hidden // heads <= 256:
        raise CheckpointError(
            f"{path}: config has num_attention_heads = {heads} of hidden_size = {hidden}, which is not supported: "
            "a multiple of 16 up to 256 for each is"
        )
    return hidden // heads


def is_classifier(config: dict[str, Any]) -> bool:
    return any("ForSequenceClassification" in str(name) for name in config.get("architectures") or ())


def num_labels(config: dict[str, Any], path: str) -> int:
    """Of a classifier: transformers' default is two."""
    names = config.get("id2label")
    return len(names) if isinstance(names, dict) and names else count(config, "num_labels", path, default=2)
