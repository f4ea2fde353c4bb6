"""What a run was like, token by token and step by step: the part of a bench's JSON that ``carousel report`` draws.

A record is plain data, and small: columns instead of objects, times rounded to what they are worth.

- ``requests``: a column for each of :data:`REQUEST_COLUMNS`. Times in seconds; ``due`` counts from the run's start, the
  others from ``due``. ``gaps``: the times before each token after the first, in units of ``GAP_S``; absent from runs of
  more than ``MAX_GAPS`` tokens.
- ``steps``: columns of :data:`STEP_COLUMNS`; ``start`` and ``duration`` in seconds, ``kv`` a share. Neighbours of the
  same run are summed up where there are more than ``MAX_STEPS``. None where the engine was not at hand.
- ``seats``: ``[seat, request id, [[use, start, end, tokens], ...]]`` for each stay of a sequence on the batch, ``use``
  as in ``SeatUse``. None where the engine was not at hand.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from carousel.bench.measure import Occupancy, RequestResult, summary
from carousel.engine.timeline import RequestRecord, SeatUse, StepRecord

VERSION = 1
GAP_S = 1e-4
MAX_GAPS = 200_000
MAX_STEPS = 3000
MAX_SPANS = 20_000
REQUEST_COLUMNS = (
    "id", "group", "tenant", "priority", "deadline", "due", "queue", "ttft", "e2e", "tpot", "prompt_tokens",
    "output_tokens", "gaps",
)  # fmt: skip
STEP_COLUMNS = ("start", "duration", "prefill", "decode", "idle", "sequences", "waiting", "kv")
_DIGITS = 4


@dataclass(slots=True)
class Stay:
    """A sequence on the batch, from the first step that computed something for it to the last, or to its preemption."""

    request_id: str
    spans: list[tuple[str, float, float, int]] = field(default_factory=list)
    step: int = -1

    def add(self, place: int, use: str, start: float, end: float, tokens: int) -> None:
        """What step ``place`` computed for it; goes on with the last span where that had the same use a step ago."""
        last = self.spans[-1] if self.spans else None
        if last is not None and last[0] == use and self.step >= place - 1:
            self.spans[-1] = (use, last[1], end, last[3] + tokens)
        else:
            self.spans.append((use, start, end, tokens))
        self.step = place


class Recorder:
    """An engine observer that keeps the steps of one run, and who had which seat.

    Args:
        origin: ``time.monotonic()`` at the start of the run.
    """

    def __init__(self, origin: float | None = None) -> None:
        self.origin = time.monotonic() if origin is None else origin
        self.steps: list[StepRecord] = []
        self._stays: list[Stay] = []
        self._open: dict[tuple[str, int], Stay] = {}

    def on_step(self, step: StepRecord, token_latencies_s: list[float]) -> None:
        if not step.num_sequences:
            return
        place, start = len(self.steps), step.started - self.origin
        self.steps.append(step)
        for request_id, choice, use, tokens in step.seats:
            key = request_id, choice
            if use is SeatUse.LOST:
                self._open.pop(key, None)
                continue
            stay = self._open.get(key)
            if stay is None:
                stay = self._open[key] = Stay(request_id)
                self._stays.append(stay)
            stay.add(place, use.value, start, start + step.duration_s, tokens)

    def on_finish(self, request: RequestRecord) -> None:
        """Requests are measured where their tokens arrive, not here."""

    def occupancy(self) -> Occupancy:
        count = len(self.steps)
        return Occupancy(
            sequences=summary(step.num_sequences for step in self.steps),
            mean_tokens_per_step=sum(step.num_tokens for step in self.steps) / count if count else None,
            steps=count,
            preemptions=sum(step.num_preemptions for step in self.steps),
            recomputed_tokens=sum(step.num_recomputed_tokens for step in self.steps),
        )

    def step_columns(self) -> dict[str, list[float]]:
        rows = [
            (
                step.started - self.origin, step.duration_s, step.num_prefill_tokens, step.num_decode_tokens,
                step.num_idle_tokens, step.num_sequences, step.num_waiting, step.kv_cache_usage,
            )
            for step in self.steps
        ]  # fmt: skip
        size = -(-len(rows) // MAX_STEPS) or 1
        merged = [_merge(rows[first : first + size]) for first in range(0, len(rows), size)]
        columns = zip(*merged, strict=True) if merged else ([] for _ in STEP_COLUMNS)
        return {
            name: [round(value, _DIGITS) for value in column]
            for name, column in zip(STEP_COLUMNS, columns, strict=True)
        }

    def seats(self, names: dict[str, str]) -> list[list[Any]]:
        """Every stay with a seat of its own; ``names`` has the workload's id of each request id.

        The engine has no numbered seats: each stay takes the lowest one that is free.
        """
        free: list[int] = []
        taken: list[tuple[float, int]] = []
        rows: list[list[Any]] = []
        spans = 0
        for stay in sorted(self._stays, key=lambda stay: stay.spans[0][1]):
            begin, end = stay.spans[0][1], stay.spans[-1][2]
            while taken and taken[0][0] <= begin + 1e-6:
                heapq.heappush(free, heapq.heappop(taken)[1])
            seat = heapq.heappop(free) if free else len(taken)
            heapq.heappush(taken, (end, seat))
            shown = [[use, round(a, _DIGITS), round(b, _DIGITS), tokens] for use, a, b, tokens in stay.spans]
            spans += len(shown)
            if spans > MAX_SPANS:
                break
            rows.append([seat, names.get(stay.request_id, stay.request_id), shown])
        return rows


def _merge(rows: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    """Several steps as one: times and tokens are summed up; sequences, queue and KV use are means over time."""
    if len(rows) == 1:
        return rows[0]
    durations = [row[1] for row in rows]
    whole = sum(durations) or 1.0
    sums = [sum(row[place] for row in rows) for place in range(1, 5)]
    means = [sum(row[place] * row[1] for row in rows) / whole for place in range(5, len(STEP_COLUMNS))]
    return (rows[0][0], *sums, *means)


def _requests(results: Sequence[RequestResult]) -> dict[str, list[Any]]:
    few = sum(result.output_tokens for result in results) <= MAX_GAPS
    columns: dict[str, list[Any]] = {name: [] for name in REQUEST_COLUMNS if few or name != "gaps"}

    def rounded(value: float | None) -> float | None:
        return None if value is None else round(value, _DIGITS)

    for result in sorted(results, key=lambda result: result.arrival):
        asked = {name: getattr(result.item, name, None) for name in ("group", "tenant", "priority", "deadline")}
        row = {
            "id": result.id, **asked, "due": rounded(result.arrival), "queue": rounded(result.queue),
            "ttft": rounded(result.ttft), "e2e": rounded(result.e2e), "tpot": rounded(result.tpot),
            "prompt_tokens": result.prompt_tokens, "output_tokens": result.output_tokens,
            "gaps": [round(gap / GAP_S) for gap in result.gaps()] if few else None,
        }  # fmt: skip
        for name, column in columns.items():
            column.append(row[name])
    return {name: column for name, column in columns.items() if any(value not in (None, "") for value in column)}


def record(results: Sequence[RequestResult], recorder: Recorder | None = None) -> dict[str, Any]:
    """The record of a run; see the module.

    Args:
        results: checked ones.
        recorder: of the engine, where it is at hand.
    """
    names = {result.engine_id: result.id for result in results}
    return {
        "version": VERSION,
        "requests": _requests(results),
        "steps": None if recorder is None else recorder.step_columns(),
        "seats": None if recorder is None else recorder.seats(names),
    }
