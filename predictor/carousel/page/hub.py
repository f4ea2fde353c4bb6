"""From the engine to the viewers of the page, several times a second, while there are any.

The engine thread appends what it tells to a bounded list and never waits. One task of the event loop asks it for a
glance, puts both on the board, encodes one message and hands the same bytes to every viewer. A viewer that reads too
slowly loses what it has not read and gets summaries until it keeps up; nobody waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

from carousel.engine.errors import EngineUnavailable, QueueFull
from carousel.engine.events import Event, Glance
from carousel.engine.timeline import StepRecord
from carousel.lifecycle import EngineLike, Lifecycle
from carousel.page.board import Board
from carousel.protocols import sse

INTERVAL_S = 0.25
COST_SHARE = 0.004
"""Share of the engine thread's time that glances may take: a costly one makes the next one wait."""

LONGEST_INTERVAL_S = 5.0
MAX_PAST_STEPS = 256
"""Steps of before that a new viewer is told."""

MAX_VIEWERS = 16
MAX_QUEUED = 8
"""Messages that wait for one viewer."""

MAX_TOLD = 20_000
"""Events of the engine that wait for the task."""

Told = tuple[list[Event], StepRecord | None]


def pause_after(cost_s: float) -> float:
    """Seconds until the engine may be asked for the next glance, when the last took it ``cost_s``."""
    return min(max(INTERVAL_S, cost_s / COST_SHARE), LONGEST_INTERVAL_S)


class _Gone(Exception):
    """There is no engine thread any more, or the server is about to stop."""


class Viewer:
    """One page that is open. ``scope``: the tenant that its key belongs to; None sees all."""

    def __init__(self, scope: str | None) -> None:
        self.scope = scope
        self.behind = False
        self.num_dropped = 0
        self._queue: deque[bytes] = deque()
        self._wake = asyncio.Event()
        self._ended = False

    def offer(self, message: Callable[[bool], bytes]) -> None:
        """The next message; ``message(summary)`` encodes it. Never waits."""
        if self.behind:
            # Until it has read one, only the latest summary waits for it; that one closes the gap.
            self.behind = bool(self._queue)
            self._queue.clear()
            self._queue.append(message(True))
        elif len(self._queue) >= MAX_QUEUED:
            self.num_dropped += len(self._queue)
            self._queue.clear()
            self._queue.append(message(True))
            self.behind = True
        else:
            self._queue.append(message(False))
        self._wake.set()

    def greet(self, message: bytes) -> None:
        self._queue.append(message)
        self._wake.set()

    def end(self, message: bytes) -> None:
        """This is the last one."""
        self._queue.append(message)
        self._ended = True
        self._wake.set()

    async def messages(self) -> AsyncIterator[bytes]:
        """What it is told, until the end."""
        while True:
            while self._queue:
                yield self._queue.popleft()
            if self._ended:
                return
            self._wake.clear()
            await self._wake.wait()


class _Ear:
    """What the engine tells between two glances, in order. Filled on the engine thread, emptied with each glance."""

    def __init__(self) -> None:
        self.told: list[Told] = []
        self.lost = False
        self._size = 0

    def on_events(self, events: list[Event], step: StepRecord | None) -> None:
        """Remember it; when nobody fetches it, forget all: the next glance says how things stand."""
        self._size += len(events) + 1
        if self._size > MAX_TOLD:
            self.told, self._size, self.lost = [], 0, True
        else:
            self.told.append((events, step))

    def empty(self) -> tuple[list[Told], bool]:
        """What was told since the last time, and whether some of it is lost."""
        told, lost = self.told, self.lost
        self.told, self._size, self.lost = [], 0, False
        return told, lost


class Hub:
    """The viewers of one server. Belongs to the event loop's thread.

    Args:
        hello: what a viewer is told first, beside how things stand.
        extra: what every message holds besides, such as the demo's state.
    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        hello: Callable[[EngineLike], dict[str, Any]],
        extra: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        self.viewers: list[Viewer] = []
        self.num_ticks = 0
        self._lifecycle = lifecycle
        self._hello = hello
        self._extra = extra
        self._board = Board(1, 0.0)
        self._task: asyncio.Task[None] | None = None

    # ---- viewers come and go

    def enter(self, scope: str | None) -> Viewer:
        """A new viewer.

        Raises:
            EngineUnavailable: there is nothing to see yet, or no longer.
            QueueFull: too many pages are open.
        """
        engine = self._lifecycle.require()
        if self._lifecycle.draining:
            raise EngineUnavailable("the server is about to stop")
        if len(self.viewers) >= MAX_VIEWERS:
            raise QueueFull(f"{MAX_VIEWERS} live pages are open, and no more may be: close one", 10.0)
        if self._task is None or self._task.done():
            self._board = Board(max(engine.stats().num_slots, 1), time.monotonic())
            self._task = asyncio.create_task(self._run(engine, self._board))
        viewer = Viewer(scope)
        steps = [self._board.step(step) for step in list(engine.timeline.steps)[-MAX_PAST_STEPS:]]
        viewer.greet(sse.event({"k": "hello", **self._hello(engine), "scope": scope, "steps": steps}))
        self.viewers.append(viewer)
        return viewer

    def leave(self, viewer: Viewer) -> None:
        """It has gone; with the last one the engine is left alone."""
        if viewer in self.viewers:
            self.viewers.remove(viewer)
        if not self.viewers and self._task is not None:
            self._task.cancel()
            self._task = None

    # ---- the task

    async def _run(self, engine: EngineLike, board: Board) -> None:
        ear = _Ear()
        engine.timeline.watch(ear)
        try:
            while not self._lifecycle.draining:
                glance = await self._tick(engine, board, ear)
                await asyncio.sleep(pause_after(glance.cost_s))
        except _Gone:
            pass
        finally:
            engine.timeline.unwatch(ear)
        last = sse.event({"k": "bye", "draining": self._lifecycle.draining})
        for viewer in list(self.viewers):
            viewer.end(last)

    async def _tick(self, engine: EngineLike, board: Board, ear: _Ear) -> Glance:
        """Ask the engine thread for a glance, with what it told before, and pass both on. Steps may take their time."""
        loop = asyncio.get_running_loop()
        seen: asyncio.Future[tuple[list[Told], bool, Glance]] = loop.create_future()

        def settle(answer: tuple[list[Told], bool, Glance]) -> None:
            if not seen.done():
                seen.set_result(answer)

        def take(glance: Glance) -> None:
            with contextlib.suppress(RuntimeError):  # the server has ended meanwhile
                loop.call_soon_threadsafe(settle, (*ear.empty(), glance))

        if not engine.glance(take):
            raise _Gone
        told, lost, glance = await self._until_draining(seen)
        if lost:
            board.lose()
        for events, step in told:
            board.take(events, step)
        board.settle(glance)
        self._broadcast(board, engine)
        return glance

    async def _until_draining(self, seen: asyncio.Future[tuple[list[Told], bool, Glance]]) -> Any:
        """What comes, unless the server begins to stop first."""
        while True:
            done, _ = await asyncio.wait((seen,), timeout=LONGEST_INTERVAL_S)
            if done:
                return seen.result()
            if self._lifecycle.draining:
                raise _Gone

    def _broadcast(self, board: Board, engine: EngineLike) -> None:
        refused = {why.value: number for why, number in engine.stats().refusals.items() if number}
        extra = {"refused": refused, **self._extra()}
        encoded: dict[tuple[str | None, bool], bytes] = {}

        def message(scope: str | None, summary: bool) -> bytes:
            if (scope, summary) not in encoded:
                encoded[scope, summary] = sse.event({**board.message(scope, summary=summary), **extra})
            return encoded[scope, summary]

        for viewer in self.viewers:
            viewer.offer(functools.partial(message, viewer.scope))
        board.clear()
        self.num_ticks += 1
