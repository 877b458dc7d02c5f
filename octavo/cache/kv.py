"""KvCache: block tables of requests, reuse of equal prefixes, and the numbers about both.

The one object the scheduler talks to. It moves no data: it decides which block holds what and lists the copies
that the next step makes before anything else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from octavo.cache.blocks import BLOCK_SIZE, BlockPool, blocks_for
from octavo.cache.prefix import Key, PrefixIndex, chain_key, root_key
from octavo.request import Request


class Usage(NamedTuple):
    """Sums over all groups. Waste (DESIGN 5) is num_held * BLOCK_SIZE - num_filled, in token slots."""

    num_blocks: int
    num_held: int  # distinct blocks that live requests refer to
    num_cached: int  # blocks that only the prefix index keeps
    num_filled: int  # written token slots of held blocks


class Copy(NamedTuple):
    source: int
    destination: int


class Match(NamedTuple):
    """What a request can reuse: `shared[g]` whole blocks by reference, then `num_copied` tokens of `sources[g]`."""

    shared: list[list[int]]
    num_copied: int
    sources: list[int]

    @property
    def num_tokens(self) -> int:
        return len(self.shared[0]) * BLOCK_SIZE + self.num_copied


class Group(NamedTuple):
    """Layers with the same needs: an id space of its own, and the prefixes found in it."""

    pool: BlockPool
    prefixes: PrefixIndex


class KvCache:
    """KV blocks of all groups.

    A table (`request.tables[g]`) grows in place; any other change to it makes a new list, so that a reader may
    remember how far it has read.
    """

    def __init__(self, num_blocks: Sequence[int], enabled: bool = True, seed: bytes = b"") -> None:
        """`num_blocks` per group. `enabled`: reuse prefixes. `seed`: everything else that the cached values depend on."""
        self.groups = [Group(BlockPool(n), PrefixIndex(seed)) for n in num_blocks]
        self.enabled = enabled
        self._root = root_key(seed)
        self._keys: dict[tuple[str, int], list[Key]] = {}
        self._coming: dict[Key, Request] = {}  # blocks that a running request is about to compute
        self._copies: list[list[Copy]] = [[] for _ in self.groups]

    def fits(self, num_tokens: int) -> bool:
        """Whether a request of this many computed tokens could ever run, alone."""
        return all(blocks_for(num_tokens) <= group.pool.num_blocks for group in self.groups)

    def room(self, request: Request) -> int:
        """Tokens that a request could compute now without taking a block from another."""
        return min(
            (len(table) + group.pool.num_available) * BLOCK_SIZE - request.num_computed
            for table, group in zip(request.tables, self.groups, strict=True)
        )

    def num_private(self, request: Request) -> int:
        """Computed tokens in blocks that no other request refers to."""
        table, refcounts = request.tables[0], self.groups[0].pool.refcounts
        num_shared = sum(refcounts[block] > 1 for block in table)
        return max(0, request.num_computed - num_shared * BLOCK_SIZE)

    # Admission

    def match(self, request: Request, limit: int) -> Match:
        """The longest computed prefix of at most `limit` tokens, valid in all groups. Changes nothing."""
        if not self.enabled:
            return Match([[] for _ in self.groups], 0, [-1 for _ in self.groups])
        keys = self._extend_keys(request, limit // BLOCK_SIZE)
        depth = min(self._depth(group.prefixes, keys) for group in self.groups)
        start = depth * BLOCK_SIZE
        tail = tuple(request.token_ids(start, min(limit, start + BLOCK_SIZE)))
        parent = keys[depth - 1] if depth else self._root
        found = [group.prefixes.best_child(parent, tail) for group in self.groups]
        shared = [[self._block(group.prefixes, key) for key in keys[:depth]] for group in self.groups]
        return Match(shared, min(common for _, common in found), [block for block, _ in found])

    def awaited(self, request: Request, match: Match, limit: int) -> Key | None:
        """The block after the match, where a running request is about to compute it."""
        if not self.enabled or match.num_tokens >= limit:
            return None
        depth = len(match.shared[0])
        if (depth + 1) * BLOCK_SIZE <= request.num_tokens:
            key = self._extend_keys(request, depth + 1)[depth]
        elif depth == len(request.prompt_ids) // BLOCK_SIZE:
            key = self._tail_key(request)
        else:
            return None
        return key if key in self._coming else None

    def leader(self, key: Key) -> Request | None:
        """The running request that is still about to compute this block."""
        return self._coming.get(key)

    def admit(self, request: Request, match: Match, num_tokens: int, num_reserved: int) -> bool:
        """Give the request the matched blocks, if blocks for `num_tokens` could be had beside `num_reserved` others.

        Sets tables, num_cached and num_computed. The copies are due before the next step; their sources stay held
        until `end_step`.
        """
        if not self._has_room(match, num_tokens, num_reserved):
            match = match._replace(num_copied=0)  # the source of a copy is held too, for a step
            if not self._has_room(match, num_tokens, num_reserved):
                return False
        for shared, source, group in zip(match.shared, match.sources, self.groups, strict=True):
            for block in shared:
                group.pool.share(block)
            if match.num_copied:
                group.pool.share(source)
        request.tables = [list(shared) for shared in match.shared]
        if match.num_copied:
            for g, (pool, _) in enumerate(self.groups):
                block = self._take(g)
                pool.set_filled(block, match.num_copied)
                request.tables[g].append(block)
                self._copies[g].append(Copy(match.sources[g], block))
        request.num_cached = request.num_computed = match.num_tokens
        if self.enabled:
            for key in self._coming_keys(request, len(match.shared[0])):
                self._coming.setdefault(key, request)
        return True

    # Progress

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Extend the tables to hold `num_tokens`, evicting cached blocks where needed. All or nothing."""
        wanted = blocks_for(num_tokens)
        if min(map(len, request.tables)) >= wanted:
            return True
        for table, group in zip(request.tables, self.groups, strict=True):
            if wanted - len(table) > group.pool.num_available:
                return False
        for g, table in enumerate(request.tables):
            while len(table) < wanted:
                table.append(self._take(g))
        return True

    def advance(self, request: Request, num_computed: int) -> None:
        """The tokens up to `num_computed` are in the cache now: count them, publish the blocks that became full."""
        start, request.num_computed = request.num_computed, num_computed
        first, last = start // BLOCK_SIZE, num_computed // BLOCK_SIZE
        for table, group in zip(request.tables, self.groups, strict=True):
            for block in table[first:last]:
                group.pool.set_filled(block, BLOCK_SIZE)
            if num_computed > last * BLOCK_SIZE:
                group.pool.set_filled(table[last], num_computed - last * BLOCK_SIZE)
        if self.enabled:
            for i in range(first, last):
                self._publish(request, i)
            if start < len(request.prompt_ids) <= num_computed:
                self._publish_prompt_tail(request)

    def copies(self) -> list[list[Copy]]:
        """Per group, the copies due before this step. No destination is the source of another."""
        return self._copies

    def end_step(self) -> None:
        """The step ran: its copies are done and their sources may go."""
        for group, copies in zip(self.groups, self._copies, strict=True):
            for copy in copies:
                group.pool.release(copy.source, keep=copy.source in group.prefixes)
        self._copies = [[] for _ in self.groups]

    def free(self, request: Request, keep_tail: bool = True) -> None:
        """Give up all blocks, last first; what is indexed stays as cached. `keep_tail`: index the unfinished block too."""
        num_full, num_rest = divmod(request.num_computed, BLOCK_SIZE)
        if self.enabled and num_rest and keep_tail:
            self._publish_tail(request, num_full, request.num_computed)
        for table, group in zip(request.tables, self.groups, strict=False):
            for block in reversed(table):
                group.pool.release(block, keep=block in group.prefixes)
        if self.enabled and request.tables:
            for key in self._coming_keys(request, num_full):
                self._arrived(key, request)
        request.tables = []
        request.num_computed = request.num_cached = 0

    def forget(self, request: Request) -> None:
        """The request has ended: drop what was remembered of it."""
        self._keys.pop(request.key, None)

    # Numbers

    def usage(self) -> Usage:
        pools = [group.pool for group in self.groups]
        return Usage(
            sum(pool.num_blocks for pool in pools),
            sum(pool.num_held for pool in pools),
            sum(pool.num_cached for pool in pools),
            sum(pool.num_filled for pool in pools),
        )

    def check(self, requests: Iterable[Request]) -> None:
        """Raise AssertionError unless pool, tables and index agree. `requests` are all that may have tables."""
        requests = list(requests)
        for g, (pool, index) in enumerate(self.groups):
            holders = [0] * pool.num_blocks
            filled = [0] * pool.num_blocks
            for request in requests:
                if not request.tables:
                    assert request.num_computed == 0, f"{request.key} has computed tokens and no table"
                    continue
                table = request.tables[g]
                assert len(set(table)) == len(table) >= blocks_for(request.num_computed), f"table of {request.key}"
                for i, block in enumerate(table):
                    holders[block] += 1
                    slots = max(0, min(BLOCK_SIZE, request.num_computed - i * BLOCK_SIZE))
                    assert pool.filled[block] == slots
                    filled[block] = pool.filled[block]
            for copy in self._copies[g]:
                holders[copy.source] += 1
                filled[copy.source] = pool.filled[copy.source]
            assert holders == pool.refcounts, "refcounts differ from the references of tables and copies"
            sources, targets = {c.source for c in self._copies[g]}, [c.destination for c in self._copies[g]]
            assert len(set(targets)) == len(targets) and sources.isdisjoint(targets)
            cached, free = pool.cached_blocks(), pool.free_blocks()
            held = {block for block, count in enumerate(holders) if count}
            assert len(held) == pool.num_held and len(cached) == pool.num_cached and len(free) == pool.num_free
            assert len(held) + len(cached) + len(free) == pool.num_blocks == len(held | set(cached) | free)
            assert sum(filled) == pool.num_filled, "filled slots"
            index.check()
            assert all(block in index for block in cached), "a cached block is not indexed"
            assert all(block not in index and pool.filled[block] == 0 for block in free), "a free block is in use"
            order = {block: i for i, block in enumerate(cached)}
            for block, node in index.nodes():
                assert pool.filled[block] >= len(node.token_ids)
                parent = index.get(node.parent)
                if parent in order:
                    assert order.get(block, len(order)) < order[parent], "a parent would be evicted first"
        for key, request in self._coming.items():
            assert request in requests
            assert key in self._coming_keys(request, request.num_computed // BLOCK_SIZE), f"{request.key} is waited for"

    # Inside

    def _extend_keys(self, request: Request, count: int) -> list[Key]:
        """The first `count` chain keys of a request, remembered until `forget`."""
        keys = self._keys.setdefault(request.key, [])
        for i in range(len(keys), count):
            parent = keys[-1] if keys else self._root
            keys.append(chain_key(parent, request.token_ids(i * BLOCK_SIZE, (i + 1) * BLOCK_SIZE)))
        return keys[:count]

    @staticmethod
    def _depth(index: PrefixIndex, keys: list[Key]) -> int:
        for depth, key in enumerate(keys):
            if index.get(key) is None:
                return depth
        return len(keys)

    @staticmethod
    def _block(index: PrefixIndex, key: Key) -> int:
        block = index.get(key)
        assert block is not None
        return block

    def _has_room(self, match: Match, num_tokens: int, num_reserved: int) -> bool:
        for shared, source, group in zip(match.shared, match.sources, self.groups, strict=True):
            refcounts = group.pool.refcounts
            revived = sum(refcounts[block] == 0 for block in shared)
            if match.num_copied and refcounts[source] == 0:
                revived += 1
            new = max(blocks_for(num_tokens), blocks_for(match.num_tokens)) - len(shared)
            if new + revived + num_reserved > group.pool.num_available:
                return False
        return True

    def _take(self, g: int) -> int:
        pool, index = self.groups[g]
        if not pool.num_free:
            block = pool.oldest()
            index.remove(block)
            pool.drop(block)
        return pool.take()

    def _publish(self, request: Request, i: int) -> None:
        """Index full block i, or use the block that already holds this prefix."""
        keys = self._extend_keys(request, i + 1)
        key, parent = keys[i], keys[i - 1] if i else self._root
        self._arrived(key, request)
        token_ids = tuple(request.token_ids(i * BLOCK_SIZE, (i + 1) * BLOCK_SIZE))
        for g, (pool, index) in enumerate(self.groups):
            block, known = request.tables[g][i], index.get(key)
            if known == block:
                continue
            if block in index:  # as the prompt's tail
                index.remove(block)
            if known is None:
                self._drop_shorter(g, parent, token_ids)
                index.insert(key, parent, token_ids, block)
            else:
                pool.share(known)
                request.tables[g] = [*request.tables[g][:i], known, *request.tables[g][i + 1 :]]
                pool.release(block, keep=False)

    def _publish_prompt_tail(self, request: Request) -> None:
        """Let equal prompts copy the unfinished block while its owner goes on writing behind the prompt."""
        num_full, num_rest = divmod(len(request.prompt_ids), BLOCK_SIZE)
        if num_rest:
            self._arrived(self._tail_key(request), request)
            if request.num_computed < (num_full + 1) * BLOCK_SIZE:
                self._publish_tail(request, num_full, len(request.prompt_ids))

    def _publish_tail(self, request: Request, i: int, end: int) -> None:
        """Index block i, unfinished, as the source of later copies of the tokens up to `end`, unless one is known."""
        keys = self._extend_keys(request, i)
        parent = keys[i - 1] if i else self._root
        token_ids = tuple(request.token_ids(i * BLOCK_SIZE, end))
        for g, (_, index) in enumerate(self.groups):
            block = request.tables[g][i]
            other, common = index.best_child(parent, token_ids)
            if other == block and common == len(token_ids):
                continue
            if block in index:
                index.remove(block)
            if common < len(token_ids):
                self._drop_shorter(g, parent, token_ids)
                index.insert(chain_key(parent, token_ids), parent, token_ids, block)

    def _tail_key(self, request: Request) -> Key:
        """Key of the prompt's last tokens, those behind its full blocks."""
        num_full = len(request.prompt_ids) // BLOCK_SIZE
        keys = self._extend_keys(request, num_full)
        return chain_key(keys[-1] if keys else self._root, request.prompt_ids[num_full * BLOCK_SIZE :])

    def _coming_keys(self, request: Request, start: int) -> list[Key]:
        """Keys of the blocks from `start` on that the request computes from tokens known now.

        The prompt's tail is among them only while it is not computed: a resumed request may have it already.
        """
        keys = self._extend_keys(request, request.num_tokens // BLOCK_SIZE)[start:]
        if len(request.prompt_ids) % BLOCK_SIZE and request.num_computed < len(request.prompt_ids):
            keys.append(self._tail_key(request))
        return keys

    def _arrived(self, key: Key, request: Request) -> None:
        if self._coming.get(key) is request:
            del self._coming[key]

    def _drop_shorter(self, g: int, parent: Key, token_ids: tuple[int, ...]) -> None:
        pool, index = self.groups[g]
        block = index.shorter(parent, token_ids)
        if block is not None and pool.refcounts[block] == 0:
            index.remove(block)
            pool.drop(block)
