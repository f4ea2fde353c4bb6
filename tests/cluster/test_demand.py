"""The number that KEDA gets: what it adds up, and that damping neither flaps nor sticks."""

from __future__ import annotations

import itertools
import math

import pytest
from cluster_fakes import BUSY, IDLE
from hypothesis import given, settings
from hypothesis import strategies as st

from carousel.cluster.demand import (
    MODES,
    Damper,
    Fleet,
    Held,
    PodLoad,
    Targets,
    UnreadableLoad,
    demand,
    read_load,
    total,
)

LOADS = st.builds(
    PodLoad,
    *[st.integers(0, 10_000).map(float) for _ in range(4)],
    queue_seconds=st.floats(0, 1000),
    occupancy=st.floats(0, 1),
)
VALUES = st.floats(0, 1000)


def replicas(targets: Targets, fleet: Fleet) -> int:
    """What the HPA makes of it (``AverageValue``, without its tolerance)."""
    return math.ceil(demand(targets, fleet) / targets.per_replica - 1e-9)


def test_a_full_batch_without_a_queue_keeps_its_replicas_and_some_room() -> None:
    full = PodLoad(requests_running=16, occupancy=1.0)
    assert replicas(Targets(occupancy=0.8), total([full] * 4)) == 5
    assert replicas(Targets(occupancy=1.0), total([full] * 4)) == 4


def test_an_idle_fleet_asks_for_nothing() -> None:
    for mode in MODES:
        assert demand(Targets(scale_on=mode), total([read_load(IDLE)] * 3)) == 0


def test_a_backlog_asks_for_what_drains_it_within_the_target() -> None:
    # 3 pods, each with 20 s of queue at its own rate r: 60 r tokens, which 12 more pods drain in 5 s.
    loads = [PodLoad(requests_waiting=9, queue_seconds=20.0, occupancy=1.0)] * 3
    assert replicas(Targets(wait_s=5.0, occupancy=1.0), total(loads)) == 3 + 12


def test_sums_by_mode() -> None:
    fleet = total([read_load(BUSY), read_load(IDLE)], held=Held(2, 100))
    assert demand(Targets("requests"), fleet) == 8 + 4 + 2
    assert demand(Targets("tokens"), fleet) == 1600 + 400 + 100
    wanted = 3.0 + 5.0 * 0.5 / 0.8 + 5.0 * 2 / 10
    assert demand(Targets("queue-seconds", wait_s=5, occupancy=0.8), fleet) == pytest.approx(wanted)
    assert fleet.live == 14


def test_occupancy_is_the_tighter_of_seats_and_memory() -> None:
    assert read_load(BUSY).occupancy == 0.5
    assert read_load({**BUSY, "kv_cache_usage": 0.9}).occupancy == 0.9
    assert read_load({**BUSY, "sequences_running": 99}).occupancy == 1.0


@pytest.mark.parametrize("mode", MODES)
@settings(deadline=None, max_examples=60)
@given(loads=st.lists(LOADS, max_size=6), more=LOADS)
def test_more_load_never_asks_for_less(mode: str, loads: list[PodLoad], more: PodLoad) -> None:
    targets = Targets(mode)
    assert demand(targets, total([*loads, more])) >= demand(targets, total(loads))


@pytest.mark.parametrize("mode", MODES)
@settings(deadline=None, max_examples=60)
@given(loads=st.lists(LOADS, min_size=1, max_size=6))
def test_a_pod_that_falls_silent_is_worth_itself(mode: str, loads: list[PodLoad]) -> None:
    targets = Targets(mode)
    rest, silent = total(loads[1:]), total(loads[1:], silent=1)
    assert demand(targets, silent) == pytest.approx(demand(targets, rest) + targets.per_replica)
    assert silent.ready == len(loads)


@pytest.mark.parametrize(
    "found",
    [
        None,
        [],
        {},
        {"requests_running": "3"},
        {"requests_running": True},
        {"requests_running": -1},
        {"requests_running": 1, "queue_seconds": math.inf},
        {"requests_running": 1, "tokens_waiting": math.nan},
    ],
    ids=str,
)
def test_what_is_no_load_is_refused(found: object) -> None:
    with pytest.raises(UnreadableLoad):
        read_load(found)


# --- damping


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.floats(0.1, 30), VALUES), min_size=1, max_size=60), st.floats(0, 120))
def test_the_value_is_the_largest_of_the_window(steps: list[tuple[float, float]], window_s: float) -> None:
    damper, now, seen = Damper(window_s), 0.0, []
    for gap, value in steps:
        now += gap
        damper.add(now, value)
        seen.append((now, value))
        shown = damper.value(now)
        assert shown == max(known for when, known in seen if now - when <= window_s)
        assert shown >= value  # scale-out is never delayed


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(0, 1), min_size=100, max_size=100), st.floats(1, 20), st.floats(0, 0.4))
def test_constant_load_with_noise_does_not_flap(noise: list[float], level: float, width: float) -> None:
    """Readings that scatter around a level, looked at by an HPA every 15 s: at most the climb to the top of the noise,
    and no step down before the window has passed without one.
    """
    damper, asked = Damper(60.0), []
    for i, share in enumerate(noise):
        now = 2.0 * i
        damper.add(now, level + width * (share - 0.5))
        if i % 7 == 0:
            asked.append((now, math.ceil(damper.value(now) or 0)))
    falls = [now for (_, before), (now, after) in itertools.pairwise(asked) if after < before]
    assert all(later - earlier > 60.0 - 15.0 for earlier, later in itertools.pairwise(falls))
    assert {replicas for _, replicas in asked} <= {math.ceil(level + width * (share - 0.5)) for share in noise}
    if len({math.ceil(level + width * (share - 0.5)) for share in noise}) == 1:
        assert len({replicas for _, replicas in asked}) == 1


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(VALUES, VALUES), min_size=1, max_size=40), st.floats(0, 60))
def test_damping_is_monotone(pairs: list[tuple[float, float]], window_s: float) -> None:
    low, high = Damper(window_s), Damper(window_s)
    for i, (one, other) in enumerate(pairs):
        low.add(2.0 * i, min(one, other))
        high.add(2.0 * i, max(one, other))
        assert (low.value(2.0 * i) or 0) <= (high.value(2.0 * i) or 0)


@settings(deadline=None, max_examples=60)
@given(VALUES, VALUES, st.floats(1, 100))
def test_nothing_is_remembered_longer_than_the_window(peak: float, after: float, window_s: float) -> None:
    damper = Damper(window_s)
    damper.add(0.0, peak)
    damper.add(window_s + 0.01, after)
    assert damper.value(window_s + 0.01) == after
    assert damper.value(window_s * 50) == after


def test_a_damper_knows_nothing_before_the_first_reading_and_refuses_the_past() -> None:
    damper = Damper(10)
    assert damper.value(5.0) is None
    damper.add(7.0, 1.0)
    with pytest.raises(ValueError, match="before"):
        damper.add(6.0, 1.0)
