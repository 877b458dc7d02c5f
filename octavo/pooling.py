"""Pooling: how one vector is made of a text."""

from __future__ import annotations

from typing import Literal

Pooling = Literal["last", "mean", "cls", "pooler", "scores"]
"""Of which tokens: the last, all with equal weights, or the first. What a model's own head makes of the first, where it
has one: BERT's pooler, or a classifier's scores."""

HEADS: tuple[Pooling, ...] = ("pooler", "scores")
