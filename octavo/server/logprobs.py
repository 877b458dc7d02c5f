"""Logprobs as OpenAI's two APIs and vLLM's prompt_logprobs write them.

What is told of a token is encoded at once: it takes a quarter of the memory of the objects that it is made of.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw

from octavo.request import TokenLogprobs
from octavo.text.tokenizer import Tokenizer

_encode = msgspec.json.Encoder().encode


def token_text(tokenizer: Tokenizer, token: int, as_id: bool = False) -> str:
    """What a token stands for by itself; a part of a character is U+FFFD. as_id: "token_id:5" instead, as vLLM has it."""
    if as_id:
        return f"token_id:{token}"
    return tokenizer.id_to_bytes(token).decode("utf-8", "replace")


def chat_tokens(tokenizer: Tokenizer, scores: Sequence[TokenLogprobs], as_ids: bool = False) -> list[Raw]:
    """An object for each token, as chat has them."""
    return [
        Raw(
            _encode(
                {
                    **_chat_token(tokenizer, score.token_id, score.logprob, as_ids),
                    "top_logprobs": [
                        _chat_token(tokenizer, token, logprob, as_ids)
                        for token, logprob in zip(score.top_ids, score.top_logprobs, strict=True)
                    ],
                }
            )
        )
        for score in scores
    ]


def _chat_token(tokenizer: Tokenizer, token: int, logprob: float, as_id: bool) -> dict[str, Any]:
    data = tokenizer.id_to_bytes(token)
    return {"token": token_text(tokenizer, token, as_id), "logprob": _finite(logprob), "bytes": list(data)}


class CompletionTokens(NamedTuple):
    """The members of the `logprobs` object of a completion choice, each with an entry for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[Raw | None]
    text_offset: list[int]

    def extend(self, more: CompletionTokens) -> None:
        self.tokens.extend(more.tokens)
        self.token_logprobs.extend(more.token_logprobs)
        self.top_logprobs.extend(more.top_logprobs)
        self.text_offset.extend(more.text_offset)


class CompletionLogprobs:
    """The `logprobs` object of a completion choice; keeps the text offset from one chunk to the next."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._unseen = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._offset = 0
        self._as_ids = as_ids

    def write(self, scores: Sequence[TokenLogprobs], prompt_start: int | None = None) -> CompletionTokens:
        """`prompt_start`: an unscored first prompt token that comes before `scores` (echo)."""
        ids = [score.token_id for score in scores]
        tokens: list[str] = []
        logprobs: list[float | None] = []
        tops: list[Raw | None] = []
        if prompt_start is not None:
            ids.insert(0, prompt_start)
            tokens.append(self._text(prompt_start))
            logprobs.append(None)
            tops.append(None)
        for score in scores:
            tokens.append(self._text(score.token_id))
            logprobs.append(_finite(score.logprob))
            top: dict[str, float] = {}
            for token, logprob in zip(score.top_ids, score.top_logprobs, strict=True):
                top.setdefault(self._text(token), _finite(logprob))
            top.setdefault(tokens[-1], _finite(score.logprob))
            tops.append(Raw(_encode(top)))
        offsets = []
        for token in ids:
            offsets.append(self._offset)
            self._offset += 0 if token in self._unseen else len(token_text(self._tokenizer, token))
        return CompletionTokens(tokens, logprobs, tops, offsets)

    def _text(self, token: int) -> str:
        return token_text(self._tokenizer, token, self._as_ids)


def prompt_tokens(tokenizer: Tokenizer, scores: Sequence[TokenLogprobs]) -> list[Raw]:
    """Of each token of a prompt but the first, in vLLM's form: id -> score of the token and of the best alternatives."""
    positions = []
    for score in scores:
        entry = {
            str(token): {"logprob": _finite(logprob), "rank": rank, "decoded_token": token_text(tokenizer, token)}
            for rank, (token, logprob) in enumerate(zip(score.top_ids, score.top_logprobs, strict=True), 1)
        }
        own = {"logprob": _finite(score.logprob), "rank": score.rank}
        entry[str(score.token_id)] = {**own, "decoded_token": token_text(tokenizer, score.token_id)}
        positions.append(Raw(_encode(entry)))
    return positions


def _finite(logprob: float) -> float:
    """JSON has no infinity; a masked token is as unlikely as can be written."""
    return max(logprob, -9999.0)
