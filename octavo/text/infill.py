"""Infilling: a text between a prefix and a suffix, for models that have tokens which mark the two.

Sources: the tokenizers and model cards of the families named here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from octavo.text.tokenizer import Tokenizer


class Infill(NamedTuple):
    """Tokens of a model: prompts are prefix, text, suffix, text, middle, or the suffix with its text first."""

    prefix: int
    suffix: int
    middle: int | None  # None: the prefix's text is the end of the prompt
    suffix_first: bool
    ends: tuple[int, ...]  # end the text beside the end tokens of the model

    def prompt(self, before: Sequence[int], after: Sequence[int]) -> list[int]:
        """before, after: tokens of the texts."""
        middle = [] if self.middle is None else [self.middle]
        if self.suffix_first:
            return [self.suffix, *after, self.prefix, *before, *middle]
        return [self.prefix, *before, self.suffix, *after, *middle]


class _Family(NamedTuple):
    prefix: str
    suffix: str
    middle: str | None
    suffix_first: bool = False


_FAMILIES = (
    _Family("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen coders, CodeGemma, Granite 4
    _Family("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite code, Refact
    _Family("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    _Family("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    _Family("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    _Family("<PRE>", "<SUF>", "<MID>"),
    _Family("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    _Family("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>", suffix_first=True),  # Seed
    _Family("[PREFIX]", "[SUFFIX]", None, suffix_first=True),  # Codestral
)
_ENDS = ("▁<EOT>", "<EOT>", "<|endoftext|>", "<|file_separator|>", "<|fim_pad|>", "<|file_sep|>", "<|repo_name|>")
"""With them a model goes on to another file, or says that it is done."""


def find_infill(tokenizer: Tokenizer) -> Infill | None:
    """None: the model has no such tokens."""
    for family in _FAMILIES:
        prefix, suffix = (tokenizer.token_to_id(name) for name in (family.prefix, family.suffix))
        middle = None if family.middle is None else tokenizer.token_to_id(family.middle)
        if prefix is None or suffix is None or (middle is None and family.middle is not None):
            continue
        ends = {i for name in _ENDS if (i := tokenizer.token_to_id(name)) is not None}
        return Infill(prefix, suffix, middle, family.suffix_first, tuple(sorted(ends - tokenizer.eos_ids)))
    return None


def encode_inside(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokens of a text that does not stand at the beginning: without the space that some tokenizers put there."""
    probe = tokenizer.encode("\n", add_special_tokens=False)
    first = tokenizer.id_to_token(probe[0]) if len(probe) > 1 else None
    if first != "▁":
        return tokenizer.encode(text, add_special_tokens=False)
    ids = tokenizer.encode("\n" + text, add_special_tokens=False)
    return ids[len(probe) :] if ids[: len(probe)] == probe else tokenizer.encode(text, add_special_tokens=False)
