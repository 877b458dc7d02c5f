"""Which blocks a sliding window covers: a token sees the `window` last tokens, itself included."""

from __future__ import annotations

from octavo.cache.blocks import BLOCK_SIZE, blocks_for


def first_block(num_computed: int, window: int | None) -> int:
    """The first block that the token at position `num_computed`, or any after it, may see."""
    return 0 if window is None else max(0, num_computed - window + 1) // BLOCK_SIZE


def most_blocks(num_tokens: int, window: int | None) -> int:
    """Blocks that a sequence must be able to hold at once to reach `num_tokens`, computing one block at a time."""
    blocks = blocks_for(num_tokens)
    return blocks if window is None else min(blocks, blocks_for(window - 1) + 1)
