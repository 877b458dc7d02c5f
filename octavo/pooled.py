"""One vector of a text, of the states after the final norm of its tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from octavo.pooling import HEADS, Pooling

if TYPE_CHECKING:  # a server that embeds nothing starts without
    import numpy as np
    from numpy.typing import NDArray

    F64 = NDArray[np.float64]


class Pool:
    """The states of a request's tokens as they are computed, in the order of the tokens.

    The sum is in float64, token by token: its bits do not depend on which steps the tokens came in.
    """

    def __init__(self, pooling: Pooling, num_tokens: int) -> None:
        self.output = pooling if pooling in HEADS else "hidden"  # of the graph
        self._wanted = {"last": range(num_tokens - 1, num_tokens), "mean": range(num_tokens)}.get(pooling, range(1))
        self._num_taken = 0
        self._sum: F64 | None = None

    @property
    def wanted(self) -> range:
        """Tokens whose states are still to come."""
        return self._wanted[self._num_taken :]

    def take(self, states: NDArray[Any]) -> None:
        """Of the next tokens that were wanted, [n, hidden size]."""
        for state in states.astype("float64"):
            self._sum = state if self._sum is None else self._sum + state
        self._num_taken += len(states)

    def vector(self) -> F64:
        """[hidden size], not normalised. Once nothing more is wanted."""
        assert self._sum is not None and not self.wanted
        return self._sum / len(self._wanted)


def embedding(vector: F64, normalize: bool = True) -> NDArray[np.float32]:
    """With a Euclidean norm of 1; a vector of zeros stays."""
    norm = math.sqrt((vector * vector).sum())
    return (vector / norm if normalize and norm > 0 else vector).astype("float32")


def logistic(score: float) -> float:
    """1 / (1 + exp(-score)): what classifiers of one label are trained with."""
    return 1 / (1 + math.exp(-score)) if score > 0 else math.exp(score) / (1 + math.exp(score))


def similarities(first: Sequence[NDArray[Any]], second: Sequence[NDArray[Any]]) -> list[float]:
    """Cosines of each of `second` with that of its place in `first`, or the only one there; -1 to 1."""
    return [_cosine(first[i % len(first)], vector) for i, vector in enumerate(second)]


def _cosine(a: NDArray[Any], b: NDArray[Any]) -> float:
    """0 where one is all zeros."""
    import numpy as np

    norms = float(np.sqrt(np.sum(a * a) * np.sum(b * b)))
    return min(1.0, max(-1.0, float(np.sum(a * b)) / norms)) if norms > 0 else 0.0
