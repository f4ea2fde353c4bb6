"""OpenTelemetry spans of calls and of what the engine did for them, sent over OTLP. Loaded only when traces are wanted.

A call has a span of its own (the one that its ``traceparent`` names), below it one for each request to the model, by
OpenTelemetry's conventions for generative AI, and below that one for each stay in the queue, each prefill (with an
event for every chunk) and each decode. Nothing of a prompt or an answer goes into them.

The engine thread only collects; spans are built on a thread of their own and sent by OpenTelemetry's. All ids are
decided when the call begins, since its answer and its log lines carry them.
"""

from __future__ import annotations

import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from opentelemetry import trace as api
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from carousel.engine.events import Event, What
from carousel.engine.request import FinishReason, GenerationRequest
from carousel.engine.timeline import RequestRecord, StepRecord
from carousel.telemetry import tracing
from carousel.telemetry.tracing import Trace

logger = logging.getLogger("carousel.traces")

MAX_QUEUED = 2048
"""Calls and requests that wait to become spans; further ones are dropped, and the log says so."""

MAX_CHUNKS = 128
"""Events of one prefill span, which is also OpenTelemetry's own bound."""

FLUSH_S = 3.0
_NO_ROUTE = (401, 404, 405)
"""Whoever likes can ask for any path: names of spans must stay few, so these have the method alone."""

_SERVED = frozenset({FinishReason.EOS, FinishReason.STOP, FinishReason.LENGTH, FinishReason.CANCELLED})


class TracesUnusable(ValueError):
    """The OTEL_* variables ask for what cannot be had; the message names the variable."""


class _Ids(RandomIdGenerator):
    """Random ids, but for the next span where its ids are given. Used on one thread only."""

    def __init__(self) -> None:
        self.trace_id = self.span_id = 0

    def generate_trace_id(self) -> int:
        given, self.trace_id = self.trace_id, 0
        return given or super().generate_trace_id()

    def generate_span_id(self) -> int:
        given, self.span_id = self.span_id, 0
        return given or super().generate_span_id()


@dataclass(slots=True)
class _Pending:
    """A request in the engine that somebody traces."""

    request: GenerationRequest
    trace: Trace
    operation: str
    left: int
    events: list[Event] = field(default_factory=list)
    record: RequestRecord | None = None


class CallSpan:
    """One call of a client, from its headers to the end of its answer. Made by :meth:`Spans.begin`."""

    def __init__(self, spans: Spans, trace: Trace, parent: SpanContext | None, name: str, attributes: dict[str, Any]):
        self.trace = trace
        self.attributes = attributes
        self._spans, self._parent, self._name = spans, parent, name
        self._operation = "chat" if name.endswith("/chat/completions") else "text_completion"
        self._started = time.time_ns()

    def follow(self, request: GenerationRequest) -> None:
        """This request is about to be submitted for the call."""
        if self.trace.sampled:
            self._spans.follow(request, self.trace, self._operation)

    def refused(self, request: GenerationRequest) -> None:
        """The engine did not take it."""
        self._spans.forget(request)

    def end(self, attributes: Mapping[str, Any], error: str | None = None) -> None:
        """The call has been answered. ``error``: its kind, where the server is to blame."""
        if self.trace.sampled:
            ended = time.time_ns()
            self.attributes.update(attributes)
            if attributes.get("http.response.status_code") in _NO_ROUTE:
                self._name = self._name.partition(" ")[0]
            self._spans.build(
                lambda: self._spans.emit_call(self, self._parent, self._name, self._started, ended, error)
            )


class Spans:
    """The tracer of one server: a watcher and an observer of the engine's timeline.

    Args:
        provider: with ``ids`` as its generator.
        model_name: of all requests.
    """

    def __init__(self, provider: TracerProvider, ids: _Ids, model_name: str) -> None:
        self.model_name = model_name
        self._provider, self._ids = provider, ids
        self._tracer = provider.get_tracer("carousel")
        self._open: dict[str, _Pending] = {}
        self._work: queue.Queue[Callable[[], None] | None] = queue.Queue(MAX_QUEUED)
        self._dropped = 0
        self._thread = threading.Thread(target=self._run, name="carousel-traces", daemon=True)
        self._thread.start()

    # ---- on the event loop

    def begin(self, headers: Mapping[str, str], name: str, attributes: dict[str, Any]) -> CallSpan:
        """A call begins: a child of the caller's span, or the root of a new trace, sampled as OTEL_TRACES_SAMPLER says.

        ``headers``: with ``traceparent`` and ``tracestate``, if the caller sent them.
        """
        trace = tracing.accept(headers.get("traceparent", ""))
        parent = None
        if trace is not None:
            state = TraceState.from_header([headers["tracestate"]]) if headers.get("tracestate") else None
            flags = TraceFlags(int(trace.flags, 16))
            parent = SpanContext(int(trace.trace_id, 16), int(trace.parent_id, 16), True, flags, state)
        else:
            trace = tracing.root()
        context = None if parent is None else api.set_span_in_context(NonRecordingSpan(parent))
        sampler = self._provider.sampler
        verdict = sampler.should_sample(context, int(trace.trace_id, 16), name, SpanKind.SERVER, attributes)
        return CallSpan(self, trace.with_flag(verdict.decision.is_sampled()), parent, name, attributes)

    def follow(self, request: GenerationRequest, trace: Trace, operation: str) -> None:
        """Collect what happens to ``request``."""
        self._open[request.request_id] = _Pending(request, trace, operation, request.sampling.n)

    def forget(self, request: GenerationRequest) -> None:
        self._open.pop(request.request_id, None)

    def close(self) -> None:
        """Send what is left, for a few seconds at most. Blocks."""
        try:
            self._work.put(None, timeout=FLUSH_S)
            self._thread.join(FLUSH_S)
        except queue.Full:
            pass
        self._provider.force_flush(int(FLUSH_S * 1000))
        closing = threading.Thread(target=self._provider.shutdown, name="carousel-traces-end", daemon=True)
        closing.start()
        closing.join(FLUSH_S)

    # ---- on the engine thread

    def trace_id(self, request_id: str) -> str | None:
        """The trace of a request that is in the engine, if it is sampled."""
        pending = self._open.get(request_id)
        return None if pending is None else pending.trace.trace_id

    def on_step(self, step: StepRecord, token_latencies_s: list[float]) -> None:
        """Nothing: a step belongs to no call."""

    def on_finish(self, request: RequestRecord) -> None:
        pending = self._open.get(request.request_id)
        if pending is not None:
            pending.record = request

    def on_events(self, events: list[Event], step: StepRecord | None) -> None:
        for event in events:
            pending = self._open.get(event.request_id)
            if pending is None:
                continue
            pending.events.append(event)
            if event.what is What.ENDED:
                pending.left -= 1
                if not pending.left:
                    del self._open[event.request_id]
                    self.build(functools.partial(self._emit_request, pending))

    # ---- on the thread of its own

    def build(self, work: Callable[[], None]) -> None:
        """Have the thread do ``work``. Never waits."""
        try:
            self._work.put_nowait(work)
        except queue.Full:
            self._dropped += 1
            if self._dropped & (self._dropped - 1) == 0:  # 1, 2, 4, ...
                logger.warning("traces come faster than they can be made into spans: %d dropped so far", self._dropped)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except Exception:  # a fault here must cost spans, not requests
                logger.exception("a span could not be made")

    def emit_call(
        self, call: CallSpan, parent: SpanContext | None, name: str, started: int, ended: int, error: str | None
    ) -> None:
        context = None if parent is None else api.set_span_in_context(NonRecordingSpan(parent))
        self._ids.trace_id, self._ids.span_id = int(call.trace.trace_id, 16), int(call.trace.span_id, 16)
        span = self._tracer.start_span(name, context, SpanKind.SERVER, call.attributes, start_time=started)
        if error is not None:
            span.set_attribute("error.type", error)
            span.set_status(Status(StatusCode.ERROR))
        span.end(ended)

    def _emit_request(self, pending: _Pending) -> None:
        offset = time.time_ns() - time.monotonic_ns()

        def wall(seconds: float) -> int:
            return int(seconds * 1e9) + offset

        trace, request, record = pending.trace, pending.request, pending.record
        above = SpanContext(int(trace.trace_id, 16), int(trace.span_id, 16), False, TraceFlags(TraceFlags.SAMPLED))
        span = self._tracer.start_span(
            f"{pending.operation} {self.model_name}",
            api.set_span_in_context(NonRecordingSpan(above)),
            SpanKind.INTERNAL,
            _attributes(pending, self.model_name),
            start_time=wall(request.arrival),
        )
        ended = max(event.at for event in pending.events)
        reason = record.finish_reason if record is not None else FinishReason.ERROR
        if reason not in _SERVED:
            span.set_attribute("error.type", reason.value)
            span.set_status(Status(StatusCode.ERROR))
        context = api.set_span_in_context(span)
        for order in dict.fromkeys(event.order for event in pending.events):
            mine = [event for event in pending.events if event.order == order]
            for phase in phases(mine):
                part = self._tracer.start_span(phase.name, context, start_time=wall(phase.started))
                if request.sampling.n > 1:
                    part.set_attribute("carousel.choice", mine[0].choice)
                for key, value in phase.attributes.items():
                    part.set_attribute(key, value)
                for at, name, attributes in phase.events:
                    part.add_event(name, attributes, wall(at))
                part.end(wall(phase.ended))
        span.end(wall(ended))

    # ---- made from the environment

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], model_name: str, version: str) -> Spans | None:
        """As OTEL_TRACES_EXPORTER and the other OTEL_* variables say; None where they switch traces off.

        Raises:
            TracesUnusable: they name an exporter or a protocol that is not there.
        """
        if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
            return None
        exporter = _exporter(environ)
        if exporter is None:
            return None
        named = "OTEL_SERVICE_NAME" in environ or "service.name" in environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
        own = {"service.version": version} | ({} if named else {"service.name": "carousel"})
        ids = _Ids()
        provider = TracerProvider(resource=Resource.create(own), id_generator=ids, shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(exporter))
        return cls(provider, ids, model_name)


def _exporter(environ: Mapping[str, str]) -> SpanExporter | None:
    kind = environ.get("OTEL_TRACES_EXPORTER", "").strip().lower() or "otlp"
    if kind == "none":
        return None
    if kind == "console":
        return ConsoleSpanExporter()
    if kind != "otlp":
        raise TracesUnusable(f"OTEL_TRACES_EXPORTER: got {kind!r}, allowed: otlp, console or none")
    variables = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    name = next((variable for variable in variables if environ.get(variable, "").strip()), variables[1])
    protocol = environ.get(name, "").strip().lower() or "http/protobuf"
    exporter: SpanExporter
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as OverHttp

        exporter = OverHttp()
    elif protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as OverGrpc

        exporter = OverGrpc()
    else:
        raise TracesUnusable(f"{name}: got {protocol!r}, allowed: http/protobuf or grpc")
    return exporter


def _attributes(pending: _Pending, model_name: str) -> dict[str, Any]:
    """By OpenTelemetry's semantic conventions for generative AI; what they do not have stands under ``carousel.``."""
    request, record = pending.request, pending.record
    params = request.sampling
    found: dict[str, Any] = {
        "gen_ai.operation.name": pending.operation,
        "gen_ai.provider.name": "carousel",
        "gen_ai.request.model": model_name,
        "gen_ai.response.model": model_name,
        "gen_ai.response.id": request.request_id,
        "gen_ai.request.temperature": float(params.temperature),
        "gen_ai.request.top_p": float(params.top_p),
    }
    if params.n > 1:
        found["gen_ai.request.choice.count"] = params.n
    for name, value, unset in (
        ("max_tokens", params.max_tokens, None),
        ("top_k", params.top_k, 0),
        ("seed", params.seed, None),
        ("frequency_penalty", params.frequency_penalty, 0.0),
        ("presence_penalty", params.presence_penalty, 0.0),
    ):
        if (
            value is not None and value != unset and abs(value) < 2**63
        ):  # a seed may have 64 bits without a sign, an attribute has not
            found[f"gen_ai.request.{name}"] = value
    if request.tenant:
        found["carousel.tenant"] = request.tenant
    ends = [event.detail for event in pending.events if event.what is What.ENDED]
    found["gen_ai.response.finish_reasons"] = ["stop" if end == FinishReason.EOS else end for end in ends]
    if record is not None:
        found["gen_ai.usage.input_tokens"] = record.prompt_tokens
        found["gen_ai.usage.output_tokens"] = record.output_tokens
        found["gen_ai.usage.cache_read.input_tokens"] = record.cached_tokens
        found["carousel.preemptions"] = record.num_preemptions
        if record.ttft_s is not None:
            found["carousel.time_to_first_token"] = record.ttft_s
    return found


@dataclass(slots=True)
class Phase:
    """A part of a sequence's life, which becomes a span. Times on the engine's clock."""

    name: str
    started: float
    ended: float
    attributes: dict[str, Any] = field(default_factory=dict)
    events: list[tuple[float, str, dict[str, Any]]] = field(default_factory=list)


def phases(events: list[Event]) -> list[Phase]:
    """What the events of one sequence, from its arrival to its end, amount to: queue, prefill, decode, and those again
    after each preemption."""
    done: list[Phase] = []
    now: Phase | None = None
    sampled = False

    def turn(name: str | None, at: float, **attributes: Any) -> None:
        nonlocal now
        if now is not None:
            now.ended = at
            done.append(now)
        now = (
            None
            if name is None
            else Phase(name, at, at, {f"carousel.{key}": value for key, value in attributes.items()})
        )

    for event in events:
        if event.what is What.ARRIVED:
            turn("queue", event.at, prompt_tokens=event.tokens)
        elif event.what is What.ADMITTED:
            # After a preemption the cache may have everything but the last token, which is a decode like any other.
            turn("decode" if sampled and event.left <= 1 else "prefill", event.at, cached_tokens=event.tokens)
        elif event.what is What.PREEMPTED:
            turn("queue", event.at, preempted=True, lost_tokens=event.tokens)
        elif event.what is What.ENDED:
            if now is not None and now.name == "decode":
                now.attributes["carousel.output_tokens"] = event.tokens
            turn(None, event.at)
        elif event.what is What.FIRST_TOKEN:
            sampled = True
            turn("decode", event.at)
        elif now is not None and now.name == "prefill":
            if len(now.events) < MAX_CHUNKS:
                took = {"carousel.tokens": event.tokens, "carousel.duration": round(event.at - event.since, 6)}
                now.events.append((event.at, "chunk", took))
            if event.left <= 1 and sampled:  # computed again after a preemption: its next token comes with this step
                turn("decode", event.at)
    return done
