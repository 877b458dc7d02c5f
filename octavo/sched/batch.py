"""BatchBuilder: a Step as flat arrays. The only place that knows raggedness."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.backends.base import I32, NO_ADAPTERS, NO_TYPES, U32, Limits, SamplingArrays, StepBatch
from octavo.cache.blocks import blocks_for
from octavo.request import Request
from octavo.sampling.params import SamplingTable
from octavo.sched.step import Step, Work

NO_SLOTS: Mapping[str, int] = MappingProxyType({})
_NO_COPIES: I32 = np.zeros((0, 2), np.int32)
SPARE_BLOCKS = 16
"""Columns of block tables that are kept for several steps, beyond what the first of them needs."""


class Decodes(NamedTuple):
    """A batch in which each sequence draws one token, and nothing that a draw depends on changes but its position: it
    serves for as long as the same sequences go on, with other tokens at other positions."""

    requests: list[Request]
    slots: list[int]
    batch: StepBatch

    def continued_by(self, step: Step) -> bool:
        works = step.work
        return (
            [work.request for work in works] == self.requests
            and [work.slot for work in works] == self.slots
            and all(work.is_decode for work in works)
            and not any(step.copies)
        )


class BatchBuilder:
    """Keeps what does not change between steps by slot: sampling parameters and block tables."""

    def __init__(self, limits: Limits, num_groups: int, adapters: Mapping[str, int] = NO_SLOTS) -> None:
        """adapters: the slot of each LoRA adapter, as it is when a step is built."""
        num_blocks = blocks_for(limits.max_model_len)
        self._table = SamplingTable(limits.max_seqs)
        self._occupants: list[Request | None] = [None] * limits.max_seqs
        self._blocks: list[I32] = [np.zeros((limits.max_seqs, num_blocks), np.int32) for _ in range(num_groups)]
        self._seen: list[list[tuple[list[int], int]]] = [[([], 0)] * limits.max_seqs for _ in range(num_groups)]
        self._adapters = adapters
        self._steps: I32 = np.arange(limits.max_tokens, dtype=np.int32)
        self._decodes: Decodes | None = None  # the last batch, where it was one

    def build(self, step: Step) -> StepBatch:
        """The arrays of `step`, which describe the requests as they are now. Valid until the next call."""
        if self._decodes is not None and self._decodes.continued_by(step):
            batch = self._continue(self._decodes.batch, step.work)
            if batch is not None:
                return batch
        works = step.work
        token_ids: list[int] = []
        pairs = False
        for work in works:
            pairs |= work.request.num_first is not None
            if self._occupants[work.slot] is not work.request:
                self._occupants[work.slot] = work.request
                self._table.fill(work.slot, work.request)
            token_ids += work.request.token_ids(work.start, work.stop)
            for g, table in enumerate(work.request.tables):
                seen, length = self._seen[g][work.slot]
                if seen is not table or length != len(table):
                    self._follow(g, work.slot, table)
        num_seqs = len(works)
        slots = np.fromiter([work.slot for work in works], np.intp, num_seqs)
        starts = np.fromiter([work.start for work in works], np.int32, num_seqs)
        counts = np.fromiter([work.num_tokens for work in works], np.int32, num_seqs)
        seq_starts = _starts(counts)
        context_lens = starts + counts
        positions = np.repeat(starts - seq_starts[:-1], counts) + self._steps[: len(token_ids)]
        most = blocks_for(int(context_lens.max()))
        steady = not pairs and not any(step.copies)
        steady = steady and all(work.is_decode and self._table.is_constant(work.slot) for work in works)
        if steady:
            most += SPARE_BLOCKS
        logit_rows, sampling = self._rows(works, slots, seq_starts, context_lens)
        batch = StepBatch(
            token_ids=np.array(token_ids, np.int32),
            positions=positions,
            seq_starts=seq_starts,
            context_lens=context_lens,
            block_tables=tuple(blocks[:, :most].take(slots, axis=0) for blocks in self._blocks),
            copies=tuple(np.array(copies, np.int32) if copies else _NO_COPIES for copies in step.copies),
            logit_rows=logit_rows,
            sampling=sampling,
            token_types=_token_types(works) if pairs else NO_TYPES,
            adapters=self._slots(works, counts) if self._adapters else NO_ADAPTERS,
        )
        self._decodes = Decodes([work.request for work in works], slots.tolist(), batch) if steady else None
        return batch

    def _continue(self, batch: StepBatch, works: list[Work]) -> StepBatch | None:
        """`batch` with the tokens that come next; None where a block table has become too long for it."""
        token_ids, positions, context_lens = batch.token_ids, batch.positions, batch.context_lens
        for row, work in enumerate(works):
            token_ids[row] = work.request.last_token
            positions[row] = work.start
            context_lens[row] = work.stop  # which is the position that is drawn for
            for g, table in enumerate(work.request.tables):
                seen, length = self._seen[g][work.slot]
                if seen is not table or length != len(table):
                    self._follow(g, work.slot, table)
                    kept = batch.block_tables[g][row]
                    if len(table) > len(kept):
                        return None
                    kept[:] = self._blocks[g][work.slot, : len(kept)]
        return batch

    def _slots(self, works: list[Work], counts: I32) -> I32:
        """The adapter of each token."""
        slots = [self._adapters[work.request.adapter] if work.request.adapter else -1 for work in works]
        return np.repeat(np.array(slots, np.int32), counts) if max(slots) >= 0 else NO_ADAPTERS

    def _follow(self, g: int, slot: int, table: list[int]) -> None:
        """Bring a row of block ids up to date: a table grows in place, or is another list."""
        row = self._blocks[g][slot]
        seen, length = self._seen[g][slot]
        if seen is not table:
            row[len(table) : length] = 0
            length = 0
        row[length : len(table)] = table[length:]
        if table and table[0] < 0:  # blocks that have left the window, which nobody reads
            np.maximum(row, 0, out=row)
        self._seen[g][slot] = (table, len(table))

    def _rows(
        self, works: list[Work], slots: NDArray[np.intp], seq_starts: I32, stops: I32
    ) -> tuple[I32, SamplingArrays]:
        if any(work.num_scored for work in works):
            return self._rows_with_scores(works, seq_starts)
        draws = np.fromiter([work.draws for work in works], np.bool_, len(works))
        if draws.all():
            return seq_starts[1:] - 1, self._sampling(slots, stops, works)
        drawing = [work for work in works if work.draws]
        return seq_starts[1:][draws] - 1, self._sampling(slots[draws], stops[draws], drawing)

    def _rows_with_scores(self, works: list[Work], seq_starts: I32) -> tuple[I32, SamplingArrays]:
        """Rows of which some score the prompt token that follows, instead of drawing one, or only have their states read:
        these score any token."""
        logit_rows: list[int] = []
        slots: list[int] = []
        targets: list[int] = []
        positions: list[int] = []
        num_top: list[int] = []
        drawing: list[Work | None] = []
        for work, first in zip(works, seq_starts.tolist(), strict=False):
            request, params = work.request, work.request.params
            for position in range(work.first_scored, work.first_scored + work.num_scored):
                logit_rows.append(first + position - work.start)
                targets.append(request.prompt_ids[0 if request.pool else position + 1])
                positions.append(position + 1)
                num_top.append(-1 if request.pool else params.prompt_logprobs or 0)
                drawing.append(None)
            if work.draws:
                logit_rows.append(first + work.num_tokens - 1)
                targets.append(-1)
                positions.append(work.stop)
                num_top.append(-1 if params.logprobs is None else params.logprobs)
                drawing.append(work)
            slots += [work.slot] * work.num_rows
        sampling = self._sampling(np.array(slots, np.intp), np.array(positions, np.int32), drawing)
        return np.array(logit_rows, np.int32), sampling._replace(
            num_top=np.array(num_top, np.int32), target=np.array(targets, np.int32)
        )

    def _sampling(self, slots: NDArray[np.intp], positions: I32, drawing: Sequence[Work | None]) -> SamplingArrays:
        """Rows that draw at `positions`. `drawing` is beside them; rows with None have no bias and no history."""
        table = self._table
        biases = [table.biases[work.slot] if work else None for work in drawing]
        histories = [table.histories[work.slot] if work else None for work in drawing]
        bias_starts, bias_ids, bias_values = _ragged([b.arrays() if b else None for b in biases], np.float32)
        history_starts, history_ids, history_counts = _ragged([h.arrays() if h else None for h in histories], np.int32)
        return SamplingArrays(
            temperature=table.temperature[slots],
            top_k=table.top_k[slots],
            top_p=table.top_p[slots],
            min_p=table.min_p[slots],
            repetition=table.repetition[slots],
            presence=table.presence[slots],
            frequency=table.frequency[slots],
            noise_key=table.noise_key[slots],
            position=positions,
            num_top=table.num_top[slots],
            target=np.full(len(slots), -1, np.int32),
            bias_starts=bias_starts,
            bias_ids=bias_ids,
            bias_values=bias_values,
            history_starts=history_starts,
            history_ids=history_ids,
            history_counts=history_counts,
            **self._extras(drawing),
        )

    def _extras(self, drawing: Sequence[Work | None]) -> dict[str, Any]:
        """Masks, DRY and chains; few requests have any."""
        table = self._table
        extras = SamplingArrays.extras(len(drawing))
        if not table.special:
            return extras
        slots = [work.slot if work else -1 for work in drawing]
        sources = [table.masks[slot] if slot >= 0 else None for slot in slots]
        masks = [source.words() if source else None for source in sources]
        if any(mask is not None for mask in masks):
            extras["mask_rows"], extras["masks"] = _stacked(masks)
        dries = [table.dries[slot] if slot >= 0 else None for slot in slots]
        if any(dries):
            lists = _ragged([d.arrays() if d else None for d in dries], np.float32)
            extras["dry_starts"], extras["dry_ids"], extras["dry_values"] = lists
        chains = [table.chains[slot] if slot >= 0 else None for slot in slots]
        if any(chains):
            extras["chain_starts"], extras["chain_ops"], extras["chain_values"] = _ragged(chains, np.float32)
        return extras


def _token_types(works: list[Work]) -> I32:
    """0 in the first of two texts, 1 behind it."""
    firsts = [work.stop if (n := work.request.num_first) is None else n for work in works]
    rows = [np.arange(work.start, work.stop) >= first for work, first in zip(works, firsts, strict=True)]
    return np.concatenate(rows).astype(np.int32)


def _starts(counts: NDArray[Any]) -> I32:
    """[0, c0, c0 + c1, ...]"""
    starts = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    return starts


def _stacked(masks: list[U32 | None]) -> tuple[I32, U32]:
    """(row of each, or -1; the rows, as wide as the widest)."""
    given = [mask for mask in masks if mask is not None]
    rows = np.zeros((len(given), max(map(len, given))), np.uint32)
    for row, mask in zip(rows, given, strict=True):
        row[: len(mask)] = mask
    filled = np.array([mask is not None for mask in masks])
    return np.where(filled, np.cumsum(filled) - 1, -1).astype(np.int32), rows


def _ragged(rows: list[tuple[I32, NDArray[Any]] | None], dtype: type[Any]) -> tuple[I32, I32, NDArray[Any]]:
    """(starts, ids, values) of the rows laid end to end."""
    filled = [row for row in rows if row is not None]
    if not filled:
        return np.zeros(len(rows) + 1, np.int32), np.zeros(0, np.int32), np.zeros(0, dtype)
    starts = _starts(np.array([0 if row is None else len(row[0]) for row in rows]))
    return starts, np.concatenate([ids for ids, _ in filled]), np.concatenate([values for _, values in filled])
