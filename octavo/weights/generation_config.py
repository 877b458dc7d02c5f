"""Sampling values that the makers of a model recommend: generation_config.json beside its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from octavo.weights.hf_config import read_json_if_present

NAMES = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")


def recommended_sampling(path: Path) -> dict[str, Any]:
    """Of a model directory, by the names of SamplingParams; empty where it says nothing, as GGUF files do."""
    if not path.is_dir():
        return {}
    config = read_json_if_present(path / "generation_config.json")
    return {name: config[name] for name in NAMES if config.get(name) is not None}
