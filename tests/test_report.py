"""``carousel report``: what it reads, the ratios and intervals that it states, and the page that it writes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from carousel.bench.histogram import Histogram
from carousel.config import SettingsError
from carousel.report import command, document, plots
from carousel.report.groups import contested_shares, groups_of
from carousel.report.runs import Experiment, ReportError, Run, read
from carousel.report.statistics import METRICS, Metric, ratio, seat_use

TTFT_MEAN = next(metric for metric in METRICS if metric.path == ("ttft", "mean"))
TOKENS = METRICS[0]


def a_record(ttft: list[float], **more: Any) -> dict[str, Any]:
    count = len(ttft)
    requests = {
        "id": [f"r{place}" for place in range(count)], "due": [0.1 * place for place in range(count)],
        "queue": [value / 2 for value in ttft], "ttft": ttft, "e2e": [value + 1 for value in ttft],
        "tpot": [0.05] * count, "prompt_tokens": [10] * count, "output_tokens": [4] * count,
        "gaps": [[500, 400, 600]] * count,
    }  # fmt: skip
    steps = {
        "start": [0.0, 1.0], "duration": [1.0, 3.0], "prefill": [30, 0], "decode": [0, 8], "idle": [0, 2],
        "sequences": [4, 2], "waiting": [2, 0], "kv": [0.5, 0.25],
    }  # fmt: skip
    seats = [[0, "r0", [["prefill", 0.0, 1.0, 10], ["decode", 1.0, 4.0, 3]]], [1, "r1", [["prefill", 0.0, 1.0, 10]]]]
    return {"version": 1, "requests": requests | more, "steps": steps, "seats": seats}


def bench(ttft: list[float], rate: float | str = "inf", **more: Any) -> dict[str, Any]:
    """What ``carousel bench --json`` writes, with known values."""
    values = {"mean": float(np.mean(ttft)), "p50": float(np.median(ttft)), "p90": max(ttft), "p99": max(ttft)}
    return {
        "output_tokens_per_second": 100.0, "requests_per_second": 2.0, "requests": len(ttft), "rate": rate,
        **dict.fromkeys(("ttft", "tpot", "itl", "queue", "e2e", "batch_occupancy"), values),
        "settings": {"max_batch_sequences": 8}, "record": a_record(ttft),
    } | more  # fmt: skip


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    def put(name: str, data: Any) -> str:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(data))
        return str(path)

    return put


def a_run(ttft: list[float], **more: Any) -> Run:
    data = bench(ttft, **more)
    return Run("", "x", math.inf, data, data.get("runs") or [data], "x.json")


class TestReading:
    def test_a_file_is_called_by_its_name_or_as_told(self, write: Callable[..., str]) -> None:
        path = write("mine.json", bench([1.0]))
        assert read([path])[0].labels == ["mine"]
        assert read([f"fast={path}"])[0].labels == ["fast"]

    def test_a_comparison_has_its_contestants(self, write: Callable[..., str]) -> None:
        both = {"compare": {"static": bench([2.0]), "continuous": bench([1.0])}, **bench([1.0])}
        (experiment,) = read([write("c.json", both)])
        assert experiment.labels == ["static", "continuous"]
        assert [run.figures["ttft"]["mean"] for run in experiment.runs] == [2.0, 1.0]

    def test_rounds_of_peers_meet_by_pass(self, tmp_path: Path) -> None:
        line = {"workload": "w", "cpu": "c"}
        lines = [
            line
            | {
                "round": turn,
                "contestant": who,
                "name": name,
                "figures": {**bench([2.0]), "output_tokens_per_second": rate},
            }
            for name in ("offline", "rate:2.5", "rate:5", "single")
            for turn in (1, 2, 3)
            for who, rate in (("ours", 100.0 * turn), ("theirs", 50.0))
        ]
        path = tmp_path / "results.jsonl"
        path.write_text("\n".join(map(json.dumps, lines)) + "\n")
        arriving, single = read([str(path)])
        assert (arriving.labels, arriving.rates) == (["ours", "theirs"], [2.5, 5.0, math.inf])
        assert (single.labels, single.rates) == (["ours", "theirs"], [math.inf])
        ours, theirs = arriving.at(math.inf)
        assert ours.figures["output_tokens_per_second"] == 200.0
        assert ratio(theirs, ours, TOKENS).value == 4.0
        drawn = [
            [part.name for part in document.sections([one])[0].parts if isinstance(part, document.Picture)]
            for one in (arriving, single)
        ]
        assert "engines-beside-each-other-requests-by-arrival-load" in drawn[0]
        assert not any(name.endswith("-load") for name in drawn[1])
        path.write_text('{"round": 1}')
        with pytest.raises(ReportError, match=r"results\.jsonl: line 1: no round of bench_peers"):
            read([str(path)])

    def test_files_of_a_folder_meet_by_experiment_and_rounds_by_contestant(self, write: Callable[..., str]) -> None:
        for turn, value in enumerate((1.0, 3.0, 2.0)):
            write(f"runs/{turn}.json", bench([value], 2.0, experiment="one", label="a", about="what it is"))
        write("runs/b.json", bench([5.0], 2.0, experiment="two", label="b"))
        one, two = read([str(Path(write("runs/c.json", bench([7.0], "inf", experiment="one", label="a"))).parent)])
        assert (one.name, one.about, one.rates) == ("one", "what it is", [2.0, math.inf])
        assert len(one.at(2.0)[0].rounds) == 3
        assert one.at(2.0)[0].figures["ttft"]["mean"] == 2.0  # the median
        assert str(one.at(2.0)[0].figures["settings"]["max_batch_sequences"]) == "8"
        assert (two.name, two.labels) == ("two", ["b"])

    def test_a_load_test_is_a_run_with_histograms(self, write: Callable[..., str]) -> None:
        histogram = Histogram()
        histogram.add(0.5, 3)
        row = {name: value for name, value in bench([0.5]).items() if name not in ("record", "settings")}
        data = {"test": {"rate": 3.0}, "rows": {"all": row | {"histograms": {"ttft": histogram.to_wire()}}}}
        (experiment,) = read([write("l.json", data)])
        assert experiment.rates == [3.0]
        assert plots.distributions(experiment, experiment.runs) is not None

    @pytest.mark.parametrize(
        ("data", "message"),
        [
            ([1], "must be an object"),
            ({"a": 1}, "has no output_tokens_per_second, ttft"),
            ({"rows": {}}, "without req"),
        ],
    )
    def test_anything_else_is_refused(self, write: Callable[..., str], data: Any, message: str) -> None:
        with pytest.raises(ReportError, match=rf"x\.json: .*{message}"):
            read([write("x.json", data)])

    def test_a_missing_file_and_text_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ReportError, match=r"none\.json: No such file"):
            read([str(tmp_path / "none.json")])
        (tmp_path / "t.json").write_text("{")
        with pytest.raises(ReportError, match="not JSON"):
            read([str(tmp_path / "t.json")])
        (tmp_path / "empty").mkdir()
        with pytest.raises(ReportError, match="no run in"):
            read([str(tmp_path / "empty")])


class TestRatios:
    RANDOM = np.random.default_rng(3)

    def test_latencies_are_better_when_smaller_and_rates_when_larger(self) -> None:
        slow, fast = a_run([4.0, 6.0]), a_run([1.0, 1.5], output_tokens_per_second=250.0)
        assert ratio(slow, fast, TTFT_MEAN).value == pytest.approx(4.0)
        assert ratio(slow, fast, TOKENS).value == 2.5

    def test_an_interval_holds_the_truth_and_is_narrow_where_runs_are_paired(self) -> None:
        lengths = self.RANDOM.lognormal(0, 1, 60)
        slow, fast = a_run(list(3 * lengths)), a_run(list(lengths))
        found = ratio(slow, fast, TTFT_MEAN)
        assert found.low == pytest.approx(3.0)  # each request is three times as fast: no doubt is left
        assert found.high == pytest.approx(3.0)
        fast.rounds[0]["record"]["requests"]["id"] = [f"other{place}" for place in range(60)]
        unpaired = ratio(slow, fast, TTFT_MEAN)
        assert unpaired.low < 2.5 < 3.5 < unpaired.high

    def test_intervals_cover_as_often_as_they_say(self) -> None:
        metric, hits = Metric("", ("ttft", "mean"), False, "s"), 0
        for _ in range(30):
            slow, fast = (a_run(list(self.RANDOM.gamma(4, scale, 50))) for scale in (2.0, 1.0))
            fast.rounds[0]["record"]["requests"]["id"] = list(range(50))
            found = ratio(slow, fast, metric)
            hits += found.low <= 2.0 <= found.high
        assert hits >= 24

    def test_what_a_run_has_once_varies_from_round_to_round(self) -> None:
        single = a_run([1.0])
        assert ratio(single, single, TOKENS).low is None
        rounds = [bench([1.0], output_tokens_per_second=value) for value in (90.0, 100.0, 130.0)]
        several = a_run([1.0], runs=rounds)
        found = ratio(a_run([1.0], runs=[bench([1.0])] * 3), several, TOKENS)
        assert (found.low, found.high) == (0.9, 1.3)

    def test_what_is_unknown_has_no_ratio(self) -> None:
        unknown = a_run([1.0])
        unknown.figures["ttft"]["mean"] = None
        assert ratio(unknown, a_run([1.0]), TTFT_MEAN) is None

    def test_seats_in_use(self) -> None:
        assert seat_use(a_record([1.0]), 8) == pytest.approx((1 * 4 + 3 * 2) / (4 * 8))


class TestGroups:
    def run(self, **columns: Any) -> Run:
        record = a_record([0.2, 3.0, 0.4, 5.0], **columns)
        record["steps"] |= {"start": [0.0, 1.0, 2.0], "duration": [1.0, 1.0, 1.0]}
        record["requests"] |= {"due": [0.5, 0.5, 0.5, 0.5], "queue": [0.5, 1.5, 0.5, 1.5]}
        record["seats"] = [[place, f"r{place}", [["prefill", 1.0 + place % 2, 3.0, 9]]] for place in range(4)]
        data = bench([1.0], record=record) | {"settings": {"tenant_weights": {"gold": 3.0, "free": 1.0}}}
        return Run("", "x", 1.0, data, [data], "x")

    def test_waits_in_steps_and_deadlines(self) -> None:
        urgent, slow = groups_of(self.run(group=["urgent", "slow"] * 2, deadline=[0.3, 4.0, 0.3, 4.0]))
        assert (urgent.name, urgent.requests, urgent.queue_steps_p99, urgent.missed) == ("urgent", 2, 1.0, 0.5)
        assert (slow.queue_steps_p99, slow.missed) == (2.0, 0.5)

    def test_requests_without_a_group_make_none(self) -> None:
        assert groups_of(self.run()) == []
        assert groups_of(self.run(tenant=["a", None, "a", "b"])) == []

    def test_shares_count_while_all_groups_wait(self) -> None:
        spans = {
            "r0": [["prefill", 0.0, 1.0, 100], ["decode", 1.0, 3.0, 40]],
            "r1": [["prefill", 0.0, 1.0, 40], ["idle", 1.0, 2.0, 99]],
            "r2": [["prefill", 2.0, 3.0, 100]],
            "r3": [["prefill", 2.0, 3.0, 60]],
        }
        record = a_record([1.0] * 4) | {"seats": [[0, name, found] for name, found in spans.items()]}
        shares, until = contested_shares(record, ["gold", "free", "gold", "free"])
        assert until == 2.0  # then the last of them take their seats
        gold, free = 100 + 2 * 20, 40  # an output token is charged twice
        assert shares["gold"] == pytest.approx(gold / (gold + free))
        groups = groups_of(self.run(tenant=["gold", "free"] * 2))
        assert [group.owed for group in groups] == [0.75, 0.25]

    def test_a_picture_has_a_bar_for_each_group_of_each_run(self) -> None:
        run = self.run(group=["urgent", "slow"] * 2, deadline=[0.3, 4.0, 0.3, 4.0])
        found = {"x": groups_of(run), "y": groups_of(run)}
        labels = [Run("", label, 1.0, run.figures, run.rounds, "x") for label in found]
        figure = plots.by_group(Experiment("e", "", labels), found)
        titles = {axes.get_title(): [bar.get_height() for bar in axes.patches] for axes in figure.axes}
        assert titles["later than their deadline, %"] == [50.0] * 4
        assert titles["queue time, p99, s"] == pytest.approx([0.5, 1.5] * 2)
        assert plots.by_group(Experiment("e", "", labels), {"x": [], "y": []}) is None

    def test_requests_within_limits(self) -> None:
        run = a_run([0.5, 1.0, 2.0, 4.0])
        assert plots.share_within(run, (("ttft", 1.0),)) == 0.5
        assert plots.share_within(run, (("ttft", 9.0), ("tpot", 0.01))) == 0.0


class Page:
    """A report that was written."""

    def __init__(self, folder: Path) -> None:
        self.html = (folder / "report.html").read_text()
        self.markdown = (folder / "report.md").read_text()
        self.pictures = sorted(path.name for path in folder.glob("*.png"))
        self.svgs = [ElementTree.fromstring(text) for text in re.findall(r"<svg.*?</svg>", self.html, re.DOTALL)]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    folder = tmp_path_factory.mktemp("report")
    runs = folder / "runs"
    runs.mkdir()
    probes = [{"rate": 1.0, "met": True}, {"rate": 2.0, "met": False}, {"rate": "inf", "met": False}]
    goodput = {"slo": ["ttft_p99=1s"], "rate": 1.0, "bound": 2.0, "probes": probes}
    for place, (label, factor) in enumerate((("static", 4.0), ("<continuous>", 1.0))):
        for rate in (1.0, 2.0):
            data = bench([factor, 2 * factor], rate, experiment="Static & continuous", label=label, about="About <it>")
            (runs / f"{place}-{rate}.json").write_text(json.dumps(data))
        data = bench([factor], 1.0, experiment="Goodput", label=label, goodput=goodput)
        (runs / f"{place}-goodput.json").write_text(json.dumps(data))
    command.make([str(runs)], folder / "out", "A title", (("ttft", 3.0),))
    return Page(folder / "out")


class TestPage:
    def test_it_needs_nothing_from_elsewhere(self, page: Page) -> None:
        addresses = set(re.findall(r"https?://[^\s\"'<>]+", page.html))
        assert all(re.match(r"http://(www\.w3\.org|purl\.org|creativecommons\.org)/", item) for item in addresses)
        assert not re.search(r"<(script|link|img|iframe)\b", page.html)

    def test_pictures_are_drawn_with_readable_text(self, page: Page) -> None:
        assert page.pictures == [
            *("goodput-goodput.png",),
            *(f"static-continuous-{kind}.png" for kind in ("batch", "curves", "load", "times", "within")),
        ]
        words = {text for svg in page.svgs for text in (item.text for item in svg.iter() if item.text)}
        assert {"static, 2/s", "<continuous>, 2/s", "waiting", "TTFT, p99, s", "seconds"} <= words

    def test_no_two_elements_have_one_id_and_every_reference_leads_somewhere(self, page: Page) -> None:
        ids = re.findall(r'\bid="([^"]+)"', page.html)
        assert len(ids) == len(set(ids))
        wanted = re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', page.html)
        assert {first or second for first, second in wanted} <= set(ids)

    def test_names_are_text_and_not_markup(self, page: Page) -> None:
        assert "&lt;continuous&gt;" in page.html
        assert "About &lt;it&gt;" in page.html
        assert "<continuous>" not in page.html

    def test_both_forms_state_the_figures_and_the_ratios(self, page: Page) -> None:
        for text in (page.html, page.markdown):
            assert "4 x (4 to 4)" in text
            assert "6.00 s" in text
            assert "objectives: ttft_p99=1s" in text
        assert "| time to first token, mean | 6.00 s | 1.50 s | 4 x (4 to 4) |" in page.markdown
        assert "![Who sat on the batch when; below, the queue and the KV memory.](static-continuous-batch.png)" in (
            page.markdown
        )

    def test_the_same_runs_make_the_same_page(self, page: Page, tmp_path: Path) -> None:
        experiment = Experiment("e", "", [a_run([1.0, 2.0])])
        pages = [document.as_html("t", [], document.sections([experiment])) for _ in range(2)]
        assert pages[0] == pages[1]


class TestCommand:
    def test_files_are_named_on_standard_output(self, write: Callable[..., str], tmp_path: Path, capsys: Any) -> None:
        out = tmp_path / "out"
        assert command.main([write("a.json", bench([1.0])), "--out", str(out), "--title", "T"]) == 0
        assert capsys.readouterr().out.splitlines()[:2] == [str(out / "report.html"), str(out / "report.md")]

    def test_without_the_library_the_extra_is_named(
        self, write: Callable[..., str], monkeypatch: pytest.MonkeyPatch, capsys: Any
    ) -> None:
        monkeypatch.setattr(command.util, "find_spec", lambda name: None)
        assert command.main([write("a.json", bench([1.0]))]) == 1
        assert "pip install 'kserve-carousel[report]'" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            ((), "no RUN"),
            (("a.json", "--limits", "ttft=1"), "ttft, tpot, queue, e2e with a time"),
            (("--rate=1",), "rate"),
        ],
    )
    def test_wrong_calls_are_refused(self, words: tuple[str, ...], message: str) -> None:
        with pytest.raises(SettingsError, match=message):
            command.main(words)

    def test_a_missing_run_is_an_error_in_one_line(self, capsys: Any) -> None:
        assert command.main(["nowhere.json"]) == 1
        assert capsys.readouterr().err == "carousel report: nowhere.json: No such file or directory\n"


def test_no_two_lines_look_alike() -> None:
    labels = [f"engine {number}" for number in range(4 * len(plots.COLOURS))]
    experiment = SimpleNamespace(labels=labels)
    looks = [plots.line(experiment, label) for label in labels]  # type: ignore[arg-type]
    assert len({(look["color"], look["linestyle"]) for look in looks}) == len(labels)
