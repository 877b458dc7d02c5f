"""What a quantisation method finds in a checkpoint."""

from __future__ import annotations

from typing import NamedTuple

from octavo.weights.quant.matrix import Matrix


class Found(NamedTuple):
    matrices: dict[str, Matrix]  # by the plain name of the weight
    idle: set[str]  # tensors that need not be read: no weights, or biases of zeros
    notices: list[str]
