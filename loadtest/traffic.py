"""Who sends which request when: the share of one process in the arrivals of the whole test."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

from carousel.bench.workload import WorkItem
from loadtest.figures import Board, Observation
from loadtest.options import shape_of, workload_of


class Traffic:
    """The arrivals of this process. Every process draws the same arrivals from the same seed and takes every n-th.

    Users take what is next with :meth:`take` and give back what they saw with :meth:`finish`.

    Args:
        options: see ``loadtest.options``.
        board: where observations are counted.
        share: (which share this is, of how many).
        clock: seconds.
    """

    def __init__(
        self,
        options: Any,
        board: Board,
        share: tuple[int, int] = (0, 1),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.options, self.board, self.share = options, board, share
        self._clock, self._start = clock, 0.0
        self.workload, self.shape = workload_of(options), shape_of(options)
        self.closed = self.shape.name == "closed"
        self.in_flight = 0
        self.exhausted = False
        self._next = self._arrivals()

    def _arrivals(self) -> Iterator[tuple[float | None, WorkItem]]:
        index, of = self.share
        items = self.workload.items
        due: Iterator[float | None] = itertools.repeat(None)
        if not self.closed:
            due = self.shape.times(self.options.workload_seed, [item.unit_gap for item in items])
        if not self.options.duration:
            due = itertools.islice(due, len(items))
        for place, time_ in enumerate(due):
            if place % of == index:
                yield time_, items[place % len(items)]

    def begin(self) -> None:
        """Start the clock; before the first :meth:`take`."""
        self._start = self._clock()

    def now(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._start

    def take(self) -> tuple[float | None, WorkItem] | None:
        """What is next and when it is due, None for at once (closed loop); None when nothing is left."""
        taken = None if self._over() else next(self._next, None)
        if taken is None:
            self.exhausted = True
        else:
            self.in_flight += 1
        return taken

    def _over(self) -> bool:
        return self.closed and bool(self.options.duration) and self.now() >= self.options.duration

    def finish(self, seen: Observation) -> None:
        """Count a request that was taken and has ended, one way or another."""
        self.in_flight -= 1
        self.board.add(seen)

    @property
    def done(self) -> bool:
        """Whether everything has been sent and has ended."""
        return self.exhausted and self.in_flight == 0
