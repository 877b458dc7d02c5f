"""ScoreStore: scores of prompt tokens, kept with the blocks of the prefix that they belong to.

The score of token i depends on the tokens up to and including i. So it is kept under the name of the block that holds
token i, and it is right wherever that name is: with the same weights, numbers and salt.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from octavo.cache.prefix import Key
from octavo.request import TokenLogprobs

Table = NDArray[np.int32]
"""[tokens, 2 + 2 * num_top]: bits of the score, rank, ids of the alternatives, bits of theirs."""


class ScoreStore:
    """Scores of the first tokens of named blocks. The first token of a sequence has none: its row is zero.

    A block has at most 16 rows of 2 + 2 * MAX_LOGPROBS numbers, 4 KB, and they go when its name does: memory is
    bounded by the number of blocks.
    """

    def __init__(self) -> None:
        self._tables: dict[Key, Table] = {}
        self.num_bytes = 0

    def count(self, key: Key, num_top: int) -> int:
        """Leading tokens of this block whose scores are known with `num_top` alternatives."""
        table = self._tables.get(key)
        return 0 if table is None or table.shape[1] < 2 + 2 * num_top else len(table)

    def put(self, key: Key, scores: Sequence[TokenLogprobs | None], num_top: int) -> None:
        """Keep the scores of a block's first tokens, unless as many with as many alternatives are known."""
        known, width = self._tables.get(key), 2 + 2 * num_top
        if known is not None and len(known) >= len(scores) and known.shape[1] >= width:
            return
        table = np.zeros((len(scores), width), np.int32)
        floats = table.view(np.float32)
        for i, score in enumerate(scores):
            if score is not None:
                floats[i, 0] = score.logprob
                table[i, 1] = score.rank
                table[i, 2 : 2 + num_top] = score.top_ids[:num_top]
                floats[i, 2 + num_top :] = score.top_logprobs[:num_top]
        self.drop(key)
        self._tables[key] = table
        self.num_bytes += table.nbytes

    def read(self, key: Key, start: int, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
        """Scores of the tokens from `start` on in this block, which are `token_ids`."""
        table = self._tables[key][start : start + len(token_ids)]
        assert len(table) == len(token_ids)
        floats, most = table.view(np.float32), table.shape[1] // 2 - 1
        return [
            TokenLogprobs(
                token, float(floats[i, 0]), int(table[i, 1]), table[i, 2 : 2 + num_top].tolist(),
                floats[i, 2 + most : 2 + most + num_top].tolist(),
            )
            for i, token in enumerate(token_ids)
        ]  # fmt: skip

    def inherit(self, key: Key, heir: Key) -> None:
        """`heir` names a block that begins like this one, whose name is given up."""
        table = self._tables.get(key)
        if table is not None and heir not in self._tables:
            self._tables[heir] = table
            self.num_bytes += table.nbytes

    def drop(self, key: Key) -> None:
        table = self._tables.pop(key, None)
        if table is not None:
            self.num_bytes -= table.nbytes

    def clear(self) -> None:
        self._tables.clear()
        self.num_bytes = 0

    def check(self) -> None:
        """Raise AssertionError unless the bytes are those of the tables."""
        assert self.num_bytes == sum(table.nbytes for table in self._tables.values())

    @property
    def keys(self) -> set[Key]:
        return set(self._tables)
