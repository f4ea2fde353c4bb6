"""The search for the goodput: on a server whose capacity is known, and through the command."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.standalone_fakes import Factory, FakeEngine

from carousel.bench.command import main
from carousel.bench.goodput import MOST_PROBES, TOLERANCE, Search, search
from carousel.bench.slo import SloError, bench_slos, parse_slo, seconds
from carousel.config import SettingsError

LATENCIES = ("ttft", "tpot", "itl", "queue", "e2e")


def figures(ttft: float, served: float) -> dict[str, Any]:
    rates = {"requests_per_second": served, "output_tokens_per_second": 10 * served, "total_tokens_per_second": 20.0}
    return rates | {name: dict.fromkeys(("mean", "p50", "p90", "p99"), ttft) for name in LATENCIES}


def searched(limit: float, served: float, slo: str = "ttft_p99=1s") -> tuple[Search, list[float]]:
    """Search on a server that keeps its objective up to the rate ``limit`` and serves ``served`` requests/s at most."""
    tried: list[float] = []

    async def measure(rate: float) -> dict[str, Any]:
        tried.append(rate)
        return figures(0.5 if rate <= limit else 5.0, served)

    return asyncio.run(search(measure, bench_slos(slo, "--goodput"))), tried


@given(st.floats(0.05, 1.5), st.floats(0.5, 500))
def test_the_highest_rate_that_holds_is_found_to_within_the_tolerance(share: float, served: float) -> None:
    limit = share * served
    found, tried = searched(limit, served)
    assert found.rate <= limit < found.bound
    assert found.bound - found.rate <= TOLERANCE * found.bound or len(tried) == MOST_PROBES
    assert len(tried) <= MOST_PROBES
    assert found.best is None or found.best.rate == found.rate


def test_where_even_all_at_once_holds_one_run_is_enough() -> None:
    found, tried = searched(math.inf, 7.0)
    assert tried == [math.inf]
    assert (found.rate, found.report()["bound"]) == (7.0, None)


def test_where_nothing_holds_the_rate_is_nought() -> None:
    found, tried = searched(0.0, 8.0)
    assert found.rate == 0
    assert len(tried) == MOST_PROBES
    assert found.best is None
    assert [probe["met"] for probe in found.report()["probes"]] == [False] * MOST_PROBES


def test_every_objective_must_hold() -> None:
    found, _ = searched(math.inf, 2.0, "ttft_p99=1s,requests_per_second=3")
    assert found.rate == 0


class TestObjectives:
    @pytest.mark.parametrize("text", ["ttft_p95=1s", "ttft_max=1s", "errors=1%", "lag_p99=1s", "ttft_p99[chat]=1s"])
    def test_a_bench_refuses_what_it_does_not_measure(self, text: str) -> None:
        with pytest.raises(SloError, match=r"--goodput '.*allowed"):
            bench_slos(text, "--goodput")

    def test_times_have_units(self) -> None:
        assert [seconds(text) for text in ("200ms", "1.5s", "2min", "3", "x")] == [0.2, 1.5, 120.0, None, None]
        assert parse_slo("itl_p99=80ms").limit == pytest.approx(0.08)

    def test_no_data_is_a_miss(self) -> None:
        assert not parse_slo("ttft_p99=1s").met(None)


class TestCommand:
    def bench(self, folder: Path, *words: str, step_s: float = 0.01) -> dict[str, Any]:
        def prepare(engine: FakeEngine) -> None:
            engine.step_s = step_s

        path, target = folder / "w.json", folder / "r.json"
        path.write_text(json.dumps([{"prompt_ids": [1], "output_len": 2, "unit_gap": 1.0}] * 3))
        argv = ["--workload", str(path), "--warmup", "0", "--json", str(target), *words]
        assert main(argv, {}, Factory(prepare)) == 0
        return json.loads(target.read_text())

    def test_the_figures_are_those_of_the_best_rate(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        found = self.bench(tmp_path, "--goodput", "ttft_p99=30s")
        assert found["goodput"]["slo"] == ["ttft_p99=30s"]
        assert found["goodput"]["bound"] is None
        assert found["rate"] == "inf"
        assert "goodput: at least" in capsys.readouterr().out

    def test_each_mode_has_its_own(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        slo = "output_tokens_per_second=1000000000"  # no rate is as good as that
        found = self.bench(tmp_path, "--goodput", slo, "--compare", "static,continuous", step_s=0.0)
        assert [found["compare"][mode]["goodput"]["rate"] for mode in ("static", "continuous")] == [0, 0]
        assert "goodput, static: 0 requests/s" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (("--goodput", "ttft_p99=soon"), "ttft, tpot, itl, queue or e2e with _mean"),
            (("--goodput", "ttft_p99=1s", "--rate", "3"), "--goodput looks for the rate: give no --rate"),
        ],
    )
    def test_what_makes_no_sense_is_refused(self, words: tuple[str, ...], message: str) -> None:
        with pytest.raises(SettingsError, match=message):
            main(words, {}, Factory())

    def test_a_workload_without_gaps_has_no_rates(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = tmp_path / "w.json"
        path.write_text(json.dumps([{"prompt_ids": [1], "output_len": 2}]))
        assert main(["--workload", str(path), "--goodput", "ttft_p99=1s"], {}, Factory()) == 1
        assert "has no unit_gap, which --goodput needs" in capsys.readouterr().err
