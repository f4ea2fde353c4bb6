"""The board and the hub without a server: lanes, rates, tenants, and viewers that do not keep up."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import pytest
from tests.engine.fakes import Bench
from tests.engine.test_scheduler import request

from carousel.engine.errors import EngineUnavailable
from carousel.engine.events import Event, Glance, PoolView, What
from carousel.engine.request import FinishReason
from carousel.engine.timeline import EngineStats, StepRecord, Timeline
from carousel.page import board as boards
from carousel.page import hub as hubs
from carousel.page.board import Board
from carousel.page.demo import NUM_REQUESTS, plan
from carousel.page.hub import Hub, Viewer

POOL = PoolView(10, 10, 0, 0, 1, "")


def glance(at: float, **changes: Any) -> Glance:
    fields: dict[str, Any] = {
        "at": at, "running": [], "num_running": 0, "waiting": [], "num_waiting": 0, "idle": [], "pool": POOL,
        "static": False, "cost_s": 0.0,
    }  # fmt: skip
    return Glance(**{**fields, **changes})


def step(index: int, started: float, took: float, decode: int = 0, prefill: int = 0, idle: int = 0) -> StepRecord:
    return StepRecord(index, started, took, 0, took, 0, 1, prefill, decode, 0, decode, 0, 1, 0, num_idle_tokens=idle)


class Follower:
    """A board that follows a bench as the hub would, with checks of its lanes."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.board = Board(bench.scheduler.limits.max_batch_sequences, 0.0)
        self.messages: list[dict[str, Any]] = []
        bench.core.timeline.watch(self)

    def on_events(self, events: list[Event], step: StepRecord | None) -> None:
        self.board.take(events, step)

    def look(self) -> dict[str, Any]:
        self.board.settle(self.bench.core.glance())
        message = self.board.message()
        self.board.clear()
        self.messages.append(message)
        lanes = list(self.board.lanes.values())
        assert len(set(lanes)) == len(lanes), "two sequences in one row"
        running = {sequence.order for sequence in self.bench.scheduler.running}
        idle = {sequence.order for sequence in self.bench.scheduler.idle}
        assert set(self.board.lanes) == running | idle
        assert [view[0] for view in message["run"]] == [s.order for s in self.bench.scheduler.running]
        return message


@pytest.mark.parametrize("static", [False, True])
def test_rows_follow_the_batch_through_preemptions_and_cancels(static: bool) -> None:
    bench = Bench(num_blocks=14, max_batch_tokens=32, max_batch_sequences=4, static=static)
    follower, rng = Follower(bench), random.Random(3)
    for number in range(60):
        bench.submit(request(f"r{number}", prompt_len=rng.randint(1, 50), max_tokens=rng.randint(1, 30)))
        for _ in range(rng.randint(0, 8)):
            bench.step()
            if rng.random() < 0.5:
                follower.look()
        if rng.random() < 0.15:
            bench.core.end(f"r{number}", FinishReason.CANCELLED)
    bench.run()
    follower.look()
    assert follower.board.lanes == {}
    assert follower.board._known == {}
    kinds = [event[0] for message in follower.messages for event in message["ev"]]
    assert kinds.count("a") == kinds.count("e") == 60
    assert ("r" in kinds) is static
    assert max(event[3] for m in follower.messages for event in m["ev"] if event[0] == "s") <= 3


def test_a_board_that_begins_in_the_middle_shows_what_runs() -> None:
    bench = Bench(max_batch_sequences=4)
    for name in "abc":
        bench.submit(request(name, max_tokens=30))
    for _ in range(4):
        bench.step()
    follower = Follower(bench)
    message = follower.look()
    assert [view[1] for view in message["run"]] == ["a", "b", "c"]
    assert sorted(view[15] for view in message["run"]) == [0, 1, 2]
    bench.run()
    assert follower.look()["run"] == []


def test_rates_are_those_of_the_last_seconds() -> None:
    board = Board(4, 100.0)
    for index in range(20):  # one a second, the last ten with two decodes of which each takes 0.5 s
        board.take([], step(index, 100.0 + index, 0.5 if index >= 10 else 0.1, decode=2, prefill=10))
    rates = board.rates(120.0)
    assert rates["out"] == pytest.approx(2 * 5 / 5, rel=0.2)
    assert rates["prompt"] == pytest.approx(50 / 5, rel=0.2)
    assert rates["itl"] == [0.5, 0.5]
    assert rates["ttft"] == [None, None]
    board.take([Event(What.ARRIVED, 118.0, 7, "x"), Event(What.FIRST_TOKEN, 118.25, 7, "x")], None)
    assert board.rates(120.0)["ttft"] == [0.25, 0.25]
    assert board.rates(300.0) == {
        **rates,
        "out": 0,
        "prompt": 0,
        **{key: [None, None] for key in ("step", "itl", "ttft")},
    }


def test_between_tokens_weighs_each_step_by_its_decodes() -> None:
    board = Board(4, 0.0)
    board.take([], step(1, 1.0, 0.1, decode=1))
    board.take([], step(2, 1.2, 0.3, decode=9))
    assert board.rates(2.0)["itl"] == [0.3, 0.3]


def test_a_message_is_bounded_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boards, "MAX_EVENTS", 3)
    board = Board(4, 0.0)
    board.take([Event(What.ARRIVED, 1.0, order, f"r{order}") for order in range(5)], None)
    board.settle(glance(2.0))
    message = board.message()
    assert (len(message["ev"]), message["gap"]) == (3, True)
    board.clear()
    assert board.message()["gap"] is False


# ---- viewers


def drain(viewer: Viewer) -> list[bytes]:
    found = list(viewer._queue)
    viewer._queue.clear()
    return found


def test_a_slow_viewer_gets_summaries_until_it_reads_again() -> None:
    viewer = Viewer(None)

    def say(summary: bool) -> bytes:
        return b"summary" if summary else b"all"

    for _ in range(hubs.MAX_QUEUED):
        viewer.offer(say)
    assert drain(viewer) == [b"all"] * hubs.MAX_QUEUED
    for _ in range(50):
        viewer.offer(say)
        assert len(viewer._queue) <= hubs.MAX_QUEUED
    assert viewer.behind
    assert drain(viewer) == [b"summary"]
    viewer.offer(say)  # it has read: one more summary closes the gap, then everything
    viewer.offer(say)
    assert drain(viewer) == [b"summary", b"all"]
    assert viewer.num_dropped == hubs.MAX_QUEUED


class StillEngine:
    """Tells what it is told to, and answers every glance at once."""

    def __init__(self) -> None:
        self.timeline = Timeline()
        self.alive = True
        self.glances = 0

    def stats(self) -> EngineStats:
        return EngineStats(num_slots=4)

    def glance(self, take: Any) -> bool:
        self.glances += 1
        if self.alive:
            take(glance(time.monotonic()))
        return self.alive


class House:
    """A life cycle around it."""

    def __init__(self) -> None:
        self.engine = StillEngine()
        self.draining = False

    def require(self) -> StillEngine:
        return self.engine


def test_the_same_bytes_go_to_all_and_the_engine_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hubs, "INTERVAL_S", 0.005)

    async def run() -> None:
        house = House()
        hub = Hub(house, lambda engine: {})  # type: ignore[arg-type]
        viewers = [hub.enter(None) for _ in range(5)]
        while hub.num_ticks < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        queues = [drain(viewer) for viewer in viewers]
        assert house.engine.glances in (hub.num_ticks, hub.num_ticks + 1)
        for one in queues[1:]:
            assert all(mine is theirs for mine, theirs in zip(one[1:], queues[0][1:], strict=True))
        for viewer in viewers:
            hub.leave(viewer)
        await asyncio.sleep(0.02)
        assert house.engine.timeline.watchers == ()
        asked = house.engine.glances
        await asyncio.sleep(0.05)
        assert house.engine.glances == asked, "nobody looks, and the engine is asked all the same"

    asyncio.run(run())


def test_a_costly_glance_makes_the_next_one_wait() -> None:
    assert hubs.pause_after(0.0001) == hubs.INTERVAL_S
    for cost_s in (0.002, 0.01):
        assert cost_s / hubs.pause_after(cost_s) == pytest.approx(hubs.COST_SHARE)
    assert hubs.pause_after(1.0) == hubs.LONGEST_INTERVAL_S


def test_no_viewer_enters_a_server_that_is_about_to_stop() -> None:
    house = House()
    house.draining = True
    with pytest.raises(EngineUnavailable, match="about to stop"):
        Hub(house, lambda engine: {}).enter(None)  # type: ignore[arg-type]


def test_viewers_are_told_when_the_engine_is_gone() -> None:
    async def run() -> list[bytes]:
        house = House()
        house.engine.alive = False
        viewer = Hub(house, lambda engine: {}).enter(None)  # type: ignore[arg-type]
        async with asyncio.timeout(5):
            return [message async for message in viewer.messages()]

    assert b'"bye"' in asyncio.run(run())[-1]


def test_what_nobody_fetches_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hubs, "MAX_TOLD", 100)
    ear = hubs._Ear()
    for index in range(1000):
        ear.on_events([Event(What.FIRST_TOKEN, 0.0, index, "x")], None)
        assert len(ear.told) <= 100
    _, lost = ear.empty()
    assert lost
    assert ear.empty() == ([], False)


# ---- the demonstration's load


@pytest.mark.parametrize("longest", [16, 512, 8192])
def test_the_load_is_the_same_each_time_and_fits_the_model(longest: int) -> None:
    requests = plan(longest)
    assert requests == plan(longest)
    assert len(requests) == NUM_REQUESTS
    assert all(one.prompt_tokens + one.output_tokens <= longest for one in requests)
    assert all(one.prompt_tokens > 0 and one.output_tokens > 0 for one in requests)
