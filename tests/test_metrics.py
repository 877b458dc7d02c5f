"""What /metrics says, under either name, and the dashboard that reads it."""

from __future__ import annotations

import json
import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from octavo.engine.messages import Stats
from octavo.request import FinishReason
from octavo.server.metrics import Metrics
from octavo.server.vllm_metrics import NAMES

DASHBOARD = Path(__file__).parents[1] / "docs" / "grafana.json"


def _used(names: str) -> Metrics:
    metrics = Metrics(lambda: Stats(num_running=3, kv_blocks_total=8, kv_blocks_held=2), "tiny", names)  # type: ignore[arg-type]
    metrics.begin(1, 50)
    metrics.tokens(4, 0.1, first=True)
    metrics.tokens(4, 0.1, first=False)
    metrics.looked_up(50, 16, 32)
    metrics.phases(0.1, 0.2, 0.3)
    metrics.end([FinishReason.STOP, FinishReason.LENGTH], 48, 1.0)
    return metrics


def _series(text: str) -> dict[str, float]:
    return {
        sample.name + json.dumps(sample.labels, sort_keys=True): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_vllm_names() -> None:
    own, other = (_series(_used(names).text().decode()) for names in ("octavo", "vllm"))
    both = _series(_used("both").text().decode())
    assert all(name.startswith("octavo_") for name in own)
    assert all(name.startswith("vllm:") and '"model_name": "tiny"' in name for name in other)
    assert {**own, **other}.keys() == both.keys()
    model = '{"model_name": "tiny"}'
    assert other["vllm:num_requests_running" + model] == 3
    assert other["vllm:kv_cache_usage_perc" + model] == 0.25
    assert other["vllm:prefix_cache_queries_total" + model] == 50
    assert other["vllm:prefix_cache_hits_total" + model] == 48  # both tiers
    assert other["vllm:generation_tokens_total" + model] == 8
    assert other['vllm:request_success_total{"finished_reason": "stop", "model_name": "tiny"}'] == 1
    assert other["vllm:request_decode_time_seconds_sum" + model] == 0.3
    shown = text_string_to_metric_families(_used("vllm").text().decode())
    families = {family.name for family in shown if not family.name.endswith("_created")}
    assert families == set(NAMES.values())


def test_the_dashboard_reads_series_that_exist() -> None:
    known = {name.partition("{")[0] for name in _series(_used("octavo").text().decode())}
    known |= {"octavo_http_responses_total"}  # none was counted here
    expressions = [t["expr"] for panel in json.loads(DASHBOARD.read_text())["panels"] for t in panel["targets"]]
    used = {name for expression in expressions for name in re.findall(r"octavo_\w+", expression)}
    assert len(used) > 15
    assert used <= known
