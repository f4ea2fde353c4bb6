"""From single observations to the figures of a run. Times are seconds."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from carousel.bench.workload import WorkItem

QUANTILES = {"p50": 0.50, "p90": 0.90, "p99": 0.99}
LATENCIES = ("ttft", "tpot", "itl", "queue", "e2e")
STATISTICS = ("mean", *QUANTILES)


class BenchError(RuntimeError):
    """The run is worthless: a request failed, or the number of tokens was not what was asked for."""


@dataclass(slots=True)
class RequestResult:
    """One request as its client saw it. ``deltas`` holds (time, tokens that came with it), times since the start.
    ``item``: what was asked for. ``engine_id``: what the engine calls it, where that is known.
    """

    id: str
    arrival: float
    wanted: int
    deltas: list[tuple[float, int]] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    finished: float = 0.0
    queue: float | None = None
    error: str | None = None
    item: WorkItem | None = None
    engine_id: str = ""

    @property
    def ttft(self) -> float:
        """Arrival to first token."""
        return self.deltas[0][0] - self.arrival

    @property
    def e2e(self) -> float:
        """Arrival to last token."""
        return self.deltas[-1][0] - self.arrival

    @property
    def tpot(self) -> float | None:
        """Mean time per token after the first; None where there is no second."""
        if self.output_tokens < 2:
            return None
        return (self.deltas[-1][0] - self.deltas[0][0]) / (self.output_tokens - 1)

    def gaps(self) -> Iterable[float]:
        """Time before each token after the first. Tokens that came together have no time between them."""
        first_time, first_count = self.deltas[0]
        yield from [0.0] * (first_count - 1)
        before = first_time
        for now, count in self.deltas[1:]:
            yield now - before
            yield from [0.0] * (count - 1)
            before = now


@dataclass(slots=True)
class Occupancy:
    """How full the batch was: per-step values where the engine is at hand, a mean where only counters are."""

    sequences: dict[str, float | None]
    mean_tokens_per_step: float | None = None
    steps: int | None = None
    preemptions: int | None = None
    recomputed_tokens: int | None = None


def percentile(ordered: Sequence[float], share: float) -> float:
    """Linear interpolation between the closest ranks of sorted values."""
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summary(values: Iterable[float]) -> dict[str, float | None]:
    """``mean``, ``p50``, ``p90``, ``p99``; all None when there are no values."""
    ordered = sorted(values)
    if not ordered:
        return dict.fromkeys(STATISTICS)
    return {"mean": statistics.fmean(ordered), **{name: percentile(ordered, q) for name, q in QUANTILES.items()}}


def check(results: Sequence[RequestResult]) -> None:
    """Refuse a run in which anything failed or a length is wrong.

    Raises:
        BenchError: naming the first few requests.
    """
    wrong = []
    for result in results:
        if result.error:
            wrong.append(f"request {result.id}: {result.error}")
        elif result.output_tokens != result.wanted:
            wrong.append(f"request {result.id}: {result.output_tokens} output tokens instead of {result.wanted}")
    if wrong:
        more = f" (and {len(wrong) - 5} more)" if len(wrong) > 5 else ""
        raise BenchError(f"{len(wrong)} of {len(results)} requests went wrong: {'; '.join(wrong[:5])}{more}")


def figures(
    results: Sequence[RequestResult],
    wall: float,
    occupancy: Occupancy | None,
    queue: dict[str, float | None] | None = None,
    queue_source: str | None = "engine",
) -> dict[str, Any]:
    """The figures of one run.

    Args:
        results: checked ones, see :func:`check`.
        wall: seconds from the first arrival to the last token.
        occupancy: None where nothing is known.
        queue: a summary measured elsewhere; None takes the requests' own.
        queue_source: ``engine``, ``usage``, ``metrics``, or None where nothing is known.
    """
    output_tokens = sum(result.output_tokens for result in results)
    prompt_tokens = sum(result.prompt_tokens for result in results)
    own_queue = [result.queue for result in results if result.queue is not None]
    return {
        "output_tokens_per_second": output_tokens / wall,
        "total_tokens_per_second": (output_tokens + prompt_tokens) / wall,
        "requests_per_second": len(results) / wall,
        "wall": wall,
        "requests": len(results),
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "ttft": summary(result.ttft for result in results),
        "tpot": summary(tpot for result in results if (tpot := result.tpot) is not None),
        "itl": summary(gap for result in results for gap in result.gaps()),
        "queue": queue if queue is not None else summary(own_queue),
        "queue_source": queue_source,
        "e2e": summary(result.e2e for result in results),
        "batch_occupancy": occupancy.sequences if occupancy else dict.fromkeys(STATISTICS),
        "mean_tokens_per_step": occupancy.mean_tokens_per_step if occupancy else None,
        "steps": occupancy.steps if occupancy else None,
        "preemptions": occupancy.preemptions if occupancy else None,
        "recomputed_tokens": occupancy.recomputed_tokens if occupancy else None,
    }


def median_figures(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Key by key, the median over runs of one workload; what is no number is taken from the first run."""
    merged: dict[str, Any] = {}
    for key, first in runs[0].items():
        values = [run[key] for run in runs]
        if isinstance(first, dict):
            merged[key] = median_figures(values)
        elif all(isinstance(value, (int, float)) for value in values):
            merged[key] = statistics.median(values) if len(values) > 1 else first
        else:
            merged[key] = first
    return merged
