"""PrefixIndex: which block holds the keys and values of which prefix.

A prefix is named by a chain key: a 128-bit BLAKE2b digest of the parent's key and the block's token ids, so equal
keys mean equal prefixes, back to the seed (weights, KV type, rope, numerics version, ISA, activations), the adapter and
the salt.
Blocks that are not full may be indexed too; they end a chain and serve only as the source of a copy.
"""

from __future__ import annotations

import bisect
import hashlib
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

PART = 256
"""Blocks that are checked at a time: 2 to 3 ms."""

Key = bytes


def root_key(seed: bytes, salt: str = "", adapter: str = "") -> Key:
    """Parent of every first block of one seed, salt and adapter (the digest of its content)."""
    root = hashlib.blake2b(seed, digest_size=16, person=b"octavo-prefix").digest()
    if adapter:
        root = hashlib.blake2b(adapter.encode(), digest_size=16, key=root, person=b"octavo-adapter").digest()
    return hashlib.blake2b(salt.encode(errors="surrogatepass"), digest_size=16, key=root).digest() if salt else root


def chain_key(parent: Key, token_ids: Sequence[int]) -> Key:
    """Name of the prefix that continues `parent` by `token_ids`."""
    return hashlib.blake2b(parent + struct.pack(f"<{len(token_ids)}I", *token_ids), digest_size=16).digest()


class Node(NamedTuple):
    block: int
    parent: Key
    token_ids: tuple[int, ...]
    depth: int  # blocks before it in its chain; the parent of depth 0 is a root


class PrefixIndex:
    """Keys to blocks of one KV group. The pool knows which blocks are held; the index only names them."""

    def __init__(self, chained: bool = True) -> None:
        """`chained`: a block is of use only with its parents, so it leaves before them. Not so in a window."""
        self.chained = chained
        self._nodes: dict[Key, Node] = {}
        self._keys: dict[int, Key] = {}
        # Sorted by tokens: the longest common prefix with any query is at one of the two neighbours of its place.
        self._children: dict[Key, list[tuple[tuple[int, ...], int]]] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, block: int) -> bool:
        return block in self._keys

    def get(self, key: Key) -> int | None:
        """The block with this key."""
        node = self._nodes.get(key)
        return None if node is None else node.block

    def node(self, key: Key) -> Node | None:
        """What is known under this key."""
        return self._nodes.get(key)

    def key_of(self, block: int) -> Key:
        """The name of an indexed block."""
        return self._keys[block]

    def insert(self, key: Key, node: Node) -> None:
        """Name `node.block`. Neither the key nor the block may be in use."""
        assert key not in self._nodes and node.block not in self._keys
        self._nodes[key] = node
        self._keys[node.block] = key
        bisect.insort(self._children.setdefault(node.parent, []), (node.token_ids, node.block))

    def remove(self, block: int) -> Key:
        """Forget a block, which has no children where they need it. Returns its name."""
        key = self._keys[block]
        assert not self.chained or key not in self._children, "a block is removed before its parent"
        del self._keys[block]
        node = self._nodes.pop(key)
        siblings = self._children[node.parent]
        del siblings[bisect.bisect_left(siblings, (node.token_ids, block))]
        if not siblings:
            del self._children[node.parent]
        return key

    def clear(self) -> None:
        """Forget every block."""
        self._nodes.clear()
        self._keys.clear()
        self._children.clear()

    def best_child(self, parent: Key, token_ids: tuple[int, ...]) -> tuple[int, int]:
        """(block, n): the child of `parent` that shares most leading tokens with `token_ids`; n = 0 if none does."""
        siblings = self._children.get(parent, ())
        place = bisect.bisect_left(siblings, (token_ids, -1))
        best = (-1, 0)
        for child, block in siblings[max(0, place - 1) : place + 1]:
            common = common_prefix(child, token_ids)
            if common > best[1]:
                best = (block, common)
        return best

    def goes_on(self, parent: Key, token_ids: tuple[int, ...]) -> bool:
        """Whether a child of `parent` begins with `token_ids` and holds more."""
        siblings, n = self._children.get(parent, ()), len(token_ids)
        for place in range(bisect.bisect_left(siblings, (token_ids, -1)), len(siblings)):
            child, _ = siblings[place]
            if child[:n] != token_ids:
                break
            if len(child) > n:
                return True
        return False

    def shorter(self, parent: Key, token_ids: tuple[int, ...]) -> int | None:
        """A child of `parent` that holds a true prefix of `token_ids`, hence nothing that `token_ids` would not."""
        siblings = self._children.get(parent, ())
        place = bisect.bisect_left(siblings, (token_ids, -1))
        if place:
            child, block = siblings[place - 1]
            if len(child) < len(token_ids) and token_ids[: len(child)] == child:
                return block
        return None

    def nodes(self) -> Iterator[tuple[int, Node]]:
        """Every indexed block, and what it holds."""
        return ((node.block, node) for node in self._nodes.values())

    def check_in_parts(self) -> Iterator[None]:
        """Raise AssertionError where the three maps disagree, a key is not its content's, or a chain is broken."""
        assert {node.block: key for key, node in self._nodes.items()} == self._keys
        assert sum(map(len, self._children.values())) == len(self._nodes)
        for i, (key, node) in enumerate(self._nodes.items()):
            if i % PART == 0:
                yield
            assert key == chain_key(node.parent, node.token_ids)
            parent = self._nodes.get(node.parent)
            assert parent is None or parent.depth == node.depth - 1
            assert parent or node.depth == 0 or not self.chained, f"block {node.block} lost its parent"
        for i, (parent_key, siblings) in enumerate(self._children.items()):
            if i % PART == 0:
                yield
            assert siblings == sorted(siblings)
            for token_ids, block in siblings:
                node = self._nodes[self._keys[block]]
                assert (node.parent, node.token_ids) == (parent_key, token_ids)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of leading items that are equal."""
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count
