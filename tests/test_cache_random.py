"""The KV cache by random operations, beside a memory that remembers which prefix was written to which slot.

Nothing is trusted of what the cache says about itself: each reused token must be found in the slots that a request is
given, written for exactly its prefix and salt since the last flush, in every group, and no longer match may exist.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from octavo.cache.blocks import BLOCK_SIZE, GroupSpec, blocks_for
from octavo.cache.kv import KvCache
from octavo.cache.match import EndReason, Match
from octavo.cache.prefix import Key, chain_key, root_key
from octavo.cache.window import first_block
from octavo.request import Request, Retention, SamplingParams, Terms, TokenLogprobs

SALTS = ("", "", "", "red", "blue")
GROUPS: list[list[int | None]] = [[None], [None], [None, None], [None, 20], [7, None], [33], [1, 40], [16, None, 17]]
"""Windows of the groups."""

PARAMS = [SamplingParams(prompt_logprobs=n) for n in (None, None, 0, 1, 3)]

Prefix = tuple[str, tuple[int, ...]]
"""Salt and tokens: what a slot depends on."""


class Memory:
    """The slots of all groups, and the sequences that were ever seen."""

    def __init__(self, windows: Sequence[int | None]) -> None:
        self.windows = windows
        self.slots: list[dict[tuple[int, int], tuple[Prefix, int]]] = [{} for _ in windows]
        self.names: dict[Key, Prefix] = {root_key(b"", salt): (salt, ()) for salt in SALTS}
        self.epoch = 0  # flushes so far

    def learn(self, salt: str, tokens: Sequence[int]) -> list[Key]:
        """The chain keys of a sequence, computed here."""
        keys = [root_key(b"", salt)]
        for end in range(BLOCK_SIZE, len(tokens) + 1, BLOCK_SIZE):
            keys.append(chain_key(keys[-1], tokens[end - BLOCK_SIZE : end]))
            self.names[keys[-1]] = (salt, tuple(tokens[:end]))
        return keys

    def step(self, cache: KvCache, request: Request, stop: int) -> None:
        """Copies, then tokens, as a step does."""
        for slots, copies in zip(self.slots, cache.copies(), strict=True):
            assert {c.source for c in copies}.isdisjoint(c.destination for c in copies)
            assert len({c.destination for c in copies}) == len(copies)
            for copy in copies:
                for i in range(BLOCK_SIZE):
                    slots.pop((copy.destination, i), None)
                    if (copy.source, i) in slots:
                        slots[copy.destination, i] = slots[copy.source, i]
        tokens = request.token_ids(0, stop)
        for slots, table in zip(self.slots, request.tables, strict=True):
            for p in range(request.num_computed, stop):
                prefix = (request.terms.cache_salt, tuple(tokens[: p + 1]))
                slots[table[p // BLOCK_SIZE], p % BLOCK_SIZE] = (prefix, self.epoch)

    def verify(self, request: Request, reused: bool = False) -> None:
        """All that the next token of the request sees is its own prefix, none of it flushed where it is `reused`."""
        n, tokens = request.num_computed, request.token_ids(0, request.num_computed)
        for window, slots, table in zip(self.windows, self.slots, request.tables, strict=True):
            for p in range(0 if window is None else max(0, n - window + 1), n):
                prefix, epoch = slots[table[p // BLOCK_SIZE], p % BLOCK_SIZE]
                assert prefix == (request.terms.cache_salt, tuple(tokens[: p + 1]))
                assert not reused or epoch == self.epoch

    def longest(self, cache: KvCache, request: Request, limit: int) -> int:
        """The longest prefix that named blocks of every group could give."""
        salt, tokens = request.terms.cache_salt, tuple(request.token_ids(0, limit))
        named: list[set[Prefix]] = []
        for group in cache.groups:
            found: set[Prefix] = set()
            for _, node in group.prefixes.nodes():
                parent_salt, parent = self.names[node.parent]
                assert len(parent) == node.depth * BLOCK_SIZE
                for n in range(1, len(node.token_ids) + 1):
                    found.add((parent_salt, parent + node.token_ids[:n]))
            named.append(found)
        for end in range(limit, 0, -1):
            if all(
                (salt, tokens[: min(end, (i + 1) * BLOCK_SIZE)]) in found
                for window, found in zip(self.windows, named, strict=True)
                for i in range(first_block(end, window), blocks_for(end))
            ):
                return end
        return 0


def score(salt: str, tokens: Sequence[int]) -> TokenLogprobs:
    """Of the last token, a function of all."""
    value = hash((salt, tuple(tokens)))
    top = [value % 7, value % 11, value % 13]
    return TokenLogprobs(tokens[-1], -float(value % 1000) / 8, 1 + value % 5, top, [-0.5, -float(value % 3), -4.0])


class History:
    """One random life of a cache."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        windows = rng.choice(GROUPS)
        self.num_blocks = rng.choice([2, 4, 8, 12, 20])
        specs = [GroupSpec(max(self.num_blocks + g, 1 + blocks_for((w or 1) - 1)), w) for g, w in enumerate(windows)]
        self.now = 0.0
        self.cache = KvCache(specs, clock=lambda: self.now)
        self.memory = Memory(windows)
        self.live: list[Request] = []
        self.known: list[tuple[str, list[int]]] = [("", [])]
        self.seen: Counter[str] = Counter()
        self.number = 0
        self.longest = max(n for n in range(1, 16 * self.num_blocks + 1) if self.cache.fits(n))

    def play(self, num_turns: int) -> Counter[str]:
        moves = [self.admit] * 8 + [self.compute] * 14 + [self.fork] * 3 + [self.end] * 6 + [self.install] * 2
        for _ in range(num_turns):
            self.now += self.rng.choice([0, 0.1, 1, 30])
            (self.flush if self.rng.random() < 0.01 else self.rng.choice(moves))()
            self.check()
        while self.live:
            self.end()
            self.check()
        assert self.cache.usage().num_held == 0 and not len(self.cache.chains)
        assert not list(self.cache.published.coming.items())
        last = self.request(self.longest - 1, "", self.longest)  # nothing that is cached stands in the way
        match = self.cache.match(last)
        assert self.cache.admit(last, match, self.longest, [0] * len(self.cache.groups)) is not None
        self.live.append(last)
        while last.num_computed < last.num_tokens:
            self.compute()
        self.end()
        return self.seen

    def check(self) -> None:
        self.cache.check(self.live)
        for request in self.live:
            if not any(map(len, self.cache.copies())):
                self.memory.verify(request)

    def request(self, num_fresh: int, salt: str, longest: int) -> Request:
        rng = self.rng
        old = rng.choice([tokens for s, tokens in self.known if s == salt][-6:] or [[]])
        fresh = [rng.randrange(3) for _ in range(num_fresh)]
        tokens = (old[: rng.choice([len(old), len(old), rng.randint(0, len(old))])] + fresh)[:longest]
        hint = None
        if rng.random() < 0.2:
            priority = rng.choice([-100, 0, 100])
            num_tokens = None if priority < 0 else rng.choice([None, 20])
            hint = Retention(seconds=rng.choice([0, 10, 3600]), priority=priority, num_tokens=num_tokens)
        params = rng.choice(PARAMS)
        self.number += 1
        terms = Terms(cache_salt=salt, retention=hint)
        self.memory.learn(salt, tokens)
        return Request(str(self.number), 0, tokens, params, 0, terms=terms)

    def admit(self) -> None:
        cache, rng = self.cache, self.rng
        request = self.request(rng.choice([1, 9, 24, 60]), rng.choice(SALTS), self.longest)
        match = cache.match(request)
        self.look_at(request, match)
        reserved = [rng.choice([0, 0, 1]) for _ in cache.groups]
        free = [group.pool.num_available for group in cache.groups]
        used = cache.admit(request, match, request.num_tokens, reserved)
        if used is None:
            assert request.tables == [] and request.num_computed == 0
            assert free == [group.pool.num_available for group in cache.groups]
            assert any(n < blocks_for(request.num_tokens) + 2 for n in free)
            cache.forget(request)
            self.seen["refused"] += 1
            return
        assert used.num_tokens == request.num_computed == request.num_cached <= match.num_tokens
        for group, others in zip(cache.groups, reserved, strict=True):
            assert group.pool.num_available >= others
        self.live.append(request)
        self.memory.step(cache, request, request.num_computed)
        cache.end_step()
        self.memory.verify(request, reused=True)
        num_scored = len(request.prompt_logprobs)
        assert num_scored == (used.num_tokens if request.params.prompt_logprobs is not None else 0)
        self.verify_scores(request)
        self.seen["copied"] += used.num_copied > 0
        self.seen["copy given up"] += used.end.reason == EndReason.NO_ROOM
        self.seen["shared"] += used.num_tokens >= 16
        self.seen["scores reused"] += num_scored > 0
        self.seen["salted"] += used.num_tokens > 0 and request.terms.cache_salt != ""
        self.seen["behind a window"] += any(-1 in table for table in request.tables)

    def look_at(self, request: Request, match: Match) -> None:
        """The match is the best there is, and says rightly why it ends."""
        wants_scores = request.params.prompt_logprobs is not None
        best = self.memory.longest(self.cache, request, request.num_tokens - 1)
        assert match.num_tokens <= best if wants_scores else match.num_tokens == best
        reason, position = match.end
        self.seen[reason] += 1
        assert match.num_tokens <= position <= match.num_tokens + wants_scores
        if reason in (EndReason.UNKNOWN, EndReason.SALT):
            assert position <= wants_scores and (reason == EndReason.SALT) == bool(request.terms.cache_salt)
        if match.awaits is not None:
            leader = self.cache.leader(match.awaits)
            assert leader in self.live
            assert not wants_scores or leader.params.prompt_logprobs is not None

    def compute(self) -> None:
        if not self.live:
            return
        cache, rng = self.cache, self.rng
        request = rng.choice(self.live)
        limit = request.num_computed + min(request.num_tokens - request.num_computed, rng.choice([1, 3, 16, 40, 200]))
        room = cache.room(request)
        stop = min(limit, request.num_computed + max(0, room))
        if stop < limit:
            assert not cache.grow(request, limit)
            self.seen["full"] += 1
        if stop == request.num_computed:
            self.extend(request)
            return
        cached = cache.usage().num_cached
        assert cache.grow(request, stop)
        self.seen["evicted"] += cache.usage().num_cached < cached
        self.seen["copied on write"] += any(map(len, cache.copies()))
        self.memory.step(cache, request, stop)
        cache.end_step()
        if request.params.prompt_logprobs is not None:
            for n in range(len(request.prompt_logprobs) + 1, min(stop + 1, len(request.prompt_ids))):
                tokens = request.prompt_ids[: n + 1]
                kept = score(request.terms.cache_salt, tokens)
                k = request.params.prompt_logprobs
                request.prompt_logprobs.append(
                    TokenLogprobs(kept.token_id, kept.logprob, kept.rank, kept.top_ids[:k], kept.top_logprobs[:k])
                )
        cache.advance(request, stop)
        self.seen["left the window"] += any(-1 in table for table in request.tables)
        self.extend(request)

    def extend(self, request: Request) -> None:
        """Draw the next token where it is due."""
        if request.num_computed == request.num_tokens < self.longest:
            request.output_ids.append(self.rng.randrange(3))
            self.memory.learn(request.terms.cache_salt, request.token_ids(0, request.num_tokens))

    def verify_scores(self, request: Request) -> None:
        k = request.params.prompt_logprobs
        for n, found in enumerate(request.prompt_logprobs, 2):
            want = score(request.terms.cache_salt, request.prompt_ids[:n])
            assert (found.token_id, found.logprob, found.rank) == (want.token_id, want.logprob, want.rank)
            assert (found.top_ids, found.top_logprobs) == (want.top_ids[:k], want.top_logprobs[:k])

    def fork(self) -> None:
        if not self.live or len(self.live) > 8:
            return
        parent = self.rng.choice(self.live)
        self.number += 1
        child = Request(str(self.number), 0, parent.prompt_ids, PARAMS[0], 0, terms=parent.terms)
        child.output_ids = list(parent.output_ids)
        held = self.cache.usage().num_held
        self.cache.fork(parent, child)
        assert self.cache.usage().num_held == held
        if child.num_computed < child.num_tokens and child.output_ids:
            child.output_ids[-1] = self.rng.randrange(3)
            self.memory.learn(child.terms.cache_salt, child.token_ids(0, child.num_tokens))
        self.live.append(child)
        self.seen["forked"] += 1

    def end(self) -> None:
        if not self.live:
            return
        request = self.live.pop(self.rng.randrange(len(self.live)))
        self.known.append((request.terms.cache_salt, request.token_ids(0, request.num_tokens)))
        self.cache.free(request, keep_tail=self.rng.random() < 0.9)
        self.cache.forget(request)

    def install(self) -> None:
        """A chain from elsewhere, of a sequence that was seen."""
        rng, cache = self.rng, self.cache
        salt, tokens = rng.choice(self.known)
        keys = self.memory.learn(salt, tokens)
        if len(keys) < 2:
            return
        g = rng.randrange(len(cache.groups))
        start = rng.randrange(len(keys) - 1)
        chain = [
            (keys[i + 1], tuple(tokens[i * BLOCK_SIZE : (i + 1) * BLOCK_SIZE])) for i in range(start, len(keys) - 1)
        ]

        def write(block: int, i: int) -> None:
            for n in range(BLOCK_SIZE):
                prefix = (salt, tuple(tokens[: (start + i) * BLOCK_SIZE + n + 1]))
                self.memory.slots[g][block, n] = (prefix, self.memory.epoch)
            self.seen["installed"] += 1

        done = cache.install(g, keys[start], start, chain, write)
        assert all(cache.groups[g].prefixes.get(key) is not None for key, _ in chain[:done])

    def flush(self) -> None:
        num_cached = self.cache.usage().num_cached
        assert self.cache.flush() == num_cached
        assert self.cache.usage().num_cached == self.cache.usage().score_bytes == 0
        self.memory.epoch += 1
        self.seen["flushed"] += 1


def histories(first: int, last: int) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in range(first, last):
        try:
            seen += History(seed).play(60)
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
    return seen


REACHED = (
    "refused", "copied", "copy given up", "shared", "scores reused", "salted", "behind a window", "full", "evicted",
    "copied on write", "left the window", "forked", "installed", "flushed",
    *({*EndReason} - {EndReason.DISABLED, EndReason.NO_ROOM}),
)  # fmt: skip


def assert_reached(seen: Counter[str]) -> None:
    missing: list[Any] = [what for what in REACHED if not seen[what]]
    assert not missing, f"no history reached: {missing}"


def test_random_operations() -> None:
    assert_reached(histories(0, 400))


@pytest.mark.long
@pytest.mark.parametrize("part", range(20))
def test_many_random_operations(part: int) -> None:
    assert_reached(histories(1000 * (part + 1), 1000 * (part + 2)))
