"""SamplingTable: the sampling parameters of running requests as arrays, one row per slot, and their token counts."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octavo.request import Request, SamplingParams
from octavo.sampling.definition import noise_key

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
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
        self.histories: list[History | None] = [None] * num_slots

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
        self.biases[slot] = Bias(request) if params.logit_bias or params.min_tokens else None
        self.histories[slot] = History(request) if has_penalty(params) else None


def has_penalty(params: SamplingParams) -> bool:
    """Whether draws depend on which tokens came before."""
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0


class Bias:
    """What is added to single logits: `logit_bias`, and -inf for the ids that end the output before `min_tokens`."""

    def __init__(self, request: Request) -> None:
        self._request = request
        bias = request.params.logit_bias or {}
        self._usual = _ids_and_values(bias)
        self._masked = _ids_and_values(bias | dict.fromkeys(request.stop_ids, -np.inf))

    def arrays(self) -> tuple[I32, F32]:
        """(ids, values) for the next draw."""
        early = len(self._request.output_ids) < self._request.params.min_tokens
        return self._masked if early else self._usual


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


def _ids_and_values(bias: dict[int, float]) -> tuple[I32, F32]:
    return np.fromiter(bias.keys(), np.int32, len(bias)), np.fromiter(bias.values(), np.float32, len(bias))
