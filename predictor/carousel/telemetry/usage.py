"""Who used what, and what it costs: sums by tenant since the start, exact to the nanosecond."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from carousel.engine.meter import AMOUNTS, Amounts, RequestUsage
from carousel.engine.timeline import EngineStats

MAX_TENANTS = 10_000
"""Tenants with sums of their own; any further ones are counted together, as :data:`OTHER`."""

OTHER = "other"
NOBODY = "-"
"""How requests without a tenant are shown."""

_NS = 1e9
_HOUR_NS = 3600 * 10**9


@dataclass(frozen=True, slots=True)
class Price:
    """What a node costs while it works or waits, in ``currency``."""

    per_node_hour: float = 0.0
    currency: str = "EUR"

    def of(self, nanoseconds: int) -> float:
        """What this much time of the node costs."""
        return self.per_node_hour * nanoseconds / _HOUR_NS


def stamp(seconds: float) -> str:
    """Seconds since 1970 as ISO 8601 in UTC, to the millisecond."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def shown_tenant(tenant: str) -> str:
    return tenant or NOBODY


def seconds_of(nanoseconds: int) -> float:
    return round(nanoseconds / _NS, 6)


@dataclass(slots=True)
class Sums:
    """Of a tenant, or of all."""

    requests: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    preemptions: int = 0
    queue_s: float = 0.0
    amounts: Amounts = field(default_factory=Amounts)

    def add(self, usage: RequestUsage) -> None:
        self.requests += 1
        self.reasons[usage.finish_reason.value] += 1
        self.preemptions += usage.num_preemptions
        self.queue_s += usage.queue_s if usage.queue_s is not None else usage.e2e_s
        self.amounts.add(usage.amounts)

    def merge(self, other: Sums) -> None:
        self.requests += other.requests
        self.reasons.update(other.reasons)
        self.preemptions += other.preemptions
        self.queue_s += other.queue_s
        self.amounts.add(other.amounts)

    def show(self, price: Price) -> dict[str, Any]:
        """For JSON. Nanoseconds are exact; seconds are the same, for people."""
        amounts = self.amounts
        return {
            "requests": self.requests,
            "finish_reasons": dict(sorted(self.reasons.items())),
            "preemptions": self.preemptions,
            "queue_seconds": round(self.queue_s, 6),
            **{name: getattr(amounts, name) for name in AMOUNTS},
            "device_seconds": seconds_of(amounts.device_ns),
            "slot_seconds": seconds_of(amounts.slot_ns),
            "kv_block_seconds": seconds_of(amounts.block_ns),
            "cost": price.of(amounts.device_ns),
        }


class UsageBook:
    """Sums by tenant. The engine thread writes; anybody may ask.

    Args:
        model_name: for the summary.
        price: of the node.
        clock: seconds since 1970.
    """

    def __init__(self, model_name: str, price: Price, clock: Callable[[], float] = time.time) -> None:
        self.model_name, self.price = model_name, price
        self._clock = clock
        self._lock = threading.Lock()
        self._tenants: dict[str, Sums] = {}
        self._since = clock()

    def begin(self) -> None:
        """The engine serves from now on: until then the node was not there to be paid by anybody."""
        self._since = self._clock()

    def __call__(self, usage: RequestUsage) -> None:
        """A request has ended. On the engine thread."""
        tenant = shown_tenant(usage.tenant)
        with self._lock:
            if tenant not in self._tenants and len(self._tenants) >= MAX_TENANTS:
                tenant = OTHER
            self._tenants.setdefault(tenant, Sums()).add(usage)

    def summary(self, stats: EngineStats, only: str | None = None) -> dict[str, Any]:
        """What was used since the start.

        Args:
            stats: the engine's own counts, which have what live requests took so far, too.
            only: a tenant, who is shown no other's figures.
        """
        until = self._clock()
        total, rows = Sums(), []
        with self._lock:
            for name, sums in sorted(self._tenants.items()):
                if only in (None, name):
                    total.merge(sums)
                    rows.append({"tenant": name, **sums.show(self.price)})
        found = {
            "model": self.model_name,
            "since": stamp(self._since),
            "until": stamp(until),
            "currency": self.price.currency,
            "price_per_node_hour": self.price.per_node_hour,
            "tenants": rows,
            "total": total.show(self.price),
        }
        if only is None:
            found["engine"] = self._engine(stats, int((until - self._since) * _NS))
        return found

    def _engine(self, stats: EngineStats, elapsed_ns: int) -> dict[str, Any]:
        """The whole: what was worked, and what nobody is charged for because nothing was to do."""
        idle = max(0, elapsed_ns - stats.device_ns)
        return {
            "elapsed_seconds": seconds_of(elapsed_ns),
            "device_ns": stats.device_ns,
            "slot_ns": stats.slot_ns,
            "block_ns": stats.block_ns,
            "device_seconds": seconds_of(stats.device_ns),
            "idle_seconds": seconds_of(idle),
            "idle_cost": self.price.of(idle),
            "cost": self.price.of(max(elapsed_ns, stats.device_ns)),
            "requests_live": stats.live,
            "prompt_tokens": stats.prompt_tokens,
            "generated_tokens": stats.generation_tokens,
            "recomputed_tokens": stats.recomputed_tokens,
            "cached_tokens": stats.prefix_cache_hits,
        }
