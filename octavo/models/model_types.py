"""The two names of a family in config.json: `model_type`, by which transformers chooses, and `architectures`, by which
vLLM and Octavo do."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from octavo.weights.spec import CheckpointError

_SPELLINGS = {
    "gemma3text": "gemma3",
    "hunyuanv1dense": "hunyuandensev1",
    "refinedweb": "falcon",
    "refinedwebmodel": "falcon",
}
_ALIKE = {
    **dict.fromkeys(("ministral", "ministral3"), "mistral"),
    **dict.fromkeys(("xlmroberta", "camembert"), "roberta"),
}
"""Families that are computed alike."""


def check_model_type(config: Mapping[str, Any], architecture: str, served: Iterable[str], path: str) -> None:
    """Raise CheckpointError where the config's model_type is another family of those `served` than the architecture.

    A model_type that is none of them is another spelling, or comes with code of its own.
    """
    kind = config.get("model_type")
    if kind is None:
        return
    if not isinstance(kind, str):
        raise CheckpointError(f"{path}: config has model_type = {kind!r:.100}, expected a name")
    said = _family(kind)
    if said != _family(_stem(architecture)) and any(_family(_stem(name)) == said for name in served):
        raise CheckpointError(
            f"{path}: config has model_type = {kind!r} and architectures = {architecture}, which are two families: "
            "one of them is wrong"
        )


def _stem(architecture: str) -> str:
    return re.sub(r"(For[A-Z]\w*|LMHeadModel|Model)$", "", architecture)


def _family(name: str) -> str:
    letters = re.sub(r"[^a-z0-9]", "", name.lower())
    family = _SPELLINGS.get(letters, letters)
    return _ALIKE.get(family, family)
