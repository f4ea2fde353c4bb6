"""The state of the scaler: looks at all pods every few seconds, and answers what KEDA asks out of memory.

Each replica of the scaler watches for itself and tells nobody, so any of them may be asked. Two things would make
their answers differ. What one of them holds for a target at zero: each asks the others (``peers``). And the past: the
value is the largest of a window, and a replica that has just started has seen none of it, so that until it has watched
for one window it never reports less than what keeps the pods that are there.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from carousel.cluster.demand import Damper, Fleet, Held, Targets, demand
from carousel.cluster.pods import PodSource
from carousel.cluster.readings import Readings

logger = logging.getLogger("carousel.scaler")

_MOST_TARGETS = 16


class NoReading(Exception):
    """There is no value that may be served. The message says why."""


class HeldSource(Protocol):
    """What waits outside of the pods, here and at the other replicas."""

    def held(self) -> Held: ...
    def activated(self) -> bool: ...


class Watcher:
    """What is known of the fleet, and the values that follow.

    Args:
        source: of pods.
        readings: of their loads.
        outside: what waits elsewhere.
        interval_s: between two looks.
        stale_s: how long the last good value is served when there is no newer one.
        window_s: over which the value is the largest.
        idle_s: how long the target stays active after the last request.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        source: PodSource,
        readings: Readings,
        outside: HeldSource,
        *,
        interval_s: float,
        stale_s: float,
        window_s: float,
        idle_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.source = source
        self.readings = readings
        self.outside = outside
        self.fleet = Fleet()
        self.looks = 0
        self._interval_s = interval_s
        self._stale_s = stale_s
        self._window_s = window_s
        self._idle_s = idle_s
        self._clock = clock
        self._first: float | None = None
        self._good: float | None = None  # when the fleet was last known
        self._busy_at: float | None = None
        self._problem = "no look at the pods has been taken yet"
        self._history: deque[tuple[float, Fleet]] = deque()
        self._dampers: dict[Targets, Damper] = {}
        self._poke = asyncio.Event()
        self._changed = asyncio.Condition()
        self._active = False

    # ---- looking

    async def run(self) -> None:
        """Look every ``interval_s`` seconds, and at once when :meth:`poke` says that something has happened."""
        while True:
            self._poke.clear()
            await self.look()
            try:
                async with asyncio.timeout(self._interval_s):
                    await self._poke.wait()
                await asyncio.sleep(min(0.05, self._interval_s))  # a burst of events is one look
            except TimeoutError:
                pass

    def poke(self) -> None:
        """Look now."""
        self._poke.set()

    async def look(self) -> None:
        """Ask all pods and take the result in."""
        pods = self.source.pods()
        await self.readings.collect(pods)
        self.looks += 1
        self._take(self.readings.fleet(pods, self.outside.held()))
        await self._tell()

    def _take(self, fleet: Fleet) -> None:
        now = self._clock()
        if fleet.live > 0:
            self._busy_at = now
        age = self.source.age()
        if age > self._stale_s:
            known = "the pods have never been listed" if age == float("inf") else f"list of pods is {age:.0f} s old"
            self._problem = f"{known}: {self.source.problem or 'the first answer is awaited'}"
            return
        if fleet.ready and fleet.silent == fleet.ready:
            self._problem = f"none of {fleet.ready} ready pods has told its load for {self._stale_s:g} s"
            return
        if self._first is None:
            self._first = now
        self.fleet, self._good, self._problem = fleet, now, ""
        self._history.append((now, fleet))
        while now - self._history[0][0] > self._window_s:
            self._history.popleft()
        for targets, damper in self._dampers.items():
            damper.add(now, demand(targets, fleet))

    # ---- answering

    def check(self) -> None:
        """Whether values may be served.

        Raises:
            NoReading: nothing good is known, or it is too old.
        """
        now = self._clock()
        if self._good is None:
            raise NoReading(self._problem)
        if now - self._good > self._stale_s:
            raise NoReading(f"the last good reading is {now - self._good:.0f} s old: {self._problem or 'stuck'}")

    def value(self, targets: Targets) -> float:
        """The metric's value for KEDA.

        Raises:
            NoReading: see :meth:`check`.
        """
        self.check()
        now = self._clock()
        value = self._damper(targets).value(now)
        assert value is not None  # check() has seen a good reading, which every damper holds
        if self._first is None or now - self._first < self._window_s:
            value = max(value, self.fleet.ready * targets.per_replica)
        return value

    def _damper(self, targets: Targets) -> Damper:
        damper = self._dampers.get(targets)
        if damper is None:
            if len(self._dampers) >= _MOST_TARGETS:  # somebody edits the trigger again and again
                self._dampers.pop(next(iter(self._dampers)))
            damper = self._dampers[targets] = Damper(self._window_s)
            for when, fleet in self._history:
                damper.add(when, demand(targets, fleet))
        return damper

    def active(self) -> bool:
        """Whether the target should be above zero: there are requests, or were within ``idle_s``, or one is announced.

        Raises:
            NoReading: nothing asks for the target, and whether its pods are idle is not known.
        """
        now = self._clock()
        if self.outside.held().requests > 0 or self.outside.activated():
            return True
        seen = [at for at in (self._busy_at, self.readings.served_at) if at is not None]
        if seen and now - max(seen) <= self._idle_s:
            return True
        self.check()
        return False

    async def _tell(self) -> None:
        try:
            active = self.active()
        except NoReading:
            return
        if active != self._active:
            self._active = active
            logger.info("the target is %s", "active" if active else "idle")
            async with self._changed:
                self._changed.notify_all()

    async def announce(self) -> None:
        """Something that :meth:`active` depends on has changed outside of the pods."""
        await self._tell()

    async def next_change(self, seen: bool) -> bool:
        """Wait until the target's activity differs from ``seen``; returns it."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._active != seen)
            return self._active
