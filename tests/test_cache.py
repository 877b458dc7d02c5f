"""Pool, prefix index, tables, windows, forks and hints, case by case; `test_cache_random` plays them at random."""

from __future__ import annotations

import random
from typing import Any

import pytest

from octavo.backends import base
from octavo.cache.blocks import BLOCK_SIZE, BlockPool, GroupSpec, blocks_for
from octavo.cache.integrity import exhaust
from octavo.cache.kv import KvCache
from octavo.cache.match import End, EndReason
from octavo.cache.prefix import Node, PrefixIndex, chain_key, common_prefix, root_key
from octavo.request import ParameterError, Request, Retention, SamplingParams, Terms

ROOT = root_key(b"")


def make(id: str, tokens: list[int], prompt_logprobs: int | None = None, **terms: Any) -> Request:
    return Request(id, 0, tokens, SamplingParams(prompt_logprobs=prompt_logprobs), 0, terms=Terms(**terms))


def admit(cache: KvCache, request: Request, num_reserved: int = 0) -> bool:
    reserved = [num_reserved for _ in cache.groups]
    return cache.admit(request, cache.match(request), request.num_tokens, reserved) is not None


def compute(cache: KvCache, request: Request, num_tokens: int) -> bool:
    if not cache.grow(request, num_tokens):
        return False
    cache.end_step()
    cache.advance(request, num_tokens)
    return True


def run(cache: KvCache, request: Request) -> int:
    """Admit, compute and free a request; tokens that came from the cache."""
    assert admit(cache, request)
    num_cached = request.num_cached
    assert compute(cache, request, request.num_tokens)
    cache.check([request])
    cache.free(request)
    cache.forget(request)
    cache.check([])
    return num_cached


def test_block_size_is_that_of_the_backends() -> None:
    assert BLOCK_SIZE == base.BLOCK_SIZE
    assert [blocks_for(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]


def test_pool_gives_low_ids_first() -> None:
    pool = BlockPool(4)
    assert [pool.take() for _ in range(3)] == [0, 1, 2]
    pool.release(1, None)
    pool.release(0, 1.0)
    assert (pool.num_free, pool.num_cached, pool.num_held, pool.num_available) == (2, 1, 1, 3)
    assert [pool.take(), pool.take()] == [1, 3]
    with pytest.raises(IndexError):
        pool.take()
    assert pool.oldest() == 0
    pool.drop(0)
    assert pool.take() == 0


def test_pool_counts_filled_slots_of_held_blocks() -> None:
    pool = BlockPool(2)
    block = pool.take()
    pool.set_filled(block, 5)
    pool.share(block)
    assert pool.num_filled == 5
    pool.release(block, 1.0)
    pool.release(block, 1.0)
    assert pool.num_filled == 0
    pool.share(block)
    assert pool.num_filled == 5


def test_pool_refuses_no_blocks() -> None:
    with pytest.raises(ValueError, match="at least one block"):
        BlockPool(0)


def test_keys_depend_on_seed_parent_and_tokens() -> None:
    keys = {root_key(b"a"), root_key(b"b")}
    for root in list(keys):
        for tokens in ([1], [1, 2], [2, 1], [258], [1, 2**31]):
            keys.add(chain_key(root, tokens))
            keys.add(chain_key(chain_key(root, [1]), tokens))
    assert len(keys) == 2 + 2 * 2 * 5
    assert all(len(key) == 16 for key in keys)
    assert chain_key(root_key(b""), [1, 2]).hex() == "248318c69cde5dadb9676ce15ca83b97"


def test_best_child_is_the_longest_common_prefix() -> None:
    rng = random.Random(1)
    for _ in range(300):
        index = PrefixIndex()
        children = {tuple(rng.randrange(3) for _ in range(rng.randint(1, 8))) for _ in range(rng.randint(0, 12))}
        for block, child in enumerate(sorted(children)):
            index.insert(chain_key(ROOT, child), Node(block, ROOT, child, 0))
        exhaust(index.check_in_parts())
        query = tuple(rng.randrange(3) for _ in range(rng.randint(0, 8)))
        block, common = index.best_child(ROOT, query)
        assert common == max((common_prefix(child, query) for child in children), default=0)
        if common:
            assert common_prefix(sorted(children)[block], query) == common


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 100])
def test_all_but_the_last_token_of_a_prompt_seen_before_is_cached(length: int) -> None:
    cache = KvCache([GroupSpec(16)])
    tokens = [i % 7 for i in range(length)]
    assert run(cache, make("a", tokens)) == 0
    assert run(cache, make("b", tokens)) == length - 1


def test_reuse_is_exact_to_the_token() -> None:
    cache = KvCache([GroupSpec(200)])
    tokens = list(range(40))
    run(cache, make("a", tokens))
    for cut in range(1, 40):
        assert run(cache, make(f"r{cut}", [*tokens[:cut], 99, 98])) == cut


def test_nothing_is_shared_when_disabled_or_differently_seeded() -> None:
    cache = KvCache([GroupSpec(16)], enabled=False)
    assert [run(cache, make(id, [1] * 40)) for id in "ab"] == [0, 0]
    assert cache.usage().num_cached == 0
    one, two = KvCache([GroupSpec(4)], seed=b"1"), KvCache([GroupSpec(4)], seed=b"2")
    run(one, make("a", [1] * 40))
    run(two, make("a", [1] * 40))
    keys = [set(cache.groups[0].prefixes._nodes) for cache in (one, two)]
    assert keys[0].isdisjoint(keys[1])


def test_full_blocks_of_a_running_request_are_shared_once() -> None:
    cache = KvCache([GroupSpec(16)])
    a, b = make("a", [1] * 40), make("b", [1] * 40)
    assert admit(cache, a) and compute(cache, a, 33)
    assert admit(cache, b)
    assert b.num_cached == 32 and b.tables[0][:2] == a.tables[0][:2]
    assert cache.usage().num_held == 3
    cache.check([a, b])


def test_equal_blocks_computed_twice_are_stored_once() -> None:
    cache = KvCache([GroupSpec(16)])
    a, b = make("a", [1] * 40), make("b", [1] * 40)
    assert admit(cache, a) and admit(cache, b)
    assert compute(cache, a, 40)
    before = b.tables[0]
    assert compute(cache, b, 40)
    assert b.tables[0] is not before, "a table that changes is another list"
    assert b.tables[0][:2] == a.tables[0][:2]
    assert cache.usage().num_held == 4
    cache.check([a, b])


def test_chains_lose_their_tail_first() -> None:
    cache = KvCache([GroupSpec(8)])
    run(cache, make("a", list(range(64))))
    run(cache, make("b", list(range(100, 164))))
    assert cache.usage().num_cached == 8
    run(cache, make("c", list(range(200, 232))))  # two blocks
    assert cache.match(make("d", list(range(64)))).num_tokens == 32
    assert cache.match(make("e", list(range(100, 164)))).num_tokens == 63


def test_a_block_that_says_more_replaces_the_shorter_one() -> None:
    cache = KvCache([GroupSpec(8)])
    tokens = list(range(30))
    for length in (3, 9, 20, 30):
        run(cache, make(f"r{length}", tokens[:length]))
    assert cache.usage().num_cached == 2


def test_admission_leaves_what_is_reserved() -> None:
    cache = KvCache([GroupSpec(4)])
    request = make("a", [1] * 33)
    assert not admit(cache, request, num_reserved=2)
    assert request.tables == []
    assert admit(cache, request, num_reserved=1)
    assert request.tables == [[]], "blocks come with the tokens of a step"


def test_a_copy_is_given_up_where_its_source_takes_the_last_block() -> None:
    cache = KvCache([GroupSpec(2)])
    run(cache, make("a", [1] * 8))
    request = make("b", [1] * 8 + [2] * 24)
    assert admit(cache, request) and request.num_cached == 0
    assert compute(cache, request, 32)


def test_the_source_of_a_copy_outlives_its_owner() -> None:
    cache = KvCache([GroupSpec(3)])
    a = make("a", [1] * 8)
    assert admit(cache, a) and compute(cache, a, 8)
    b = make("b", [1] * 8 + [2])
    assert admit(cache, b)
    ((copy,),) = cache.copies()
    cache.free(a)
    assert cache.grow(b, 32) and copy.source not in b.tables[0]
    assert not cache.grow(b, 48)
    cache.check([b])
    cache.end_step()
    assert cache.grow(b, 48)
    cache.check([b])


def test_a_hit_is_valid_in_all_groups() -> None:
    cache = KvCache([GroupSpec(8), GroupSpec(3)])
    run(cache, make("a", list(range(40))))
    run(cache, make("b", list(range(100, 120))))  # evicts from the small group
    small = cache.groups[1].prefixes
    assert len(small) < len(cache.groups[0].prefixes)
    request = make("c", list(range(40)))
    assert admit(cache, request)
    assert request.num_cached == 16
    assert [len(table) for table in request.tables] == [1, 1]
    cache.check([request])


def test_salts_never_share() -> None:
    cache = KvCache([GroupSpec(16)])
    tokens = [1] * 40
    for i, salt in enumerate(["", "red", "blue", "red\0blue"]):
        assert run(cache, make(f"a{i}", tokens, cache_salt=salt)) == 0
    for i, salt in enumerate(["", "red", "blue", "red\0blue"]):
        assert run(cache, make(f"b{i}", tokens, cache_salt=salt)) == 39


def test_a_fork_shares_all_blocks_and_a_write_copies_the_unfinished_one() -> None:
    cache = KvCache([GroupSpec(8)])
    parent, child, other = make("p", [1] * 20), make("c", [1] * 20), make("o", [1] * 20)
    assert admit(cache, parent) and compute(cache, parent, 20)
    for fork in (child, other):
        cache.fork(parent, fork)
    assert child.num_computed == child.num_cached == 20 and child.tables == parent.tables
    assert cache.usage().num_held == 2
    for i, request in enumerate((parent, child, other)):
        request.output_ids.append(i)
        assert cache.grow(request, 21)
    cache.check([parent, child, other])
    ((first, second),) = cache.copies()
    assert first.source == second.source == other.tables[0][1], "the last one writes in place"
    assert first.destination == parent.tables[0][1] and second.destination == child.tables[0][1]
    cache.end_step()
    assert cache.usage().num_held == 4
    for request in (parent, child, other):
        cache.advance(request, 21)
        cache.check([parent, child, other])


def test_room_counts_the_copy() -> None:
    cache = KvCache([GroupSpec(3)])
    parent, child = make("p", [1] * 20), make("c", [1] * 20)
    assert admit(cache, parent) and compute(cache, parent, 20)
    cache.fork(parent, child)
    assert cache.room(child) == 12 and cache.demands([(child, 21)]) == [1]
    assert not cache.grow(child, 33) and cache.grow(child, 32)
    assert cache.room(parent) == 12 and cache.demands([(parent, 21)]) == [0], "the block is its own again"
    cache.end_step()
    cache.check([parent, child])


def test_a_copy_to_a_block_that_is_given_back_is_not_made() -> None:
    cache = KvCache([GroupSpec(4)])
    parent, child = make("p", [1] * 20), make("c", [1] * 20)
    assert admit(cache, parent) and compute(cache, parent, 20)
    cache.fork(parent, child)
    assert cache.grow(child, 21)
    cache.free(child)
    assert cache.copies() == [[]]
    cache.check([parent])


def test_a_hit_needs_only_the_window_before_it() -> None:
    """LESSONS B4: as deep as whatever window is still there, not all or nothing."""
    cache = KvCache([GroupSpec(16), GroupSpec(8, window=20)])
    tokens = list(range(100))
    a = make("a", tokens)
    assert admit(cache, a)
    for n in (40, 80, 100):
        assert compute(cache, a, n)
        cache.check([a])
        assert sum(block >= 0 for block in a.tables[1]) <= 3
    cache.free(a)
    cache.forget(a)
    b = make("b", [*tokens[:70], 200, 201])
    assert admit(cache, b) and b.num_cached == 70
    assert b.tables[1][:3] == [-1, -1, -1] and b.tables[1][3] >= 0
    cache.check([b])
    cache.free(b)
    window = cache.groups[1]
    for block in list(window.pool.cached_blocks()):
        if window.prefixes.node(window.prefixes.key_of(block)).depth == 4:  # type: ignore[union-attr]
            window.prefixes.remove(block)
            window.pool.drop(block)
    match = cache.match(make("c", [*tokens[:70], 200, 201]))
    assert match.num_tokens == 64 and match.end == End(EndReason.EVICTED, 64), "block 4 and what follows need it"


def test_hints_order_eviction_and_fade() -> None:
    now = 0.0
    cache = KvCache([GroupSpec(6)], clock=lambda: now)
    kept = make("kept", [1] * 32, retention=Retention(seconds=100))
    last = make("last", [2] * 32, retention=Retention(priority=-1))
    for request in (kept, last, make("plain", [3] * 32)):
        now += 1
        run(cache, request)

    def evicts(token: int) -> list[int]:
        """Which of the sequences of tokens 1, 2, 3 are gone after another."""
        run(cache, make(f"r{token}", [token] * 32))
        return [t for t in (1, 2, 3) if cache.match(make(f"m{token}{t}", [t] * 32)).num_tokens == 0]

    now += 1
    assert evicts(10) == [2], "the one that asked to go first, though it was not the oldest"
    assert evicts(11) == [2, 3], "then the plain one"
    now += 200
    assert evicts(12) == [2, 3], "10 was used before the hint was"
    assert evicts(13) == [2, 3]
    assert evicts(14) == [1, 2, 3], "the hint has faded: 12 and 13 were used later"


def test_hints_never_wedge_the_pool() -> None:
    """LESSONS B7: a cache full of blocks that are to be kept serves the next request as an empty one."""
    cache = KvCache([GroupSpec(8)])
    for i in range(20):
        run(cache, make(f"r{i}", [i] * 64, retention=Retention(seconds=86_400, priority=100)))
    assert run(cache, make("last", [99] * 128)) == 0
    assert cache.usage().num_cached == 8


def test_retention_out_of_bounds_is_refused() -> None:
    for bad in ({"seconds": -1.0}, {"seconds": float("nan")}, {"priority": 101}, {"num_tokens": 0}):
        with pytest.raises(ParameterError, match=f"retention.{next(iter(bad))} must be between"):
            Retention(**bad)
    with pytest.raises(ParameterError, match=r"retention\.num_tokens needs"):
        Retention(priority=-1, num_tokens=5)


def test_after_a_flush_nothing_is_found_not_even_of_those_who_run() -> None:
    cache = KvCache([GroupSpec(16)])
    run(cache, make("a", [1] * 40))
    b = make("b", [2] * 60)
    assert admit(cache, b) and compute(cache, b, 40)
    assert cache.flush() == 3
    assert compute(cache, b, 60)
    for token in (1, 2):
        assert cache.match(make(f"c{token}", [token] * 40)).num_tokens == 0
    cache.check([b])
    cache.free(b)
    cache.forget(b)
    cache.check([])
    assert cache.usage().num_cached == 0
    assert run(cache, make("d", [2] * 40)) == 0 and run(cache, make("e", [2] * 40)) == 39


def test_a_match_says_why_it_ends() -> None:
    cache = KvCache([GroupSpec(8)])

    def end(tokens: list[int], **terms: Any) -> End:
        return cache.match(make("probe", tokens, **terms)).end

    def reset() -> None:
        cache.chains.forget(make("probe", [0]))

    tokens = list(range(40))
    assert end(tokens) == End(EndReason.UNKNOWN, 0)
    reset()
    assert end(tokens, cache_salt="red") == End(EndReason.SALT, 0)
    reset()
    run(cache, make("a", tokens))
    for query, want in (
        (tokens, End(EndReason.COMPLETE, 39)),
        ([*tokens[:21], 99, 98], End(EndReason.DIFFERS, 21)),
        ([*tokens[:32], 99, 98], End(EndReason.DIFFERS, 32)),
        ([*tokens, 99], End(EndReason.COMPLETE, 40)),
        ([*tokens, 99, 98], End(EndReason.TOO_SHORT, 40)),
        ([99, 98], End(EndReason.UNKNOWN, 0)),
    ):
        assert end(query) == want
        reset()
    assert cache.match(make("scored", tokens, prompt_logprobs=1)).end == End(EndReason.SCORES, 1)
    running = make("running", list(range(100, 164)))
    assert admit(cache, running) and compute(cache, running, 16)
    assert end(list(range(100, 140))) == End(EndReason.COMPUTING, 16)
    reset()
    assert compute(cache, running, 64)
    cache.free(running)
    run(cache, make("evicts", list(range(200, 248))))
    assert end(tokens) == End(EndReason.EVICTED, 16)
    assert KvCache([GroupSpec(8)], enabled=False).match(make("probe", tokens)).end == End(EndReason.DISABLED, 0)
