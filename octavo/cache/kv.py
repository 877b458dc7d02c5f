"""KvCache: block tables of requests, reuse of equal prefixes, and the numbers about both.

The one object the scheduler talks to. It moves no data: it decides which block holds what and lists the copies
that the next step makes before anything else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from octavo.cache.blocks import BLOCK_SIZE, GroupSpec, blocks_for
from octavo.cache.chains import Chains
from octavo.cache.coming import Coming
from octavo.cache.groups import Copy, Group
from octavo.cache.integrity import check
from octavo.cache.match import Match, Matcher
from octavo.cache.prefix import Key, Node, chain_key
from octavo.cache.scores import ScoreStore
from octavo.cache.window import first_block, most_blocks
from octavo.request import Request, TokenLogprobs


class Usage(NamedTuple):
    """Sums over all groups. Waste (DESIGN 5) is num_held * BLOCK_SIZE - num_filled, in token slots."""

    num_blocks: int
    num_held: int  # distinct blocks that live requests refer to
    num_cached: int  # blocks that only the prefix index keeps
    num_filled: int  # written token slots of held blocks
    score_bytes: int  # of prompt scores kept with blocks


class KvCache:
    """KV blocks of all groups.

    `request.tables[g][i]` is the block that holds tokens [16i, 16i+16); -1 where it has left the window. A table grows
    at its end and its blocks leave the window in place; any other change makes a new list, so that a reader may
    remember how far it has read.
    """

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        enabled: bool = True,
        seed: bytes = b"",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`enabled`: reuse prefixes. `seed`: everything else that the cached values depend on. `clock`: in seconds."""
        self.groups = [Group(spec) for spec in groups]
        self.scores = ScoreStore()
        self.enabled = enabled
        self.chains = Chains(seed)
        self.coming = Coming()
        self._clock = clock
        self._matcher = Matcher(self.groups, self.scores, self.chains, self.coming)
        self._admitted: set[tuple[str, int]] = set()
        self._flushed: set[tuple[str, int]] = set()  # they hold what may not be reused any more

    # Questions

    def fits(self, num_tokens: int) -> bool:
        """Whether a request of this many computed tokens could ever run, alone."""
        return all(most_blocks(num_tokens, group.window) <= group.pool.num_blocks for group in self.groups)

    def room(self, request: Request) -> int:
        """Tokens that a request could compute now without taking a block from another."""
        return min(
            (len(table) + group.pool.num_available - group.must_copy(table, request.num_computed)) * BLOCK_SIZE
            - request.num_computed
            for table, group in zip(request.tables, self.groups, strict=True)
        )

    def demands(self, goals: Iterable[tuple[Request, int]]) -> list[int]:
        """Per group, the blocks that running requests still take from others to compute so many tokens each."""
        demands = [0] * len(self.groups)
        for request, num_tokens in goals:
            for g, (table, group) in enumerate(zip(request.tables, self.groups, strict=True)):
                held = group.num_in_window(len(table), request.num_computed)
                demands[g] += max(0, most_blocks(num_tokens, group.window) - held)
                demands[g] += group.must_copy(table, request.num_computed)
        return demands

    def num_private(self, request: Request) -> int:
        """Computed tokens in blocks that no other request refers to."""
        g = self._matcher.anchor
        refcounts = self.groups[g].pool.refcounts
        num_shared = sum(block >= 0 and refcounts[block] > 1 for block in request.tables[g])
        return max(0, request.num_computed - num_shared * BLOCK_SIZE)

    def keys(self, request: Request, num_blocks: int) -> list[Key]:
        """Names of the request's first 0 to `num_blocks` whole blocks: the root of its salt, then one for each block."""
        return self.chains.keys(request, num_blocks)

    def leader(self, key: Key) -> Request | None:
        """The running request that is still about to compute this block."""
        return self.coming.leader(key)

    # Admission

    def match(self, request: Request) -> Match:
        """The longest prefix, without the last token, that is computed, and scored if scores are wanted. Changes nothing."""
        return self._matcher.match(request) if self.enabled else self._matcher.nothing(request)

    def admit(self, request: Request, match: Match, num_tokens: int, reserved: Sequence[int]) -> Match | None:
        """Give the request the matched blocks, if blocks for `num_tokens` could be had beside `reserved` ones per group.

        Sets tables, num_cached, num_computed and known prompt scores. Returns the match that was used: less where
        a block for the copied part was not there. The copies are due before the next step; their sources stay held until
        `end_step`.
        """
        if not self._has_room(match, num_tokens, reserved):
            if not match.num_copied:
                return None
            match = self._matcher.whole_blocks(request, match)  # the source of a copy is held too, for a step
            if not self._has_room(match, num_tokens, reserved):
                return None
        request.prompt_logprobs += self._matcher.known_scores(request, match.num_tokens)
        for blocks, source, group in zip(match.shared, match.sources, self.groups, strict=True):
            for block in blocks:
                if block >= 0:
                    group.pool.share(block)
            if match.num_copied:
                group.pool.share(source)
        request.tables = [list(blocks) for blocks in match.shared]
        if match.num_copied:
            for table, source, group in zip(request.tables, match.sources, self.groups, strict=True):
                table.append(self._copy(group, source, match.num_copied))
        request.num_cached = request.num_computed = match.num_tokens
        self._admitted.add(request.key)
        if self.enabled:
            self.coming.announce(self._coming_keys(request, len(match.shared[0])), request)
        return match

    def fork(self, parent: Request, child: Request) -> None:
        """The child, equal to the parent so far, refers to all its blocks, the unfinished one included. Between steps."""
        assert not child.tables and not any(group.copies for group in self.groups), "a step is under way"
        assert child.terms.cache_salt == parent.terms.cache_salt and child.key != parent.key
        num_blocks = blocks_for(parent.num_computed)
        child.tables = [table[:num_blocks] for table in parent.tables]
        for table, group in zip(child.tables, self.groups, strict=True):
            for block in table:
                if block >= 0:
                    group.pool.share(block)
        child.num_cached = child.num_computed = parent.num_computed
        self.chains.fork(parent, child, parent.num_computed // BLOCK_SIZE)
        self._admitted.add(child.key)
        if parent.key in self._flushed:
            self._flushed.add(child.key)

    # Progress

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Let the next tokens up to `num_tokens` be written, evicting cached blocks where needed. All or nothing.

        Extends the tables; an unfinished block that others refer to is copied.
        """
        wanted, num_computed = blocks_for(num_tokens), request.num_computed
        for table, group in zip(request.tables, self.groups, strict=True):
            new = max(0, wanted - len(table)) + group.must_copy(table, num_computed)
            if new > group.pool.num_available:
                return False
        for g, group in enumerate(self.groups):
            table = request.tables[g]
            if group.must_copy(table, num_computed):
                i, num_slots = divmod(num_computed, BLOCK_SIZE)
                table = request.tables[g] = list(table)
                table[i] = self._copy(group, table[i], num_slots)  # our reference is the copy's now
            while len(table) < wanted:
                table.append(self._take(group))
        return True

    def copies(self) -> list[list[Copy]]:
        """Per group, the copies due before this step. No destination is the source of another."""
        return [[Copy(source, block) for block, source in group.copies.items()] for group in self.groups]

    def end_step(self) -> None:
        """The step ran: its copies are done and their sources may go."""
        if any(group.copies for group in self.groups):
            now = self._clock()
            for group in self.groups:
                while group.copies:
                    group.release(group.copies.popitem()[1], now)

    def advance(self, request: Request, num_computed: int) -> None:
        """The tokens up to `num_computed` are in the cache now: count them, publish the blocks that became full.

        Prompt scores of these tokens are there already.
        """
        start, request.num_computed = request.num_computed, num_computed
        first, last = start // BLOCK_SIZE, num_computed // BLOCK_SIZE
        for table, group in zip(request.tables, self.groups, strict=True):
            for block in table[first:last]:
                group.pool.set_filled(block, BLOCK_SIZE)
            if num_computed > last * BLOCK_SIZE:
                group.pool.set_filled(table[last], num_computed - last * BLOCK_SIZE)
        if self._publishes(request):
            for i in range(first, last):
                self._publish(request, i)
            if start < len(request.prompt_ids) <= num_computed:
                self._publish_prompt_tail(request)
        for table, group in zip(request.tables, self.groups, strict=True):
            if group.window is not None:
                left = range(first_block(start, group.window), first_block(num_computed, group.window))
                now = self._clock() if left else 0.0
                for i in left:
                    group.release(table[i], self._used(request, i, now))
                    table[i] = -1

    def free(self, request: Request, keep_tail: bool = True) -> None:
        """Give up all blocks, last first; what is indexed stays as cached. `keep_tail`: index the unfinished block too."""
        num_full, num_rest = divmod(request.num_computed, BLOCK_SIZE)
        if request.tables:
            publishes, now = self._publishes(request), self._clock()
            if publishes and num_rest and keep_tail:
                self._publish_tail(request, num_full, request.num_computed)
            for table, group in zip(request.tables, self.groups, strict=True):
                for i in range(len(table) - 1, -1, -1):
                    if table[i] >= 0:
                        group.release(table[i], self._used(request, i, now))
            if publishes:
                for key in self._coming_keys(request, num_full):
                    self.coming.arrived(key, request)
        self._admitted.discard(request.key)
        self._flushed.discard(request.key)
        request.tables = []
        request.num_computed = request.num_cached = 0

    def forget(self, request: Request) -> None:
        """The request has ended: drop what was remembered of it."""
        self.chains.forget(request)

    def flush(self) -> int:
        """Nothing computed before is reused from here on. Returns the blocks that are free by it.

        Requests go on with the blocks they hold, which nobody else finds any more.
        """
        self.coming.clear()
        self.scores.clear()
        self._matcher.evicted.clear()
        self._flushed = set(self._admitted)
        return sum(group.flush() for group in self.groups)

    def install(
        self, g: int, parent: Key, depth: int, blocks: Sequence[tuple[Key, tuple[int, ...]]],
        write: Callable[[int, int], None],
    ) -> int:  # fmt: skip
        """Take up full blocks that were computed elsewhere: a chain of (key, tokens) behind `parent`, at `depth` blocks.

        `write(block, i)` fills each one that is not known. The parent is a root or indexed, except in a window.
        Returns how many of `blocks` are indexed now, from the first on: fewer than all where no block can be had.
        """
        group = self.groups[g]
        pool, index = group.pool, group.prefixes
        if not self.enabled or (index.chained and depth and index.get(parent) is None):
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
                known = self._take(group)
                write(known, done)
                pool.set_filled(known, BLOCK_SIZE)
                self._index(g, key, Node(known, parent, token_ids, depth + done))
            else:
                break
            held.append(known)
            parent, done = key, done + 1
        now = self._clock()
        for block in reversed(held):
            group.release(block, now)
        return done

    # Numbers

    def usage(self) -> Usage:
        pools = [group.pool for group in self.groups]
        return Usage(
            sum(pool.num_blocks for pool in pools),
            sum(pool.num_held for pool in pools),
            sum(pool.num_cached for pool in pools),
            sum(pool.num_filled for pool in pools),
            self.scores.num_bytes,
        )

    def check(self, requests: Iterable[Request]) -> None:
        """Raise AssertionError unless pool, tables and index agree. `requests` are all that may have tables."""
        requests = list(requests)
        assert self._admitted == {request.key for request in requests if request.tables} >= self._flushed
        for g, group in enumerate(self.groups):
            check(g, group, requests)
        self.scores.check()
        anchor = self.groups[self._matcher.anchor].prefixes
        assert all(anchor.get(key) is not None for key in self.scores.keys), "scores without their block"
        for key, request in self.coming.items():
            assert request in requests
            assert key in self._coming_keys(request, request.num_computed // BLOCK_SIZE), f"{request.key} is waited for"

    # Inside

    def _publishes(self, request: Request) -> bool:
        return self.enabled and request.key not in self._flushed

    def _used(self, request: Request, i: int, now: float) -> float:
        """When block i of the request counts as used, where it is used `now`."""
        hint = request.terms.retention
        return now + hint.bonus if hint and hint.covers(i * BLOCK_SIZE) else now

    def _has_room(self, match: Match, num_tokens: int, reserved: Sequence[int]) -> bool:
        num_tokens = max(num_tokens, match.num_tokens)
        for blocks, source, group, others in zip(match.shared, match.sources, self.groups, reserved, strict=True):
            refcounts = group.pool.refcounts
            revived = sum(block >= 0 and refcounts[block] == 0 for block in blocks)
            if match.num_copied and refcounts[source] == 0:
                revived += 1
            held = group.num_in_window(len(blocks), match.num_tokens)
            new = max(0, most_blocks(num_tokens, group.window) - held)
            if new + revived + others > group.pool.num_available:
                return False
        return True

    def _take(self, group: Group) -> int:
        pool = group.pool
        if not pool.num_free:
            block = pool.oldest()
            self._matcher.evicted.add(self._unindex(group, block))
            pool.drop(block)
        return pool.take()

    def _copy(self, group: Group, source: int, num_slots: int) -> int:
        """A new block that this step fills with what a held one has. The hold goes with the step."""
        block = self._take(group)
        group.pool.set_filled(block, num_slots)
        group.copies[block] = source
        return block

    def _index(self, g: int, key: Key, node: Node) -> None:
        """Name a block; what holds less of the same is not needed any more."""
        group = self.groups[g]
        other = group.prefixes.shorter(node.parent, node.token_ids)
        if other is not None and group.pool.refcounts[other] == 0:
            self._unindex(group, other, heir=key)
            group.pool.drop(other)
        group.prefixes.insert(key, node)

    def _unindex(self, group: Group, block: int, heir: Key | None = None) -> Key:
        """`heir`: the name of a block that begins with the same tokens and takes its place."""
        key = group.prefixes.remove(block)
        if group is self.groups[self._matcher.anchor]:
            if heir is not None:
                self.scores.inherit(key, heir)
            self.scores.drop(key)
        return key

    def _publish(self, request: Request, i: int) -> None:
        """Index full block i, or use the block that already holds this prefix."""
        parent, key = self.chains.keys(request, i + 1)[i:]
        self.coming.arrived(key, request)
        token_ids = tuple(request.token_ids(i * BLOCK_SIZE, (i + 1) * BLOCK_SIZE))
        for g, group in enumerate(self.groups):
            block, known = request.tables[g][i], group.prefixes.get(key)
            if known == block:
                continue
            if block in group.prefixes:  # as the prompt's tail
                self._unindex(group, block, heir=key)
            if known is None:
                self._index(g, key, Node(block, parent, token_ids, i))
            else:
                group.pool.share(known)
                request.tables[g] = [*request.tables[g][:i], known, *request.tables[g][i + 1 :]]
                group.release(block, None)
        self._keep_scores(request, i, (i + 1) * BLOCK_SIZE, key)

    def _publish_prompt_tail(self, request: Request) -> None:
        """Let equal prompts copy the unfinished block while its owner goes on writing behind the prompt."""
        num_full, num_rest = divmod(len(request.prompt_ids), BLOCK_SIZE)
        if num_rest:
            self.coming.arrived(self.chains.prompt_tail(request), request)
            if request.num_computed < (num_full + 1) * BLOCK_SIZE:
                self._publish_tail(request, num_full, len(request.prompt_ids))

    def _publish_tail(self, request: Request, i: int, end: int) -> None:
        """Index block i, unfinished, as the source of later copies of the tokens up to `end`, unless one is known."""
        parent = self.chains.keys(request, i)[i]
        token_ids = tuple(request.token_ids(i * BLOCK_SIZE, end))
        key = chain_key(parent, token_ids)
        for g, group in enumerate(self.groups):
            block = request.tables[g][i]
            other, common = group.prefixes.best_child(parent, token_ids)
            if other == block and common == len(token_ids):
                continue
            if block in group.prefixes:
                self._unindex(group, block, heir=key)
            if common < len(token_ids):
                self._index(g, key, Node(block, parent, token_ids, i))
        anchor = self.groups[self._matcher.anchor].prefixes
        self._keep_scores(request, i, end, anchor.key_of(anchor.best_child(parent, token_ids)[0]))

    def _keep_scores(self, request: Request, i: int, stop: int, key: Key) -> None:
        """Keep, with the block named `key`, the known scores of the request's tokens from block i's first up to `stop`."""
        num_top = request.params.prompt_logprobs
        if num_top is None or num_top < 0:
            return
        scores: list[TokenLogprobs | None] = [*request.prompt_logprobs[max(0, i * BLOCK_SIZE - 1) : stop - 1]]
        if scores:
            self.scores.put(key, scores if i else [None, *scores], num_top)

    def _coming_keys(self, request: Request, start: int) -> list[Key]:
        """Keys of the blocks from `start` on that the request computes from tokens known now.

        The prompt's tail is among them only while it is not computed: a resumed request may have it already.
        """
        keys = self.chains.keys(request, request.num_tokens // BLOCK_SIZE)[start + 1 :]
        if len(request.prompt_ids) % BLOCK_SIZE and request.num_computed < len(request.prompt_ids):
            keys.append(self.chains.prompt_tail(request))
        return keys
