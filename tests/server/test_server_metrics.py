"""``/metrics``: names, and counts that always add up."""

from __future__ import annotations

import json
import threading

import httpx
from prometheus_client.parser import text_string_to_metric_families

GAUGES = [
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "num_tokens_waiting",
    "oldest_wait_seconds",
    "estimated_queue_seconds",
    "requests_live",
    "kv_blocks_free",
    "kv_blocks_cached",
    "batch_occupancy_ratio",
    "build_info",
    "ready",
]
COUNTERS = [
    "prompt_tokens",
    "generation_tokens",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "num_preemptions",
    "recomputed_tokens",
    "request_success",
    "requests_admitted",
    "requests_finished",
    "requests_cancelled",
    "requests_failed",
    "requests_rejected",
]
HISTOGRAMS = [
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "iteration_tokens_total",
    "request_prompt_tokens",
    "request_generation_tokens",
    "step_seconds",
]


def scrape(url: str) -> dict[str, float]:
    text = httpx.get(url + "/metrics", timeout=5).text
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("carousel_"):
                labels = {
                    name: value for name, value in sample.labels.items() if name in ("finished_reason", "kind", "le")
                }
                found[sample.name.removeprefix("carousel_") + (json.dumps(labels) if labels else "")] = sample.value
    return found


def test_names(server):
    found = scrape(server.url)
    for name in GAUGES:
        assert name in found
    for name in COUNTERS:
        assert any(key.startswith(f"{name}_total") for key in found), name
    for name in HISTOGRAMS:
        assert any(key.startswith(f"{name}_bucket") for key in found), name


def test_every_series_of_a_model_carries_its_name(server):
    for line in httpx.get(server.url + "/metrics").text.splitlines():
        if line.startswith("carousel_"):
            assert 'model_name="fake"' in line


def test_kserves_own_metrics_are_there_too(server):
    httpx.post(server.url + "/v1/models/fake:predict", json={"instances": ["a"]})
    assert "request_predict_seconds" in httpx.get(server.url + "/metrics").text


def test_identity_holds_in_every_scrape_while_requests_come_go_fail_and_leave(server):
    server.engine.delay_s = 0.002
    stop = threading.Event()

    def traffic(worker: int) -> None:
        with httpx.Client(base_url=server.url, timeout=10) as client:
            for turn in range(15):
                if stop.is_set():
                    return
                body = {"text_input": "a", "parameters": {"max_tokens": 10}}
                if (worker + turn) % 3:
                    client.post("/v2/models/fake/generate", json=body)
                else:
                    with client.stream("POST", "/v2/models/fake/generate_stream", json=body) as left:
                        next(left.iter_lines())

    before = scrape(server.url)
    threads = [threading.Thread(target=traffic, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    scrapes = 0
    while any(thread.is_alive() for thread in threads):
        now = scrape(server.url)
        parts = ("requests_finished_total", "requests_cancelled_total", "requests_failed_total", "requests_live")
        assert now["requests_admitted_total"] == sum(now[part] for part in parts)
        scrapes += 1
    stop.set()
    after = scrape(server.url)
    assert scrapes > 5
    assert after["requests_admitted_total"] - before["requests_admitted_total"] == 60
    assert after["requests_cancelled_total"] > before["requests_cancelled_total"]
    assert after["generation_tokens_total"] > before["generation_tokens_total"]
    key = 'request_success_total{"finished_reason": "length"}'
    assert after[key] - before[key] == after["requests_finished_total"] - before["requests_finished_total"]
    assert after["e2e_request_latency_seconds_count"] - before["e2e_request_latency_seconds_count"] == 60
    assert after["inter_token_latency_seconds_count"] == after["generation_tokens_total"]


def test_rejections_are_counted(server):
    from carousel.engine.errors import QueueFull

    before = scrape(server.url)["requests_rejected_total"]
    server.engine.refuse = QueueFull("full", 1)
    httpx.post(server.url + "/v2/models/fake/generate", json={"text_input": "a"})
    assert scrape(server.url)["requests_rejected_total"] == before + 1
