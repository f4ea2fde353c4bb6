"""From what pods report to the number that KEDA gets. Pure: no clock, no network; the simulator runs the same code.

**The signal.** For ``queue-seconds`` each ready pod asks for

    estimated queue seconds + target wait x occupancy / target occupancy

seconds, and a replica is worth ``target wait`` seconds, so that the HPA's ``ceil(sum / target)`` is

    sum over pods of (occupancy / target occupancy + queue seconds / target wait)

The first term keeps as many replicas as the running work needs: a queue alone is 0 both on an idle pod and on one that
just keeps up, and scaling on it alone swings between the two. The second adds what drains the backlog within the
target: with rate r per pod and W tokens waiting, n pods have W / r queue seconds in sum, and W / (r x target wait) more
of them drain W in that time. ``requests`` and ``tokens`` are plain sums, running and waiting, over a target per
replica.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

MODES = ("queue-seconds", "requests", "tokens")


@dataclass(frozen=True, slots=True)
class Targets:
    """What a replica shall carry.

    Attributes:
        scale_on: one of ``MODES``.
        wait_s: seconds of queue that are acceptable.
        requests: running and waiting requests per replica; what a held request counts, in ``queue-seconds`` too.
        tokens: running and waiting tokens per replica.
        occupancy: share of a full batch, or of full KV memory, at which a replica counts as used up, above 0 up to 1.
    """

    scale_on: str = "queue-seconds"
    wait_s: float = 5.0
    requests: float = 10.0
    tokens: float = 2000.0
    occupancy: float = 0.6

    @property
    def per_replica(self) -> float:
        """The target of the metric: what one replica is worth in its unit."""
        return {"queue-seconds": self.wait_s, "requests": self.requests, "tokens": self.tokens}[self.scale_on]

    @property
    def metric_name(self) -> str:
        return f"carousel-{self.scale_on}"


@dataclass(frozen=True, slots=True)
class PodLoad:
    """What a pod's ``/load`` says. ``occupancy`` is the larger of its seats' and its KV memory's, 0 to 1."""

    requests_running: float = 0.0
    requests_waiting: float = 0.0
    tokens_running: float = 0.0
    tokens_waiting: float = 0.0
    queue_seconds: float = 0.0
    occupancy: float = 0.0
    admitted: float = 0.0


class UnreadableLoad(ValueError):
    """The answer is not what ``/load`` gives."""


def _number(found: Mapping[str, Any], name: str) -> float:
    value = found.get(name, 0)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise UnreadableLoad(f"{name}: got {value!r}, wanted a number of 0 or more")
    return float(value)


def read_load(found: Any) -> PodLoad:
    """A pod's load out of the JSON of ``/load``.

    Raises:
        UnreadableLoad: it is not that.
    """
    if not isinstance(found, Mapping) or "requests_running" not in found:
        raise UnreadableLoad("no answer of /load: no requests_running in it")
    seats = _number(found, "sequences_running") / max(_number(found, "sequence_slots"), 1.0)
    return PodLoad(
        requests_running=_number(found, "requests_running"),
        requests_waiting=_number(found, "requests_waiting"),
        tokens_running=_number(found, "tokens_running"),
        tokens_waiting=_number(found, "tokens_waiting"),
        queue_seconds=_number(found, "queue_seconds"),
        occupancy=min(1.0, max(seats, _number(found, "kv_cache_usage"))),
        admitted=_number(found, "requests_admitted"),
    )


@dataclass(frozen=True, slots=True)
class Held:
    """Requests that wait outside of any pod, and the tokens that they are thought to have."""

    requests: float = 0.0
    tokens: float = 0.0

    def __add__(self, other: Held) -> Held:
        return Held(self.requests + other.requests, self.tokens + other.tokens)


@dataclass(frozen=True, slots=True)
class Fleet:
    """Sums over the ready pods at one moment. ``silent`` of the ``ready`` pods have not answered for too long."""

    ready: int = 0
    silent: int = 0
    requests_running: float = 0.0
    requests_waiting: float = 0.0
    tokens_running: float = 0.0
    tokens_waiting: float = 0.0
    queue_seconds: float = 0.0
    occupancy: float = 0.0
    held: Held = Held()

    @property
    def live(self) -> float:
        """Requests anywhere."""
        return self.requests_running + self.requests_waiting + self.held.requests


def total(loads: Iterable[PodLoad], silent: int = 0, held: Held = Held()) -> Fleet:
    """Sum what pods report; ``silent`` further ones are ready and report nothing."""
    known = list(loads)
    return Fleet(
        ready=len(known) + silent,
        silent=silent,
        requests_running=sum(load.requests_running for load in known),
        requests_waiting=sum(load.requests_waiting for load in known),
        tokens_running=sum(load.tokens_running for load in known),
        tokens_waiting=sum(load.tokens_waiting for load in known),
        queue_seconds=sum(load.queue_seconds for load in known),
        occupancy=sum(load.occupancy for load in known),
        held=held,
    )


def demand(targets: Targets, fleet: Fleet) -> float:
    """The metric's value, in seconds, requests or tokens by ``targets.scale_on``.

    A silent pod counts as one that is worth keeping, a full target's worth: readings that get lost never scale in.
    """
    silent = fleet.silent * targets.per_replica
    if targets.scale_on == "requests":
        return fleet.requests_running + fleet.requests_waiting + fleet.held.requests + silent
    if targets.scale_on == "tokens":
        return fleet.tokens_running + fleet.tokens_waiting + fleet.held.tokens + silent
    held = targets.wait_s * fleet.held.requests / targets.requests
    return fleet.queue_seconds + targets.wait_s * fleet.occupancy / targets.occupancy + held + silent


class Damper:
    """The largest value of a sliding window: rises at once, falls only when the whole window was lower.

    Args:
        window_s: seconds; 0 keeps the newest value only.
    """

    def __init__(self, window_s: float) -> None:
        self.window_s = window_s
        self._falling: deque[tuple[float, float]] = deque()  # (when, value), values strictly falling
        self._newest = -math.inf

    def add(self, now: float, value: float) -> None:
        """A reading at ``now``, which must not be before the last one."""
        if now < self._newest:
            raise ValueError(f"{now} is before {self._newest}")
        self._newest = now
        while self._falling and self._falling[-1][1] <= value:
            self._falling.pop()
        self._falling.append((now, value))
        self._expire(now)

    def value(self, now: float) -> float | None:
        """The largest reading of the window before ``now``; the last reading when all are older; None without any."""
        self._expire(now)
        return self._falling[0][1] if self._falling else None

    def _expire(self, now: float) -> None:
        while len(self._falling) > 1 and now - self._falling[0][0] > self.window_s:
            self._falling.popleft()
