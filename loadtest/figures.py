"""From single requests to the figures of a test, by row: a protocol, or a protocol's group of requests."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from carousel.bench.histogram import Histogram
from carousel.bench.slo import TOTAL

#: ``lag`` is how late the load generator itself sent a request: it belongs to the generator, not to the server.
TIMES = ("ttft", "itl", "tpot", "queue", "e2e", "lag")
COUNTS = ("requests", "failures", "unfinished", "prompt_tokens", "output_tokens")


@dataclass(slots=True)
class Observation:
    """One request as its client saw it. Times are seconds on the clock on which ``due`` stands.

    ``due``: when it should have been sent, from which its latencies count. ``deltas``: (time, tokens that came then);
    empty where the answer did not stream. ``queue``: seconds that it waited by the server's own account.
    """

    due: float
    protocol: str
    group: str = ""
    sent: float = 0.0
    deltas: list[tuple[float, int]] = field(default_factory=list)
    ended: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    queue: float | None = None
    error: str | None = None
    unfinished: bool = False

    def add_delta(self, now: float, tokens: int) -> None:
        if tokens > 0:
            self.deltas.append((now, tokens))

    @property
    def tokens(self) -> int:
        """Output tokens: the server's count, or what came in deltas where it sent none."""
        return self.output_tokens or sum(count for _, count in self.deltas)

    @property
    def rows(self) -> Iterable[str]:
        """Names of the rows that it counts in."""
        yield self.protocol
        if self.group:
            yield f"{self.protocol} {self.group}"

    def times(self) -> dict[str, list[tuple[float, int]]]:
        """Its (value, how often) pairs of each of :data:`TIMES`."""
        out: dict[str, list[tuple[float, int]]] = {"lag": [(self.sent - self.due, 1)]} if self.sent else {}
        if self.queue is not None:
            out["queue"] = [(self.queue, 1)]
        if self.unfinished:
            if not self.deltas:  # it waited at least so long; to leave it out would hide a stall
                out["ttft"] = [(self.ended - self.due, 1)]
            out["e2e"] = [(self.ended - self.due, 1)]
            return out
        if self.error is not None:
            return out
        out["e2e"] = [(self.ended - self.due, 1)]
        if not self.deltas:
            return out
        (first, together), (last, _) = self.deltas[0], self.deltas[-1]
        out["ttft"] = [(first - self.due, 1)]
        gaps, before = [(0.0, together - 1)], first
        for now, count in self.deltas[1:]:
            gaps += [(now - before, 1), (0.0, count - 1)]  # tokens that came together have no time between them
            before = now
        out["itl"] = [(value, times) for value, times in gaps if times > 0]
        if self.tokens > 1:
            out["tpot"] = [((last - first) / (self.tokens - 1), 1)]
        return out


@dataclass(slots=True)
class Row:
    """What is known of one kind of requests; ``start`` and ``end`` are the first due time and the last token's."""

    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))
    times: dict[str, Histogram] = field(default_factory=lambda: {name: Histogram() for name in TIMES})
    start: float = math.inf
    end: float = 0.0

    def add(self, seen: Observation, times: Mapping[str, list[tuple[float, int]]]) -> None:
        counts = self.counts
        counts["requests"] += 1
        counts["failures"] += seen.error is not None
        counts["unfinished"] += seen.unfinished
        counts["prompt_tokens"] += seen.prompt_tokens
        counts["output_tokens"] += seen.tokens
        for name, values in times.items():
            for value, often in values:
                self.times[name].add(value, often)
        self.start, self.end = min(self.start, seen.due), max(self.end, seen.ended)

    def merge(self, other: Row) -> None:
        for name, value in other.counts.items():
            self.counts[name] += value
        for name, histogram in other.times.items():
            self.times[name].merge(histogram)
        self.start, self.end = min(self.start, other.start), max(self.end, other.end)

    @property
    def wall(self) -> float:
        """Seconds from the first due time to the last end."""
        return max(self.end - self.start, 0.0) if self.counts["requests"] else 0.0

    def figures(self) -> dict[str, Any]:
        """Counts, rates and summaries, under the names that ``carousel bench`` uses."""
        counts, wall = self.counts, self.wall
        tokens = counts["output_tokens"]
        answered = counts["requests"] - counts["failures"]
        return {
            **counts,
            "wall": wall,
            "errors": counts["failures"] / counts["requests"] if counts["requests"] else None,
            "requests_per_second": answered / wall if wall else None,
            "output_tokens_per_second": tokens / wall if wall else None,
            "total_tokens_per_second": (tokens + counts["prompt_tokens"]) / wall if wall else None,
            **{name: histogram.summary() for name, histogram in self.times.items()},
        }

    def to_wire(self) -> dict[str, Any]:
        start = self.start if self.counts["requests"] else 0.0
        times = {name: histogram.to_wire() for name, histogram in self.times.items()}
        return {"counts": dict(self.counts), "start": start, "end": self.end, "times": times}

    @classmethod
    def from_wire(cls, data: Mapping[str, Any]) -> Self:
        row = cls(start=data["start"] if data["counts"]["requests"] else math.inf, end=data["end"])
        row.counts.update({name: int(data["counts"][name]) for name in COUNTS})
        row.times.update({name: Histogram.from_wire(data["times"][name]) for name in TIMES})
        return row


class Board:
    """All rows of a process, and on a master those of its workers: each worker's latest state, never a difference."""

    def __init__(self) -> None:
        self.own: dict[str, Row] = {}
        self._others: dict[str, dict[str, Row]] = {}

    def clear(self) -> None:
        self.own.clear()
        self._others.clear()

    def add(self, seen: Observation) -> None:
        """Count a request that has ended, in its rows and in the total."""
        times = seen.times()
        for name in (TOTAL, *seen.rows):
            self.own.setdefault(name, Row()).add(seen, times)

    def to_wire(self) -> dict[str, Any]:
        """This process's rows, for the master."""
        return {name: row.to_wire() for name, row in self.own.items()}

    def take(self, who: str, data: Mapping[str, Any]) -> None:
        """Put the state of worker ``who`` in place of its earlier one: a lost or doubled report does no harm."""
        self._others[who] = {name: Row.from_wire(row) for name, row in data.items()}

    def rows(self) -> dict[str, Row]:
        """Everything, merged; the total first, then by name."""
        merged: dict[str, Row] = {}
        for rows in (self.own, *self._others.values()):
            for name, row in rows.items():
                merged.setdefault(name, Row()).merge(row)
        return dict(sorted(merged.items(), key=lambda pair: (pair[0] != TOTAL, pair[0])))
