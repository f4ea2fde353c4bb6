"""``make bench-peers``: its loop on an engine that is none, its results and tables, and peers that cannot be had."""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from scripts.peers.install import Installation, Unavailable, last_words
from scripts.peers.job import Job, Pass, Record, Request, answer, answer_in, read_job, run_steps
from scripts.peers.results import Results, table

from carousel.bench.measure import LATENCIES
from carousel.bench.workload import WorkItem, Workload

ROOT = Path(__file__).resolve().parents[1]


class Stepped:
    """Gives every live request a token a step; remembers how many lived at once, and when they came."""

    def __init__(self) -> None:
        self.left: dict[int, int] = {}
        self.most = 0

    def add(self, number: int, request: Request) -> None:
        self.left[number] = request.output

    def step(self) -> Iterable[tuple[int, int]]:
        self.most = max(self.most, len(self.left))
        live = list(self.left)
        for number in live:
            self.left[number] -= 1
            if not self.left[number]:
                del self.left[number]
        return [(number, 1) for number in live]


def test_requests_enter_at_their_time_or_one_at_a_time() -> None:
    requests = [Request([1], 3, 0.0), Request([1], 2, 0.05), Request([1], 4, 0.05)]
    engine = Stepped()
    records = run_steps(engine, Pass("rate:1", requests))
    assert [sum(count for _, count in record.deltas) for record in records] == [3, 2, 4]
    assert [record.arrival for record in records] == [0.0, 0.05, 0.05]
    assert records[0].deltas[-1][0] < 0.05 <= records[1].deltas[0][0]
    assert engine.most == 2
    alone = Stepped()
    records = run_steps(alone, Pass("single", requests, 1))
    assert alone.most == 1
    assert records[1].arrival >= records[0].deltas[-1][0]


def test_a_job_goes_through_a_file_and_wrong_lengths_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = Pass("offline", [Request([1, 2], 2, 0.0)])
    job = Job("model", "int8", 2, [one])
    written = {"model": "model", "precision": "int8", "threads": 2, "batch": 16}
    passes = [{"name": "offline", "requests": [{"prompt": [1, 2], "output": 2, "at": 0.0}], "concurrency": 0}]
    (tmp_path / "job.json").write_text(json.dumps(written | {"passes": passes}))
    assert read_job(str(tmp_path / "job.json")) == job
    assert (job.longest, job.most) == (4, 1)
    answer(job, lambda _: [Record(0.0, [(0.5, 1), (0.75, 1)])])
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"offline": [[0.0, [[0.5, 1], [0.75, 1]]]]}
    with pytest.raises(SystemExit, match="offline: 1 tokens instead of 2"):
        answer(job, lambda _: [Record(0.0, [(0.5, 1)])])


def figures(rate: float, tpot: float = 0.01) -> dict[str, Any]:
    spread = {"mean": tpot, "p50": tpot, "p99": 2 * tpot}
    return {"output_tokens_per_second": rate} | dict.fromkeys(LATENCIES, spread)


def test_results_are_kept_and_ratios_are_those_of_rounds(tmp_path: Path) -> None:
    file = tmp_path / "new" / "results.jsonl"
    results = Results(file, "digest", "cpu")
    for number, (own, other) in enumerate([(100, 50), (300, 100), (90, 90)], 1):
        results.add(number, "carousel-int8", "offline", figures(own))
        results.add(number, "openvino-int8", "offline", figures(other))
    results.add(1, "carousel-int8", "single", figures(5, tpot=0.005))
    again = Results(file, "digest", "cpu")
    assert again.runs == results.runs
    assert again.has(2, "openvino-int8", "offline")
    assert not again.has(1, "openvino-int8", "single")
    assert Results(file, "another", "cpu").runs == Results(file, "digest", "another").runs == []
    text = table(again.runs, "offline", ["carousel-int8"], {"vllm-bf16": "no wheel", "openvino-int8": "late"})
    assert text.splitlines()[0].endswith("| carousel-int8 is faster by |")
    assert "| openvino-int8 | 3 | 90.0 | 10 / 20 | 10 / 20 | 2.00 x |" in text
    assert text.endswith("| vllm-bf16 | not run: no wheel |")
    assert "| carousel-int8 | 1 | 200.0 |" in table(again.runs, "single", ["carousel-int8"], {})


def test_a_file_of_other_figures_is_not_gone_on_with(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    Results(file, "digest", "cpu").add(1, "carousel-int8", "offline", figures(1))
    for line in ('{"round": 1}', "not JSON", file.read_text().strip().replace('"ttft"', '"ttft_p50"')):
        (tmp_path / "other.jsonl").write_text(file.read_text() + line + "\n")
        with pytest.raises(ValueError, match=r"other\.jsonl: line 2 is no run .*: name another file"):
            Results(tmp_path / "other.jsonl", "digest", "cpu")


def test_measurements_end_in_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the contestants and passes that were asked for, whatever else the file has."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    bench_peers = importlib.import_module("bench_peers")
    file = tmp_path / "results.jsonl"
    items = tuple(WorkItem(str(place), "", (1, 2), 3, 0.1) for place in range(4))
    options = argparse.Namespace(
        results=file, out=tmp_path / "report", minutes=1, home=tmp_path, repeat=2, batch=16,
        contestants=["carousel-int8", "openvino-int8"], passes=["offline", "rate:1", "rate:2"],
    )  # fmt: skip
    bench = bench_peers.Bench(options, Workload("four", items))
    for number in (1, 2):
        for place, contestant in enumerate(("carousel-int8", "openvino-int8", "vllm-bf16"), 1):
            for name in ("offline", "rate:1", "rate:2"):
                one = bench_peers.pass_of(name, bench.workload)
                times = [
                    (request.at, [(request.at + place * 0.1 * n, 1) for n in (1, 2, 3)]) for request in one.requests
                ]
                bench.results.add(number, contestant, name, bench_peers.figures_of(one, times))
    assert bench.measure()  # nothing is left to do
    names = [path.name for path in bench.report()]
    text = (tmp_path / "report" / "report.md").read_text()
    assert "vllm" not in text
    assert "None" not in text
    assert "openvino-int8: better by" in text
    assert {
        "report.html",
        "report.md",
        *(f"engines-beside-each-other-requests-by-arrival-{kind}.png" for kind in ("curves", "load", "times")),
    } == set(names)
    ours = bench.results.runs[0].figures
    assert ours["ttft"]["p50"] == pytest.approx(0.1)
    assert ours["record"]["requests"]["gaps"][0] == [1000, 1000]


def test_the_answer_is_found_behind_what_an_engine_says_last() -> None:
    assert answer_in('loading\n{"offline": [[0.0, []]]}\nEngine core is shutting down\n{not this}\n') == {
        "offline": [[0.0, []]]
    }
    for printed, said in (("", "printed nothing"), ("one\ntwo {}", "printed one two {}")):
        with pytest.raises(ValueError, match=said):
            answer_in(printed)


def test_a_peer_that_does_not_install_says_why(tmp_path: Path) -> None:
    def installation(gguf: Path) -> Installation:
        return Installation(tmp_path / "home", [], gguf)

    with pytest.raises(Unavailable, match=r"writing failed: .* \(all of it in .*models\.log\)"):
        installation(tmp_path / "no.gguf").command("transformers", "fp32", "static")
    log = (tmp_path / "home" / "models.log").read_text()
    assert "Traceback" in log


def test_the_words_of_a_failure_are_those_of_its_error() -> None:
    pip = "Collecting x\nERROR: No matching distribution found for x==1\n\n[notice] A new release of pip is there\n"
    assert last_words(pip) == "ERROR: No matching distribution found for x==1"
    assert last_words("one\ntwo\n") == "two"
    assert last_words("\n") == "it said nothing"


def test_wrong_names_are_refused_with_what_is_allowed() -> None:
    def said(*arguments: str) -> str:
        command = [sys.executable, str(ROOT / "scripts" / "bench_peers.py"), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 2
        return done.stderr

    assert "--contestants: got carousel-int9, allowed: carousel-int8, openvino-int8" in said(
        "--contestants", "carousel-int9"
    )
    assert "--passes: got rate:0, allowed: offline, single and rate:R" in said("--passes", "offline,rate:0")
