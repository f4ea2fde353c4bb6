"""Prometheus metrics of tenants, with as many labels as are allowed: the busiest by name, the others as one.

A tenant has a name while it is among the busiest of late (device time, halved every ten minutes). Which label an event
counts for is decided when it happens, so every series only grows while it is there; one that lost its place is dropped,
and comes back from zero, which Prometheus takes for a restart.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from carousel.engine.meter import RequestUsage
from carousel.telemetry.metrics import PREFIX, Registered
from carousel.telemetry.usage import OTHER, Price, Sums, shown_tenant
from carousel.telemetry.usage_log import UsageLog
from carousel.tenancy.policy import PolicyFile

HALF_LIFE_S = 600.0
LEAD = 2.0
"""By what factor a tenant must have been busier than one with a name to take its place: names must not flap."""

MAX_CANDIDATES = 10_000
QUOTAS = ("requests", "tokens", "concurrent")


class TopTenants:
    """Which tenants have a label of their own. Not locked.

    Args:
        size: how many.
        on_drop: told of one that has lost its label.
        clock: seconds, monotonic.
    """

    def __init__(self, size: int, on_drop: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._size = size
        self._on_drop = on_drop
        self._clock = clock
        self.named: set[str] = set()
        self._scores: dict[str, tuple[float, float]] = {}  # tenant -> what it took of late, as of when

    def _score(self, tenant: str, now: float) -> float:
        score, at = self._scores.get(tenant, (0.0, now))
        return score * 0.5 ** ((now - at) / HALF_LIFE_S)

    def label(self, tenant: str, took: float) -> str:
        """The label under which a tenant counts that has just taken this much."""
        now = self._clock()
        score = self._score(tenant, now) + took
        if tenant in self._scores or len(self._scores) < MAX_CANDIDATES:
            self._scores[tenant] = (score, now)
        if tenant in self.named:
            return tenant
        if len(self.named) >= self._size:
            least = min(self.named, key=lambda name: self._score(name, now), default=None)
            if least is None or score <= LEAD * self._score(least, now):
                return OTHER
            self.named.discard(least)
            self._on_drop(least)
        self.named.add(tenant)
        return tenant


class TenantMetrics(Registered):
    """A Prometheus collector, told of each request's usage and of each refusal.

    Args:
        model_name: value of the ``model_name`` label.
        price: of the node.
        size: tenants with labels of their own.
        policies: the policy file.
        log: the usage log, if there is one.
    """

    def __init__(
        self, model_name: str, price: Price, size: int, policies: PolicyFile, log: UsageLog | None = None
    ) -> None:
        self.model_name, self._price, self._policies, self._log = model_name, price, policies, log
        self._lock = threading.Lock()
        self._sums: dict[str, Sums] = {}
        self._refusals: Counter[tuple[str, str]] = Counter()
        self._top = TopTenants(size, self._drop)

    def _drop(self, tenant: str) -> None:
        self._sums.pop(tenant, None)
        for quota in QUOTAS:
            self._refusals.pop((tenant, quota), None)

    def __call__(self, usage: RequestUsage) -> None:
        """A request has ended. On the engine thread."""
        with self._lock:
            label = self._top.label(shown_tenant(usage.tenant), usage.amounts.device_ns)
            self._sums.setdefault(label, Sums()).add(usage)

    def refused(self, tenant: str, quota: str) -> None:
        """A quota has refused a call. On any thread."""
        with self._lock:
            self._refusals[self._top.label(shown_tenant(tenant), 0.0), quota] += 1

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            families = [*self._usage(), self._refused()]
        yield from families
        yield from self._state()

    def _usage(self) -> Iterator[Metric]:
        tokens = self._counter("tenant_tokens", "Tokens of requests that have ended, by kind.", "kind")
        for tenant, sums in self._sums.items():
            for kind in ("prompt", "cached", "generated", "recomputed"):
                tokens.add_metric([self.model_name, tenant, kind], getattr(sums.amounts, f"{kind}_tokens"))
        yield tokens
        values: tuple[tuple[str, str, Callable[[Sums], float]], ...] = (
            ("tenant_requests", "Requests that have ended.", lambda sums: sums.requests),
            ("tenant_queue_seconds", "Seconds that they waited.", lambda sums: sums.queue_s),
            ("tenant_device_seconds", "Seconds of the device, divided step by step.",
             lambda sums: sums.amounts.device_ns / 1e9),
            ("tenant_slot_seconds", "Slots of the batch times seconds.", lambda sums: sums.amounts.slot_ns / 1e9),
            ("tenant_kv_block_seconds", "KV blocks held times seconds.", lambda sums: sums.amounts.block_ns / 1e9),
            ("tenant_cost", "Money: device time at the price of a node.",
             lambda sums: self._price.of(sums.amounts.device_ns)),
        )  # fmt: skip
        for name, text, value in values:
            family = self._counter(name, text)
            for tenant, sums in self._sums.items():
                family.add_metric([self.model_name, tenant], value(sums))
            yield family

    def _refused(self) -> Metric:
        family = self._counter("tenant_refusals", "Calls that a quota has refused.", "quota")
        for (tenant, quota), count in self._refusals.items():
            family.add_metric([self.model_name, tenant, quota], count)
        return family

    def _counter(self, name: str, text: str, *more: str) -> CounterMetricFamily:
        return CounterMetricFamily(PREFIX + name, text, labels=["model_name", "tenant", *more])

    def _state(self) -> Iterator[Metric]:
        policies, log = self._policies, self._log
        gauges: list[tuple[str, str, float]] = [
            ("tenant_policy_valid", "0 while a changed policy file is wrong and the one before holds.",
             float(policies.problem is None)),
            ("tenant_policy_loaded_timestamp_seconds", "When the policies in force were read.", policies.loaded_at),
            ("usage_log_pending", "Lines of the usage log that are not written yet.", log.pending if log else 0),
        ]  # fmt: skip
        counters: list[tuple[str, str, float]] = [
            ("tenant_policy_reload_failures", "Changes of the policy file that could not be taken.", policies.failures),
            ("usage_log_lines", "Lines written to the usage log.", log.written if log else 0),
            ("usage_log_failures", "Failures to write or sync the usage log.", log.failures if log else 0),
            ("usage_log_lost", "Lines that the disk did not take for too long.", log.lost if log else 0),
        ]
        for name, text, value in gauges:
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=["model_name"])
            gauge.add_metric([self.model_name], value)
            yield gauge
        for name, text, value in counters:
            counter = CounterMetricFamily(PREFIX + name, text, labels=["model_name"])
            counter.add_metric([self.model_name], value)
            yield counter
