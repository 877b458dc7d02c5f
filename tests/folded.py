"""Names of tensors of which many differ in numbers alone, as tests/data/published*.json have them."""

from __future__ import annotations

import itertools
import re


def unfolded(tensors: dict[str, list[int]]) -> dict[str, tuple[int, ...]]:
    """Of "a.{0-31}.b" 32 names."""
    found = {}
    for line, shape in tensors.items():
        parts = re.split(r"\{(\d+)-(\d+)\}", line)
        spans = [range(int(first), int(last) + 1) for first, last in zip(parts[1::3], parts[2::3], strict=True)]
        for numbers in itertools.product(*spans):
            found["".join(a + str(b) for a, b in zip(parts[::3], (*numbers, ""), strict=True))] = tuple(shape)
    return found
