"""Chains: the chain keys of live requests, each hashed once."""

from __future__ import annotations

from octavo.cache.blocks import BLOCK_SIZE
from octavo.cache.prefix import Key, chain_key, root_key
from octavo.request import Request


class Chains:
    """`keys(request, n)[i]` names the prefix of i whole blocks; [0] is the root of the request's salt."""

    def __init__(self, seed: bytes) -> None:
        self._seed = seed
        self._keys: dict[tuple[str, int], list[Key]] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def keys(self, request: Request, num_blocks: int) -> list[Key]:
        """The first num_blocks + 1 names, remembered until `forget`."""
        keys = self._keys.get(request.key)
        if keys is None:
            keys = self._keys[request.key] = [root_key(self._seed, request.terms.cache_salt, request.adapter)]
        for i in range(len(keys) - 1, num_blocks):
            keys.append(chain_key(keys[i], request.token_ids(i * BLOCK_SIZE, (i + 1) * BLOCK_SIZE)))
        return keys[: num_blocks + 1]

    def prompt_tail(self, request: Request) -> Key:
        """The name of the whole prompt, where it ends within a block."""
        num_full = len(request.prompt_ids) // BLOCK_SIZE
        return chain_key(self.keys(request, num_full)[-1], request.prompt_ids[num_full * BLOCK_SIZE :])

    def fork(self, parent: Request, child: Request, num_blocks: int) -> None:
        """The child begins with the parent's whole blocks."""
        self._keys[child.key] = self.keys(parent, num_blocks)

    def forget(self, request: Request) -> None:
        self._keys.pop(request.key, None)
