"""A tiny model whose answers do not end before somebody ends them: no token ends one, and its context is long.

Tests of what happens in the middle of an answer need no guess how long it takes: alone, an answer to the end of the
context takes minutes.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

CONTEXT = 2**17
"""Tokens: 32 MiB of KV cache."""

NUM_TOKENS = 100_000
"""Of an answer, where a request has to say."""


def endless_model(data: Path, folder: Path) -> Path:
    """The tiny model of Llama's architecture. folder: where it is made."""
    model = folder / "endless"
    shutil.copytree(data / "arch" / "llama", model)
    for name, changes in (
        ("config.json", {"eos_token_id": None, "max_position_embeddings": CONTEXT}),
        ("generation_config.json", {"eos_token_id": None}),
        ("tokenizer_config.json", {"eos_token": None}),
    ):
        path = model / name
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return model
