"""The integrity check of one KV group: pool, tables, copies and index agree."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from octavo.cache.blocks import BLOCK_SIZE, blocks_for
from octavo.cache.groups import Group
from octavo.cache.window import first_block
from octavo.request import Request


def exhaust(parts: Iterator[None]) -> None:
    """All parts of a check at once."""
    for _ in parts:
        pass


def check_in_parts(g: int, group: Group, requests: Iterable[Request]) -> Iterator[None]:
    """Raise AssertionError where they disagree. `requests` are all that may have tables; theirs of this group is `g`."""
    pool, index = group.pool, group.prefixes
    holders = [0] * pool.num_blocks
    filled = [0] * pool.num_blocks
    for request in requests:
        if not request.tables:
            assert request.num_computed == 0, f"{request.key} has computed tokens and no table"
            continue
        _check_table(request, request.tables[g], group)
        for block in request.tables[g]:
            if block >= 0:
                holders[block] += 1
                filled[block] = pool.filled[block]
    for source in group.copies.values():
        holders[source] += 1
        filled[source] = pool.filled[source]
    assert holders == pool.refcounts, "refcounts differ from the references of tables and copies"
    assert group.copies.keys().isdisjoint(group.copies.values()), "a copy of a copy"
    assert all(pool.refcounts[block] == 1 and block not in index for block in group.copies)
    cached, free = pool.cached_blocks(), pool.free_blocks()
    held = {block for block, count in enumerate(holders) if count}
    assert len(held) == pool.num_held and len(cached) == pool.num_cached and len(free) == pool.num_free
    assert len(held) + len(cached) + len(free) == pool.num_blocks == len(held | set(cached) | free)
    assert sum(filled) == pool.num_filled, "filled slots"
    yield
    yield from index.check_in_parts()
    assert all(block in index for block in cached), "a cached block is not indexed"
    assert all(block not in index and pool.filled[block] == 0 for block in free), "a free block is in use"
    order = {block: i for i, block in enumerate(cached)}
    for block, node in index.nodes():
        assert pool.filled[block] >= len(node.token_ids)
        parent = index.get(node.parent)
        if index.chained and parent in order:
            assert order.get(block, len(order)) < order[parent], "a parent would be evicted first"


def _check_table(request: Request, table: list[int], group: Group) -> None:
    assert len(table) >= blocks_for(request.num_computed), f"table of {request.key}"
    first = first_block(request.num_computed, group.window)
    inside = table[first:]
    assert all(block < 0 for block in table[:first]), f"{request.key} holds blocks that have left the window"
    assert len(set(inside)) == len(inside) and all(block >= 0 for block in inside), f"table of {request.key}"
    for i, block in enumerate(inside, first):
        slots = max(0, min(BLOCK_SIZE, request.num_computed - i * BLOCK_SIZE))
        assert group.pool.filled[block] == slots, f"filled slots of {request.key}"
