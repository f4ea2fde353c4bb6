"""The simulator: the HPA as Kubernetes documents it, an engine that conserves requests, the same figures every time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carousel.cluster import simulate_command
from carousel.cluster.demand import Targets
from carousel.cluster.simulate import Hpa, Policy, Rates, Replica, Simulation, simulate
from carousel.cluster.traces import TRACES, Arrival, make_trace
from carousel.options import SettingsError

TEN = Policy("requests", Targets("requests", requests=10.0), hpa_window_s=60.0, highest=20)


def test_hpa_rounds_up_and_leaves_small_excesses_alone() -> None:
    hpa = Hpa(TEN)
    assert hpa.wanted(0, 31, 3) == 3  # 3 % above
    assert hpa.wanted(15, 32.9, 3) == 3  # just within 10 %
    assert hpa.wanted(30, 34, 3) == 4
    assert hpa.wanted(45, 31, 4) == 4  # rounds up
    assert hpa.wanted(60, 0, 0) == 0


def test_hpa_climbs_by_four_pods_or_doubles() -> None:
    hpa = Hpa(TEN)
    assert hpa.wanted(0, 500, 1) == 5
    assert hpa.wanted(15, 500, 5) == 10
    assert hpa.wanted(30, 500, 10) == 20
    assert hpa.wanted(45, 500, 20) == 20  # the bound


def test_hpa_scales_in_to_the_largest_recommendation_of_its_window() -> None:
    hpa = Hpa(TEN)
    assert hpa.wanted(0, 80, 8) == 8
    assert hpa.wanted(15, 40, 8) == 8
    assert hpa.wanted(45, 10, 8) == 8
    assert hpa.wanted(61, 10, 8) == 4
    assert hpa.wanted(90, 0, 4) == 1
    assert hpa.wanted(500, 0, 1) == 1


def test_keda_wakes_at_once_and_sleeps_after_the_cooldown() -> None:
    hpa = Hpa(Policy("requests", TEN.targets, lowest=0, cooldown_s=100))
    assert hpa.activity(0, True, 0) == 1
    assert hpa.activity(50, False, 1) == 1
    assert hpa.activity(99, False, 1) == 1
    assert hpa.activity(101, False, 3) == 3  # the HPA comes first
    assert hpa.activity(101, False, 1) == 0


def test_a_replica_alone_is_as_fast_as_its_rates() -> None:
    replica = Replica(Rates(seats=4, step_s=0.01, sequence_s=0.01, prefill_tokens_per_s=100), 0.0, 0.0)
    replica.take(Arrival(0.0, 200, 50))
    now = 0.0
    while replica.busy:
        now += 0.1
        replica.advance(now)
    ((_, first),) = replica.first_tokens
    assert first == pytest.approx(2.0, abs=0.2)
    assert now == pytest.approx(2.0 + 50 * 0.02, abs=0.3)
    assert replica.load().requests_running == 0
    assert replica.cost == 0


def test_a_replica_reports_its_queue_in_seconds() -> None:
    replica = Replica(Rates(seats=2, step_s=0.02, sequence_s=0.01), 0.0, 0.0)
    for _ in range(12):
        replica.take(Arrival(0.0, 100, 100))
    for tick in range(1, 130):
        replica.advance(tick / 10)
    load = replica.load()
    assert load.occupancy == 1.0
    # Two answers of 100 tokens take 4 s and a bit, so a pair leaves the queue about as often.
    pairs = load.requests_waiting / 2
    assert 0 < load.requests_waiting < 10
    assert load.queue_seconds == pytest.approx(4.3 * pairs, rel=0.45)


@settings(max_examples=8, deadline=None)
@given(st.sampled_from(sorted(TRACES)), st.integers(0, 99), st.sampled_from(["waiting", "requests", "queue-seconds"]))
def test_every_request_gets_its_first_token_and_bounds_hold(name: str, seed: int, signal: str) -> None:
    trace = make_trace(name, 1.0, 90, seed)
    targets = Targets(signal if signal != "waiting" else "requests")
    policy = Policy(signal, targets, lowest=0, highest=4, cooldown_s=30)
    outcome = simulate(trace, policy, startup_s=5, seconds=90)
    assert len(outcome.first_token_s) == outcome.requests == len(trace)
    assert all(seconds >= 0 for seconds in outcome.first_token_s)
    assert outcome.most <= 4
    assert all(0 <= wanted <= 4 for _, wanted, _, _ in outcome.timeline)


def test_the_same_seed_gives_the_same_figures_and_another_other_ones() -> None:
    def run(seed: int) -> tuple[float, list[float]]:
        outcome = simulate(make_trace("bursts", 2.0, 300, seed), TEN, seconds=300)
        return outcome.replica_seconds, outcome.first_token_s

    assert run(3) == run(3)
    assert run(3) != run(4)


def test_the_most_replicas_count_those_that_were_there_before_the_warm_up_ended() -> None:
    trace = make_trace("poisson", 6.0, 120, 1)
    outcome = simulate(trace, TEN, seconds=120, warmup_s=60)
    assert outcome.most == max(wanted for now, wanted, _, _ in outcome.timeline if now >= 60) > 1


def test_constant_load_does_not_flap() -> None:
    trace = make_trace("poisson", 2.0, 600, 5)
    outcome = simulate(trace, Policy("queue-seconds", Targets(), hpa_window_s=300.0), seconds=600, warmup_s=200)
    assert outcome.events <= 3
    assert outcome.missed(5.0) < 0.01


def test_counting_what_waits_alone_costs_more_and_lets_wait_longer() -> None:
    trace = make_trace("poisson", 3.0, 400, 5)
    plain = simulate(trace, Policy("waiting", Targets("requests", requests=2.0)), seconds=400, warmup_s=100)
    ours = simulate(trace, Policy("queue-seconds", Targets()), seconds=400, warmup_s=100)
    assert plain.replica_seconds > 1.5 * ours.replica_seconds
    assert plain.missed(5.0) > 2 * ours.missed(5.0)


def test_from_zero_a_request_waits_for_the_start_and_no_longer() -> None:
    policy = Policy("requests", TEN.targets, lowest=0, cooldown_s=60)
    outcome = simulate([Arrival(10.0, 50, 10)], policy, startup_s=20, seconds=200)
    assert 20 <= outcome.first_token_s[0] <= 23
    assert outcome.timeline[-1][1] == 0
    assert outcome.events == 2


def test_the_idlest_replica_goes() -> None:
    simulation = Simulation([], Policy("requests", TEN.targets, lowest=3), Rates(), 20.0)
    for index, count in enumerate((3, 0, 2)):
        for _ in range(count):
            simulation._replicas[index].take(Arrival(0.0, 100, 100))
    before = list(simulation._replicas)
    simulation._set(0.0, 2)
    assert [replica.leaving for replica in before] == [False, True, False]


@pytest.mark.parametrize("name", sorted(TRACES))
def test_traces_are_ordered_and_near_their_rate(name: str) -> None:
    trace = make_trace(name, 2.0, 3600, 1)
    assert [arrival.at for arrival in trace] == sorted(arrival.at for arrival in trace)
    assert all(16 <= arrival.prompt <= 512 and 8 <= arrival.output <= 256 for arrival in trace)
    expected = {"sparse": 720.0, "bursts": 4230.0, "step": 6400.0, "diurnal": 7560.0}.get(name, 7200.0)
    assert len(trace) == pytest.approx(expected, rel=0.12)


def test_the_command_prints_a_table_and_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"
    words = ["--traces", "step", "--signals", "requests,tokens", "--minutes", "3", "--json", str(path)]
    assert simulate_command.main(words, {"CAROUSEL_ANYTHING": "x"}) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert lines[2].startswith("| step | requests | ")
    rows = json.loads(path.read_text("utf-8"))["rows"]
    assert [row["signal"] for row in rows] == ["requests", "tokens"]
    assert rows[0]["timeline"]
    with pytest.raises(SettingsError, match="--traces: got 'weekly'"):
        simulate_command.main(["--traces", "weekly"], {})
    assert "--startup-seconds" in simulate_command.simulate_help()
