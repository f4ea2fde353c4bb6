"""Locust and ``carousel bench`` against a server whose delays are known: both must tell the truth, and so agree."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.loadtest.harness import fake_server

SCRIPTS = str(Path(__file__).resolve().parents[2] / "scripts")
FIRST, GAP, OUTPUT = 0.6, 0.06, 11
CLOSE = 0.1  # on a machine that is busy with other tests; loadtest/README.md has what a quiet one shows


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    sys.path.insert(0, SCRIPTS)
    try:
        import bench_clients

        yield bench_clients
    finally:
        sys.path.remove(SCRIPTS)


@pytest.mark.parametrize("name", ["carousel bench", "locust"])
def test_means_are_those_of_the_server(script: Any, tmp_path: Path, name: str) -> None:
    with fake_server(tmp_path, f"first={FIRST}", f"gap={GAP}") as server:
        load = script.Load(f"http://127.0.0.1:{server.http}", tmp_path, requests=8, concurrency=4, output=OUTPUT)
        load.write(8)
        found = script.GENERATORS[name](load)
        sent = server
    assert len(sent.sent) == 8
    known = [(times[0] - received, times[-1] - received) for _, received, times, *_ in sent.sent]
    ttft, e2e = (sum(column) / len(column) for column in zip(*known, strict=True))
    assert found["TTFT, mean"] == pytest.approx(ttft, rel=CLOSE)
    assert found["end to end, mean"] == pytest.approx(e2e, rel=CLOSE)
    assert found["ITL, mean"] == pytest.approx((e2e - ttft) / (OUTPUT - 1), rel=CLOSE)


def test_the_table_has_medians_and_ratios_round_by_round(script: Any) -> None:
    def figures(value: float) -> dict[str, float]:
        return dict.fromkeys(script.MEASURED, value)

    shown = script.table(
        {"ours": [figures(1.0), figures(2.0), figures(4.0)], "theirs": [figures(1.1), figures(2.0), figures(5.0)]}
    )
    assert "| output tokens/s | 2.0 | 2.0 (1.100) |" in shown
    assert "| TTFT, mean | 2000.0 ms | 2000.0 ms (1.100) |" in shown


def test_what_is_not_installed_is_left_out(script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(script, "CLIENTS", tmp_path)
    assert script.present() == ["carousel bench", "locust"]
    (tmp_path / "aiperf" / "bin").mkdir(parents=True)
    (tmp_path / "aiperf" / "bin" / "aiperf").touch()
    assert script.present() == ["carousel bench", "locust", "aiperf"]
