"""What a contestant is asked to do and what it answers, and the loop that feeds an engine which is driven step by step.

A job is a JSON file: ``model``, ``precision``, ``threads``, ``batch`` and ``passes``, each a name, requests and a
concurrency (0: requests arrive at their times; else so many at once, each as soon as one has ended). The answer is the
last line of standard output that is a JSON object: for each pass a list of [arrival, [[time, tokens], ...]], in seconds
since the pass began.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class Request:
    """``at`` is the time of its arrival, in seconds since the pass began."""

    prompt: list[int]
    output: int
    at: float


@dataclass(frozen=True)
class Pass:
    name: str
    requests: list[Request]
    concurrency: int = 0


@dataclass(frozen=True)
class Job:
    model: str
    precision: str
    threads: int
    passes: list[Pass]
    batch: int = 16
    """Sequences of a static batch."""

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence of any pass."""
        return max(len(request.prompt) + request.output for one in self.passes for request in one.requests)

    @property
    def most(self) -> int:
        """Requests of the largest pass."""
        return max(len(one.requests) for one in self.passes)


@dataclass
class Record:
    """What became of a request: its arrival, and when how many tokens came."""

    arrival: float
    deltas: list[tuple[float, int]] = field(default_factory=list)


class SteppedEngine(Protocol):
    """An engine that computes only while it is asked to."""

    def add(self, number: int, request: Request) -> None: ...

    def step(self) -> Iterable[tuple[int, int]]:
        """Compute a step. Gives the requests that got tokens, and how many."""
        ...


def read_job(path: str) -> Job:
    job = json.loads(Path(path).read_text("utf-8"))
    passes = [
        Pass(one["name"], [Request(**request) for request in one["requests"]], one["concurrency"])
        for one in job["passes"]
    ]
    return Job(job["model"], job["precision"], job["threads"], passes, job["batch"])


def answer_in(printed: str) -> dict[str, Any]:
    """The answer in what a contestant printed: an engine may print its farewells after it.

    Raises:
        ValueError: there is none.
    """
    for line in reversed(printed.splitlines()):
        if line.startswith("{"):
            with contextlib.suppress(ValueError):
                return dict(json.loads(line))
    raise ValueError(f"it gave no figures; it printed {' '.join(printed.split())[-300:] or 'nothing'}")


def answer(job: Job, run: Callable[[Pass], list[Record]]) -> None:
    """Run the passes, and print what came of them."""
    found: dict[str, Any] = {}
    for one in job.passes:
        records = run(one)
        for request, record in zip(one.requests, records, strict=True):
            got = sum(count for _, count in record.deltas)
            if got != request.output:
                raise SystemExit(f"{one.name}: {got} tokens instead of {request.output}")
        found[one.name] = [[record.arrival, record.deltas] for record in records]
    sys.stdout.flush()
    print("\n" + json.dumps(found), flush=True)


def run_steps(engine: SteppedEngine, one: Pass) -> list[Record]:
    """Feed a stepped engine: requests enter between two steps, when their time has come."""
    waiting = deque(enumerate(one.requests))
    records: list[Record] = [Record(request.at) for request in one.requests]
    left: dict[int, int] = {}
    start = time.perf_counter()
    while waiting or left:
        now = time.perf_counter() - start
        while waiting and waiting[0][1].at <= now and (not one.concurrency or len(left) < one.concurrency):
            number, request = waiting.popleft()
            if one.concurrency:
                records[number].arrival = time.perf_counter() - start
            left[number] = request.output
            engine.add(number, request)
        if not left:
            time.sleep(max(0.0, waiting[0][1].at - now))
            continue
        found = list(engine.step())
        now = time.perf_counter() - start
        for number, count in found:
            records[number].deltas.append((now, count))
            left[number] -= count
            if left[number] <= 0:
                del left[number]
    return records
