"""The series of /metrics. Names are an interface: they are only ever added to."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from octavo.config import MetricNames
from octavo.engine.messages import Stats
from octavo.request import FinishReason
from octavo.server.vllm_metrics import VllmCollector

_FIRST_TOKEN = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)  # seconds
_BETWEEN_TOKENS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 2)
_WHOLE = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600)

_GAUGES = {
    "num_running": ("octavo_requests_running", "Choices that are being computed."),
    "num_waiting": ("octavo_requests_waiting", "Choices that wait for a place."),
    "waiting_tokens": ("octavo_tokens_waiting", "Tokens to be computed, of those that wait and of prompts that run."),
    "waiting_seconds": ("octavo_waiting_seconds_predicted", "Until those that wait now will have been served."),
    "prediction_error": ("octavo_step_prediction_error", "Median relative error of predicted step times of late."),
    "kv_blocks_total": ("octavo_kv_blocks", "KV blocks there are."),
    "kv_blocks_held": ("octavo_kv_blocks_held", "Distinct KV blocks that live requests refer to."),
    "kv_blocks_cached": ("octavo_kv_blocks_cached", "KV blocks that only the prefix index keeps."),
    "kv_score_bytes": ("octavo_kv_score_bytes", "Bytes of prompt scores kept with KV blocks."),
    "kv_slots_filled": ("octavo_kv_slots_filled", "Token slots written in held blocks."),
    "disk_open": ("octavo_disk_cache_open", "1 while the disk cache is in use."),
    "disk_bytes": ("octavo_disk_cache_bytes", "Bytes of its files, those of other models too."),
}
_COUNTERS = {
    "steps": ("octavo_engine_steps", "Steps computed."),
    "step_seconds": ("octavo_engine_step_seconds", "Time spent in steps."),
    "predicted_seconds": ("octavo_engine_step_seconds_predicted", "The same as predicted before each step."),
    "prompt_tokens": ("octavo_engine_prompt_tokens", "Prompt tokens computed."),
    "cached_tokens": ("octavo_engine_cached_tokens", "Prompt tokens taken from the prefix cache."),
    "output_tokens": ("octavo_engine_output_tokens", "Tokens drawn, those behind a stop string included."),
    "kv_tiles_read": ("octavo_attention_kv_tiles", "Tiles of keys and values that attention read, of 128 tokens each."),
    "kv_tiles_saved": (
        "octavo_attention_kv_tiles_saved",
        "Tiles that attention need not read again for sequences with a common prefix.",
    ),
    "preemptions": ("octavo_engine_preemptions", "Choices put back to wait for want of KV blocks."),
    "recomputed_tokens": ("octavo_engine_recomputed_tokens", "Tokens computed again after a preemption."),
    "forced_tokens": ("octavo_engine_forced_tokens", "Tokens that a grammar left no choice about, not drawn."),
    "grammars_compiled": ("octavo_grammars_compiled", "Grammars compiled."),
    "grammars_reused": ("octavo_grammars_reused", "Requests whose grammar another had asked for."),
    "grammars_refused": ("octavo_grammars_refused", "Grammars refused: wrong, unsupported, or past a limit."),
    "disk_blocks_written": ("octavo_disk_cache_written_blocks", "KV blocks of 16 tokens written to disk."),
    "disk_blocks_loaded": ("octavo_disk_cache_loaded_blocks", "KV blocks brought from disk into the cache."),
    "disk_blocks_refused": ("octavo_disk_cache_refused_blocks", "Damaged or foreign files, removed."),
    "disk_blocks_removed": ("octavo_disk_cache_removed_blocks", "Files removed to keep the bound."),
    "disk_blocks_skipped": ("octavo_disk_cache_skipped_blocks", "Blocks evicted before they could be written."),
}


REFUSALS = ("max_queued_requests", "max_queued_tokens", "timeout", "ttft_timeout")

MAX_TENANTS = 100
"""Tenants with a series of their own: those that come later share one, for a client may name any number."""


class Metrics:
    """All series of one server. `stats` gives the engine's latest numbers. Nothing here raises for a bad number."""

    def __init__(self, stats: Callable[[], Stats], model: str = "", names: MetricNames = "octavo") -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(stats))
        registry = self.registry
        self._responses = Counter("octavo_http_responses", "HTTP answers.", ["path", "status"], registry=registry)
        self._open = Gauge(
            "octavo_http_requests_open", "Generation requests being read or answered.", registry=registry
        )
        self._prompts = Counter("octavo_prompts", "Prompts accepted.", registry=registry)
        self._prompt_tokens = Counter("octavo_prompt_tokens", "Tokens in the prompts accepted.", registry=registry)
        self._cached_tokens = Counter(
            "octavo_prompt_tokens_cached", "Of these, taken from the prefix cache.", registry=registry
        )
        self._tokens = _TokenCollector()
        registry.register(self._tokens)
        self._choices = Counter("octavo_choices_finished", "Choices ended, by reason.", ["reason"], registry=registry)
        self._first = Histogram(
            "octavo_time_to_first_token_seconds", "From a request to the first token of a choice.",
            buckets=_FIRST_TOKEN, registry=registry,
        )  # fmt: skip
        self._whole = Histogram(
            "octavo_request_seconds", "From a request to its end.", buckets=_WHOLE, registry=registry
        )
        self._queue = Histogram(
            "octavo_queue_seconds", "What a prompt waited for its turn.", buckets=_FIRST_TOKEN, registry=registry
        )
        self._prefill = Histogram(
            "octavo_prefill_seconds", "From the turn of a prompt to its first token.",
            buckets=_FIRST_TOKEN, registry=registry,
        )  # fmt: skip
        self._decode = Histogram(
            "octavo_decode_seconds", "From the first token of a prompt's first choice to its end.",
            buckets=_WHOLE, registry=registry,
        )  # fmt: skip
        self._queries = Counter(
            "octavo_cache_queries", "Prompt tokens looked up in the prefix cache.", registry=registry
        )
        self._hits = Counter(
            "octavo_cache_hits", "Prompt tokens found there, by where they were.", ["tier"], registry=registry
        )
        self._refused = Counter(
            "octavo_requests_refused",
            "Requests refused or ended for want of time, by the bound.",
            ["bound"],
            registry=registry,
        )
        self._tenant_tokens = Counter(
            "octavo_tenant_tokens", "Tokens of prompts and answers, by tenant.", ["tenant"], registry=registry
        )
        self._tenants: set[str] = set()
        for bound in REFUSALS:
            self._refused.labels(bound)
        self._startup = Gauge(
            "octavo_startup_seconds", "Time of each phase of the start.", ["phase"], registry=registry
        )
        renamed = CollectorRegistry()
        renamed.register(VllmCollector(self.registry, model))
        self._shown = {"octavo": [registry], "vllm": [renamed], "both": [registry, renamed]}[names]
        for tier in ("memory", "disk"):
            self._hits.labels(tier)
        for reason in FinishReason:
            self._choices.labels(reason.value)

    @property
    def num_open(self) -> int:
        """Generation requests being read or answered now."""
        return int(self._open._value.get())

    def open_request(self) -> AbstractContextManager[None]:
        """A generation request is open until the end of the context."""
        return self._open.track_inprogress()

    def begin(self, num_prompts: int, num_tokens: int) -> None:
        self._prompts.inc(num_prompts)
        self._prompt_tokens.inc(num_tokens)

    def tokens(self, count: int, seconds: float, first: bool) -> None:
        """Of one choice, that came so long after those before, or after its request."""
        if first:
            self._first.observe(seconds)
        else:
            self._tokens.observe(seconds)
        self._tokens.count += count

    def end(self, reasons: Iterable[FinishReason], num_cached: int, seconds: float) -> None:
        for reason in reasons:
            self._choices.labels(reason.value).inc()
        self._cached_tokens.inc(num_cached)
        self._whole.observe(seconds)

    def phases(self, queue: float, prefill: float, decode: float) -> None:
        """Seconds that the first choice of a prompt spent in each."""
        self._queue.observe(queue)
        self._prefill.observe(prefill)
        self._decode.observe(decode)

    def looked_up(self, num_tokens: int, num_memory: int, num_disk: int) -> None:
        """A prompt of so many tokens was admitted; of them, those found in each tier."""
        self._queries.inc(num_tokens)
        self._hits.labels("memory").inc(num_memory)
        self._hits.labels("disk").inc(num_disk)

    def refused(self, bound: str) -> None:
        """One of REFUSALS."""
        self._refused.labels(bound).inc()

    def served(self, tenant: str, num_tokens: int) -> None:
        """Tokens of a request that has ended."""
        if len(self._tenants) < MAX_TENANTS:
            self._tenants.add(tenant)
        self._tenant_tokens.labels(tenant if tenant in self._tenants else "(others)").inc(num_tokens)

    def response(self, path: str, status: int) -> None:
        self._responses.labels(path, str(status)).inc()

    def startup(self, phases: dict[str, float]) -> None:
        for phase, seconds in phases.items():
            self._startup.labels(phase).set(seconds)

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return b"".join(map(generate_latest, self._shown))


class _TokenCollector(Collector):
    """What is counted for every token: plain numbers, for the library's take a lock each, 5 us together."""

    def __init__(self) -> None:
        self.count = 0
        self._buckets = [0] * (len(_BETWEEN_TOKENS) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        self._buckets[bisect_left(_BETWEEN_TOKENS, seconds)] += 1
        self._sum += seconds

    def collect(self) -> Iterable[CounterMetricFamily | HistogramMetricFamily]:
        yield CounterMetricFamily("octavo_output_tokens", "Tokens in answers.", value=self.count)
        bounds = [*map(floatToGoString, _BETWEEN_TOKENS), "+Inf"]
        yield HistogramMetricFamily(
            "octavo_inter_token_seconds", "Between two deliveries of a choice.",
            buckets=list(zip(bounds, accumulate(self._buckets), strict=True)), sum_value=self._sum,
        )  # fmt: skip


class _EngineCollector(Collector):
    def __init__(self, stats: Callable[[], Stats]) -> None:
        self._stats = stats

    def collect(self) -> Iterable[GaugeMetricFamily | CounterMetricFamily]:
        stats = self._stats()
        for field, (name, help) in _GAUGES.items():
            yield GaugeMetricFamily(name, help, value=getattr(stats, field))
        usage = stats.kv_blocks_held / max(1, stats.kv_blocks_total)
        yield GaugeMetricFamily("octavo_kv_usage_ratio", "Share of the KV blocks that live requests hold.", value=usage)
        waiting = GaugeMetricFamily(
            "octavo_requests_waiting_by_reason", "Choices that wait, by what for.", labels=["reason"]
        )
        for reason, count in stats.waiting_by_reason.items():
            waiting.add_metric([reason], count)
        yield waiting
        adapters = GaugeMetricFamily(
            "octavo_adapter_choices", "Choices being served, by the LoRA adapters that are loaded.", labels=["digest"]
        )
        for digest, count in stats.adapters.items():
            adapters.add_metric([digest], count)
        yield adapters
        computed = stats.prompt_tokens + stats.output_tokens + stats.recomputed_tokens
        yield GaugeMetricFamily(
            "octavo_recomputed_ratio", "Share of all computed tokens that were computed again after a preemption.",
            value=stats.recomputed_tokens / max(1, computed),
        )  # fmt: skip
        waste = stats.kv_blocks_held * 16 - stats.kv_slots_filled
        yield GaugeMetricFamily("octavo_kv_slots_wasted", "Slots of held blocks that hold no token.", value=waste)
        for field, (name, help) in _COUNTERS.items():
            yield CounterMetricFamily(name, help, value=getattr(stats, field))
