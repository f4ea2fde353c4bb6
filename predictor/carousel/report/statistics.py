"""Ratios of two runs, with confidence intervals, and what a record says about groups of requests.

The intervals are bootstrap percentiles (Efron and Tibshirani, An Introduction to the Bootstrap, 1993, ch. 13). A draw
takes rounds, and in each round requests, with replacement; both runs of a pair take the same ones where they ran the
same requests, since a long prompt is long for both. What a whole run has once, such as its throughput, varies only from
round to round: with one round it has no interval.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from carousel.bench.measure import LATENCIES
from carousel.bench.record import GAP_S
from carousel.report.runs import Figures, Run

DRAWS = 400
LEVEL = 0.95
Array = NDArray[np.float64]
Places = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times better a run is than the baseline, and the interval of that where it can be told."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure to compare. ``path``: where it stands in the figures; ``more_is_better``; ``unit``: s, or a word."""

    label: str
    path: tuple[str, ...]
    more_is_better: bool
    unit: str

    def of(self, figures: Figures) -> float | None:
        value: Any = figures
        for key in self.path:
            value = value.get(key) if isinstance(value, Mapping) else None
        return float(value) if isinstance(value, (int, float)) else None


METRICS = (
    Metric("output tokens/s", ("output_tokens_per_second",), True, "tokens/s"),
    Metric("queue time, mean", ("queue", "mean"), False, "s"),
    Metric("queue time, p99", ("queue", "p99"), False, "s"),
    Metric("time to first token, mean", ("ttft", "mean"), False, "s"),
    Metric("time to first token, p99", ("ttft", "p99"), False, "s"),
    Metric("time per output token, mean", ("tpot", "mean"), False, "s"),
    Metric("inter-token latency, p50", ("itl", "p50"), False, "s"),
    Metric("inter-token latency, p99", ("itl", "p99"), False, "s"),
    Metric("end to end, mean", ("e2e", "mean"), False, "s"),
    Metric("end to end, p99", ("e2e", "p99"), False, "s"),
    Metric("sequences per step, mean", ("batch_occupancy", "mean"), True, ""),
)


def _statistic(name: str) -> Callable[[Array], float]:
    if name == "mean":
        return lambda values: float(values.mean())
    share = float(name[1:]) / 100
    return lambda values: float(np.quantile(values, share))


def _samples(record: Figures, metric: str) -> list[Array] | None:
    """The values of each request, in the order of the record; None where a request has none."""
    requests = record["requests"]
    if metric == "itl":
        gaps = requests.get("gaps")
        return None if gaps is None else [np.asarray(found, float) * GAP_S for found in gaps]
    column = requests.get(metric)
    if column is None or any(value is None for value in column):
        return None
    return [np.asarray([value], float) for value in column]


def _by_round(run: Run, metric: str) -> list[list[Array]] | None:
    found = [_samples(record, metric) for record in run.records]
    return [values for values in found if values is not None] if found and None not in found else None


def _paired(base: Run, other: Run) -> bool:
    """Whether both ran the same requests, in the same number of rounds."""
    ids = [[record["requests"]["id"] for record in run.records] for run in (base, other)]
    return ids[0] == ids[1]


def _draw(random: np.random.Generator, rounds: Sequence[Sequence[Array]]) -> list[tuple[int, Places]]:
    chosen = random.integers(len(rounds), size=len(rounds))
    return [(int(place), random.integers(len(rounds[place]), size=len(rounds[place]))) for place in chosen]


def _taken(rounds: Sequence[Sequence[Array]], drawn: Sequence[tuple[int, Places]]) -> Array:
    return np.concatenate([rounds[place][int(request)] for place, requests in drawn for request in requests])


def _request_draws(base: Run, other: Run, metric: str, statistic: str) -> list[tuple[float, float]]:
    first, second = _by_round(base, metric), _by_round(other, metric)
    if not first or not second:
        return []
    random, paired, value = np.random.default_rng(0), _paired(base, other), _statistic(statistic)
    found = []
    for _ in range(DRAWS):
        drawn = _draw(random, first)
        mine, theirs = _taken(first, drawn), _taken(second, drawn if paired else _draw(random, second))
        if len(mine) and len(theirs):
            found.append((value(mine), value(theirs)))
    return found


def _round_draws(base: Run, other: Run, metric: Metric) -> list[tuple[float, float]]:
    values = [[metric.of(found) for found in run.rounds] for run in (base, other)]
    known = [[value for value in column if value is not None] for column in values]
    if min(map(len, known)) < 2:
        return []
    random = np.random.default_rng(0)
    found = []
    for _ in range(DRAWS):
        drawn = random.integers(len(known[0]), size=len(known[0]))
        same = len(known[0]) == len(known[1])
        others = drawn if same else random.integers(len(known[1]), size=len(known[1]))
        pair = [
            float(np.median([column[place] for place in places]))
            for column, places in zip(known, (drawn, others), strict=True)
        ]
        found.append((pair[0], pair[1]))
    return found


def ratio(base: Run, other: Run, metric: Metric) -> Ratio | None:
    """How many times better ``other`` is; None where a figure is missing or nought."""
    ours, theirs = metric.of(other.figures), metric.of(base.figures)
    if not ours or not theirs:
        return None
    of_requests = metric.path[0] in LATENCIES
    draws = _request_draws(base, other, *metric.path) if of_requests else _round_draws(base, other, metric)
    gains = [_gain(first, second, metric.more_is_better) for first, second in draws if first > 0 and second > 0]
    value = _gain(theirs, ours, metric.more_is_better)
    if len(gains) < DRAWS / 2:
        return Ratio(value)
    low, high = np.quantile(gains, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Ratio(value, float(low), float(high))


def _gain(base: float, other: float, more_is_better: bool) -> float:
    return other / base if more_is_better else base / other


def seat_use(record: Figures, seats: int) -> float | None:
    """The share of the seats that computed something useful, over the time of all steps."""
    steps = record.get("steps")
    if not steps or not seats:
        return None
    weights, used = np.asarray(steps["duration"], float), np.asarray(steps["sequences"], float)
    return float((weights * used).sum() / (weights.sum() * seats)) if weights.sum() else None
