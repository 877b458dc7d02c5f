"""Publisher: names blocks in the prefix indices and takes the names away again, together with what is kept by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from octavo.cache.blocks import BLOCK_SIZE
from octavo.cache.chains import Chains
from octavo.cache.coming import Coming, ComingBlock
from octavo.cache.evicted import Evicted
from octavo.cache.groups import Group
from octavo.cache.prefix import Key, Node, chain_key
from octavo.cache.scores import ScoreStore
from octavo.request import Request, TokenLogprobs


class Publisher:
    """Of all groups. `anchor`: the group whose names the scores are kept by."""

    def __init__(self, groups: Sequence[Group], chains: Chains) -> None:
        self._groups = groups
        self._chains = chains
        whole = [g for g, group in enumerate(groups) if group.window is None]
        self.anchor = groups[whole[0] if whole else 0]
        self.scores = ScoreStore()
        self.coming = Coming()
        self.evicted = Evicted()

    def take(self, group: Group) -> int:
        """A block to write to: a free one, or the cached one that is to go next."""
        pool = group.pool
        if not pool.num_free:
            block = pool.oldest()
            self.evicted.add(self._unname(group, block))
            pool.drop(block)
        return pool.take()

    def announce(self, request: Request, start: int) -> None:
        """The request is about to compute its blocks from `start` on."""
        self.coming.announce(self.coming_blocks(request, start), request)

    def give_up(self, request: Request, start: int) -> None:
        """The request will not compute its blocks from `start` on."""
        for block in self.coming_blocks(request, start):
            self.coming.arrived(block.key, request)

    def coming_blocks(self, request: Request, start: int) -> list[ComingBlock]:
        """The blocks from `start` on that the request computes from tokens known now.

        The prompt's tail is among them only while it is not computed: a resumed request may have it already.
        """
        num_full, num_prompt = request.num_tokens // BLOCK_SIZE, len(request.prompt_ids)
        keys = self._chains.keys(request, num_full)
        blocks = [
            ComingBlock(keys[i + 1], keys[i], tuple(request.token_ids(i * BLOCK_SIZE, (i + 1) * BLOCK_SIZE)))
            for i in range(start, num_full)
        ]
        if num_prompt % BLOCK_SIZE and request.num_computed < num_prompt:
            i = num_prompt // BLOCK_SIZE
            tail = tuple(request.prompt_ids[i * BLOCK_SIZE :])
            blocks.append(ComingBlock(self._chains.prompt_tail(request), keys[i], tail))
        return blocks

    def block(self, request: Request, i: int) -> None:
        """Name full block i, or use the block that already holds this prefix."""
        parent, key = self._chains.keys(request, i + 1)[i:]
        self.coming.arrived(key, request)
        token_ids = tuple(request.token_ids(i * BLOCK_SIZE, (i + 1) * BLOCK_SIZE))
        for g, group in enumerate(self._groups):
            block, known = request.tables[g][i], group.prefixes.get(key)
            if known == block:
                continue
            if block in group.prefixes:  # as the prompt's tail
                self._unname(group, block, heir=key)
            if known is None:
                self._name(group, key, Node(block, parent, token_ids, i))
            else:
                group.pool.share(known)
                request.tables[g] = [*request.tables[g][:i], known, *request.tables[g][i + 1 :]]
                group.release(block, None)
        self._keep_scores(request, i, (i + 1) * BLOCK_SIZE, key)

    def prompt_tail(self, request: Request) -> None:
        """Let equal prompts copy the unfinished block while its owner goes on writing behind the prompt."""
        num_full, num_rest = divmod(len(request.prompt_ids), BLOCK_SIZE)
        if num_rest:
            self.coming.arrived(self._chains.prompt_tail(request), request)
            if request.num_computed < (num_full + 1) * BLOCK_SIZE:
                self.tail(request, num_full, len(request.prompt_ids))

    def tail(self, request: Request, i: int, end: int) -> None:
        """Name block i, unfinished, as the source of later copies of the tokens up to `end`, unless one is known."""
        parent = self._chains.keys(request, i)[i]
        token_ids = tuple(request.token_ids(i * BLOCK_SIZE, end))
        key = chain_key(parent, token_ids)
        for g, group in enumerate(self._groups):
            block = request.tables[g][i]
            other, common = group.prefixes.best_child(parent, token_ids)
            if other == block and common == len(token_ids):
                continue
            found = common == len(token_ids)
            if block in group.prefixes:
                self._unname(group, block, heir=None if found else key)
            if not found:
                self._name(group, key, Node(block, parent, token_ids, i))
        holder, _ = self.anchor.prefixes.best_child(parent, token_ids)
        self._keep_scores(request, i, end, self.anchor.prefixes.key_of(holder))

    def install(
        self, group: Group, parent: Key, depth: int, blocks: Sequence[tuple[Key, tuple[int, ...]]],
        write: Callable[[int, int], None], now: float,
    ) -> int:  # fmt: skip
        """`KvCache.install` in one group."""
        pool, index = group.pool, group.prefixes
        if index.chained and depth and index.get(parent) is None:
            return 0
        held = group.ancestors(parent)
        for block in held:
            pool.share(block)
        done = 0
        for key, token_ids in blocks:
            known = index.get(key)
            if known is not None:
                pool.share(known)
            elif pool.num_available:
                known = self.take(group)
                write(known, done)
                pool.set_filled(known, BLOCK_SIZE)
                self._name(group, key, Node(known, parent, token_ids, depth + done))
            else:
                break
            held.append(known)
            parent, done = key, done + 1
        for block in reversed(held):
            group.release(block, now)
        return done

    def flush(self) -> int:
        """No name is known any more. Returns the blocks that are free by it."""
        self.coming.clear()
        self.scores.clear()
        self.evicted.clear()
        return sum(group.flush() for group in self._groups)

    def check(self, requests: Sequence[Request]) -> None:
        """Raise AssertionError where something is kept by a name that is not known, or awaited from nobody."""
        self.scores.check()
        names = self.anchor.prefixes
        assert all(names.get(key) is not None for key in self.scores.keys), "scores without their block"
        for key, request in self.coming.items():
            assert request in requests
            coming = self.coming_blocks(request, request.num_computed // BLOCK_SIZE)
            assert key in [block.key for block in coming], f"{request.key} is waited for"

    def _name(self, group: Group, key: Key, node: Node) -> None:
        """What holds less of the same is not needed any more."""
        other = group.prefixes.shorter(node.parent, node.token_ids)
        if other is not None and group.pool.refcounts[other] == 0:
            self._unname(group, other, heir=key)
            group.pool.drop(other)
        group.prefixes.insert(key, node)

    def _unname(self, group: Group, block: int, heir: Key | None = None) -> Key:
        """`heir`: the name of a block that begins with the same tokens and takes its place."""
        key = group.prefixes.remove(block)
        if group is self.anchor:
            if heir is not None:
                self.scores.inherit(key, heir)
            self.scores.drop(key)
        return key

    def _keep_scores(self, request: Request, i: int, stop: int, key: Key) -> None:
        """Keep, with the block named `key`, the known scores of the request's tokens from block i's first up to `stop`."""
        num_top = request.params.prompt_logprobs
        if num_top is None:
            return
        scores: list[TokenLogprobs | None] = [*request.prompt_logprobs[max(0, i * BLOCK_SIZE - 1) : stop - 1]]
        if scores:
            self.scores.put(key, scores if i else [None, *scores], num_top)
