"""``make compare``: the configuration, what is measured again and what is not, and the estimate of the time left."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
from loadtest.compare import CONFIGURATION, Cell, Comparison, ConfigurationError, EngineMeasure, cells_of
from loadtest.sources import Limits, WorkloadError, open_workload
from tests.standalone_fakes import Factory

from carousel.config import load_settings
from loadtest import compare

SMALL = {
    "settings": {"prefix_caching": False},
    "experiment": [
        {
            "name": "one", "workload": "uniform:8,4", "requests": 3, "rates": [50.0, math.inf], "rounds": 2,
            "contestants": {"static": {"batching": "static"}, "continuous": {}},
        },
        {
            "name": "two", "workload": "tenants", "requests": 2, "goodput": "ttft_p99=10s",
            "contestants": {"fair": {"policy": "fair", "tenant_weights": "a=2"}},
        },
    ],
}  # fmt: skip


class Clock:
    """Time that passes only while something is measured: twice as long as guessed."""

    def __init__(self) -> None:
        self.now = 0.0
        self.measured: list[str] = []

    def __call__(self) -> float:
        return self.now

    def measure(self, cell: Cell) -> dict[str, Any]:
        self.now += 2 * cell.guess_s
        self.measured.append(cell.file)
        return {"label": cell.label}


def comparison(folder: Path, clock: Clock, configuration: dict[str, Any] = SMALL) -> Comparison:
    return Comparison(cells_of(configuration), folder, clock.measure, say=lambda line: None, clock=clock)


class TestCells:
    def test_contestants_take_turns_in_every_round(self) -> None:
        cells = cells_of(SMALL)
        assert [(cell.label, cell.rate, cell.round) for cell in cells[:4]] == [
            ("static", 50.0, 0), ("continuous", 50.0, 0), ("static", 50.0, 1), ("continuous", 50.0, 1),
        ]  # fmt: skip
        assert len(cells) == 9
        assert len({cell.file for cell in cells}) == 9
        assert [cell.settings.batching for cell in cells[:2]] == ["static", "continuous"]
        assert all(cell.settings.prefix_caching is False for cell in cells)
        assert cells[-1].settings.tenant_weights == {"a": 2.0}

    def test_the_configuration_that_ships_is_right(self) -> None:
        configuration = compare.read_configuration(CONFIGURATION)
        cells = cells_of(configuration)
        assert {cell.settings.policy for cell in cells} == {"fcfs", "priority", "fair", "deadline"}
        assert {cell.settings.batching for cell in cells} == {"static", "continuous"}
        assert {cell.settings.prefix_caching for cell in cells} == {True, False}
        assert {cell.settings.target_step_ms for cell in cells} == {0, 200}
        assert compare.LIMIT_LIST.parse(configuration["limits"])

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"workload": "nonsense"}, "experiment one: --workload nonsense"),
            ({"workload": "uniform:8"}, r"allowed is uniform:PROMPT,OUTPUT"),
            ({"settings": {"max_batch_sequences": 0}}, "--max-batch-sequences"),
            ({"settings": {"max_seats": 3}}, "--max-seats"),
            ({"goodput": "ttft=1", "rates": []}, "experiment one: goodput 'ttft=1'"),
        ],
    )
    def test_what_is_wrong_is_named(self, change: dict[str, Any], message: str) -> None:
        configuration = copy.deepcopy(SMALL)
        configuration["experiment"][0] |= change
        with pytest.raises(ConfigurationError, match=message):
            cells_of(configuration)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "at least one"),
            ("colour = 1", "unknown colour; allowed are experiment, limits"),
            ("[[experiment]]\nname = 'x'\nseats = 3", "experiment x: unknown seats"),
            ("[[experiment]]\nname = 'x'\nworkload = 'chats'\nrates = [1]", "contestants is missing"),
            ("[[experiment]]\nname = 'x'\nworkload = 'chats'\ncontestants.a = {b = 1}", "either rates or goodput"),
            ("[[experiment]]\nname='x'\nworkload='chats'\ncontestants.a={b=1}\nrates=[0]", "numbers above 0"),
            ("nonsense", "c.toml"),
        ],
    )
    def test_and_so_is_what_is_wrong_in_the_file(self, tmp_path: Path, text: str, message: str) -> None:
        (tmp_path / "c.toml").write_text(text)
        with pytest.raises(ConfigurationError, match=message):
            compare.read_configuration(tmp_path / "c.toml")


class TestResuming:
    def test_what_was_measured_is_not_measured_again(self, tmp_path: Path) -> None:
        clock = Clock()
        assert comparison(tmp_path, clock).run()
        assert len(clock.measured) == 9
        again = comparison(tmp_path, clock)
        assert again.left == []
        assert again.run()
        assert len(clock.measured) == 9

    def test_but_for_what_was_changed_or_broken_since(self, tmp_path: Path) -> None:
        clock = Clock()
        comparison(tmp_path, clock).run()
        changed = copy.deepcopy(SMALL)
        changed["experiment"][1]["contestants"]["fair"]["tenant_weights"] = "a=3"
        broken = cells_of(SMALL)[0].file
        (tmp_path / broken).write_text('{"digest": ')  # stopped while it wrote
        assert {cell.file for cell in comparison(tmp_path, clock, changed).left} == {broken, "two-fair-goodput-0.json"}

    def test_nothing_begins_that_would_not_end_in_time(self, tmp_path: Path) -> None:
        clock = Clock()
        budget = 2 * max(cell.guess_s for cell in cells_of(SMALL))
        turns = 1
        while not comparison(tmp_path, clock).run(budget):
            assert clock.now <= turns * budget
            turns += 1
            assert turns < 10
        assert turns > 1
        assert sorted(clock.measured) == sorted(cell.file for cell in cells_of(SMALL))

    def test_the_time_left_is_learnt_from_what_was_measured(self, tmp_path: Path) -> None:
        clock = Clock()
        first = comparison(tmp_path, clock)
        assert not first.run(first.cells[0].guess_s / 2)
        assert not clock.measured
        first.run(2 * first.cells[0].guess_s)  # one measurement, which takes twice its guess
        assert len(clock.measured) == 1
        assert first.seconds_left() == pytest.approx(2 * sum(cell.guess_s for cell in first.left))


class TestMeasuring:
    def test_runs_become_a_report(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
        factory = Factory()
        monkeypatch.setattr(compare, "engines", factory)
        text = """
            title = "T"
            limits = "ttft=1s"
            [[experiment]]
            name = "Static or not"
            about = "See."
            workload = "uniform:8,4"
            requests = 3
            rates = [200.0, inf]
            contestants = { static = { batching = "static" }, continuous = { max_batch_sequences = 3 } }
            [[experiment]]
            name = "Goodput"
            workload = "uniform:8,2"
            requests = 2
            goodput = "ttft_p99=60s"
            contestants = { only = { prefix_caching = true } }
        """
        (tmp_path / "c.toml").write_text(text)
        argv = ["--config", str(tmp_path / "c.toml"), "--out", str(tmp_path / "out")]
        assert compare.main(argv) == 0
        assert factory.loads == 1
        assert all(engine.stopped for engine in factory.engines)
        runs = [json.loads(path.read_text()) for path in sorted((tmp_path / "out" / "runs").glob("*.json"))]
        assert [(run["experiment"], run["label"], run["rate"]) for run in runs if run["label"] != "only"] == [
            ("Static or not", label, rate) for label in ("continuous", "static") for rate in (200.0, "inf")
        ]
        assert all(run["record"]["requests"]["id"] == ["0", "1", "2"] for run in runs if run["label"] != "only")
        page = (tmp_path / "out" / "report.html").read_text()
        assert "Static or not" in page
        assert "goodput, requests/s" in page
        assert "2/5, " in capsys.readouterr().err
        loaded = factory.loads
        assert compare.main([*argv, "--only", "static"]) == 0
        assert factory.loads == loaded, "no model is loaded for nothing"
        assert compare.main([*argv, "--only", "xyz"]) == 1
        assert "no experiment is called so" in capsys.readouterr().err

    def test_a_prefix_cache_begins_empty(self) -> None:
        factory = Factory()
        measure = EngineMeasure(factory)
        workload = open_workload("uniform:4,2", Limits(2))
        for words, engines in ((["--no-prefix-caching"], 1), (["--prefix-caching"], 2)):
            factory.engines.clear()
            cell = Cell("e", "", "x", load_settings(words, {}), workload, math.inf, "", 0)
            for _ in range(2):
                measure(cell)
            assert len(factory.engines) == engines
            measure.stop()


class TestWorkloads:
    def test_uniform_prompts_have_the_same_words_in_another_order(self) -> None:
        items = open_workload("uniform:64,7", Limits(5)).items
        assert len({item.prompt for item in items}) == 5
        assert len({tuple(sorted(item.prompt.split())) for item in items}) == 1
        assert {item.output_len for item in items} == {7}

    def test_a_contest_has_tenants_in_proportion(self) -> None:
        items = open_workload("contest:gold=3,free=1", Limits(400)).items
        gold = sum(item.tenant == "gold" for item in items)
        assert 260 < gold < 340
        assert {item.group for item in items} == {"gold", "free"}
        with pytest.raises(WorkloadError, match="allowed is contest:NAME=COUNT"):
            open_workload("contest:gold=x", Limits(4))
