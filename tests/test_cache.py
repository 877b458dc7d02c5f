"""Pool, prefix index and tables by random operations, beside a model that remembers whole prefixes."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from octavo.backends import base
from octavo.cache.blocks import BLOCK_SIZE, BlockPool, GroupSpec, blocks_for
from octavo.cache.kv import KvCache
from octavo.cache.prefix import Node, PrefixIndex, chain_key, common_prefix, root_key
from octavo.request import Request, SamplingParams

ROOT = root_key(b"")


def make(id: str, tokens: list[int]) -> Request:
    return Request(id, 0, tokens, SamplingParams(), 0)


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
        index.check()
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


def play(seed: int) -> Counter[str]:
    rng = random.Random(seed)
    num_blocks = rng.randint(2, 12)
    cache = KvCache([GroupSpec(num_blocks + g) for g in range(rng.choice([1, 1, 2]))])
    live: list[Request] = []
    known: list[list[int]] = [[]]
    seen: Counter[str] = Counter()
    for turn in range(60):
        if rng.random() < 0.4:
            old = rng.choice(known)
            fresh = [rng.randrange(3) for _ in range(rng.randint(1, 24))]
            request = make(str(turn), (old[: rng.randint(0, len(old))] + fresh)[: num_blocks * 16])
            match = cache.match(request)
            assert match.num_tokens == longest_known(cache, request.prompt_ids[:-1])
            pools = [group.pool for group in cache.groups]
            free = min(pool.num_available for pool in pools)
            if cache.admit(request, match, request.num_tokens, [0] * len(cache.groups)):
                left = min(pool.num_available for pool in pools)
                assert left >= free - blocks_for(request.num_tokens) - (request.num_cached % 16 > 0)
                live.append(request)
                seen["copied"] += request.num_cached % 16 > 0
                seen["shared"] += request.num_cached >= 16
            else:
                assert blocks_for(request.num_tokens) > free - num_blocks or free < num_blocks
                cache.forget(request)
                seen["refused"] += 1
        elif live and rng.random() < 0.7:
            request = rng.choice(live)
            stop = rng.randint(request.num_computed, request.num_tokens)
            before = cache.usage().num_cached
            if not compute(cache, request, stop):
                seen["full"] += 1
            seen["evicted"] += cache.usage().num_cached < before
            if stop == request.num_tokens and stop < num_blocks * 16:
                request.output_ids.append(rng.randrange(3))
        elif live:
            request = live.pop(rng.randrange(len(live)))
            known.append(request.prompt_ids + request.output_ids)
            cache.end_step()
            cache.free(request, keep_tail=rng.random() < 0.9)
            cache.forget(request)
        cache.check(live)
    cache.end_step()
    for request in live:
        cache.free(request)
        cache.forget(request)
    cache.check([])
    assert cache.usage().num_held == 0 and not len(cache.chains) and not list(cache.published.coming.items())
    return seen


def longest_known(cache: KvCache, tokens: list[int]) -> int:
    """The most leading tokens that any indexed block of every group ends with."""
    best = []
    for group in cache.groups:
        prefixes: dict[bytes, list[int]] = {ROOT: []}
        nodes = dict(group.prefixes._nodes)
        while nodes:
            for key, node in list(nodes.items()):
                if node.parent in prefixes:
                    prefixes[key] = [*prefixes[node.parent], *node.token_ids]
                    del nodes[key]
        best.append(max(common_prefix(prefix, tokens) for prefix in prefixes.values()))
    return min(best)


def test_random_operations() -> None:
    seen: Counter[str] = Counter()
    for seed in range(400):
        try:
            seen += play(seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
    for what in ("copied", "shared", "refused", "full", "evicted"):
        assert seen[what] > 0, f"no history reached: {what}"
