"""The space of KV blocks on disk: a digest of everything that their bytes depend on, tokens and salt aside."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from octavo.backends.base import BLOCK_SIZE
from octavo.graph.ir import Graph


def kv_space(graph: Graph, fingerprint: str, weights: bytes) -> bytes:
    """16 bytes. weights: the digest of their files (`weights.digest`).

    The graph says shape, KV groups and their type, rope, activation mode and weight formats; the backend's fingerprint
    how they are computed here.
    """
    digest = hashlib.blake2b(digest_size=16, person=b"octavo-kv-space")
    digest.update(weights)
    for line in (fingerprint, str(BLOCK_SIZE), *_lines(graph)):
        digest.update(line.encode() + b"\n")
    return digest.digest()


def _lines(graph: Graph) -> Iterator[str]:
    yield f"{graph.name} {graph.vocab_size}"
    yield from map(repr, graph.groups)
    yield from map(repr, graph.nodes)
    yield from (f"{weight!r} {weight.parts}" for weight in graph.weights())
