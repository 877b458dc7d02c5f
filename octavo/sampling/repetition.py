"""What a draw depends on of the tokens before it: penalties, DRY and banned sequences. Each is a function of the
request's tokens alone, so that a request that was preempted or resumed draws what it would have drawn.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octavo.request import Request

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]

MAX_DRY_MATCH = 128
"""Tokens a repetition is followed back: the penalty of one as long is over 1e30 at the usual base, 1.75."""

MAX_DRY_PENALTY = 1e30


class History:
    """Distinct tokens of a request, and how often each is in the output. Follows the output as it grows."""

    def __init__(self, request: Request) -> None:
        self._request = request
        ids = list(dict.fromkeys(request.prompt_ids))
        self._places = {token: place for place, token in enumerate(ids)}
        self._ids: I32 = np.zeros(2 * len(ids) + 64, np.int32)
        self._ids[: len(ids)] = ids
        self._counts: I32 = np.zeros(len(self._ids), np.int32)
        self._num_seen = 0  # output tokens counted

    def arrays(self) -> tuple[I32, I32]:
        """(ids, counts in the output) for the next draw. Valid until the next call."""
        output_ids = self._request.output_ids
        for token in output_ids[self._num_seen :]:
            place = self._places.setdefault(token, len(self._places))
            if place == len(self._ids):
                self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._ids[place] = token
            self._counts[place] += 1
        self._num_seen = len(output_ids)
        return self._ids[: len(self._places)], self._counts[: len(self._places)]


class RecentHistory:
    """As History, of the last `repeat_last_n` tokens alone."""

    def __init__(self, request: Request) -> None:
        self._request = request

    def arrays(self) -> tuple[I32, I32]:
        """(ids, counts in the output) for the next draw."""
        request = self._request
        total, last_n = request.num_tokens, request.params.repeat_last_n
        recent = np.array(request.token_ids(max(0, total - last_n), total), np.int32)
        num_output = min(len(recent), len(request.output_ids))
        ids, places = np.unique(recent, return_inverse=True)
        return ids, np.bincount(places[len(recent) - num_output :], minlength=len(ids)).astype(np.int32)


class Dry:
    """DRY ("don't repeat yourself"; p-e-w 2024): a token that would go on a repetition is made less likely, the more the
    longer what is repeated: by multiplier * base ** (length - allowed_length) from allowed_length on. No repetition
    reaches back over a sequence breaker, or over the last `dry_penalty_last_n` tokens.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self._tokens: I32 = np.zeros(2 * request.num_tokens + 64, np.int32)
        self._num_seen = 0
        self._after_breaker = 0  # index of the first token behind the last breaker
        self._breakers: dict[int, list[list[int]]] = {}  # last token -> breakers that end with it
        for breaker in request.params.dry_breaker_ids:
            self._breakers.setdefault(breaker[-1], []).append(breaker)

    def arrays(self) -> tuple[I32, F32]:
        """(ids, what is taken from their logits) for the next draw."""
        self._follow()
        params, n = self._request.params, self._num_seen
        start = 0 if params.dry_penalty_last_n < 0 else max(0, n - params.dry_penalty_last_n)
        tokens = self._tokens[start:n]
        n -= start
        longest = min(n - max(0, self._after_breaker - start), MAX_DRY_MATCH)
        # ends[i]: tokens[..ends[i]] repeats the last `length` tokens, and tokens[ends[i] + 1] went on
        ends = np.arange(n - 1)
        lengths = np.zeros(max(0, n - 1), np.int32)
        for length in range(1, longest + 1):
            ends = ends[ends >= length - 1]
            ends = ends[tokens[ends - (length - 1)] == tokens[n - length]]
            if not len(ends):
                break
            lengths[ends] = length
        repeats = np.flatnonzero(lengths >= params.dry_allowed_length)
        ids, places = np.unique(tokens[repeats + 1], return_inverse=True)
        most = np.zeros(len(ids), np.int32)
        np.maximum.at(most, places, lengths[repeats])
        with np.errstate(over="ignore"):
            penalties = params.dry_multiplier * np.power(params.dry_base, most - float(params.dry_allowed_length))
        return ids, np.minimum(penalties, MAX_DRY_PENALTY).astype(np.float32)

    def _follow(self) -> None:
        """Take over tokens that came since."""
        request = self._request
        new = request.token_ids(self._num_seen, request.num_tokens)
        if request.num_tokens > len(self._tokens):
            self._tokens = np.concatenate((self._tokens, np.zeros(request.num_tokens, np.int32)))
        for token in new:
            self._tokens[self._num_seen] = token
            self._num_seen += 1
            for breaker in self._breakers.get(token, ()):
                if self._tokens[max(0, self._num_seen - len(breaker)) : self._num_seen].tolist() == breaker:
                    self._after_breaker = self._num_seen


class Bans:
    """Sequences of tokens that the output must not have: the last token of one is banned where the others came before."""

    def __init__(self, request: Request) -> None:
        self._request = request
        sequences = request.params.bad_word_ids
        self._always = {sequence[0] for sequence in sequences if len(sequence) == 1}
        self._longer = [sequence for sequence in sequences if len(sequence) > 1]

    def next(self) -> set[int]:
        """Tokens that must not be drawn next."""
        output = self._request.output_ids
        return self._always | {s[-1] for s in self._longer if output[len(output) - len(s) + 1 :] == s[:-1]}
