"""The record of a run: who had which seat when, step by step, and every request."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.engine.tiny import started_engine
from tests.standalone_fakes import Factory

from carousel.bench import inprocess, record
from carousel.bench.command import main
from carousel.bench.measure import summary
from carousel.bench.record import GAP_S, Recorder
from carousel.bench.workload import WorkItem, Workload, WorkloadError, headers_of, load_workload
from carousel.engine.timeline import Seat, SeatUse, StepRecord

LENGTHS = ((20, 12), (5, 3), (33, 1), (7, 25), (40, 6), (12, 9))


def items(**more: Any) -> tuple[WorkItem, ...]:
    return tuple(
        WorkItem(f"r{place}", "", tuple(range(1 + place, 1 + place + prompt)), output, 1.0, **more)
        for place, (prompt, output) in enumerate(LENGTHS)
    )


def recorded(**settings: Any) -> dict[str, Any]:
    """Figures of a run on the real tiny engine."""
    engine = started_engine(max_batch_sequences=3, prefix_caching=False, **settings)
    try:
        workload = Workload("lengths", items(tenant="gold", priority=2, deadline=9.0, group="gold"))
        return asyncio.run(inprocess.run(engine, workload, rate=math.inf, keep_record=True))
    finally:
        engine.stop()


def tokens_by_use(seats: list[list[Any]]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for _, _, spans in seats:
        for use, _, _, tokens in spans:
            counts[use] += tokens
    return counts


class TestSeats:
    @pytest.mark.parametrize("batching", ["continuous", "static"])
    def test_they_hold_what_the_steps_computed(self, batching: str) -> None:
        found = recorded(batching=batching)
        steps, seats = found["record"]["steps"], found["record"]["seats"]
        counts = tokens_by_use(seats)
        for use in ("prefill", "decode", "idle"):
            assert counts[use] == sum(steps[use])
        assert counts["prefill"] == sum(prompt for prompt, _ in LENGTHS)
        assert counts["decode"] == sum(output - 1 for _, output in LENGTHS)  # the first comes out of the prompt
        assert (counts["idle"] > 0) == (batching == "static")
        assert found["steps"] == len(steps["start"])

    def test_a_seat_has_one_sequence_at_a_time(self) -> None:
        seats = recorded()["record"]["seats"]
        assert {name for _, name, _ in seats} == {item.id for item in items()}
        assert {seat for seat, _, _ in seats} == {0, 1, 2}
        for number in range(3):
            stays = sorted((spans[0][1], spans[-1][2]) for seat, _, spans in seats if seat == number)
            assert all(end <= begin + 2e-4 for (_, end), (begin, _) in itertools.pairwise(stays))

    def test_those_of_a_static_group_leave_together(self) -> None:
        seats = recorded(batching="static")["record"]["seats"]
        stays = sorted((spans[0][1], spans[-1][2]) for _, _, spans in seats)
        assert len({end for _, end in stays}) < len(stays)
        for (_, first_end), (begin, end) in itertools.pairwise(stays):
            assert end == first_end or begin >= first_end - 2e-4, "nobody joins a group that has begun to leave"

    def test_nobody_looks_when_nobody_asked(self) -> None:
        engine = started_engine()
        try:
            found = asyncio.run(inprocess.run(engine, Workload("lengths", items()), rate=math.inf))
            assert "record" not in found
            assert not any(step.seats for step in engine.timeline.steps)
        finally:
            engine.stop()

    def test_a_preempted_sequence_loses_its_seat(self) -> None:
        recorder = Recorder(origin=0.0)
        uses = ({"a": SeatUse.PREFILL}, {"a": SeatUse.DECODE}, {"a": SeatUse.LOST, "b": SeatUse.PREFILL})
        for place, step in enumerate([*uses, {"b": SeatUse.DECODE}, {"a": SeatUse.PREFILL}]):
            recorder.on_step(a_step(place, *(Seat(name, 0, use, 1) for name, use in step.items())), [])
        seats = recorder.seats({"a": "first"})
        assert [(seat, name, [(use, start) for use, start, _, _ in spans]) for seat, name, spans in seats] == [
            (0, "first", [("prefill", 0.0), ("decode", 1.0)]),
            (0, "b", [("prefill", 2.0), ("decode", 3.0)]),
            (0, "first", [("prefill", 4.0)]),
        ]

    def test_steps_without_a_sequence_are_a_gap_in_its_stay(self) -> None:
        recorder = Recorder(origin=0.0)
        for place, names in enumerate(["a", "ab", "b", "ab"]):
            recorder.on_step(a_step(place, *(Seat(name, 0, SeatUse.PREFILL, 4) for name in names)), [])
        spans = {name: spans for _, name, spans in recorder.seats({})}
        assert spans["a"] == [["prefill", 0.0, 2.0, 8], ["prefill", 3.0, 4.0, 4]]
        assert spans["b"] == [["prefill", 1.0, 4.0, 12]]


def a_step(place: int, *seats: Seat, waiting: int = 0, kv: float = 0.5) -> StepRecord:
    counts = (0, 0, 0, max(1, len(seats)), 4, 1, 0, 1, 0, 1, waiting)
    return StepRecord(place, float(place), 1.0, *counts, kv_cache_usage=kv, seats=seats)


class TestSteps:
    def test_very_many_are_summed_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(record, "MAX_STEPS", 4)
        recorder = Recorder(origin=0.0)
        for place in range(9):
            recorder.on_step(a_step(place, waiting=place), [])
        columns = recorder.step_columns()
        assert columns["start"] == [0.0, 3.0, 6.0]
        assert columns["duration"] == [3.0, 3.0, 3.0]
        assert columns["prefill"] == [12, 12, 12]
        assert columns["waiting"] == [1.0, 4.0, 7.0]
        assert columns["kv"] == [0.5] * 3

    def test_kv_memory_fills_and_empties(self) -> None:
        steps = recorded()["record"]["steps"]
        assert 0 < max(steps["kv"]) < 1
        assert steps["kv"][-1] == 0


class TestRequests:
    def test_columns_tell_what_the_figures_sum_up(self) -> None:
        found = recorded()
        requests = found["record"]["requests"]
        assert requests["id"] == [f"r{place}" for place in range(len(LENGTHS))]
        assert requests["output_tokens"] == [output for _, output in LENGTHS]
        assert [len(gaps) + 1 for gaps in requests["gaps"]] == requests["output_tokens"]
        assert summary(requests["ttft"])["p99"] == pytest.approx(found["ttft"]["p99"], abs=1e-4)
        gaps = [gap * GAP_S for row in requests["gaps"] for gap in row]
        assert summary(gaps)["mean"] == pytest.approx(found["itl"]["mean"], abs=1e-4)
        assert (requests["tenant"][0], requests["priority"][0], requests["deadline"][0]) == ("gold", 2, 9.0)

    def test_gaps_are_left_out_where_they_are_too_many(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(record, "MAX_GAPS", 10)
        assert "gaps" not in recorded()["record"]["requests"]


class TestCommand:
    def file(self, folder: Path) -> str:
        path = folder / "w.json"
        entries = [{"prompt_ids": [1, 2], "output_len": 3, "tenant": "gold"}, {"prompt_ids": [3], "output_len": 2}]
        path.write_text(json.dumps(entries))
        return str(path)

    def test_the_json_has_it_in_each_run_unless_told_otherwise(self, tmp_path: Path) -> None:
        target, argv = tmp_path / "r.json", ["--workload", self.file(tmp_path), "--json", str(tmp_path / "r.json")]
        assert main(argv, {}, Factory()) == 0
        written = json.loads(target.read_text())
        assert written["record"]["requests"]["tenant"] == ["gold", None]
        assert '"output_tokens": [3,2],' in [
            line.strip() for line in target.read_text().splitlines()
        ]  # a line a column
        assert main([*argv, "--repeat", "2"], {}, Factory()) == 0
        written = json.loads(target.read_text())
        assert "record" not in written
        assert [run["record"]["version"] for run in written["runs"]] == [1, 1]
        assert main([*argv, "--no-record"], {}, Factory()) == 0
        assert "record" not in json.loads(target.read_text())

    def test_requests_go_as_their_tenants(self, tmp_path: Path) -> None:
        factory = Factory()
        main(["--workload", self.file(tmp_path), "--warmup", "0"], {}, factory)
        assert [request.tenant for request in factory.engines[0].requests] == ["gold", ""]


def test_a_workload_may_say_tenant_priority_and_deadline(tmp_path: Path) -> None:
    path = tmp_path / "w.json"
    path.write_text(json.dumps([{"prompt": "a", "output_len": 1, "tenant": "t", "priority": -1, "deadline": 0.5}]))
    (item,) = load_workload(path).items
    wanted = {"x-carousel-tenant": "t", "x-carousel-priority": "-1", "x-carousel-deadline": "0.5"}
    assert headers_of(item) == wanted
    path.write_text(json.dumps([{"prompt": "a", "output_len": 1, "deadline": 0}]))
    with pytest.raises(WorkloadError, match="deadline must be a number of seconds above 0"):
        load_workload(path)
