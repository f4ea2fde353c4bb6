"""vLLM's names beside ours, of the same snapshot."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from carousel.engine.request import FinishReason
from carousel.engine.timeline import EngineStats, RequestRecord
from carousel.telemetry.metrics import EngineMetrics
from carousel.telemetry.vllm_names import NAMES

STATS = EngineStats(
    num_requests_running=3, num_requests_waiting=4, num_blocks=10, num_free_blocks=5, generation_tokens=77,
    finished={FinishReason.EOS: 1, FinishReason.STOP: 2, FinishReason.TIMEOUT: 4, FinishReason.CANCELLED: 8},
)  # fmt: skip


def scrape(vllm_names: bool) -> str:
    registry = CollectorRegistry()
    metrics = EngineMetrics("m", lambda: STATS, vllm_names=vllm_names)
    metrics.on_finish(RequestRecord("r", "", FinishReason.EOS, 1, 10, 0, 20, 0, 1.5, ttft_s=0.03))
    metrics.register(registry)
    generate_openmetrics(registry)
    return generate_latest(registry).decode()


def test_they_are_off_unless_asked_for():
    assert "vllm:" not in scrape(False)


def test_every_name_is_there_with_the_value_of_ours():
    text = scrape(True)
    families = {family.name: family for family in text_string_to_metric_families(text)}
    for name in NAMES:
        assert f"carousel_{name}" in families or f"carousel_{name.removesuffix('_total')}" in families, name
        theirs = families.get(f"vllm:{name}") or families[f"vllm:{name.removesuffix('_total')}"]
        assert theirs.samples
        for sample in theirs.samples:
            assert (sample.labels["model_name"], sample.labels["engine"]) == ("m", "0")
    lines = text.splitlines()
    assert 'vllm:num_requests_running{engine="0",model_name="m"} 3.0' in lines
    assert 'vllm:num_requests_waiting{engine="0",model_name="m"} 4.0' in lines
    assert 'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5' in lines
    assert 'vllm:generation_tokens_total{engine="0",model_name="m"} 77.0' in lines
    assert 'vllm:time_to_first_token_seconds_bucket{engine="0",le="0.04",model_name="m"} 1.0' in lines


def test_ends_are_told_in_vllms_words():
    found = {
        sample.labels["finished_reason"]: sample.value
        for family in text_string_to_metric_families(scrape(True))
        if family.name == "vllm:request_success"
        for sample in family.samples
    }
    assert found == {"stop": 3, "length": 0, "abort": 12, "error": 0}
