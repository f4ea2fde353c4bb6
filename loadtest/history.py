"""A test's figures over time, for the charts of the web UI: a point for each stretch of a few seconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gevent

from loadtest.figures import Row

SECONDS = 2.0
MOST_POINTS = 900
_TIMES = {"ttft": ("p50", "p99"), "itl": ("p50", "p99"), "queue": ("p50", "p99")}


class History:
    """Points of what ended since the point before. Where they become too many, two become one, and later ones are twice
    as far apart.

    Args:
        look: the row of all requests so far, a copy that nobody adds to, None before the first has ended; and the
            seconds since the test began, or None while none is running.
    """

    def __init__(self, look: Callable[[], tuple[Row | None, float | None]]) -> None:
        self._look = look
        self._clear()

    def _clear(self) -> None:
        self.points: list[dict[str, Any]] = []
        self.seconds = SECONDS
        self._at = 0.0
        self._requests = self._tokens = 0
        self._times = Row().times

    def follow(self) -> None:
        """Take a point again and again; the body of a greenlet."""
        while True:
            gevent.sleep(self.seconds)
            self.take()

    def take(self) -> None:
        """Add a point, if a test is running. A test that has begun since the last one begins a new history."""
        found, at = self._look()
        if at is None:
            return
        row = found or Row()
        requests, tokens = row.counts["requests"], row.counts["output_tokens"]
        if at <= self._at or requests < self._requests:
            self._clear()
        wall = max(at - self._at, 1e-3)
        point: dict[str, Any] = {
            "at": round(at, 2),
            "requests_per_second": (requests - self._requests) / wall,
            "output_tokens_per_second": (tokens - self._tokens) / wall,
        }
        for name, quantiles in _TIMES.items():
            summary = row.times[name].since(self._times[name]).summary()
            point |= {f"{name}_{quantile}": summary[quantile] for quantile in quantiles}
        self._at, self._requests, self._tokens, self._times = at, requests, tokens, row.times
        self.points.append(point)
        if len(self.points) > MOST_POINTS:
            self.points = self.points[::2]
            self.seconds *= 2
