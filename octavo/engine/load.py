"""From a config to everything a step needs: checkpoint, graph, packed weights, KV cache, program, scheduler."""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from octavo.backends.adapted import AdaptedProgram
from octavo.backends.base import Backend, Limits, Program
from octavo.cache.blocks import BLOCK_SIZE, GroupSpec, blocks_for
from octavo.cache.kv import KvCache
from octavo.cache.match import Match
from octavo.cache.store import BlockStore
from octavo.cache.tiers import LONG_PREFIX, DiskTier
from octavo.config import ConfigError, EngineConfig
from octavo.engine.adapters import AdapterReader, Adapters, Packed
from octavo.engine.admission import Bounds
from octavo.engine.memory import KvNeeds, KvSize, check_weights, format_bytes, free_memory, size_kv
from octavo.engine.messages import Abilities, Loading, Ready
from octavo.engine.packed import PackedCache, packed_cache
from octavo.engine.space import kv_space
from octavo.graph.adapt import adapt, targets
from octavo.graph.ir import Graph, Kind
from octavo.models import build_graph, rope
from octavo.pooling import HEADS
from octavo.quantize.at_load import identity, quantised
from octavo.request import Gate, Request
from octavo.sched.admission import Fetch
from octavo.sched.batch import BatchBuilder
from octavo.sched.scheduler import Scheduler
from octavo.weights.checkpoint import open_checkpoint
from octavo.weights.digest import WeightsDigest
from octavo.weights.sentence_transformers import read_pooling
from octavo.weights.spec import Checkpoint

MIN_LOGIT_ROWS = 64
"""Logit rows of a step, at least: how many prompt positions are scored at once. 64 rows of 128k float32: 34 MB."""

QUIET_SECONDS = 0.5
REPORT_SECONDS = 0.1
"""A phase of the start that takes longer than the first is reported, as often as the second says."""

Report = Callable[[Loading], None]


@dataclass
class Loaded:
    """A model ready to serve, and how long each phase of loading took."""

    checkpoint: Checkpoint
    graph: Graph
    backend: Backend
    weights: Any
    packed: PackedCache | None
    state: Any
    kv: KvSize
    limits: Limits
    bounds: Bounds
    program: Program
    cache: KvCache
    tier: DiskTier | None
    scheduler: Scheduler
    adapters: Adapters
    named_adapters: dict[str, str]  # digests of those that the config names, by name
    batches: BatchBuilder
    phases: dict[str, float]
    notices: list[str]

    def ready(self, epoch: int, python_seconds: float) -> Ready:
        """python_seconds: from the launch of the process to the start of loading."""
        return Ready(
            epoch=epoch,
            vocab_size=self.bounds.vocab_size,
            max_model_len=self.bounds.max_model_len,
            num_kv_blocks=min(self.kv.num_blocks),
            kv_bytes=self.kv.total_bytes,
            phases={"python": python_seconds, **self.phases},
            threads=self.backend.num_threads,
            isa=getattr(self.backend, "isa", self.backend.name),
            eos_ids=sorted(self.bounds.eos_ids),
            abilities=self.bounds.abilities,
            adapters=self.named_adapters,
            notices=[self.kv.describe(self.bounds.max_model_len), *self.notices],
        )


def load(config: EngineConfig, report: Report | None = None) -> Loaded:
    """`config.model` names files on this machine (`weights.locate` finds or fetches them).

    Raises CheckpointError, GraphError or ConfigError with one line for the user.
    """
    phases: dict[str, float] = {}

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        phases[name] = time.perf_counter() - started

    with phase("backend"):
        backend = _backend(config)
    with phase("open"):
        checkpoint = open_checkpoint(Path(config.model))
        digest = WeightsDigest(checkpoint, identity(config.quantize))  # of the files that are packed below
    with phase("graph"):
        build = partial(
            build_graph, activations=config.activations, kv_dtype=config.kv_dtype, max_model_len=config.max_model_len,
            bf16_dots=backend.bf16_dots,
        )  # fmt: skip
        graph = build(checkpoint)
        if config.quantize != "none":
            checkpoint = quantised(checkpoint, graph, config.quantize)
            graph = build(checkpoint)
        notices, max_model_len = _max_model_len(config, checkpoint, graph)
        abilities = _abilities(graph, checkpoint)
        # An encoder reads a text in one step, and pools any of its states.
        max_tokens = max(config.max_num_batched_tokens, 0 if graph.causal else max_model_len)
        max_rows = max(config.max_num_seqs, min(MIN_LOGIT_ROWS, max_tokens) if graph.causal else max_tokens)
        notices += checkpoint.notices
    with phase("weights"):
        check_weights(backend.weight_bytes(graph), free_memory())
        kept = packed_cache(config, backend.packing(graph), digest, notices, _tell)
        weights = kept.read(backend.num_threads, _slow("reading the weights", report)) if kept else None
    if weights is None:
        with phase("pack"):
            weights = backend.pack(graph, checkpoint, _slow("packing the weights", report))
            if kept:
                kept.keep(weights.image)
    free = partial(_free, kept.mapped_bytes if kept else 0)
    reader = (
        AdapterReader(backend, _targets(graph, checkpoint), config.max_lora_rank, free) if config.num_adapters else None
    )
    packed: dict[str, Packed] = {}
    if reader is not None and config.adapters:
        with phase("adapters"):
            packed = {name: reader.read(path) for name, path in config.adapters}
    with phase("kv"):
        block_bytes = backend.block_bytes(graph)
        # What one step writes, nothing of which is kept.
        needed = None if graph.causal else sum(block_bytes) * (blocks_for(max_tokens) + config.max_num_seqs)
        kv = size_kv(
            [KvNeeds(n, group.window) for n, group in zip(block_bytes, graph.groups, strict=True)],
            max_model_len=max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_step_tokens=max_tokens,
            wanted_bytes=config.kv_cache_memory or needed,
            free_bytes=free(),
        )
        state = backend.make_state(graph, kv.num_blocks)
    if reader is not None:
        reader.free = partial(_beside, free, kv, state)
    limits = Limits(
        max_tokens=max_tokens,
        max_rows=max_rows,
        max_seqs=config.max_num_seqs,
        max_model_len=max_model_len,
        max_adapters=config.num_adapters,
    )
    with phase("compile"):
        program = backend.compile(graph, weights, state, limits)
        if reader is not None:
            adapted = backend.compile(adapt(graph, config.max_lora_rank), weights, state, limits)
            program = AdaptedProgram(program, adapted)
    eos_ids = frozenset(i for i in checkpoint.generation["eos_token_id"] if 0 <= i < graph.vocab_size)
    # A nonce: these keys never leave the process. The disk tier has its own, seeded with what the blocks depend on.
    groups = [GroupSpec(n, group.window) for n, group in zip(kv.num_blocks, graph.groups, strict=True)]
    cache = KvCache(groups, seed=os.urandom(16), enabled=config.prefix_caching and graph.causal)
    tier = None
    if config.disk_cache is not None:
        if not graph.causal:
            raise ConfigError("disk_cache keeps what texts begin with, and an encoder can reuse nothing of it")
        tier = _disk_tier(config, cache, state, lambda: kv_space(graph, backend.fingerprint(), digest.take()))
        notices.append(f"disk cache in {config.disk_cache}, at most {format_bytes(config.disk_cache_size)}")
    scheduler = Scheduler(
        cache, limits, _fetch(tier) if tier else None, target_itl=config.target_itl, whole=not graph.causal
    )
    adapters = Adapters(program, reader, config.num_adapters, scheduler.adapters)
    return Loaded(
        checkpoint=checkpoint,
        graph=graph,
        backend=backend,
        weights=weights,
        packed=kept,
        state=state,
        kv=kv,
        limits=limits,
        bounds=Bounds(graph.vocab_size, max_model_len, eos_ids, abilities),
        program=program,
        cache=cache,
        tier=tier,
        scheduler=scheduler,
        adapters=adapters,
        named_adapters={name: adapters.install(each) for name, each in packed.items()},
        batches=BatchBuilder(limits, len(graph.groups), adapters.slots),
        phases=phases,
        notices=notices,
    )


def _abilities(graph: Graph, checkpoint: Checkpoint) -> Abilities:
    outputs = {value.name: value.cols for value in graph.values() if value.kind is Kind.OUTPUT}
    return Abilities(
        generates=graph.causal,
        heads={name: outputs[name] for name in HEADS if name in outputs},
        pooling=read_pooling(checkpoint) or ("last" if graph.causal else "mean"),
        token_types=max(
            (node.ins[1].rows.coef for node in graph.nodes if node.ins[0].name == "token_types"), default=0
        ),
    )


def _backend(config: EngineConfig) -> Backend:
    if config.backend == "reference":
        from octavo.backends.reference import ReferenceBackend

        return ReferenceBackend()
    from octavo.backends.cpu import CpuBackend

    try:
        return CpuBackend(
            isa=config.isa,
            num_threads=config.num_threads,
            fuse=config.fuse,
            reuse=config.reuse,
            share=config.share,
            poison=config.poison,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _slow(what: str, report: Report | None) -> Callable[[int, int], None] | None:
    """For the progress of what begins now."""
    if report is None:
        return None
    due = time.monotonic() + QUIET_SECONDS

    def progress(done: int, total: int) -> None:
        nonlocal due
        if time.monotonic() >= due:
            due = time.monotonic() + REPORT_SECONDS
            report(Loading(what, done, total))

    return progress


def _tell(line: str) -> None:
    print(f"octavo: {line}", file=sys.stderr, flush=True)


def _disk_tier(config: EngineConfig, cache: KvCache, state: Any, space: Callable[[], bytes]) -> DiskTier:
    """Not started. space: may take long."""
    assert config.disk_cache is not None
    directory = Path(config.disk_cache).expanduser()
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"disk_cache is {directory}, which is no directory")
    least = LONG_PREFIX // BLOCK_SIZE * sum(state.block_bytes(g) for g in range(len(cache.groups)))
    if config.disk_cache_size < least:
        raise ConfigError(
            f"disk_cache_size is {format_bytes(config.disk_cache_size)}; a prompt of {LONG_PREFIX} tokens of this model "
            f"takes {format_bytes(least)}: disk_cache_size={least} would work"
        )
    return DiskTier(
        cache,
        state,
        lambda: BlockStore(directory, space(), config.disk_cache_size),
        notify=_tell,
    )


def _targets(graph: Graph, checkpoint: Checkpoint) -> dict[str, tuple[int, int]]:
    """Modules that adapters may be for. Those whose rows the converter of a GGUF file has sorted are not."""
    joined = checkpoint.config.get("qkv_order") == "joined"
    return {name: size for name, size in targets(graph).items() if not (joined and "query_key_value" in name)}


def _free(mapped_bytes: int) -> int:
    """Bytes free beside so many of weights in mapped files: the kernel would give up their pages before it refuses others."""
    return max(0, free_memory() - mapped_bytes)


def _beside(free: Callable[[], int], kv: KvSize, state: Any) -> int:
    """Bytes free beside the KV cache, which takes its memory as it is used."""
    return free() - kv.total_bytes + getattr(state, "touched_bytes", kv.total_bytes)


def _fetch(tier: DiskTier) -> Fetch:
    """Holds the tier weakly: the scheduler is part of cycles, and the tier holds the KV memory."""
    alive = weakref.ref(tier)

    def fetch(request: Request, match: Match, limit: int) -> Gate | None:
        tier = alive()
        return tier.fetch(request, match, limit) if tier else None

    return fetch


def _max_model_len(config: EngineConfig, checkpoint: Checkpoint, graph: Graph) -> tuple[list[str], int]:
    wanted = config.max_model_len
    if wanted is None and rope.can_be_longer(checkpoint.config, checkpoint.path):
        return [
            f"serving {graph.max_positions} positions: those of longer sequences have other rotary frequencies, "
            "which --max-model-len chooses for all"
        ], graph.max_positions
    if wanted is None or wanted == graph.max_positions:
        return [], graph.max_positions
    if wanted > graph.max_positions and graph.bounded:
        raise ConfigError(f"max_model_len is {wanted}, but this model has only {graph.max_positions} positions")
    if wanted > graph.max_positions:
        return [
            f"max_model_len is {wanted}, but the model was made for {graph.max_positions} positions: "
            "expect poor text beyond them"
        ], wanted
    return [], wanted
