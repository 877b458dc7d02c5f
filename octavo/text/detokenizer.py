"""Text of a growing sequence of tokens."""

from __future__ import annotations

from collections.abc import Iterable
from encodings.utf_8 import IncrementalDecoder

from octavo.text.tokenizer import Tokenizer


class Detokenizer:
    """Joined results of `push` and `finish` equal `tokenizer.decode` of all ids with the same options."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        continues: bool = False,
        keep: frozenset[int] = frozenset(),
    ) -> None:
        """keep: special tokens that are not skipped."""
        self._piece = tokenizer.piece
        self._skip = tokenizer.special_ids - keep if skip_special_tokens else frozenset()
        self._first = not continues
        self._utf8 = IncrementalDecoder("replace")

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete; an unfinished character is held back. O(1) per token."""
        data = b""
        for token_id in token_ids:
            if token_id in self._skip:
                continue
            piece = self._piece(token_id, self._first)
            if piece is not None:
                data += piece
                self._first = False
        if not self._utf8.buffer:
            try:
                return data.decode()  # as nearly always: whole characters
            except UnicodeDecodeError:
                pass
        return self._utf8.decode(data)

    def finish(self) -> str:
        """What was held back: an unfinished character becomes U+FFFD."""
        return self._utf8.decode(b"", final=True)
