"""Special tokens that are written in a text, and are to stay text."""

from __future__ import annotations

import copy
import json
import re
import secrets
from collections.abc import Iterable
from typing import Any

import tokenizers

GUARD = "\ufdd0"
"""Stands behind the first character of what looks like a special token and is none. No character of Unicode."""


def literal(backend: tokenizers.Tokenizer, special_ids: frozenset[int]) -> tokenizers.Tokenizer:
    """A copy that makes special tokens of no text."""
    copied = copy.deepcopy(backend)
    copied.encode_special_tokens = True
    if not _finds(copied, special_ids):
        return copied
    state = json.loads(backend.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["id"] not in special_ids]
    _hide(state["model"], special_ids)
    return tokenizers.Tokenizer.from_str(json.dumps(state))


class Guarded:
    """Encodes texts in which some special tokens are meant, and guarded ones are not.

    A copy of the tokenizer knows special tokens by other spellings, which those that are meant are given: so the text
    around them is cut, normalised and merged as it always is.
    """

    def __init__(self, backend: tokenizers.Tokenizer, special_ids: frozenset[int]) -> None:
        self._backend, self._special_ids = backend, special_ids
        self._ids = {backend.id_to_token(i) or "": i for i in special_ids}
        self._special = _any_of(self._ids)
        self._guarded = _any_of(_with_guard(text) for text in self._ids)
        self._copy: tokenizers.Tokenizer | None = None  # made when first needed: a vocabulary is written and read again
        self._meant: dict[int, int] = {}  # id in the copy -> id

    @property
    def made(self) -> bool:
        """Whether the copy is there, which the first `encode` makes."""
        return self._copy is not None

    def spelled(self, body: bytes) -> bool:
        return any(text.encode() in body for text in self._ids if text)

    def guard(self, text: str) -> str:
        return self._special.sub(lambda found: _with_guard(found.group()), text)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """As the library: its post-processor adds what it adds."""
        if self._copy is None:
            self._copy = self._make()
        text = self._special.sub(lambda found: _spelling(self._ids[found.group()]), text)
        text = self._guarded.sub(lambda found: found.group().replace(GUARD, "", 1), text)
        return [self._meant.get(i, i) for i in self._copy.encode(text, add_special_tokens=add_special_tokens).ids]

    def _make(self) -> tokenizers.Tokenizer:
        state = json.loads(self._backend.to_str())
        for token in state["added_tokens"]:
            if token["id"] in self._special_ids:
                token["content"] = _spelling(token["id"])
        plain = copy.deepcopy(self._backend)
        plain.encode_special_tokens = True
        if _finds(plain, self._special_ids):
            _hide(state["model"], self._special_ids)
        copied = tokenizers.Tokenizer.from_str(json.dumps(state))
        for i in self._special_ids:
            place = copied.token_to_id(_spelling(i))
            assert place is not None
            self._meant[place] = i
        return copied


def _finds(backend: tokenizers.Tokenizer, special_ids: frozenset[int]) -> bool:
    """Whether the model's own vocabulary finds special tokens in their text."""
    texts = [backend.id_to_token(i) for i in special_ids]
    made = {i for text in texts if text for i in backend.encode(text, add_special_tokens=False).ids}
    return bool(made & special_ids)


def _hide(model: dict[str, Any], special_ids: frozenset[int]) -> None:
    """Give them spellings in the vocabulary that no text has."""
    if isinstance(model["vocab"], list):  # unigram
        for i in special_ids & set(range(len(model["vocab"]))):
            model["vocab"][i][0] = _spelling(i)
        return
    kept = model.get("unk_token")
    model["vocab"] = {
        text if text == kept or i not in special_ids else _spelling(i): i for text, i in model["vocab"].items()
    }


_NONCE = secrets.token_hex(8)
"""Drawn by each process: whoever writes a text cannot know it, so that no text spells a special token."""


def _spelling(token_id: int) -> str:
    return f"\ufdd1{_NONCE}.{token_id}\ufdd1"


def _with_guard(text: str) -> str:
    return text[:1] + GUARD + text[1:]


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """The longest, at each place from the left."""
    found = sorted(filter(None, texts), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, found)) or r"(?!)")
