"""The collector without a server: buckets, one snapshot a scrape, and observers that cost little."""

from __future__ import annotations

import threading
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from tests.calls import count_calls

from carousel.engine.request import FinishReason
from carousel.engine.timeline import EngineStats, RequestRecord, StepRecord
from carousel.telemetry.metrics import ITL_BUCKETS, TTFT_BUCKETS, EngineMetrics, Histogram, versions


def step(index: int = 0, prefill: int = 0, decode: int = 4, duration: float = 0.03) -> StepRecord:
    return StepRecord(index, 0.0, duration, 0.0, duration, 0.0, 4, prefill, decode, 0, decode, 0, 4, 0)


def request(reason: FinishReason = FinishReason.EOS, **fields: float | None) -> RequestRecord:
    return RequestRecord("r", "", reason, 1, 10, 0, 20, 0, 1.5, **fields)


def collect(metrics: EngineMetrics) -> dict[tuple[str, str], float]:
    """``{(name, kind or reason or le): value}``."""
    found = {}
    for family in metrics.collect():
        for sample in family.samples:
            labels = sample.labels
            key = labels.get("le") or labels.get("finished_reason") or labels.get("kind") or ""
            if "le" in labels and "kind" in labels:
                key = f"{labels['kind']}:{labels['le']}"
            found[sample.name, key] = sample.value
    return found


@given(st.lists(st.floats(0, 1e4), max_size=50))
def test_buckets_count_every_value_at_or_below_their_bound(values):
    one_by_one, together = Histogram(ITL_BUCKETS), Histogram(ITL_BUCKETS)
    for value in values:
        one_by_one.observe(value)
    together.observe_many(values)
    assert one_by_one.counts == together.counts
    assert together.sum == pytest.approx(sum(values))
    for bound, count, *_ in together.buckets():
        assert count == sum(value <= float(bound) for value in values)


def test_steps_are_told_apart_by_kind():
    metrics = EngineMetrics("m", EngineStats)
    metrics.on_step(step(decode=4), [0.02] * 4)
    metrics.on_step(step(prefill=100, decode=4, duration=0.15), [0.3] * 4)
    metrics.on_step(step(prefill=100, decode=0, duration=0.15), [])
    found = collect(metrics)
    assert {kind: found["carousel_step_seconds_count", kind] for kind in ("decode", "mixed", "prefill")} == {
        "decode": 1,
        "mixed": 1,
        "prefill": 1,
    }
    assert found["carousel_inter_token_latency_seconds_count", ""] == 8
    assert found["carousel_inter_token_latency_seconds_bucket", "0.025"] == 4
    assert found["carousel_iteration_tokens_total_sum", ""] == 4 + 104 + 100


def test_a_request_that_never_ran_has_only_the_times_it_lived_through():
    metrics = EngineMetrics("m", EngineStats)
    metrics.on_finish(request(FinishReason.CANCELLED))
    metrics.on_finish(request(ttft_s=0.2, queue_s=0.1, prefill_s=0.1, decode_s=1.2, tpot_s=0.06))
    found = collect(metrics)
    assert found["carousel_e2e_request_latency_seconds_count", ""] == 2
    for name in ("time_to_first_token", "request_queue_time", "request_prefill_time", "request_decode_time"):
        assert found[f"carousel_{name}_seconds_count", ""] == 1
    assert found["carousel_time_to_first_token_seconds_sum", ""] == pytest.approx(0.2)
    assert found["carousel_request_time_per_output_token_seconds_sum", ""] == pytest.approx(0.06)


def test_one_snapshot_a_scrape_even_while_it_changes():
    calls = 0

    def stats() -> EngineStats:
        nonlocal calls
        calls += 1
        finished = {
            FinishReason.EOS: 3 * calls,
            FinishReason.TIMEOUT: calls,
            FinishReason.CANCELLED: 2,
            FinishReason.ERROR: 1,
        }
        return EngineStats(
            admitted=4 * calls + 3 + 9, finished=finished, num_requests_running=5, num_requests_waiting=4
        )  # fmt: skip

    metrics = EngineMetrics("m", stats)
    for turn in (1, 2):
        found = collect(metrics)
        assert calls == turn
        ended = sum(found[f"carousel_requests_{name}_total", ""] for name in ("finished", "cancelled", "failed"))
        assert found["carousel_requests_admitted_total", ""] == ended + found["carousel_requests_live", ""]
        assert sum(found["carousel_request_success_total", reason.value] for reason in FinishReason) == ended


def test_gauges():
    stats = EngineStats(
        num_blocks=100, num_free_blocks=20, num_cached_blocks=30, num_slots=8, num_sequences_running=2,
        oldest_wait_s=1.5, queue_seconds=2.5, num_tokens_waiting=700,
    )  # fmt: skip
    found = collect(EngineMetrics("m", lambda: stats, ready=lambda: False))
    assert found["carousel_kv_cache_usage_perc", ""] == 0.5
    assert found["carousel_batch_occupancy_ratio", ""] == 0.25
    assert found["carousel_batch_slots_free", ""] == 6
    assert found["carousel_oldest_wait_seconds", ""] == 1.5
    assert found["carousel_estimated_queue_seconds", ""] == 2.5
    assert found["carousel_num_tokens_waiting", ""] == 700
    assert found["carousel_ready", ""] == 0


def test_every_series_exists_from_the_start_and_both_text_formats_take_them():
    registry = CollectorRegistry()
    metrics = EngineMetrics("m", EngineStats)
    metrics.register(registry)
    for text in (generate_latest(registry).decode(), generate_openmetrics(registry).decode()):
        assert 'carousel_num_requests_waiting{model_name="m"} 0.0' in text
        assert 'carousel_request_success_total{finished_reason="eos",model_name="m"} 0.0' in text
        assert f'carousel_time_to_first_token_seconds_bucket{{le="{TTFT_BUCKETS[0]}",model_name="m"}} 0.0' in text
        names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
        assert len(names) == len(set(names))
        assert not any(":" in name for name in names)
    metrics.unregister()
    assert generate_latest(registry) == b""


def test_build_info():
    info = next(family for family in EngineMetrics("m", EngineStats).collect() if family.name == "carousel_build_info")
    assert info.samples[0].value == 1
    assert set(versions()) <= set(info.samples[0].labels)


def test_observing_is_cheap_beside_a_step_and_safe_beside_scrapes():
    metrics = EngineMetrics("m", EngineStats)
    stop = threading.Event()

    def scrape() -> None:
        while not stop.is_set():
            found = collect(metrics)
            assert found["carousel_inter_token_latency_seconds_count", ""] % 64 == 0

    scraper = threading.Thread(target=scrape)
    scraper.start()
    latencies = [0.02] * 64
    calls = min(count_calls(partial(metrics.on_step, step(index, decode=64), latencies)) for index in range(500))
    stop.set()
    scraper.join()
    assert collect(metrics)["carousel_inter_token_latency_seconds_count", ""] == 500 * 64
    assert calls <= 64 + 20, "one for each latency, a few for the step"
