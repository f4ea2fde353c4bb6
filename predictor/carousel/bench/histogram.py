"""Histograms that merge: what several processes saw adds up to what one would have seen."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from carousel.bench.measure import QUANTILES

#: Ratio of neighbouring bucket bounds: a percentile is at most half of it, 0.5 %, off.
GROWTH = 1.01
#: Seconds below which everything is one bucket, that of 0.
SMALLEST = 1e-6

_LOG = math.log(GROWTH)


def _bucket(value: float) -> int:
    return 0 if value < SMALLEST else 1 + math.floor(math.log(value / SMALLEST) / _LOG)


def _middle(bucket: int) -> float:
    """The geometric middle of a bucket."""
    return 0.0 if bucket == 0 else SMALLEST * GROWTH ** (bucket - 0.5)


@dataclass(slots=True)
class Histogram:
    """Non-negative values, seconds. Buckets grow by 1 %, as in HdrHistogram; sum, least and greatest are exact."""

    count: int = 0
    total: float = 0.0
    least: float = math.inf
    most: float = 0.0
    buckets: dict[int, int] = field(default_factory=dict)

    def add(self, value: float, times: int = 1) -> None:
        """Count ``value`` (negative ones as 0) ``times`` times."""
        if times <= 0:
            return
        value = max(value, 0.0)
        bucket = _bucket(value)
        self.buckets[bucket] = self.buckets.get(bucket, 0) + times
        self.count += times
        self.total += value * times
        self.least, self.most = min(self.least, value), max(self.most, value)

    def merge(self, other: Histogram) -> None:
        """Count everything that ``other`` counted."""
        for bucket, times in other.buckets.items():
            self.buckets[bucket] = self.buckets.get(bucket, 0) + times
        self.count += other.count
        self.total += other.total
        self.least, self.most = min(self.least, other.least), max(self.most, other.most)

    def since(self, earlier: Histogram) -> Histogram:
        """What was counted after ``earlier``, an older copy of this one. Least and greatest are to within a bucket."""
        buckets = {
            bucket: times - earlier.buckets.get(bucket, 0)
            for bucket, times in self.buckets.items()
            if times > earlier.buckets.get(bucket, 0)
        }
        least, most = (_middle(min(buckets)), _middle(max(buckets))) if buckets else (math.inf, 0.0)
        return Histogram(self.count - earlier.count, self.total - earlier.total, least, most, buckets)

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count else None

    def percentile(self, share: float) -> float | None:
        """Interpolated between closest ranks as ``carousel.bench.measure.percentile``; None when nothing was counted.

        Args:
            share: 0 to 1.
        """
        if not self.count:
            return None
        place = share * (self.count - 1)
        low = int(place)
        below = self._ranked(low)
        if place == low:
            return below
        above = self._ranked(low + 1)
        return below + (above - below) * (place - low)

    def _ranked(self, rank: int) -> float:
        """The value of a rank, counted from 0."""
        if rank == 0:
            return self.least
        if rank >= self.count - 1:
            return self.most
        seen = 0
        for bucket in sorted(self.buckets):
            seen += self.buckets[bucket]
            if seen > rank:
                return min(max(_middle(bucket), self.least), self.most)
        return self.most

    def share_at_most(self, limit: float) -> float | None:
        """The share of values of at most ``limit`` seconds, to within one bucket; None when nothing was counted."""
        if not self.count:
            return None
        last = _bucket(limit)
        return sum(times for bucket, times in self.buckets.items() if bucket <= last) / self.count

    def cumulated(self) -> list[tuple[float, float]]:
        """(seconds, the share of values of at most so many), rising, a pair for each bucket that is not empty."""
        points, seen = [], 0
        for bucket in sorted(self.buckets):
            seen += self.buckets[bucket]
            points.append((_middle(bucket), seen / self.count))
        return points

    def summary(self) -> dict[str, float | None]:
        """``mean``, ``p50``, ``p90``, ``p99`` and ``max``; all None when nothing was counted."""
        figures = {"mean": self.mean} | {name: self.percentile(share) for name, share in QUANTILES.items()}
        return figures | {"max": self.most if self.count else None}

    def to_wire(self) -> dict[str, Any]:
        """Plain data, for JSON and msgpack."""
        buckets = [[bucket, times] for bucket, times in sorted(self.buckets.items())]
        least = self.least if self.count else 0.0
        return {"count": self.count, "total": self.total, "least": least, "most": self.most, "buckets": buckets}

    @classmethod
    def from_wire(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of :meth:`to_wire`."""
        least = data["least"] if data["count"] else math.inf
        buckets = {int(bucket): int(times) for bucket, times in data["buckets"]}
        return cls(int(data["count"]), float(data["total"]), least, float(data["most"]), buckets)
