"""Fields of SamplingParams that are texts, as the token sequences that the engine works with."""

from __future__ import annotations

from functools import lru_cache

import msgspec

from octavo.request import DRY_BREAKERS, ParameterError, SamplingParams
from octavo.text.tokenizer import Tokenizer

MAX_WORD = 256
"""Characters of a banned word or a sequence breaker."""


def resolve(params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """`params` with `bad_words` and DRY's sequence breakers as token ids. Raises ParameterError naming the field."""
    changes: dict[str, object] = {}
    if params.bad_words:
        words = params.bad_word_ids + [s for word in params.bad_words for s in _word(tokenizer, word)]
        changes |= {"bad_words": [], "bad_word_ids": words}
    if params.dry_multiplier > 0 and not params.dry_breaker_ids:
        breakers = DRY_BREAKERS if params.dry_sequence_breakers is None else params.dry_sequence_breakers
        sequences = dict.fromkeys(s for text in breakers for s in _breaker(tokenizer, text))
        changes["dry_breaker_ids"] = [list(s) for s in sequences if s]
    return msgspec.structs.replace(params, **changes) if changes else params


def _word(tokenizer: Tokenizer, word: str) -> list[list[int]]:
    """A word as it stands, and behind a space: its tokens differ."""
    spellings = (word, word if word.startswith(" ") else f" {word}")
    return [list(ids) for ids in dict.fromkeys(tuple(_encode(tokenizer, s, "bad_words")) for s in spellings)]


@lru_cache(maxsize=256)
def _breaker(tokenizer: Tokenizer, text: str) -> list[tuple[int, ...]]:
    """The tokens of a breaker, and every token that has it in its text: a comma and a newline may be one."""
    whole = tuple(_encode(tokenizer, text, "dry_sequence_breakers"))
    data = text.encode()
    return [whole, *((token,) for token in range(tokenizer.vocab_size) if data in tokenizer.id_to_bytes(token))]


def _encode(tokenizer: Tokenizer, text: str, param: str) -> list[int]:
    if len(text) > MAX_WORD:
        raise ParameterError(param, f"{param} has a text of {len(text)} characters; at most {MAX_WORD} are allowed")
    try:
        return tokenizer.encode(text, add_special_tokens=False, parse_special=False)
    except ValueError as e:
        raise ParameterError(param, f"{param}: {e}") from None
