"""A model's tokens in the form that llguidance takes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import takewhile
from pathlib import Path

from llguidance import LLTokenizer

from octavo.text.tokenizer import Tokenizer, load_tokenizer


def load_vocabulary(model: Path, vocab_size: int, end_ids: Iterable[int]) -> LLTokenizer:
    """model: files with a tokenizer. vocab_size: tokens that the model can draw. end_ids: allowed where the grammar is
    satisfied. Special tokens match no text; Lark names them `<name>` or `<[id]>`.

    Takes 0.6 s per 50,000 tokens, and holds the GIL for a third of it. Raises CheckpointError.
    """
    tokens = _Tokens(load_tokenizer(model), vocab_size, sorted(end_ids))
    vocabulary = LLTokenizer(tokens, eos_token=tokens.end_ids or None)  # type: ignore[arg-type]
    tokens.greedy = vocabulary.greedy_tokenize
    return vocabulary


class _Tokens:
    """What LLTokenizer asks of its first argument."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_ids: list[int]) -> None:
        self._tokenizer = tokenizer
        self.tokens = [tokenizer.id_to_bytes(i) for i in range(vocab_size)]  # empty: padding, never allowed
        self.special_token_ids = sorted(i for i in tokenizer.special_ids if i < vocab_size)
        self.end_ids = end_ids
        self.eos_token_id = end_ids[0] if end_ids else None  # None: llguidance adds one that the model cannot draw
        self.greedy: Callable[[str], list[int]]

    def __call__(self, text: str) -> list[int]:
        """Tokens of a text that the grammar forces: the tokenizer's own, where they spell just this text."""
        ids = self._tokenizer.encode(text, add_special_tokens=False, parse_special=False)
        known = list(takewhile(lambda i: i < len(self.tokens), ids))
        if b"".join(self.tokens[i] for i in known) == text.encode():
            return known
        return self.greedy(text)
