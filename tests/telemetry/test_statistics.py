"""Triton's statistics, from what the engine reports of its requests."""

from __future__ import annotations

from dataclasses import replace

from carousel.engine.request import FinishReason
from carousel.engine.timeline import RequestRecord
from carousel.grpc_messages import StatisticsResponse
from carousel.telemetry.statistics import KINDS, RequestStatistics

RECORD = RequestRecord(
    request_id="a", tenant="", finish_reason=FinishReason.LENGTH, num_choices=1, prompt_tokens=5, cached_tokens=0,
    output_tokens=3, num_preemptions=0, e2e_s=1.0, queue_s=0.25, ttft_s=0.5, prefill_s=0.25, decode_s=0.5, tpot_s=0.25,
)  # fmt: skip


def told(*records: RequestRecord) -> dict:
    statistics = RequestStatistics(clock=lambda: 12.5)
    for record in records:
        statistics.on_finish(record)
    (model,) = statistics.answer("m", "1")["model_stats"]
    return model


def test_durations_are_summed_in_nanoseconds():
    model = told(RECORD, replace(RECORD, queue_s=0.5, cached_tokens=4))
    stats = model["inference_stats"]
    assert model["inference_count"] == 2
    assert model["last_inference"] == 12_500
    assert stats["success"] == {"count": 2, "ns": 2_000_000_000}
    assert stats["queue"] == {"count": 2, "ns": 750_000_000}
    assert stats["compute_input"] == {"count": 2, "ns": 500_000_000}
    assert stats["compute_infer"] == {"count": 2, "ns": 1_000_000_000}
    assert (stats["cache_hit"]["count"], stats["cache_miss"]["count"]) == (1, 1)


def test_what_failed_or_was_cancelled_is_a_failure_and_no_inference():
    never_scheduled = replace(RECORD, finish_reason=FinishReason.CANCELLED, queue_s=None, prefill_s=None, decode_s=None)
    model = told(replace(RECORD, finish_reason=FinishReason.ERROR), never_scheduled)
    assert model["inference_count"] == 0
    assert model["inference_stats"]["fail"] == {"count": 2, "ns": 2_000_000_000}
    assert {kind for kind in KINDS if model["inference_stats"][kind]["count"]} == {"fail"}


def test_the_message_says_the_same():
    statistics = RequestStatistics()
    statistics.on_finish(RECORD)
    answer = statistics.answer("m", "1")
    (model,) = StatisticsResponse(**answer).model_stats
    assert (model.name, model.inference_stats.queue.ns) == ("m", 250_000_000)
    assert [field.name for field in model.inference_stats.DESCRIPTOR.fields] == list(KINDS)
