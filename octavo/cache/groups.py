"""Group: one KV group's blocks, the prefixes found in them, and the copies of the step in the making."""

from __future__ import annotations

from typing import NamedTuple

from octavo.cache.blocks import BLOCK_SIZE, NEVER, BlockPool, GroupSpec
from octavo.cache.prefix import Key, PrefixIndex
from octavo.cache.window import first_block


class Copy(NamedTuple):
    source: int
    destination: int


class Group:
    """Layers with the same needs: an id space of its own. A table is one request's, in this group."""

    def __init__(self, spec: GroupSpec) -> None:
        self.window = spec.window
        self.pool = BlockPool(spec.num_blocks)
        self.prefixes = PrefixIndex(chained=spec.window is None)
        self.copies: dict[int, int] = {}  # destination to source, which is held for it

    def num_in_window(self, num_blocks: int, num_computed: int) -> int:
        """How many of a table's `num_blocks` blocks have not left the window."""
        return num_blocks - min(num_blocks, first_block(num_computed, self.window))

    def must_copy(self, table: list[int], num_computed: int) -> bool:
        """Whether the next token goes to a block that others refer to as well."""
        i, num_slots = divmod(num_computed, BLOCK_SIZE)
        if not num_slots or (count := self.pool.refcounts[table[i]]) == 1:
            return False
        return count - sum(source == table[i] for source in self.copies.values()) > 1  # copies come before writes

    def release(self, block: int, used: float | None) -> None:
        """One holder less, a use of the block at the time `used` where it is kept. A copy to nobody is not made."""
        self.pool.release(block, used if block in self.prefixes else None)
        if self.pool.refcounts[block] == 0 and (source := self.copies.pop(block, None)) is not None:
            self.release(source, NEVER)

    def end_step(self) -> None:
        """The copies are made. A source counts as used before: its copy is what comes after its parents now."""
        while self.copies:
            self.release(self.copies.popitem()[1], NEVER)

    def ancestors(self, key: Key) -> list[int]:
        """Blocks of the chain that ends with `key`, first block first, as far as they are indexed."""
        blocks = []
        while (node := self.prefixes.node(key)) is not None:
            blocks.append(node.block)
            key = node.parent
        return blocks[::-1]

    def flush(self) -> int:
        """Forget all prefixes; the number of blocks that are free by it."""
        self.prefixes.clear()
        cached = self.pool.cached_blocks()
        for block in cached:
            self.pool.drop(block)
        return len(cached)
