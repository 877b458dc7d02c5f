"""Coming: blocks that running requests are about to compute, so that equal prefixes are computed once."""

from __future__ import annotations

from collections.abc import Iterable

from octavo.cache.prefix import Key
from octavo.request import Request


class Coming:
    """The first request that announces a block leads; others may wait until it arrives or its leader gives it up."""

    def __init__(self) -> None:
        self._leaders: dict[Key, Request] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._leaders

    def leader(self, key: Key) -> Request | None:
        return self._leaders.get(key)

    def announce(self, keys: Iterable[Key], request: Request) -> None:
        for key in keys:
            self._leaders.setdefault(key, request)

    def arrived(self, key: Key, request: Request) -> None:
        """The block is there, or its leader will not compute it."""
        if self._leaders.get(key) is request:
            del self._leaders[key]

    def clear(self) -> None:
        self._leaders.clear()

    def items(self) -> Iterable[tuple[Key, Request]]:
        return self._leaders.items()
