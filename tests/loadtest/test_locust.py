"""Locust in processes of its own against a server with known delays, whose log says what it really sent when."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import statistics
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from loadtest.sources import Limits, open_workload
from tests.loadtest.harness import Ended, fake_server, finish, run, start, wait_for
from tests.ports import free_port

PROTOCOLS = ("chat", "completions", "generate", "infer", "grpc", "grpc-stream")
DELAYS = ("first=0.08", "gap=0.02", "queue=0.25")
SIZE = ("--requests", "72", "--max-output-tokens", "12", "--rate", "36", "--workload", "tenants")


@dataclass
class Whole:
    """A run, what the server says of it, and where its files are."""

    ended: Ended
    sent: list[list[Any]]
    folder: Path

    def of(self, protocol: str) -> list[list[Any]]:
        return [record for record in self.sent if record[0] == protocol]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """One process, all protocols side by side."""
    folder = tmp_path_factory.mktemp("whole")
    with fake_server(folder, *DELAYS) as server:
        words = ("--protocol", ",".join(PROTOCOLS), "--csv", str(folder / "stats"), "--api-key", "a-key")
        slos = ("--slo", "ttft_p99=30s,errors=0", "--slo", "requests_per_second=0.01")
        ended = run(server, folder, *SIZE, *words, *slos)
    assert ended.code == 0, ended.err
    assert ended.err.count("SLO met") == 3
    return Whole(ended, server.sent, folder)


def truth() -> dict[str, tuple[int, int]]:
    """Requests and output tokens by tenant, as the workload has them."""
    items = open_workload("tenants", Limits(requests=72, output=12)).items
    by_tenant: dict[str, tuple[int, int]] = {}
    for item in items:
        requests, tokens = by_tenant.get(item.group, (0, 0))
        by_tenant[item.group] = (requests + 1, tokens + item.output_len)
    return by_tenant


def counted(ended: Ended) -> dict[str, tuple[int, int]]:
    """The same as the statistics have them."""
    by_tenant: dict[str, tuple[int, int]] = {}
    for name, row in ended.report["rows"].items():
        if " " in name:
            tenant = name.split(" ")[1]
            requests, tokens = by_tenant.get(tenant, (0, 0))
            by_tenant[tenant] = (requests + row["requests"], tokens + row["output_tokens"])
    return by_tenant


@pytest.mark.parametrize("protocol", ["chat", "completions", "generate", "grpc-stream"])
def test_statistics_of_streams_are_the_servers_own(protocol: str, whole: Whole) -> None:
    row, sent = whole.ended.row(protocol), whole.of(protocol)
    tokens = [times for _, _, times, *_ in sent]
    assert row["requests"] == len(sent) > 3
    assert row["output_tokens"] == sum(map(len, tokens)) == row["histograms"]["itl"]["count"] + len(sent)
    assert (row["failures"], row["unfinished"]) == (0, 0)
    truth = statistics.fmean(after - before for times in tokens for before, after in pairwise(times))
    assert row["itl"]["mean"] == pytest.approx(truth, rel=0.25)
    truth = statistics.fmean((times[-1] - times[0]) / (len(times) - 1) for times in tokens if len(times) > 1)
    assert row["tpot"]["mean"] == pytest.approx(truth, rel=0.25)
    wall = max(times[-1] for times in tokens) - min(received for _, received, *_ in sent)
    assert row["wall"] == pytest.approx(wall, rel=0.25)
    assert row["output_tokens_per_second"] * row["wall"] == pytest.approx(row["output_tokens"])
    # From when it was due: what the server took, and what the generator was late.
    served = statistics.fmean(times[0] - received for _, received, times, *_ in sent)
    assert row["ttft"]["mean"] >= served
    assert row["ttft"]["mean"] - row["lag"]["mean"] == pytest.approx(served, rel=0.5)
    assert row["e2e"]["mean"] > row["ttft"]["mean"]


@pytest.mark.parametrize("protocol", ["infer", "grpc"])
def test_whole_answers_have_no_invented_token_times(protocol: str, whole: Whole) -> None:
    row, sent = whole.ended.row(protocol), whole.of(protocol)
    assert row["output_tokens"] == sum(len(times) for _, _, times, *_ in sent)
    served = statistics.fmean(times[-1] - received for _, received, times, *_ in sent)
    assert row["e2e"]["mean"] - row["lag"]["mean"] == pytest.approx(served, rel=0.5)
    assert row["ttft"]["mean"] is row["itl"]["mean"] is row["tpot"]["mean"] is None


def test_queue_time_comes_from_the_answers_and_from_metrics(whole: Whole) -> None:
    for protocol in ("chat", "generate", "infer", "grpc", "grpc-stream"):
        assert whole.ended.row(protocol)["queue"]["p99"] == pytest.approx(0.25)
    assert whole.ended.report["test"]["server_queue"]["mean"] == pytest.approx(0.25)


def test_how_busy_the_generator_was_is_told(whole: Whole) -> None:
    share = whole.ended.report["test"]["generator_cpu"]
    assert 0 < share < 1.5
    assert f"the busiest load generator took {share:.2f} of a CPU" in whole.ended.out


def test_tenants_and_priorities_arrive_and_have_rows(whole: Whole) -> None:
    for protocol in PROTOCOLS:
        known = {("interactive", "0"), ("standard", "5"), ("batch", "10")}
        assert {(tenant, priority) for *_, tenant, priority in whole.of(protocol)} <= known
    assert counted(whole.ended) == truth()


def test_the_api_key_goes_with_every_call(whole: Whole) -> None:
    for protocol in PROTOCOLS:
        assert {key for *_, key, _, _ in whole.of(protocol)} == {"Bearer a-key"}
    assert "a-key" not in whole.ended.out + whole.ended.err


def test_a_wrong_api_key_is_told(tmp_path: Path) -> None:
    with fake_server(tmp_path) as server:
        ended = run(server, tmp_path, "--requests", "1", "--api-key", "wrong")
    assert ended.code == 2
    assert "HTTP 401" in ended.err
    assert server.sent == []


def test_token_times_are_locust_metrics_without_a_part_in_its_total(whole: Whole) -> None:
    with (whole.folder / "stats_stats.csv").open() as file:
        rows = {(row["Type"], row["Name"]): row for row in csv.DictReader(file)}
    assert rows[("", "Aggregated")]["Request Count"] == "72"
    assert {kind for kind, _ in rows} == {"", "E2E", "TTFT", "ITL", "TPOT", "QUEUE", "LAG"}
    itl = sum(int(row["Request Count"]) for (kind, _), row in rows.items() if kind == "ITL")
    assert itl == whole.ended.row()["histograms"]["itl"]["count"]
    with (whole.folder / "stats_tokens.csv").open() as file:
        ours = {row["name"]: row for row in csv.DictReader(file)}
    assert float(ours["all"]["ttft_p99"]) == whole.ended.row()["ttft"]["p99"]
    assert re.search(r"^token statistics, ms +requests", whole.ended.out, re.MULTILINE)


def test_a_stall_shows_in_the_latency_of_everybody_who_was_due_meanwhile(tmp_path: Path) -> None:
    """Twenty a second are due; for a second and a half nothing is sent. A loop that waits for answers would see one
    slow request. Here every request that was due meanwhile has waited for what was left of the stall."""
    with fake_server(tmp_path, "first=0", "gap=0", "stall=0.5,2.0") as server:
        ended = run(
            server, tmp_path, "--shape", "uniform", "--rate", "20", "--requests", "60", "--max-output-tokens", "2"
        )
    ttft = ended.row()["ttft"]
    buckets = ended.row()["histograms"]["ttft"]["buckets"]
    slow = sum(times for bucket, times in buckets if 1e-6 * 1.01**bucket > 0.5)
    assert slow >= 18  # of the 30 that were due in the stall, 20 had more than half a second of it before them
    assert ttft["max"] > 1.2
    assert ttft["p90"] > 0.9
    # The same as the server saw it, from when each request reached it.
    waited = [times[0] - received for _, received, times, *_ in server.sent]
    assert ttft["mean"] >= statistics.fmean(waited)


def test_a_closed_loop_keeps_so_many_in_flight(tmp_path: Path) -> None:
    with fake_server(tmp_path, "first=0.1", "gap=0.01") as server:
        words = ("--shape", "closed", "--concurrency", "3", "--requests", "15", "--max-output-tokens", "3")
        ended = run(server, tmp_path, *words)
    assert ended.code == 0, ended.err
    assert len(server.sent) == 15
    spans = [(received, times[-1]) for _, received, times, *_ in server.sent]
    assert max(sum(begin <= at < end for begin, end in spans) for at, _ in spans) == 3


def test_unfinished_requests_count_with_their_age_and_missed_objectives_are_told(tmp_path: Path) -> None:
    junit = tmp_path / "junit.xml"
    with fake_server(tmp_path, "first=30", "fail_every=3") as server:
        words = ("--slo", "errors=0 ttft_p50=1ms", "--slo", "lag_p99=60s", "--junit", str(junit))
        ended = run(server, tmp_path, "--rate", "30", "--duration", "0.4", "--drain", "1", *words)
    row = ended.row()
    assert row["unfinished"] == len(server.sent) > 0
    assert row["failures"] - row["unfinished"] == row["requests"] // 3
    assert row["histograms"]["ttft"]["count"] == row["unfinished"]
    assert row["ttft"]["max"] > 0.9
    assert "HTTP 503: not now" in ended.err + ended.out
    assert ended.code == 3
    assert "SLO MISSED ttft_p50=1ms" in ended.err
    assert 'tests="3" failures="2"' in junit.read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--slo", "ttfb_p99=1s"), r"argument --slo: --slo 'ttfb_p99=1s': there is no 'ttfb_p99'; allowed is NAME="),
        (
            ("--shape", "ramp", "--workload", "no.json"),
            r"--peak 0\.0: .*\n.*workload no\.json: No such file",
        ),
    ],
)
def test_bad_options_are_refused_before_anything_is_sent(words: tuple[str, ...], message: str, tmp_path: Path) -> None:
    ended = run(None, tmp_path, "--host", "http://127.0.0.1:9", *words)
    assert ended.code == 2
    assert re.search(message, ended.err), ended.err
    assert "Traceback" not in ended.err


def test_no_server(tmp_path: Path) -> None:
    ended = run(None, tmp_path, "--host", f"http://127.0.0.1:{free_port()}")
    assert ended.code == 2
    assert re.search(r"/v1/models names no model .*say --model", ended.err)


def test_a_master_with_two_workers_equals_one_process(tmp_path: Path, whole: Whole) -> None:
    port = str(free_port())
    with fake_server(tmp_path, *DELAYS) as server:
        workers = [start(None, "--worker", "--master-port", port) for _ in range(2)]
        words = ("--master", "--master-bind-port", port, "--master-bind-host", "127.0.0.1", "--expect-workers", "2")
        ended = run(server, tmp_path, *words, *SIZE, "--protocol", "chat,grpc-stream")
        for worker in workers:
            finish(worker)
    assert ended.code == 0, ended.err
    assert ended.report["test"]["workers"] == 2
    assert ended.report["test"]["generator_cpu"] > 0  # of the busier worker
    assert len(server.sent) == 72
    assert counted(ended) == counted(whole.ended) == truth()
    row = ended.row()
    assert row["output_tokens"] == whole.ended.row()["output_tokens"]
    for metric, count in (("ttft", 72), ("e2e", 72), ("itl", row["output_tokens"] - 72)):
        histogram = row["histograms"][metric]
        assert histogram["count"] == sum(times for _, times in histogram["buckets"]) == count, metric
    gaps = [after - before for _, _, times, *_ in server.sent for before, after in pairwise(times)]
    assert row["itl"]["mean"] == pytest.approx(statistics.fmean(gaps), rel=0.25)
    assert ended.row("chat")["queue"]["p50"] == pytest.approx(0.25)


BROWSER = os.environ.get("CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


@pytest.fixture
def page() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu"])
        opened = browser.new_page(viewport={"width": 1280, "height": 900})
        opened.set_default_timeout(30_000)
        yield opened
        browser.close()


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine (CHROMIUM names one)")
def test_a_browser_sees_the_tab_and_the_charts(page: Any, tmp_path: Path) -> None:
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    with fake_server(tmp_path, "first=0.3", "gap=0.02") as server:
        port = free_port()
        words = ("--web-host", "127.0.0.1", "--web-port", str(port), "--autostart", "--only-summary")
        size = ("--requests", "400", "--max-output-tokens", "12", "--rate", "20", "--workload", "tenants")
        locust = start(server, *words, *size)
        try:
            wait_for(lambda: _answers(port))
            page.goto(f"http://127.0.0.1:{port}/")
            page.get_by_role("tab", name="Tokens").click()
            page.get_by_text("TTFT p99 (ms)").wait_for()
            page.get_by_role("tab", name="Download Data").click()
            address = page.get_by_role("link", name="Charts of tokens over time").get_attribute("href")
            page.goto(f"http://127.0.0.1:{port}/{address}")
            charts = page.get_by_role("img")
            charts.nth(4).wait_for()
            wait_for(lambda: page.locator("polyline").nth(1).get_attribute("points").count(",") >= 3 or None)
            labels = [charts.nth(place).get_attribute("aria-label") for place in range(5)]
            if "SCREENSHOT" in os.environ:
                page.screenshot(path=os.environ["SCREENSHOT"])
            page.get_by_role("link", name="Back to locust").click()
            page.get_by_role("tab", name="Tokens").wait_for()
        finally:
            locust.terminate()
            finish(locust)
    assert not faults
    first = re.fullmatch(r"Time to first token, ms: p50 ([\d.]+), p99 ([\d.]+)", labels[2])
    assert first is not None
    assert 300 <= float(first[1]) <= float(first[2])
    assert labels[4].startswith("Queue time by the server")


def _answers(port: int) -> bool | None:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/tokens/history", timeout=5):
            return True
    except OSError:
        return None


def test_the_web_ui_has_a_tab_of_tokens(tmp_path: Path) -> None:
    with fake_server(tmp_path) as server:
        port = free_port()
        words = ("--web-host", "127.0.0.1", "--web-port", str(port), "--autostart", "--only-summary", *SIZE)
        locust = start(server, *words)
        try:

            def get(path: str) -> str:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
                    return answer.read().decode()

            def rows() -> Any:
                stats = json.loads(get("/stats/requests")).get("extended_stats") or [{"data": []}]
                found = {row["name"]: row for row in stats[0]["data"]}
                return found if found.get("all", {}).get("requests") == 72 else None

            found = wait_for(rows)
            page = json.loads(re.search(r"window\.templateArgs = (\{.*\})", get("/"))[1])  # type: ignore[index]
            table = get("/tokens/csv").splitlines()
            told = json.loads(get("/tokens/json"))
        finally:
            locust.terminate()
            finish(locust)
    assert page["extended_tabs"] == [{"key": "tokens", "title": "Tokens"}]
    assert {column["key"] for column in page["extended_tables"][0]["structure"]} == set(found["all"])
    assert found["chat"]["ttft_p99"] > 0
    assert table[0].startswith("name,requests,")
    assert told["rows"]["all"]["requests"] == 72
