"""SamplingTable: the sampling parameters of running requests as arrays, one row per slot, and their token counts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from octavo.request import Constraint, Request
from octavo.sampling.chain import chain, has_dry, has_penalty
from octavo.sampling.definition import noise_key
from octavo.sampling.repetition import Bans, Dry, History, RecentHistory

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]


class SamplingTable:
    """Rows are filled once per request and gathered by slot in each step (see `backends.base.SamplingArrays`)."""

    def __init__(self, num_slots: int) -> None:
        self.temperature: F32 = np.zeros(num_slots, np.float32)
        self.top_k: I32 = np.zeros(num_slots, np.int32)
        self.top_p: F32 = np.ones(num_slots, np.float32)
        self.min_p: F32 = np.zeros(num_slots, np.float32)
        self.repetition: F32 = np.ones(num_slots, np.float32)
        self.presence: F32 = np.zeros(num_slots, np.float32)
        self.frequency: F32 = np.zeros(num_slots, np.float32)
        self.noise_key: U64 = np.zeros(num_slots, np.uint64)
        self.num_top: I32 = np.full(num_slots, -1, np.int32)
        self.biases: list[Bias | None] = [None] * num_slots
        self.histories: list[History | RecentHistory | None] = [None] * num_slots
        self.masks: list[AllowedTokens | Constraint | None] = [None] * num_slots
        self.dries: list[Dry | None] = [None] * num_slots
        self.chains: list[tuple[I32, F32] | None] = [None] * num_slots
        self.special: set[int] = set()  # slots that have a mask, DRY or a chain

    def fill(self, slot: int, request: Request) -> None:
        """Take over the parameters of `request`."""
        params = request.params
        self.temperature[slot] = params.temperature
        self.top_k[slot] = max(0, params.top_k)
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        self.repetition[slot] = params.repetition_penalty
        self.presence[slot] = params.presence_penalty
        self.frequency[slot] = params.frequency_penalty
        self.noise_key[slot] = noise_key(request.seed, request.choice)
        self.num_top[slot] = -1 if params.logprobs is None else params.logprobs
        self.biases[slot] = Bias(request) if params.logit_bias or params.min_tokens or params.bad_word_ids else None
        recent = RecentHistory if params.repeat_last_n >= 0 else History
        self.histories[slot] = recent(request) if has_penalty(params) else None
        self.masks[slot] = request.constraint
        if request.constraint is None and params.allowed_token_ids is not None:
            self.masks[slot] = AllowedTokens(params.allowed_token_ids)
        self.dries[slot] = Dry(request) if has_dry(params) else None
        steps = chain(params)
        ops, values = [op for op, _, _ in steps], [(a, b) for _, a, b in steps]
        self.chains[slot] = (np.array(ops, np.int32), np.array(values, np.float32)) if steps else None
        if self.masks[slot] is None and self.dries[slot] is None and self.chains[slot] is None:
            self.special.discard(slot)
        else:
            self.special.add(slot)

    def is_constant(self, slot: int) -> bool:
        """Whether nothing that a draw of the slot depends on changes from step to step, but the position."""
        return self.biases[slot] is None and self.histories[slot] is None and slot not in self.special


class Bias:
    """What is added to single logits: `logit_bias`; -inf for banned words and, before `min_tokens`, for the ids that end
    the output.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self._bias = request.params.logit_bias or {}
        self._usual = _ids_and_values(self._bias)
        self._masked = _ids_and_values(self._bias | dict.fromkeys(request.stop_ids, -np.inf))
        self._bans = Bans(request) if request.params.bad_word_ids else None

    def arrays(self) -> tuple[I32, F32]:
        """(ids, values) for the next draw."""
        constraint = self._request.constraint
        early = len(self._request.output_ids) < self._request.params.min_tokens
        early = early and not (constraint is not None and constraint.holds_ends)
        banned = self._bans.next() if self._bans else None
        if banned:
            return _ids_and_values(
                self._bias | dict.fromkeys(banned | (self._request.stop_ids if early else set()), -np.inf)
            )
        return self._masked if early else self._usual


class AllowedTokens:
    """The mask of `allowed_token_ids`."""

    def __init__(self, token_ids: list[int]) -> None:
        self._words = mask_of(token_ids)

    def words(self) -> U32:
        return self._words


def mask_of(token_ids: Sequence[int]) -> U32:
    """The bits of `token_ids`: bit i % 32 of word i // 32. As many words as the greatest needs."""
    ids = np.array(token_ids, np.int64)
    words = np.zeros(int(ids.max(initial=-1)) // 32 + 1, np.uint32)
    np.bitwise_or.at(words, ids // 32, np.uint32(1) << (ids % 32).astype(np.uint32))
    return words


def _ids_and_values(bias: dict[int, float]) -> tuple[I32, F32]:
    return np.fromiter(bias.keys(), np.int32, len(bias)), np.fromiter(bias.values(), np.float32, len(bias))
