"""A model as a pure function of the token prefix, which it writes to and reads from KV blocks like a real one.

Slot (block, i) holds a digest of the whole prefix; a logit row reads every slot of its context through the block
table, as far as the group's window goes. So a request draws other tokens as soon as one slot that it reads is not its
own prefix.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from octavo.backends.base import BLOCK_SIZE, SamplingArrays, StepBatch, StepResult
from octavo.request import Request
from octavo.sampling.definition import noise_key

VOCAB = 7
Windows = Sequence[int | None]
"""Per KV group: tokens that a query sees, itself included (2 at least: each slot is written from the one before)."""

MAX_TOP = 3


class PagedModel:
    """Runs StepBatches on dictionaries of slots."""

    def __init__(self, windows: Windows = (None,)) -> None:
        self.windows = windows
        self.slots: list[dict[tuple[int, int], int]] = [{} for _ in windows]

    def run(self, batch: StepBatch) -> StepResult:
        for slots, copies in zip(self.slots, batch.copies, strict=True):
            assert set(copies[:, 0]).isdisjoint(copies[:, 1]), "copies depend on their order"
            for source, destination in copies.tolist():
                for i in range(BLOCK_SIZE):
                    slots[destination, i] = slots.get((source, i), -1)
        for s in range(len(batch.context_lens)):
            self._write(batch, s)
        reads = [self._read(batch, s, int(n)) for s, n in enumerate(batch.context_lens)]  # after all have written
        return self._sample(batch, reads)

    def _write(self, batch: StepBatch, s: int) -> None:
        """Write the tokens of sequence s behind what its blocks hold."""
        first, last = int(batch.seq_starts[s]), int(batch.seq_starts[s + 1])
        assert batch.positions[first:last].tolist() == list(range(batch.positions[first], batch.context_lens[s]))
        for g, slots in enumerate(self.slots):
            position = int(batch.positions[first])
            value = slots.get(self._slot(batch, g, s, position - 1), -1) if position else 0
            for token in batch.token_ids[first:last].tolist():
                value = slots[self._slot(batch, g, s, position)] = next_value(value, token)
                position += 1

    def _read(self, batch: StepBatch, s: int, count: int) -> list[list[int]]:
        """Per group, what sequence s finds at positions [0, count)."""
        return [
            [slots.get((block, i), -1) for block in batch.block_tables[g][s].tolist() for i in range(BLOCK_SIZE)][
                :count
            ]
            for g, slots in enumerate(self.slots)
        ]

    @staticmethod
    def _slot(batch: StepBatch, g: int, s: int, position: int) -> tuple[int, int]:
        return int(batch.block_tables[g][s, position // BLOCK_SIZE]), position % BLOCK_SIZE

    def _sample(self, batch: StepBatch, reads: list[list[list[int]]]) -> StepResult:
        rows = batch.logit_rows.tolist()
        assert rows == sorted(set(rows))
        sequences = np.searchsorted(batch.seq_starts, rows, side="right") - 1
        digests = [
            digest([values[: batch.positions[row] + 1] for values in reads[s]], self.windows)
            for s, row in zip(sequences, rows, strict=True)
        ]
        num_rows = len(rows)
        tokens, logprobs = np.zeros(num_rows, np.int32), np.zeros(num_rows, np.float32)
        a = batch.sampling
        num_top = max(MAX_TOP, int(a.num_top.max(initial=0)))
        top = np.zeros((num_rows, num_top), np.int32)
        top_logprobs = np.zeros((num_rows, num_top), np.float32)
        for r, row in enumerate(rows):
            target = int(a.target[r])
            position = int(batch.positions[row]) + 1
            assert a.position[r] == position
            if target < 0:
                tokens[r] = draw(digests[r], int(a.noise_key[r]), position, _bias(a, r), _history(a, r))
            else:
                assert not _bias(a, r) and not _history(a, r)
                tokens[r] = target
            logprobs[r] = score(digests[r], int(tokens[r])) if a.num_top[r] >= 0 else 0
            best = sorted((-score(digests[r], token), token) for token in range(VOCAB))[:num_top]
            top[r] = [token for _, token in best]
            top_logprobs[r] = [-cost for cost, _ in best]
        return StepResult(
            tokens, logprobs, np.ones(num_rows, np.int32), top, top_logprobs, np.zeros(num_rows, np.bool_)
        )


def _bias(a: SamplingArrays, r: int) -> dict[int, float]:
    part = slice(a.bias_starts[r], a.bias_starts[r + 1])
    bias = dict(zip(a.bias_ids[part].tolist(), a.bias_values[part].tolist(), strict=True))
    assert len(bias) == part.stop - part.start
    return bias


def _history(a: SamplingArrays, r: int) -> dict[int, int]:
    part = slice(a.history_starts[r], a.history_starts[r + 1])
    history = dict(zip(a.history_ids[part].tolist(), a.history_counts[part].tolist(), strict=True))
    assert len(history) == part.stop - part.start
    return history


def next_value(before: int, token: int) -> int:
    """What the slot of `token` holds, after the slot before it."""
    return hash((before, token))


def digest(groups: Sequence[list[int]], windows: Windows) -> int:
    """What a logit row depends on: in each group, all slots that its token sees."""
    seen = [
        tuple(values if window is None else values[-window:]) for values, window in zip(groups, windows, strict=True)
    ]
    return hash(tuple(seen))


def score(context: int, token: int) -> float:
    return float(np.float32(-((context ^ token) % 1000) / 100))


def draw(context: int, key: int, position: int, bias: dict[int, float], history: dict[int, int]) -> int:
    """The token that follows: a function of everything that a draw may depend on."""
    first = hash((context, key, position, *sorted(history.items()))) % VOCAB
    allowed = [t for t in range(VOCAB) if bias.get(t, 0.0) != -np.inf]
    return allowed[first % len(allowed)]


def scores_after(token_ids: list[int], windows: Windows = (None,)) -> list[float]:
    """Of every token of the vocabulary behind a sequence."""
    values = list[int]()
    for token in token_ids:
        values.append(next_value(values[-1] if values else 0, token))
    context = digest([values] * len(windows), windows)
    return [score(context, token) for token in range(VOCAB)]


def expected(request: Request, max_model_len: int, windows: Windows = (None,)) -> tuple[list[int], list[float]]:
    """Output tokens and scores of the prompt tokens after the first, with neither cache nor scheduler."""
    values: list[int] = []
    scores = []
    for position, token in enumerate(request.prompt_ids):
        if position and request.params.prompt_logprobs is not None:
            scores.append(score(digest([values] * len(windows), windows), token))
        values.append(next_value(values[-1] if values else 0, token))
    params, output = request.params, list[int]()
    key = noise_key(request.seed, request.choice)
    limit = max_model_len - len(request.prompt_ids)
    if params.max_tokens is not None:
        limit = min(limit, params.max_tokens)
    while len(output) < limit:
        bias = dict(params.logit_bias or {})
        if len(output) < params.min_tokens:
            bias |= dict.fromkeys(request.stop_ids, -np.inf)
        history: dict[int, int] = {}
        if params.presence_penalty:
            history = {t: output.count(t) for t in {*request.prompt_ids, *output}}
        output.append(draw(digest([values] * len(windows), windows), key, len(values), bias, history))
        values.append(next_value(values[-1], output[-1]))
        if output[-1] in request.stop_ids:
            break
    return output, scores
