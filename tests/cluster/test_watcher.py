"""What is served from memory: last good values for a bounded time, silence, activity, two replicas that agree."""

from __future__ import annotations

import asyncio
import logging

import pytest
from cluster_fakes import BUSY, IDLE, Clock, FakePod, FakePods, pod, running, until
from hypothesis import given, settings
from hypothesis import strategies as st

from carousel.cluster.demand import Fleet, Held, PodLoad, Targets, total
from carousel.cluster.outside import Activation, Outside
from carousel.cluster.readings import Readings
from carousel.cluster.watcher import NoReading, Watcher

REQUESTS = Targets("requests", requests=10.0)


class FakeReadings:
    """Loads without pods."""

    def __init__(self) -> None:
        self.loads: list[PodLoad] = []
        self.silent = 0
        self.served_at: float | None = None
        self.failures = 0

    async def collect(self, pods: object) -> None:
        pass

    def fleet(self, pods: object, held: Held) -> Fleet:
        return total(self.loads, self.silent, held)


class Stage:
    """A watcher of which everything around it is scripted."""

    def __init__(self, window_s: float = 60.0, stale_s: float = 30.0) -> None:
        self.clock, self.pods, self.readings = Clock(), FakePods(), FakeReadings()
        self.outside = Outside(Activation(self.clock), clock=self.clock)
        self.watcher = Watcher(
            self.pods,
            self.readings,  # type: ignore[arg-type]
            self.outside,
            interval_s=2.0,
            stale_s=stale_s,
            window_s=window_s,
            idle_s=20.0,
            clock=self.clock,
        )

    async def look(self, *requests: float, seconds: float = 2.0) -> None:
        self.clock.now += seconds
        self.readings.loads = [PodLoad(requests_running=number) for number in requests]
        await self.watcher.look()


async def test_before_the_first_look_there_is_no_value() -> None:
    stage = Stage()
    with pytest.raises(NoReading, match="no look"):
        stage.watcher.value(REQUESTS)
    with pytest.raises(NoReading):
        stage.watcher.active()


async def test_out_at_once_and_in_after_the_window() -> None:
    stage = Stage(window_s=60)
    for _ in range(31):
        await stage.look(5, 5)
    assert stage.watcher.value(REQUESTS) == 10
    await stage.look(25, 25)
    assert stage.watcher.value(REQUESTS) == 50
    for _ in range(29):
        await stage.look(1, 0)
    assert stage.watcher.value(REQUESTS) == 50
    await stage.look(1, 0)
    await stage.look(1, 0)
    assert stage.watcher.value(REQUESTS) == 1


async def test_a_replica_that_has_just_started_does_not_vote_for_fewer_pods() -> None:
    stage = Stage(window_s=60)
    await stage.look(0, 0, 0)
    assert stage.watcher.value(REQUESTS) == 30
    await stage.look(90, 0, 0)
    assert stage.watcher.value(REQUESTS) == 90
    for _ in range(31):
        await stage.look(0, 0, 0)
    assert stage.watcher.value(REQUESTS) == 0


@settings(deadline=None, max_examples=20)
@given(st.lists(st.lists(st.integers(0, 40), max_size=5), min_size=32, max_size=50), st.integers(0, 31))
def test_two_replicas_give_the_same_answer_once_they_have_watched_a_window(loads: list[list[int]], late: int) -> None:
    async def compare() -> None:
        old, young = Stage(window_s=40), Stage(window_s=40)
        for i, numbers in enumerate(loads):
            await old.look(*numbers)
            if i < late:
                young.clock.now += 2.0
                continue
            await young.look(*numbers)
            assert young.watcher.active() == old.watcher.active() or i < late + 11
            if i - late >= 21:
                assert young.watcher.value(REQUESTS) == old.watcher.value(REQUESTS)
            else:
                assert young.watcher.value(REQUESTS) >= 10 * len(numbers)

    asyncio.run(compare())


async def test_new_targets_know_the_past_at_once() -> None:
    stage = Stage(window_s=60)
    for _ in range(31):
        await stage.look(40)
    await stage.look(1)
    assert stage.watcher.value(Targets("requests", requests=7.0)) == 40
    for i in range(40):
        stage.watcher.value(Targets("requests", requests=100.0 + i))
    assert len(stage.watcher._dampers) <= 16


@settings(deadline=None, max_examples=20)
@given(st.floats(1, 100), st.lists(st.floats(0.1, 40), min_size=1, max_size=20))
def test_the_last_good_value_is_served_for_a_bounded_time(stale_s: float, gaps: list[float]) -> None:
    async def lose_everything() -> None:
        stage = Stage(window_s=0, stale_s=stale_s)
        await stage.look(20)
        good = stage.clock.now
        stage.readings.silent = 1
        for gap in gaps:
            await stage.look(seconds=gap)
            if stage.clock.now - good <= stale_s:
                assert stage.watcher.value(REQUESTS) == 20
            else:
                with pytest.raises(NoReading, match="none of 1 ready pods"):
                    stage.watcher.value(REQUESTS)
                if stage.clock.now - good > 20:
                    with pytest.raises(NoReading):
                        stage.watcher.active()

    asyncio.run(lose_everything())


async def test_an_old_list_of_pods_is_an_error_that_says_why() -> None:
    stage = Stage(stale_s=30)
    await stage.look(5)
    stage.pods.stale_s, stage.pods.problem = 31.0, "list of pods: HTTP 403: no"
    for _ in range(20):
        await stage.look(5)
    with pytest.raises(NoReading, match=r"list of pods is 31 s old: list of pods: HTTP 403: no"):
        stage.watcher.value(REQUESTS)
    stage.pods.stale_s = 0.0
    await stage.look(5)
    assert stage.watcher.value(REQUESTS) == 10.0


async def test_active_while_there_are_requests_and_a_while_after() -> None:
    stage = Stage()
    await stage.look(0)
    assert not stage.watcher.active()
    await stage.look(1)
    assert stage.watcher.active()
    await stage.look(0, seconds=19)
    assert stage.watcher.active()
    await stage.look(0, seconds=2)
    assert not stage.watcher.active()
    # A request that came and went between two looks.
    stage.readings.served_at = stage.clock.now - 1
    assert stage.watcher.active()


async def test_what_is_held_or_asked_for_wakes_even_when_nothing_is_known() -> None:
    stage = Stage()
    stage.outside.activation.hold(1, 400)
    assert stage.watcher.active()
    await stage.look()
    assert stage.watcher.value(REQUESTS) == 1
    stage.outside.activation.hold(-1, -400)
    stage.outside.activation.ask_for(30)
    assert stage.watcher.active()
    await stage.look(seconds=31)
    assert not stage.watcher.active()


async def test_changes_are_pushed() -> None:
    stage = Stage()
    await stage.look(0)
    waiting = asyncio.ensure_future(stage.watcher.next_change(False))
    await asyncio.sleep(0)
    await stage.look(3)
    assert await asyncio.wait_for(waiting, 5) is True


# --- readings, of pods that answer over HTTP


def readings(port: int, clock: Clock, timeout_s: float = 0.3) -> Readings:
    return Readings(port, timeout_s, stale_s=30.0, clock=clock)


async def test_a_pod_that_stops_answering_counts_as_it_did_then_as_itself(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock = Clock()
    async with FakePod(BUSY) as server:
        known, pods = readings(server.port, clock), [pod("a")]
        await known.collect(pods)
        assert known.fleet(pods, Held()).requests_running == 8
        for trouble in ("hang", "error", "garbage", "no load"):
            server.hang = trouble == "hang"
            server.status = 500 if trouble == "error" else 200
            server.load = {"hang": BUSY, "error": BUSY, "garbage": "<html>", "no load": {"x": 1}}[trouble]
            await known.collect(pods)
            assert known.fleet(pods, Held()).silent == 0
        clock.now += 31
        fleet = known.fleet(pods, Held())
        assert (fleet.ready, fleet.silent, fleet.requests_running) == (1, 1, 0)
        assert known.failures == 4
        server.load, server.status, server.hang = dict(IDLE), 200, False
        await known.collect(pods)
        assert known.fleet(pods, Held()) == total([PodLoad(admitted=40.0)])
        await known.close()
    assert sum(record.levelno == logging.WARNING for record in caplog.records) == 1


async def test_pods_that_are_gone_are_forgotten_and_new_ones_under_the_old_name_are_new() -> None:
    clock = Clock()
    async with FakePod(BUSY) as server:
        known = readings(server.port, clock)
        first = pod("a")
        again = type(first)("uid-other", "a", first.address, True)
        await known.collect([first, pod("b", ready=False)])
        assert server.asked == 1
        assert known.load_of(first) is not None
        assert known.load_of(again) is None
        await known.collect([again])
        assert known.load_of(first) is None
        await known.close()


async def test_requests_between_two_looks_are_noticed_by_the_count() -> None:
    clock = Clock()
    async with FakePod(IDLE) as server:
        known, pods = readings(server.port, clock), [pod("a")]
        await known.collect(pods)
        await known.collect(pods)
        assert known.served_at is None
        server.load["requests_admitted"] += 1
        clock.now += 2
        await known.collect(pods)
        assert known.served_at == clock.now
        await known.close()


# --- replicas of the scaler


async def test_replicas_tell_each_other_what_they_hold() -> None:
    clock = Clock()
    one, other = Outside(Activation(clock), clock=clock), Outside(Activation(clock), clock=clock)
    one.activation.hold(3, 400)
    news = []
    other.on_change = lambda: news.append(1)
    other.learn(one.state())
    assert other.held() == Held(3, 100)
    assert news
    one.learn(one.state())
    assert one.held() == Held(3, 100), "its own echo counts nothing"
    for nonsense in (
        None,
        [],
        {"identity": "x"},
        {**one.state(), "held_requests": "many"},
        {**one.state(), "identity": "y", "held_requests": -5},
    ):
        other.learn(nonsense)
    assert other.held().requests == 3
    clock.now += 10
    assert other.held() == Held(), "a replica that is not heard of any more holds nothing"
    one.activation.ask_for(100)
    other.learn(one.state())
    clock.now += 50
    assert other.activated(), "what was asked for survives the one that was asked"
    clock.now += 60
    assert not other.activated()


async def test_a_look_follows_at_once_when_something_happens() -> None:
    stage = Stage()
    stage.watcher._interval_s = 30.0
    async with running(stage.watcher.run()):
        await until(lambda: stage.watcher.looks == 1)
        stage.watcher.poke()
        await until(lambda: stage.watcher.looks == 2)
