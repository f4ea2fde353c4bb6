"""What a server's ``/metrics`` says about a run: the difference of two scrapes. Queue time and batch occupancy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from carousel.bench.measure import QUANTILES, STATISTICS, Occupancy

_PREFIXES = ("carousel_", "vllm:")
_QUEUE = "request_queue_time_seconds"
_SEQUENCES = "iteration_sequences"
_TOKENS = "iteration_tokens_total"


@dataclass(slots=True)
class Scrape:
    """Samples by name without prefix, summed over labels; histogram buckets by name and upper bound."""

    samples: dict[str, float] = field(default_factory=dict)
    buckets: dict[str, dict[float, float]] = field(default_factory=dict)


def parse(text: str) -> Scrape:
    """Read the Prometheus text format.

    Raises:
        ValueError: when it is not that.
    """
    scrape = Scrape()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            prefix = next((prefix for prefix in _PREFIXES if sample.name.startswith(prefix)), None)
            if prefix is None:
                continue
            name = sample.name.removeprefix(prefix)
            if name.endswith("_bucket"):
                buckets = scrape.buckets.setdefault(name.removesuffix("_bucket"), {})
                bound = float(sample.labels["le"])
                buckets[bound] = buckets.get(bound, 0.0) + sample.value
            else:
                scrape.samples[name] = scrape.samples.get(name, 0.0) + sample.value
    return scrape


def _mean(before: Scrape, after: Scrape, name: str) -> float | None:
    count = after.samples.get(f"{name}_count", 0.0) - before.samples.get(f"{name}_count", 0.0)
    if count <= 0:
        return None
    return (after.samples[f"{name}_sum"] - before.samples.get(f"{name}_sum", 0.0)) / count


def _quantile(buckets: Mapping[float, float], share: float) -> float | None:
    """As Prometheus' ``histogram_quantile``: linear within the bucket; the last finite bound beyond it."""
    ordered = sorted(buckets.items())
    total = ordered[-1][1] if ordered else 0.0
    if total <= 0:
        return None
    low, seen = 0.0, 0.0
    for bound, count in ordered:
        if count >= share * total and count > seen:
            if math.isinf(bound):
                return low
            return low + (bound - low) * (share * total - seen) / (count - seen)
        low, seen = bound, count
    return low


def queue_summary(before: Scrape, after: Scrape) -> dict[str, float | None] | None:
    """Mean (exact) and percentiles (interpolated in the buckets) of the queue time; None where it is not exported."""
    mean = _mean(before, after, _QUEUE)
    if mean is None:
        return None
    old = before.buckets.get(_QUEUE, {})
    new = {bound: count - old.get(bound, 0.0) for bound, count in after.buckets.get(_QUEUE, {}).items()}
    return {"mean": mean} | {name: _quantile(new, share) for name, share in QUANTILES.items()}


def occupancy(before: Scrape, after: Scrape) -> Occupancy | None:
    """Means over the steps between two scrapes; None where the server does not export them."""
    sequences = _mean(before, after, _SEQUENCES)
    if sequences is None:
        return None

    def grown(name: str) -> int | None:
        return int(after.samples[name] - before.samples.get(name, 0.0)) if name in after.samples else None

    return Occupancy(
        sequences=dict.fromkeys(STATISTICS) | {"mean": sequences},
        mean_tokens_per_step=_mean(before, after, _TOKENS),
        steps=grown("steps_total"),
        preemptions=grown("num_preemptions_total"),
        recomputed_tokens=grown("recomputed_tokens_total"),
    )
