"""The tokens that end an answer: a set, gathered from every file that names one. Engine and tokenizer share it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from octavo.weights.gguf_file import GgufFile
from octavo.weights.hf_config import read_json_if_present
from octavo.weights.spec import CheckpointError

_END_OF_TURN = ("<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>")
"""Control tokens that end an answer in GGUF files whose metadata names no end of turn."""

_CONTROL = 3  # token type


def end_tokens_of_directory(path: Path) -> frozenset[int]:
    """eos_token_id of generation_config.json and config.json, also of a text_config there, and eos_token of
    tokenizer_config.json."""
    found: set[int] = set()
    config, generation = (read_json_if_present(path / file) for file in ("config.json", "generation_config.json"))
    text = config.get("text_config")
    places = {"generation_config.json": generation, "config.json": config}
    places |= {"config.json: text_config": text} if isinstance(text, dict) else {}
    for file, values in places.items():
        value = values.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(token_id, int) for token_id in ids):
            raise CheckpointError(f"{path / file}: eos_token_id must be a token id or a list of them; found {value!r}")
        found.update(ids)
    token = read_json_if_present(path / "tokenizer_config.json").get("eos_token")
    content = token.get("content") if isinstance(token, dict) else token
    found.update(added["id"] for added in _added_tokens(path / "tokenizer.json") if added["content"] == content)
    return frozenset(found)


def _added_tokens(file: Path) -> list[dict[str, Any]]:
    """They stand near the beginning of tokenizer.json: the vocabulary behind them, megabytes, is not parsed."""
    if not file.is_file():
        return []
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: cannot be read: {error}") from error
    key = '"added_tokens":'
    start = text.find(key)
    if start < 0:
        return []
    start += len(key)
    start += len(text[start : start + 100]) - len(text[start : start + 100].lstrip())
    try:
        tokens: Any = json.JSONDecoder().raw_decode(text, start)[0]
        return [{"id": int(token["id"]), "content": str(token["content"])} for token in tokens]
    except (json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError(f"{file}: cannot be read as JSON: {error}") from error
    except (TypeError, ValueError, KeyError) as error:
        raise CheckpointError(f"{file}: added_tokens must be a list of objects with id and content") from error


def end_tokens_of_gguf(gguf: GgufFile) -> frozenset[int]:
    """eos, end of turn and end of message of the metadata; an end of turn it does not name is known by its text."""
    ids = {role: gguf_token_id(gguf, role) for role in ("eos", "eot", "eom")}
    found = {token_id for token_id in ids.values() if token_id is not None}
    eos, key = ids["eos"], "tokenizer.ggml.tokens"
    named = ids["eot"] is not None or (eos is not None and gguf.strings(key, eos + 1)[eos] in _END_OF_TURN)
    if not named and gguf.size(key):
        types = gguf.metadata.get("tokenizer.ggml.token_type", [])
        pairs = zip(gguf.strings(key), types, strict=False)
        found |= {i for i, (token, kind) in enumerate(pairs) if kind == _CONTROL and token in _END_OF_TURN}
    return frozenset(found)


def gguf_token_id(gguf: GgufFile, role: str) -> int | None:
    """tokenizer.ggml.<role>_token_id, or None. CheckpointError where no such token exists."""
    value = gguf.metadata.get(f"tokenizer.ggml.{role}_token_id")
    if value is None:
        return None
    size = gguf.size("tokenizer.ggml.tokens")
    if not isinstance(value, int) or not 0 <= value < size:
        raise CheckpointError(f"{gguf.file.path}: {role}_token_id {value} is outside of the {size} tokens")
    return value
