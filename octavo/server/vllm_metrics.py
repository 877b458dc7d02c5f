"""The series of /metrics under vLLM's names, for dashboards and autoscalers that know those.

Source: the metric names of vLLM's V1 engine. What Octavo counts otherwise, or not at all, is not among them.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

NAMES = {
    "octavo_requests_running": "vllm:num_requests_running",
    "octavo_requests_waiting": "vllm:num_requests_waiting",
    "octavo_kv_usage_ratio": "vllm:kv_cache_usage_perc",
    "octavo_engine_preemptions": "vllm:num_preemptions",
    "octavo_cache_queries": "vllm:prefix_cache_queries",
    "octavo_cache_hits": "vllm:prefix_cache_hits",
    "octavo_prompt_tokens": "vllm:prompt_tokens",
    "octavo_output_tokens": "vllm:generation_tokens",
    "octavo_choices_finished": "vllm:request_success",
    "octavo_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "octavo_inter_token_seconds": "vllm:inter_token_latency_seconds",
    "octavo_request_seconds": "vllm:e2e_request_latency_seconds",
    "octavo_queue_seconds": "vllm:request_queue_time_seconds",
    "octavo_prefill_seconds": "vllm:request_prefill_time_seconds",
    "octavo_decode_seconds": "vllm:request_decode_time_seconds",
}

_LABELS = {"reason": "finished_reason"}
_SUMMED = frozenset({"tier"})
"""Labels that vLLM's series do not have: their values are added up."""


class VllmCollector(Collector):
    """What a registry holds, renamed, with vLLM's `model_name` label."""

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        self._registry = registry
        self._model = model

    def collect(self) -> Iterable[Metric]:
        for family in self._registry.collect():
            if family.name not in NAMES:
                continue
            renamed = Metric(NAMES[family.name], family.documentation, family.type)
            values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
            for sample in family.samples:
                labels = {_LABELS.get(k, k): v for k, v in sample.labels.items() if k not in _SUMMED}
                name = sample.name.replace(family.name, renamed.name, 1)
                key = (name, tuple({"model_name": self._model, **labels}.items()))
                values[key] = values.get(key, 0.0) + sample.value
            for (name, items), value in values.items():
                renamed.add_sample(name, dict(items), value)
            yield renamed
