"""Spans of real requests, as a real OTLP collector receives them over HTTP and gRPC, and exemplars beside them."""

from __future__ import annotations

import asyncio
import logging
import re
import sys
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import httpx
import pytest
from kserve.protocol.grpc import grpc_predict_v2_pb2 as pb
from tests.engine.fakes import Bench
from tests.engine.test_scheduler import request
from tests.server.collector import Collector, Span
from tests.server.grpc_calls import Client, infer_request
from tests.server.harness import Running, serving, wait_until

from carousel.config import Settings
from carousel.engine.events import Event, What
from carousel.engine.timeline import StepRecord
from carousel.server import make_spans
from carousel.telemetry.spans import phases

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
ASK = {"model": "tiny", "prompt": [65] * 150, "max_tokens": 5, "ignore_eos": True, "temperature": 0.5, "seed": 3}


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, collector: Collector) -> pytest.MonkeyPatch:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.http)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    return monkeypatch


def traced(**changes: Any) -> Any:
    return serving(traces=True, prefix_caching=False, **changes)


def post(running: Running, path: str = "/v1/completions", body: Any = ASK, **headers: str) -> httpx.Response:
    return httpx.post(running.url + path, json=body, headers=headers, timeout=20)


def tree(collector: Collector, name: str, number: int = 1) -> list[Span]:
    """The spans of that name once there are so many; all below them is there too."""
    wait_until(lambda: len(collector.named(name)) >= number)
    return collector.named(name)


def check_times(parent: Span, children: list[Span]) -> None:
    slack = 5_000_000  # two clocks, of the wall and of the engine
    for child in children:
        assert parent.start - slack <= child.start <= child.end <= parent.end + slack, (parent.name, child.name)


def test_a_request_has_its_spans_under_the_callers(environment: pytest.MonkeyPatch, collector: Collector) -> None:
    with traced() as running:
        answer = post(running, traceparent=f"00-{TRACE}-{SPAN}-01", tracestate="a=b")
    (call,) = tree(collector, "POST /v1/completions")
    assert (call.trace_id, call.parent_id, call.kind, call.state) == (TRACE, SPAN, 2, "a=b")
    assert answer.headers["traceparent"] == f"00-{TRACE}-{call.span_id}-01"
    assert call.attributes["http.response.status_code"] == 200
    assert call.attributes["url.path"] == "/v1/completions"
    assert call.resource["service.name"] == "carousel"

    (model,) = collector.below(call)
    assert model.name == "text_completion tiny"
    wanted = {
        "gen_ai.operation.name": "text_completion", "gen_ai.provider.name": "carousel", "gen_ai.request.model": "tiny",
        "gen_ai.request.max_tokens": 5, "gen_ai.request.temperature": 0.5, "gen_ai.request.seed": 3,
        "gen_ai.usage.input_tokens": 150, "gen_ai.usage.output_tokens": 5, "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.response.finish_reasons": ["length"],
    }  # fmt: skip
    assert model.attributes | wanted == model.attributes
    parts = collector.below(model)
    assert [part.name for part in parts] == ["queue", "prefill", "decode"]
    assert all(one.end == two.start for one, two in pairwise(parts))
    check_times(call, [model])
    check_times(model, parts)
    chunks = [attributes["carousel.tokens"] for name, attributes, _ in parts[1].events if name == "chunk"]
    assert len(chunks) >= 3, "64 tokens a step"
    assert sum(chunks) == 150
    assert parts[2].attributes["carousel.output_tokens"] == 5
    assert {span.trace_id for span in collector.spans} == {TRACE}
    assert "AAAA" not in repr([span.attributes for span in collector.spans])


def test_over_grpc_with_every_choice_and_without_a_caller(
    environment: pytest.MonkeyPatch, collector: Collector
) -> None:
    environment.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.grpc)
    environment.setenv("OTEL_SERVICE_NAME", "chat-of-ours")
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "n": 2, "stream": True}
    with traced() as running:
        answer = post(running, "/openai/v1/chat/completions", {**chat, "ignore_eos": True})
    (call,) = tree(collector, "POST /openai/v1/chat/completions")
    assert call.parent_id == ""
    assert answer.headers["traceparent"] == f"00-{call.trace_id}-{call.span_id}-01"
    (model,) = collector.below(call)
    assert (model.name, model.attributes["gen_ai.request.choice.count"]) == ("chat tiny", 2)
    assert model.attributes["gen_ai.response.finish_reasons"] == ["length", "length"]
    parts = collector.below(model)
    assert sorted((part.name, part.attributes["carousel.choice"]) for part in parts) == [
        (name, choice) for name in ("decode", "prefill", "queue") for choice in (0, 1)
    ]
    assert call.resource["service.name"] == "chat-of-ours"


async def test_v2_over_grpc_is_traced_and_probes_are_not(environment: pytest.MonkeyPatch, collector: Collector) -> None:
    with traced() as running:
        async with httpx.AsyncClient(base_url=running.url) as http:
            for path in ("/livez", "/readyz", "/metrics", "/v2/models/tiny/ready"):
                await http.get(path)
        async with Client(running.grpc) as client:
            assert (await client.stub.ServerLive(pb.ServerLiveRequest())).live
            metadata = (("traceparent", f"00-{TRACE}-{SPAN}-01"),)
            await client.infer(infer_request("Hello", model="tiny", max_tokens=2), metadata=metadata)
        await asyncio.to_thread(tree, collector, "inference.GRPCInferenceService/ModelInfer")
    (call,) = collector.named("inference.GRPCInferenceService/ModelInfer")
    assert (call.trace_id, call.parent_id) == (TRACE, SPAN)
    assert call.attributes["rpc.response.status_code"] == "OK"
    assert [part.name for part in collector.below(collector.below(call)[0])] == ["queue", "prefill", "decode"]
    assert {span.trace_id for span in collector.spans} == {TRACE}


def test_who_leaves_and_who_is_refused(environment: pytest.MonkeyPatch, collector: Collector) -> None:
    with traced() as running:
        running.engine.runner.step_s = 0.02
        with httpx.stream(
            "POST", f"{running.url}/v1/completions", json={**ASK, "max_tokens": 300, "stream": True}
        ) as r:
            next(r.iter_lines())
        wait_until(lambda: not running.engine.stats().live)
        assert post(running, body={**ASK, "max_tokens": 10_000}).status_code == 400
        assert post(running, "/nowhere").status_code == 404
        assert running.servers[0].spans._open == {}
    left, refused = tree(collector, "POST /v1/completions", 2)
    assert [span.attributes["url.path"] for span in collector.named("POST")] == ["/nowhere"]
    (model,) = collector.below(left)
    assert model.attributes["gen_ai.response.finish_reasons"] == ["cancelled"]
    assert not model.failed
    assert refused.attributes["http.response.status_code"] == 400
    assert not refused.failed
    assert collector.below(refused) == []


def test_a_seed_of_64_bits_makes_no_trouble(environment: pytest.MonkeyPatch, collector: Collector) -> None:
    said: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = said.append  # type: ignore[method-assign]
    logging.getLogger("opentelemetry").addHandler(handler)
    with traced() as running:
        assert post(running, body={**ASK, "seed": 2**64 - 1}).status_code == 200
    logging.getLogger("opentelemetry").removeHandler(handler)
    (call,) = tree(collector, "POST /v1/completions")
    (model,) = collector.below(call)
    assert "gen_ai.request.seed" not in model.attributes
    assert said == []


def test_a_caller_who_does_not_sample_gets_no_spans(environment: pytest.MonkeyPatch, collector: Collector) -> None:
    with traced() as running:
        answer = post(running, traceparent=f"00-{TRACE}-{SPAN}-00")
        assert answer.headers["traceparent"].endswith("-00")
        post(running)  # and one who says nothing does
    tree(collector, "POST /v1/completions")
    assert TRACE not in {span.trace_id for span in collector.spans}


def test_the_samplers_variables_count(environment: pytest.MonkeyPatch, collector: Collector) -> None:
    environment.setenv("OTEL_TRACES_SAMPLER", "always_off")
    with traced() as running:
        assert post(running).headers["traceparent"].endswith("-00")
    assert collector.spans == []


def test_a_collector_that_is_away_costs_no_request(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    environment.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    with traced() as running:
        assert post(running).status_code == 200


# ---- what the variables may say


def test_wrong_words_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, word, allowed in (
        ("OTEL_TRACES_EXPORTER", "zipkin", "otlp, console or none"),
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json", "http/protobuf or grpc"),
    ):
        with monkeypatch.context() as changed:
            changed.setenv(name, word)
            with pytest.raises(ValueError, match=f"{name}: got '{word}', allowed: {allowed}"):
                make_spans(Settings(traces=True))


def test_switched_off_nothing_of_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert make_spans(Settings()) is None
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert make_spans(Settings(traces=True)) is None


def test_without_the_packages_the_start_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "carousel.telemetry.spans", None)
    with pytest.raises(ValueError, match=re.escape("kserve-carousel[otel]")):
        make_spans(Settings(traces=True))


def test_off_by_default_the_engine_collects_nothing() -> None:
    with serving() as running:
        assert "traceparent" not in post(running).headers
        assert running.engine.timeline.watchers == ()


# ---- phases


def test_phases_follow_a_sequence_through_its_preemptions() -> None:
    bench = Bench(num_blocks=7, max_batch_tokens=64, max_batch_sequences=4)
    told: list[Event] = []

    class Ear:
        def on_events(self, events: list[Event], step: StepRecord | None) -> None:
            told.extend(events)

    bench.core.timeline.watch(Ear())
    for name in ("a", "b", "c"):
        bench.submit(request(name, prompt_len=20, max_tokens=30, arrival=bench.now))
    bench.run()
    victims = {event.request_id for event in told if event.what is What.PREEMPTED}
    assert victims
    for name in ("a", "b", "c"):
        parts = phases([event for event in told if event.request_id == name])
        assert [part.name for part in parts[:3]] == ["queue", "prefill", "decode"]
        assert all(one.ended == two.started for one, two in pairwise(parts))
        names = [part.name for part in parts]
        if name in victims:
            assert names.count("queue") > 1
            assert names[-1] == "decode"
            assert any(part.attributes.get("carousel.preempted") for part in parts)
        assert parts[-1].attributes["carousel.output_tokens"] == 30


# ---- exemplars


def test_histograms_lead_to_traces(environment: pytest.MonkeyPatch, collector: Collector) -> None:
    with traced() as running:
        post(running, traceparent=f"00-{TRACE}-{SPAN}-01")
        post(running, traceparent=f"00-{'a' * 32}-{SPAN}-00")
        accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
        wait_until(lambda: running.engine.stats().live == 0)
        shown = httpx.get(f"{running.url}/metrics", headers=accept).text
        plain = httpx.get(f"{running.url}/metrics").text
    lines = [line for line in shown.splitlines() if " # {" in line]
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"):
        assert any(re.match(rf'carousel_{name}_bucket.*# {{trace_id="{TRACE}"}} ', line) for line in lines), name
    assert "a" * 32 not in shown
    assert TRACE not in plain
