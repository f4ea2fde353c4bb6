"""``make soak``: its analysis by hand-made data, and the whole of it for five seconds on a tiny model."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from scripts.soak import analysis, report
from scripts.soak.calls import error_text, read_event, read_received
from scripts.soak.outcome import (
    COMPLETE,
    DRAINING,
    GONE,
    INVALID,
    LEFT,
    OVERLOADED,
    TIMED_OUT,
    UNEXPLAINED,
    Seen,
    classify,
)
from scripts.soak.plan import PROTOCOLS, Bad, Known, Leave, Plan, Planner, checked, mistakes, steady_length
from scripts.soak.watch import BLOCKS, COUNTERS, GAUGES, Sample, parse

ROOT = Path(__file__).resolve().parents[1]
PLAN = Plan("completions", "abc", 8)
GOOD = Seen(status=200, reason="length", text="def", tokens=8, ended=True)
IDLE = dict.fromkeys((*GAUGES, *COUNTERS), 0.0) | dict(zip(BLOCKS, (10.0, 4.0, 6.0), strict=True))


def sample(at: float, rss: float = 1e9, phase: str = "load", **metrics: float) -> Sample:
    return Sample(at, phase, int(rss), 30, 9, IDLE | metrics)


def test_slope_is_that_of_the_line_whatever_a_quarter_of_the_points_do() -> None:
    draw = random.Random(1)
    times = [float(second) for second in range(1000)]
    values = [5e8 + 250.0 * second + draw.gauss(0, 1000) for second in times]
    for place in draw.sample(range(1000), 200):
        values[place] += 3e8
    assert analysis.slope(times, values) == pytest.approx(250.0, rel=0.05)
    assert analysis.slope([1.0], [7.0]) == analysis.slope([], []) == analysis.slope([1.0, 1.0], [2.0, 9.0]) == 0


def test_a_leak_is_one_and_the_warm_up_before_it_is_none() -> None:
    def held(leak_per_s: float) -> bool:
        grown = [sample(at, 5e8 + 1e8 * min(at, 300) / 300 + leak_per_s * at) for at in range(0, 1800, 5)]
        return analysis._memory_verdict(grown).holds

    assert held(0)
    assert held(5_000)  # 4.5 MB of 600 in the second half
    assert not held(10_000)
    assert held(-10_000)
    assert not analysis._memory_verdict([]).holds


def test_identity_finds_the_one_scrape_that_lost_a_request() -> None:
    sound = {
        "requests_admitted_total": 10,
        "requests_finished_total": 5,
        "requests_cancelled_total": 2,
        "requests_live": 3,
    }
    samples = [sample(0, **sound), sample(1, **(sound | {"requests_live": 2}))]
    assert analysis.identity_gap(samples[0].metrics) == 0
    assert analysis._identity_verdict(samples[:1]).holds
    verdict = analysis._identity_verdict(samples)
    assert not verdict.holds
    assert "1 of 2 scrapes; first at 1 s, off by 1" in verdict.text
    assert not analysis._identity_verdict([replace(samples[0], metrics={})]).holds


def test_idle_again_means_every_gauge_and_every_block() -> None:
    def held(**metrics: float) -> list[bool]:
        return [verdict.holds for verdict in analysis._idle_verdicts(sample(0, **metrics))]

    assert held() == [True, True]
    assert held(num_tokens_waiting=1) == [False, True]
    assert held(kv_blocks_free=3) == [True, False]
    assert [verdict.holds for verdict in analysis._idle_verdicts(None)] == [False]


def test_files_and_threads_may_not_creep() -> None:
    def held(half: list[int], after: int) -> bool:
        return analysis._flat_verdict("files", 30, half, after, 8).holds

    assert held([50, 60, 55, 58], 31)
    assert not held([50, 60, 55, 58], 39)
    assert not held([50, 60, 75, 90], 30)


def test_only_the_second_half_of_the_load_counts() -> None:
    samples = [sample(at, phase=phase) for phase, at in [("learn", 0), ("load", 10), ("load", 20), ("load", 30)]]
    assert [item.at for item in analysis.second_half(samples)] == [20, 30]


@pytest.mark.parametrize(
    ("plan", "seen", "outcome"),
    [
        (PLAN, GOOD, COMPLETE),
        (PLAN, replace(GOOD, reason="timeout"), UNEXPLAINED),
        (PLAN, replace(GOOD, ended=False), UNEXPLAINED),
        (PLAN, replace(GOOD, tokens=9), UNEXPLAINED),
        (PLAN, replace(GOOD, tokens=0), UNEXPLAINED),
        (PLAN, replace(GOOD, error="the engine failed"), UNEXPLAINED),
        (replace(PLAN, timeout_s=1), replace(GOOD, reason="timeout"), TIMED_OUT),
        (replace(PLAN, timeout_s=1), Seen(status=504, error="the time is up"), TIMED_OUT),
        (PLAN, Seen(status=504, error="the time is up"), UNEXPLAINED),
        (PLAN, Seen(status=429, error="full", retry_after="2"), OVERLOADED),
        (PLAN, Seen(status=429, error="full"), UNEXPLAINED),
        (PLAN, Seen(status=429, error="full", retry_after="0"), UNEXPLAINED),
        (PLAN, Seen(status=503, error="no", retry_after="2"), UNEXPLAINED),
        (PLAN, Seen(status=503, error="no", retry_after="2", stopping=True), DRAINING),
        (PLAN, Seen(status=500, error="oops", stopping=True), UNEXPLAINED),
        (PLAN, Seen(broken="reset"), UNEXPLAINED),
        (PLAN, Seen(broken="reset", stopping=True), GONE),
        (replace(PLAN, leave=Leave("reading", 0, False)), Seen(status=200, left=True), LEFT),
        (replace(PLAN, leave=Leave("waiting", 0, True)), Seen(left=True), LEFT),
        (replace(PLAN, leave=Leave("reading", 0, False)), Seen(status=500, left=True, error="oops"), UNEXPLAINED),
        (replace(PLAN, bad=Bad("x", "/", b"", (400,))), Seen(status=400, error="wrong"), INVALID),
        (replace(PLAN, bad=Bad("x", "/", b"", (400,))), Seen(status=400), UNEXPLAINED),
        (replace(PLAN, bad=Bad("x", "/", b"", (400,))), Seen(status=500, error="oops"), UNEXPLAINED),
        (replace(PLAN, bad=Bad("x", "/", b"", (400,))), GOOD, UNEXPLAINED),
        (replace(PLAN, expected="def"), GOOD, COMPLETE),
        (replace(PLAN, expected="deg"), GOOD, UNEXPLAINED),
        (replace(PLAN, expected="defg", leave=Leave("reading", 0, False)), replace(GOOD, left=True), LEFT),
        (replace(PLAN, expected="xyz", leave=Leave("reading", 0, False)), replace(GOOD, left=True), UNEXPLAINED),
    ],
)
def test_every_outcome_is_explained_or_kept(plan: Plan, seen: Seen, outcome: str) -> None:
    got, why = classify(plan, seen)
    assert got == outcome
    assert bool(why) == (outcome == UNEXPLAINED)


def test_a_scrape_keeps_what_is_judged() -> None:
    text = '# HELP carousel_kv_blocks x\ncarousel_kv_blocks{model_name="m"} 7.0\ncarousel_other{model_name="m"} 1.0\n'
    assert parse(text) == {"kv_blocks": 7.0}


def test_what_a_client_that_left_had_got_is_read() -> None:
    plan = Plan("completions_stream")
    event = b'data: {"choices":[{"text":"ab","finish_reason":null}]}\n\n'
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
    seen = Seen(left=True)
    read_received(plan, head + b"40\r\n" + event + b'\r\n10\r\ndata: {"choices":[{"te', seen)
    assert (seen.status, seen.text) == (200, "ab")
    refused = Seen(left=True)
    read_received(plan, b'HTTP/1.1 429 no\r\nRetry-After: 3\r\n\r\n{"error":{"message":"full"}}', refused)
    assert (refused.status, refused.retry_after, refused.error) == (429, "3", "full")
    nothing = Seen(left=True)
    read_received(plan, b"HTTP/1.1 20", nothing)
    assert nothing.status is None


def test_errors_are_read_in_every_form() -> None:
    assert error_text(b'{"error": "v2"}') == "v2"
    assert error_text(b'{"error": {"message": "openai"}}') == "openai"
    assert error_text(b'{"detail": "x"}') is error_text(b"oops") is None
    seen = Seen()
    read_event(Plan("chat_stream"), b'{"error": {"message": "late"}}', seen)
    assert (seen.error, seen.ended) == ("late", False)


def test_the_mix_has_everything_and_is_drawn_from_the_seed() -> None:
    planner = Planner("m", 3, 400, 2**20)
    planner.known = [Known("abc", 5, "def", False), Known("abd", 5, "deg", True)]
    plans = [planner.any() for _ in range(3000)]
    assert {plan.protocol for plan in plans} == {*PROTOCOLS, "http"}
    assert {plan.bad.name for plan in plans if plan.bad} >= {bad.name for bad in mistakes("m", 2**20)}
    assert {(plan.leave.where, plan.leave.reset) for plan in plans if plan.leave} == {
        (where, reset) for where in ("sending", "waiting", "reading") for reset in (False, True)
    }
    assert any(plan.timeout_s for plan in plans)
    assert all(plan.greedy for plan in plans if plan.expected is not None)
    assert {plan.expected for plan in plans if plan.expected and plan.protocol.startswith("chat")} == {"deg"}
    assert max(len(plan.prompt) for plan in plans) <= 400
    again = Planner("m", 3, 400, 2**20)
    again.known = planner.known
    assert [again.any() for _ in range(100)] == plans[:100]


def test_greedy_texts_are_compared_only_as_far_as_rounding_cannot_matter() -> None:
    assert steady_length([1.0, 0.5, 0.01, 2.0], 0.05) == 2
    assert steady_length([1.0, 0.5], 0.05) == 2
    plan = checked(Plan("v1", "abc", 48), Known("xyz", 5, "def", False))
    assert (plan.prompt, plan.max_tokens, plan.expected, plan.greedy) == ("xyz", 5, "def", True)


def test_a_sparkline_shows_the_peaks() -> None:
    assert report.sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert report.sparkline([1.0] * 7 + [9.0], 4) == "▁▁▁█"
    assert report.sparkline([5.0, 5.0]) == "▁▁"
    assert report.sparkline([]) == ""


def test_five_seconds_of_it_hold_every_verdict(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "scripts.soak", "--tiny", "--minutes", str(5 / 60), "--saturate-seconds", "1"]
    command += ["--scrape-seconds", "0.2", "--drain-seconds", "10", "--log", str(tmp_path / "log")]
    command += ["--json", str(tmp_path / "soak.json"), "--report", str(tmp_path / "docs" / "soak.md")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": "predictor:kernels:."}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    result = json.loads((tmp_path / "soak.json").read_text())
    broken = {verdict["name"] for verdict in result["verdicts"] if not verdict["holds"]}
    assert broken <= {"the load was offered"}, done.stderr  # which is the machine's, not the server's
    assert done.returncode == (1 if broken else 0), done.stderr
    assert set(result["counts"]) == {*PROTOCOLS, "http"}
    assert result["totals"][COMPLETE] > 50
    assert result["totals"][OVERLOADED] > 0
    assert result["unexplained"] == result["differing"] == 0
    page = (tmp_path / "docs" / "soak.md").read_text()
    assert ("NOT all verdicts hold." if broken else "All verdicts hold.") in page
    assert str(tmp_path) not in page + json.dumps(result)


def test_a_server_that_leaves_is_not_a_soak(tmp_path: Path) -> None:
    from scripts.soak.server import Server, SoakError

    with (
        (tmp_path / "log").open("wb") as log,
        Server(["--model", str(tmp_path / "nothing")], log) as server,
        pytest.raises(SoakError, match="left with 2 before it was ready"),
    ):
        server.wait_ready()


def test_make_soak_says_how_long() -> None:
    done = subprocess.run(
        ["make", "-n", "soak", "MINUTES=7"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert re.search(r"-m scripts\.soak --minutes 7\b", done)
