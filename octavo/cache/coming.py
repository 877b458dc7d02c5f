"""Coming: blocks that running requests are about to compute, so that equal prefixes are computed once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from octavo.cache.prefix import Key, common_prefix
from octavo.request import Request


class ComingBlock(NamedTuple):
    key: Key
    parent: Key
    token_ids: tuple[int, ...]


class Coming:
    """The first request that announces a block leads; others may wait until it arrives or its leader gives it up."""

    def __init__(self) -> None:
        self._leaders: dict[Key, tuple[Request, Key]] = {}  # name to who computes it, and the name of its parent
        self._children: dict[Key, dict[Key, tuple[int, ...]]] = {}  # parent to names and tokens

    def leader(self, key: Key) -> Request | None:
        found = self._leaders.get(key)
        return None if found is None else found[0]

    def announce(self, blocks: Iterable[ComingBlock], request: Request) -> None:
        for key, parent, token_ids in blocks:
            if key not in self._leaders:
                self._leaders[key] = (request, parent)
                self._children.setdefault(parent, {})[key] = token_ids

    def arrived(self, key: Key, request: Request) -> None:
        """The block is there, or its leader will not compute it."""
        leader, parent = self._leaders.get(key, (None, b""))
        if leader is request:
            del self._leaders[key]
            siblings = self._children[parent]
            del siblings[key]
            if not siblings:
                del self._children[parent]

    def best(self, parent: Key, token_ids: tuple[int, ...]) -> Iterator[tuple[Key, int]]:
        """The blocks behind `parent`, with the number of leading tokens they share with `token_ids`; the most first."""
        shared = {key: common_prefix(tokens, token_ids) for key, tokens in self._children.get(parent, {}).items()}
        return iter(sorted(shared.items(), key=lambda item: -item[1]))

    def clear(self) -> None:
        self._leaders.clear()
        self._children.clear()

    def items(self) -> Iterable[tuple[Key, Request]]:
        return [(key, request) for key, (request, _) in self._leaders.items()]
