"""KvCache: block tables of requests, reuse of equal prefixes, and the numbers about both.

The one object the scheduler talks to. It moves no data: it decides which block holds what and lists the copies
that the next step makes before anything else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from octavo.cache.blocks import BLOCK_SIZE, GroupSpec, blocks_for
from octavo.cache.chains import Chains
from octavo.cache.groups import Copy, Group
from octavo.cache.integrity import check_in_parts, exhaust
from octavo.cache.match import Match, Matcher
from octavo.cache.prefix import Key
from octavo.cache.publisher import Publisher
from octavo.cache.window import first_block, most_blocks
from octavo.request import Request


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
        self.enabled = enabled
        self._windowed = any(group.window is not None for group in self.groups)
        self.chains = Chains(seed)
        self.published = Publisher(self.groups, self.chains)
        self._clock = clock
        self._matcher = Matcher(self.groups, self.chains, self.published)
        self._admitted: set[tuple[str, int]] = set()
        self._flushed: set[tuple[str, int]] = set()  # they hold what may not be reused any more

    # Questions

    def fits(self, num_tokens: int) -> bool:
        """Whether a request of this many computed tokens could ever run, alone."""
        return all(most_blocks(num_tokens, group.window) <= group.pool.num_blocks for group in self.groups)

    def most_tokens(self) -> int:
        """Tokens of a request that `fits` just so."""
        full = [group.pool.num_blocks for group in self.groups if group.window is None]
        return BLOCK_SIZE * min(full or (group.pool.num_blocks for group in self.groups))

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
        group = self.published.anchor
        refcounts, table = group.pool.refcounts, request.tables[self.groups.index(group)]
        num_shared = sum(block >= 0 and refcounts[block] > 1 for block in table)
        return max(0, request.num_computed - num_shared * BLOCK_SIZE)

    def keys(self, request: Request, num_blocks: int) -> list[Key]:
        """Names of the request's first 0 to `num_blocks` whole blocks: the root of its salt, then one for each block."""
        return self.chains.keys(request, num_blocks)

    def leader(self, key: Key) -> Request | None:
        """The running request that is still about to compute this block."""
        return self.published.coming.leader(key)

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
            self.published.announce(request, len(match.shared[0]))
        return match

    def fork(self, parent: Request, child: Request) -> None:
        """The child, equal to the parent so far, refers to all its blocks, the unfinished one included. Between steps."""
        assert not child.tables and not any(group.copies for group in self.groups), "a step is under way"
        assert child.terms.cache_salt == parent.terms.cache_salt and child.adapter == parent.adapter
        assert child.key != parent.key
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
        last, num_slots = divmod(num_computed, BLOCK_SIZE)
        for table, group in zip(request.tables, self.groups, strict=True):
            if len(table) < wanted or (num_slots and group.pool.refcounts[table[last]] > 1):
                break
        else:
            return True  # as in most steps
        for table, group in zip(request.tables, self.groups, strict=True):
            new = max(0, wanted - len(table)) + group.must_copy(table, num_computed)
            if new > group.pool.num_available:
                return False
        for g, group in enumerate(self.groups):
            table = request.tables[g]
            if group.must_copy(table, num_computed):
                table = request.tables[g] = list(table)
                table[last] = self._copy(group, table[last], num_slots)  # our reference is the copy's now
            while len(table) < wanted:
                table.append(self.published.take(group))
        return True

    def copies(self) -> list[list[Copy]]:
        """Per group, the copies due before this step. No destination is the source of another."""
        return [[Copy(source, block) for block, source in group.copies.items()] for group in self.groups]

    def end_step(self) -> None:
        """The step ran: its copies are done and their sources may go."""
        for group in self.groups:
            group.end_step()

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
        ends_prompt = start < len(request.prompt_ids) <= num_computed
        if (first < last or ends_prompt) and self._publishes(request):
            for i in range(first, last):
                self.published.block(request, i)
            if ends_prompt:
                self.published.prompt_tail(request)
        if self._windowed:
            self._leave_windows(request, start)

    def free(self, request: Request, keep_tail: bool = True) -> None:
        """Give up all blocks, last first; what is indexed stays as cached. `keep_tail`: index the unfinished block too."""
        num_full, num_rest = divmod(request.num_computed, BLOCK_SIZE)
        if request.tables:
            publishes, now = self._publishes(request), self._clock()
            if publishes and num_rest and keep_tail:
                self.published.tail(request, num_full, request.num_computed)
            for table, group in zip(request.tables, self.groups, strict=True):
                for i in range(len(table) - 1, -1, -1):
                    if table[i] >= 0:
                        group.release(table[i], self._used(request, i, now))
            if publishes:
                self.published.give_up(request, num_full)
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
        self._flushed = set(self._admitted)
        return self.published.flush()

    def install(
        self, g: int, parent: Key, depth: int, blocks: Sequence[tuple[Key, tuple[int, ...]]],
        write: Callable[[int, int], None],
    ) -> int:  # fmt: skip
        """Take up full blocks that were computed elsewhere: a chain of (key, tokens) behind `parent`, at `depth` blocks.

        `write(block, i)` fills each one that is not known. The parent is a root or indexed, except in a window.
        Returns how many of `blocks` are indexed now, from the first on: fewer than all where no block can be had.
        """
        if not self.enabled:
            return 0
        return self.published.install(self.groups[g], parent, depth, blocks, write, self._clock())

    # Numbers

    def usage(self) -> Usage:
        pools = [group.pool for group in self.groups]
        return Usage(
            sum(pool.num_blocks for pool in pools),
            sum(pool.num_held for pool in pools),
            sum(pool.num_cached for pool in pools),
            sum(pool.num_filled for pool in pools),
            self.published.scores.num_bytes,
        )

    def check(self, requests: Iterable[Request]) -> None:
        """Raise AssertionError unless pool, tables and index agree. `requests` are all that may have tables."""
        exhaust(self.check_in_parts(requests))

    def check_in_parts(self, requests: Iterable[Request]) -> Iterator[None]:
        """The same, a few milliseconds at a time."""
        requests = list(requests)
        assert self._admitted == {request.key for request in requests if request.tables} >= self._flushed
        for g, group in enumerate(self.groups):
            yield from check_in_parts(g, group, requests)
        self.published.check(requests)

    # Inside

    def _publishes(self, request: Request) -> bool:
        return self.enabled and request.key not in self._flushed

    def _used(self, request: Request, i: int, now: float) -> float:
        """When block i of the request counts as used, where it is used `now`."""
        hint = request.terms.retention
        return now + hint.bonus if hint and hint.covers(i * BLOCK_SIZE) else now

    def _leave_windows(self, request: Request, start: int) -> None:
        """Give up the blocks that the next token does not see, and the one at `start` may have seen."""
        for table, group in zip(request.tables, self.groups, strict=True):
            left = range(first_block(start, group.window), first_block(request.num_computed, group.window))
            now = self._clock() if left else 0.0
            for i in left:
                group.release(table[i], self._used(request, i, now))
                table[i] = -1

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

    def _copy(self, group: Group, source: int, num_slots: int) -> int:
        """A new block that this step fills with what a held one has. The hold goes with the step."""
        block = self.published.take(group)
        group.pool.set_filled(block, num_slots)
        group.copies[block] = source
        return block
