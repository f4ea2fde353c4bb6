"""Prometheus metrics of the engine, under the names that the field's tools know, prefixed ``carousel_``.

Gauges and counters come from one :class:`EngineStats` snapshot per scrape, so that in every scrape
admitted equals finished + cancelled + failed + live.
Histograms are fed by the engine thread through the ``Observer`` protocol; each is a list of bucket counts, all behind
one lock that a step takes once.
"""

from __future__ import annotations

import platform
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import metadata

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Exemplar
from prometheus_client.utils import floatToGoString

from carousel.engine.request import FinishReason
from carousel.engine.timeline import EngineStats, Refusal, RequestRecord, StepRecord
from carousel.telemetry.vllm_names import renamed
from carousel_kernels.layout import BLOCK_SIZE

PREFIX = "carousel_"

LATENCY_BUCKETS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
    120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
ITL_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)
TOKEN_BUCKETS = (
    1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10000.0, 20000.0, 50000.0, 100000.0,
)  # fmt: skip
ITERATION_TOKEN_BUCKETS = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)
SEQUENCE_BUCKETS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)

_ENDED_WELL = (FinishReason.EOS, FinishReason.STOP, FinishReason.LENGTH, FinishReason.TIMEOUT)
STEP_KINDS = ("decode", "prefill", "mixed")

# name, help, bounds
_REQUEST_HISTOGRAMS: tuple[tuple[str, str, Sequence[float]], ...] = (
    ("time_to_first_token_seconds", "Arrival to first token.", TTFT_BUCKETS),
    ("request_time_per_output_token_seconds", "Mean decode time per token after the first, per request.", ITL_BUCKETS),
    ("e2e_request_latency_seconds", "Arrival to the end of the request.", LATENCY_BUCKETS),
    ("request_queue_time_seconds", "Arrival to first scheduled.", LATENCY_BUCKETS),
    ("request_prefill_time_seconds", "First scheduled to first token.", LATENCY_BUCKETS),
    ("request_decode_time_seconds", "First to last token.", LATENCY_BUCKETS),
    ("request_prompt_tokens", "Prompt tokens per request.", TOKEN_BUCKETS),
    ("request_generation_tokens", "Generated tokens per request, summed over its choices.", TOKEN_BUCKETS),
)


class Histogram:
    """Bucket counts with ``le`` upper bounds. Not locked: the owner locks."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0
        self.exemplars: dict[int, Exemplar] = {}  # of each bucket the latest

    def observe(self, value: float, trace_id: str | None = None) -> None:
        """``trace_id``: of the request that the value is of, where there is one to look at."""
        bucket = bisect_left(self.bounds, value)
        self.counts[bucket] += 1
        self.sum += value
        if trace_id is not None:
            self.exemplars[bucket] = Exemplar({"trace_id": trace_id}, value, time.time())

    def observe_many(self, values: Iterable[float]) -> None:
        bounds, counts, total = self.bounds, self.counts, 0.0
        for value in values:
            counts[bisect_left(bounds, value)] += 1
            total += value
        self.sum += total

    def buckets(self) -> list[tuple[str, float] | tuple[str, float, Exemplar]]:
        """Cumulative counts by upper bound, as Prometheus wants them, with an exemplar of each bucket that has one."""
        result: list[tuple[str, float] | tuple[str, float, Exemplar]] = []
        seen = 0
        for index, (bound, count) in enumerate(zip((*self.bounds, float("inf")), self.counts, strict=True)):
            seen += count
            exemplar = self.exemplars.get(index)
            shown = floatToGoString(bound)
            result.append((shown, seen) if exemplar is None else (shown, seen, exemplar))
        return result


class Registered:
    """What collectors share: how they are shown in a registry, and no longer."""

    _registry: CollectorRegistry | None = None

    def register(self, registry: CollectorRegistry = REGISTRY) -> None:
        """Show these metrics in ``registry``, by default the one that KServe's ``/metrics`` reads."""
        registry.register(self)  # type: ignore[arg-type]  # a collector has collect(), which is the subclass's
        self._registry = registry

    def unregister(self) -> None:
        if self._registry is not None:
            self._registry.unregister(self)  # type: ignore[arg-type]
            self._registry = None

    def describe(self) -> list[Metric]:
        """Nothing ahead of time: registering must not call anybody."""
        return []


class EngineMetrics(Registered):
    """A Prometheus collector and an engine ``Observer`` in one.

    Args:
        model_name: value of the ``model_name`` label, the only label besides bounded enumerations.
        stats: returns the engine's present snapshot; before the engine exists, ``EngineStats()``. Called once a scrape.
        ready: whether the server takes requests now.
        build_info: further labels of ``build_info``.
        vllm_names: show the series under vLLM's names too.
        trace_id: the trace of a request by its id, for exemplars (OpenMetrics only); None where it has none.
    """

    def __init__(
        self,
        model_name: str,
        stats: Callable[[], EngineStats],
        ready: Callable[[], bool] = lambda: True,
        build_info: dict[str, str] | None = None,
        vllm_names: bool = False,
        trace_id: Callable[[str], str | None] = lambda request_id: None,
    ) -> None:
        self._trace_id = trace_id
        self.model_name = model_name
        self._stats = stats
        self._ready = ready
        self._build_info = {**versions(), **(build_info or {})}
        self._vllm_names = vllm_names
        self._lock = threading.Lock()
        self._by_request = {name: Histogram(bounds) for name, _, bounds in _REQUEST_HISTOGRAMS}
        self._inter_token = Histogram(ITL_BUCKETS)
        self._iteration_tokens = Histogram(ITERATION_TOKEN_BUCKETS)
        self._iteration_sequences = Histogram(SEQUENCE_BUCKETS)
        self._steps = {kind: Histogram(STEP_BUCKETS) for kind in STEP_KINDS}

    # Observer, on the engine thread

    def on_step(self, step: StepRecord, token_latencies_s: list[float]) -> None:
        with self._lock:
            self._steps[step.kind].observe(step.duration_s)
            self._iteration_tokens.observe(step.num_tokens)
            self._iteration_sequences.observe(step.num_sequences)
            self._inter_token.observe_many(token_latencies_s)

    def on_finish(self, request: RequestRecord) -> None:
        values = (
            request.ttft_s,
            request.tpot_s,
            request.e2e_s,
            request.queue_s,
            request.prefill_s,
            request.decode_s,
            request.prompt_tokens,
            request.output_tokens,
        )
        trace_id = self._trace_id(request.request_id)
        with self._lock:
            for histogram, value in zip(self._by_request.values(), values, strict=True):
                if value is not None:
                    histogram.observe(value, trace_id)

    # Collector, on whichever thread scrapes

    def collect(self) -> Iterator[Metric]:
        families = list(self._families(self._stats()))
        yield from families
        if self._vllm_names:
            yield from renamed(families)

    def _families(self, stats: EngineStats) -> Iterator[Metric]:
        yield from self._gauges(stats)
        yield from self._counters(stats)
        yield from self._histograms()
        yield from self._infos(stats)

    def _infos(self, stats: EngineStats) -> Iterator[Metric]:
        # What an endpoint picker counts a prompt's cached blocks by: label names and strings as it reads them.
        cache = {"block_size": str(BLOCK_SIZE), "num_gpu_blocks": str(stats.num_blocks)}
        family = GaugeMetricFamily(
            f"{PREFIX}cache_config_info",
            "Tokens of a KV block, and how many blocks there are; the value is always 1.",
            labels=["model_name", *cache],
        )
        family.add_metric([self.model_name, *cache.values()], 1)
        yield family
        info = GaugeMetricFamily(
            f"{PREFIX}build_info", "What is running; the value is always 1.", labels=["model_name", *self._build_info]
        )
        info.add_metric([self.model_name, *self._build_info.values()], 1)
        yield info

    def _gauges(self, stats: EngineStats) -> Iterator[Metric]:
        slots = max(stats.num_slots, 1)
        values: tuple[tuple[str, str, float], ...] = (
            ("num_requests_running", "Requests in the batch.", stats.num_requests_running),
            ("num_requests_waiting", "Requests in the queue.", stats.num_requests_waiting),
            ("num_sequences_running", "Sequences (choices) in the batch.", stats.num_sequences_running),
            ("num_tokens_waiting", "Tokens that waiting requests still have to compute.", stats.num_tokens_waiting),
            ("num_tokens_running", "Tokens that the batch holds in KV blocks.", stats.num_tokens_running),
            ("oldest_wait_seconds", "How long the oldest waiting request has waited.", stats.oldest_wait_s),
            ("estimated_queue_seconds", "How long a request that arrives now would wait.", stats.queue_seconds),
            ("requests_live", "Requests in the engine, running or waiting.", stats.live),
            ("kv_cache_usage_perc", "Share of KV blocks held by live sequences, 0 to 1.", stats.kv_cache_usage),
            ("kv_blocks", "KV blocks in all.", stats.num_blocks),
            ("kv_blocks_free", "KV blocks that hold nothing.", stats.num_free_blocks),
            ("kv_blocks_cached", "KV blocks kept for later prompts, free to take.", stats.num_cached_blocks),
            ("batch_slots", "Sequences that fit the batch.", stats.num_slots),
            ("batch_slots_free", "Slots of the batch that are empty.", stats.num_slots - stats.num_sequences_running),
            ("batch_occupancy_ratio", "Share of the batch's slots in use.", stats.num_sequences_running / slots),
            ("draining", "1 while the server finishes its last requests.", stats.draining),
            ("engine_alive", "1 while the engine thread turns.", stats.alive),
            ("ready", "1 while the server takes requests.", self._ready()),
        )
        for name, text, value in values:
            family = GaugeMetricFamily(PREFIX + name, text, labels=["model_name"])
            family.add_metric([self.model_name], float(value))
            yield family

    def _counters(self, stats: EngineStats) -> Iterator[Metric]:
        count = stats.finished.get
        finished = sum(count(reason, 0) for reason in _ENDED_WELL)
        values: tuple[tuple[str, str, float], ...] = (
            ("prompt_tokens", "Prompt tokens of admitted requests.", stats.prompt_tokens),
            ("generation_tokens", "Tokens generated.", stats.generation_tokens),
            ("recomputed_tokens", "Tokens computed again after a preemption.", stats.recomputed_tokens),
            ("prefix_cache_queries", "Tokens looked up in the prefix cache.", stats.prefix_cache_queries),
            ("prefix_cache_hits", "Tokens found in the prefix cache.", stats.prefix_cache_hits),
            ("num_preemptions", "Sequences put back into the queue for want of KV blocks.", stats.preemptions),
            ("steps", "Iterations of the engine.", stats.steps),
            ("device_seconds", "Seconds that steps took.", stats.device_ns / 1e9),
            ("slot_seconds", "Slots of the batch in use times seconds.", stats.slot_ns / 1e9),
            ("kv_block_seconds", "KV blocks held by live sequences times seconds.", stats.block_ns / 1e9),
            ("requests_admitted", "Requests that entered the engine.", stats.admitted),
            ("requests_rejected", "Requests refused at the door.", stats.rejected),
            ("requests_finished", "Admitted requests that ended by eos, stop, length or timeout.", finished),
            ("requests_cancelled", "Admitted requests whose client left.", count(FinishReason.CANCELLED, 0)),
            ("requests_failed", "Admitted requests that the engine failed.", count(FinishReason.ERROR, 0)),
        )
        for name, text, value in values:
            family = CounterMetricFamily(PREFIX + name, text, labels=["model_name"])
            family.add_metric([self.model_name], value)
            yield family
        ended = CounterMetricFamily(
            f"{PREFIX}request_success", "Requests that ended, by reason.", labels=["model_name", "finished_reason"]
        )
        for reason in FinishReason:
            ended.add_metric([self.model_name, reason.value], count(reason, 0))
        yield ended
        refused = CounterMetricFamily(
            f"{PREFIX}request_refusals", "Requests refused at the door, by reason.", labels=["model_name", "reason"]
        )
        for refusal in Refusal:
            refused.add_metric([self.model_name, refusal.value], stats.refusals.get(refusal, 0))
        yield refused

    def _histograms(self) -> Iterator[Metric]:
        plain: list[tuple[str, str, Histogram]] = [
            (name, text, self._by_request[name]) for name, text, _ in _REQUEST_HISTOGRAMS
        ]
        plain += [
            ("inter_token_latency_seconds", "Seconds between a sequence's tokens.", self._inter_token),
            ("iteration_tokens_total", "Tokens computed per iteration.", self._iteration_tokens),
            ("iteration_sequences", "Sequences computed per iteration.", self._iteration_sequences),
        ]
        families: list[Metric] = []
        with self._lock:
            for name, text, histogram in plain:
                family = HistogramMetricFamily(PREFIX + name, text, labels=["model_name"])
                family.add_metric([self.model_name], histogram.buckets(), histogram.sum)
                families.append(family)
            steps = HistogramMetricFamily(
                f"{PREFIX}step_seconds", "Wall time of one iteration, by kind.", labels=["model_name", "kind"]
            )
            for kind, histogram in self._steps.items():
                steps.add_metric([self.model_name, kind], histogram.buckets(), histogram.sum)
            families.append(steps)
        yield from families


def versions() -> dict[str, str]:
    """Versions of this distribution and of what it stands on; ``unknown`` where one is not installed."""
    found = {"python": platform.python_version()}
    for label, distribution in (("version", "kserve-carousel"), ("torch", "torch"), ("kserve", "kserve")):
        try:
            found[label] = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            found[label] = "unknown"
    return found
