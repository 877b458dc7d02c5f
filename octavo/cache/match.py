"""Matcher: what a request can reuse, and why it is not more."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

from octavo.cache.blocks import BLOCK_SIZE
from octavo.cache.chains import Chains
from octavo.cache.groups import Group
from octavo.cache.prefix import Key
from octavo.cache.publisher import Publisher
from octavo.cache.window import first_block
from octavo.request import Request, TokenLogprobs


class EndReason(enum.StrEnum):
    """Why a match ended where it did. Says nothing about what is held under other salts."""

    COMPLETE = "complete"  # everything but the last token, which is always computed
    DIFFERS = "differs"  # what was computed before goes on with another token here
    TOO_SHORT = "too_short"  # what was computed before ends here
    UNKNOWN = "unknown"  # nothing that was computed begins like this
    SALT = "salt"  # nothing under the request's own salt begins like this
    EVICTED = "evicted"  # what comes here, or what a window needs before it, was known and has been evicted
    COMPUTING = "not_yet_computed"  # a running request is about to compute what comes here
    SCORES = "scores"  # prompt logprobs are wanted that were not kept, or states, which never are
    NO_ROOM = "no_room"  # the rest could not be copied: no block was free for it
    DISABLED = "disabled"  # reuse is switched off


class End(NamedTuple):
    reason: EndReason
    position: int  # the first token that was not found; the first that differs where the reason says so


class Match(NamedTuple):
    """What a request can reuse: `shared[g]` whole blocks by reference, then `num_copied` tokens of `sources[g]`.

    -1 stands for a block that has left the group's window.
    """

    shared: list[list[int]]
    num_copied: int
    sources: list[int]
    limit: int  # most tokens that could have been reused
    end: End
    awaits: Key | None = None  # the next block, where a running request is about to compute it

    @property
    def num_tokens(self) -> int:
        return len(self.shared[0]) * BLOCK_SIZE + self.num_copied


class Matcher:
    """Reads what the cache holds; changes nothing."""

    def __init__(self, groups: Sequence[Group], chains: Chains, published: Publisher) -> None:
        self._groups = groups
        self._chains = chains
        self._published = published

    def nothing(self, request: Request) -> Match:
        """The match of a cache that is switched off."""
        return Match([[] for _ in self._groups], 0, [-1 for _ in self._groups], 0, End(EndReason.DISABLED, 0))

    def match(self, request: Request) -> Match:
        """The deepest boundary that is valid in all groups, at most the last token and where scores must be computed."""
        limit = request.num_tokens - 1
        num_scored = self._num_scored(request)
        match = found = self._find(request, min(limit, num_scored - 1))
        if match.num_tokens >= limit:
            return match
        num_known = match.num_tokens
        if num_known == num_scored - 1:  # the token behind it is known, too, but not what follows from it
            num_known = num_scored
            found = self._find(request, limit)
        awaits = self._awaited(request, num_known, scored=num_scored < request.num_tokens)
        if awaits is not None:
            end = End(EndReason.COMPUTING, num_known)
        elif found.num_tokens > num_known:
            end = End(EndReason.SCORES, num_known)
        else:
            end = End(self._reason(request, found), found.num_tokens)
        return match._replace(end=end, awaits=awaits)

    def whole_blocks(self, request: Request, match: Match) -> Match:
        """The same without a copy."""
        end = End(EndReason.NO_ROOM, len(match.shared[0]) * BLOCK_SIZE)
        return self._find(request, end.position)._replace(end=end)

    def known_scores(self, request: Request, num_tokens: int) -> list[TokenLogprobs]:
        """Scores of the tokens [1, num_tokens] of the prompt behind those that the request has."""
        num_top, prompt_ids = request.params.prompt_logprobs, request.prompt_ids
        start, stop = len(request.prompt_logprobs) + 1, min(num_tokens + 1, len(prompt_ids))
        scores: list[TokenLogprobs] = []
        while num_top is not None and start < stop:
            i, first = divmod(start, BLOCK_SIZE)
            end = min(stop, (i + 1) * BLOCK_SIZE)
            key, count = self._scored(request, i, num_top)
            assert i * BLOCK_SIZE + count >= end, "a match ends where scores are not known"
            scores += self._published.scores.read(key, first, prompt_ids[start:end], num_top)
            start = end
        return scores

    # Inside

    def _find(self, request: Request, limit: int) -> Match:
        """The longest prefix of at most `limit` tokens that is valid in all groups."""
        keys = self._chains.keys(request, limit // BLOCK_SIZE)
        deepest = len(keys) - 1
        for group in self._groups:
            if group.window is None:
                deepest = _depth(group, keys, deepest)
        runs = [None if group.window is None else _runs(group, keys[: deepest + 1]) for group in self._groups]
        for depth in range(deepest, -1, -1):
            start = depth * BLOCK_SIZE
            if not self._valid(runs, depth, start + BLOCK_SIZE - 1):
                continue
            tail = tuple(request.token_ids(start, min(limit, start + BLOCK_SIZE)))
            found = [group.prefixes.best_child(keys[depth], tail) for group in self._groups]
            num_copied = min(common for _, common in found)
            if self._valid(runs, depth, start + num_copied):
                shared = [_blocks(group, keys, depth, start + num_copied) for group in self._groups]
                end = End(EndReason.COMPLETE, start + num_copied)
                return Match(shared, num_copied, [block for block, _ in found], limit, end)
        raise AssertionError("nothing is always valid")

    def _valid(self, runs: list[list[int] | None], depth: int, num_tokens: int) -> bool:
        """Whether each window has its blocks before `depth`, seen from behind `num_tokens` tokens."""
        return all(
            run is None or run[depth] >= depth - first_block(num_tokens, group.window)
            for run, group in zip(runs, self._groups, strict=True)
        )

    def _num_scored(self, request: Request) -> int:
        """Leading tokens that need no computing for their own scores or states; all where none are wanted."""
        if request.pool is not None and request.pool.wanted:
            return min(request.num_tokens, request.pool.wanted.start + 1)  # states are never kept
        num_top, num_prompt = request.params.prompt_logprobs, len(request.prompt_ids)
        num_scored = len(request.prompt_logprobs) + 1
        if num_top is None or num_scored >= num_prompt:
            return request.num_tokens
        for i in range(num_scored // BLOCK_SIZE, num_prompt // BLOCK_SIZE + 1):
            _, count = self._scored(request, i, num_top)
            num_scored = max(num_scored, i * BLOCK_SIZE + count)
            if count < BLOCK_SIZE:
                break
        return request.num_tokens if num_scored == num_prompt else num_scored

    def _scored(self, request: Request, i: int, num_top: int) -> tuple[Key, int]:
        """(key, n): the block that has the scores of the first n tokens of the prompt's block i."""
        index = self._published.anchor.prefixes
        tokens = tuple(request.prompt_ids[i * BLOCK_SIZE : (i + 1) * BLOCK_SIZE])
        block, common = index.best_child(self._chains.keys(request, i)[i], tokens)
        if not common:
            return b"", 0
        key = index.key_of(block)
        return key, min(common, self._published.scores.count(key, num_top))

    def _awaited(self, request: Request, num_known: int, scored: bool) -> Key | None:
        """A block that gives more than the known tokens and that a running request is about to compute.

        `scored`: only with scores that the request can use.
        """
        i = num_known // BLOCK_SIZE
        start, stop = i * BLOCK_SIZE, request.num_tokens - (not scored)  # the last token is computed anyhow
        wanted = tuple(request.token_ids(start, min(stop, start + BLOCK_SIZE)))
        coming, num_top = self._published.coming, request.params.prompt_logprobs or 0
        for key, common in coming.best(self._chains.keys(request, i)[i], wanted):
            if start + common <= num_known:
                break
            leader = coming.leader(key)
            if not scored or (leader is not None and request.pool is None and num_top <= _num_kept(leader)):
                return key
        return None

    def _reason(self, request: Request, match: Match) -> EndReason:
        """Why a match that could be longer ends."""
        depth, num_tokens = len(match.shared[0]), match.num_tokens
        keys = self._chains.keys(request, (request.num_tokens - 1) // BLOCK_SIZE)
        following = request.token_ids(num_tokens, num_tokens + 1)
        tail = tuple(request.token_ids(depth * BLOCK_SIZE, num_tokens))
        indices = [group.prefixes for group in self._groups]
        if depth + 1 < len(keys) and (
            keys[depth + 1] in self._published.evicted
            or any(index.get(keys[depth + 1]) is not None for index in indices)
        ):
            return EndReason.EVICTED
        if any(index.goes_on(keys[depth], (*tail, *following)) for index in indices):
            return EndReason.EVICTED
        if num_tokens == 0:
            return EndReason.SALT if request.terms.cache_salt else EndReason.UNKNOWN
        return EndReason.DIFFERS if any(index.goes_on(keys[depth], tail) for index in indices) else EndReason.TOO_SHORT


def _num_kept(leader: Request) -> int:
    """Alternatives of the scores that a leader leaves with its blocks; -1: no scores."""
    num_top = leader.params.prompt_logprobs
    return -1 if num_top is None else num_top


def _depth(group: Group, keys: list[Key], most: int) -> int:
    """Leading blocks that the group holds, at most `most`."""
    for depth in range(most):
        if group.prefixes.get(keys[depth + 1]) is None:
            return depth
    return most


def _runs(group: Group, keys: list[Key]) -> list[int]:
    """[d]: blocks without a gap that the group holds right before block d."""
    runs = [0]
    for key in keys[1:]:
        runs.append(0 if group.prefixes.get(key) is None else runs[-1] + 1)
    return runs


def _blocks(group: Group, keys: list[Key], depth: int, num_tokens: int) -> list[int]:
    """The first `depth` blocks, -1 for those that the token behind `num_tokens` tokens does not see."""
    first = min(depth, first_block(num_tokens, group.window))
    found = [group.prefixes.get(key) for key in keys[first + 1 : depth + 1]]
    return [-1] * first + [block for block in found if block is not None]
