"""Evicted: names of blocks that were there and are not any more, to tell a request why its match ended."""

from __future__ import annotations

from collections import OrderedDict

from octavo.cache.prefix import Key

MAX_EVICTED = 65536
"""Names remembered, the latest: 10 MB, a million tokens."""


class Evicted:
    """A bounded memory, oldest forgotten first."""

    def __init__(self) -> None:
        self._keys: OrderedDict[Key, None] = OrderedDict()

    def __contains__(self, key: Key) -> bool:
        return key in self._keys

    def add(self, key: Key) -> None:
        self._keys[key] = None
        if len(self._keys) > MAX_EVICTED:
            self._keys.popitem(last=False)

    def clear(self) -> None:
        self._keys.clear()
