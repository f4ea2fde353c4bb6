"""The GPU check runs on the CPU at tiny shapes, goes on where it stopped, and says what has no result."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from scripts.gpu_check import __main__ as check
from scripts.gpu_check.model import Session
from scripts.gpu_check.plan import FULL, STAGES, TINY
from scripts.gpu_check.report import markdown

POPEN = check.subprocess.Popen


def test_a_stage_runs_and_is_not_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--tiny", "--out", str(tmp_path), "--stages", "roofline"]
    assert check.main(arguments) == 0, (tmp_path / "roofline.log").read_text()
    whole = json.loads((tmp_path / "report.json").read_text())
    assert set(whole["stages"]) == set(STAGES)
    backends = {row["operator"] for row in whole["stages"]["roofline"]["table"]["rows"]}
    assert {"add_rms_norm", "paged decode", "sample"} <= backends
    assert whole["stages"]["parity"]["failure"] == "was not asked for"
    before = (tmp_path / "roofline.json").read_bytes()
    capsys.readouterr()
    assert check.main(arguments) == 0
    assert "roofline: finished before" in capsys.readouterr().out
    assert (tmp_path / "roofline.json").read_bytes() == before
    assert "| roofline | good | " in (tmp_path / "report.md").read_text()


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton has no wheels for this system")
def test_the_stages_below_the_engine_find_what_they_look_for() -> None:
    """In this process, on the CPU: what is loaded is what was written, and pieces agree with launched steps."""
    from scripts.gpu_check import model_stages

    session = Session(tiny=True)
    loaded = model_stages.load(session)
    assert loaded["ok"]
    assert loaded["gigabytes"] > 0
    assert [row["files"] for row in loaded["rows"]] == ["from disk", "from the page cache", "mapped, cached"]
    mixed = model_stages.mixed(session)
    assert mixed["ok"]
    assert [row["tokens"] for row in mixed["rows"]] == [5, 16]
    assert mixed["graphs"] == 2


def stage_that(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Replace the worker's command by Python code."""

    def start(command: list[str], **options: Any) -> Any:
        return POPEN([command[0], "-c", code], **options)

    monkeypatch.setattr(check.subprocess, "Popen", start)


def test_a_stage_that_fails_or_hangs_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stage_that(monkeypatch, "raise SystemExit('CUDA error: an illegal memory access')")
    assert check.main(["--tiny", "--out", str(tmp_path), "--stages", "parity,decode"]) == 1
    report = (tmp_path / "report.md").read_text()
    assert "| parity | no result: exit status 1: CUDA error: an illegal memory access |" in report
    stage_that(monkeypatch, "import time; time.sleep(60)")
    assert check.run_stage("decode", tmp_path, True, 0.3) == "no result within 0 s"
    assert check.main(["--tiny", "--out", str(tmp_path), "--stages", "decode", "--minutes", "0"]) == 1
    assert "| decode | no result: no time was left; run the script again |" in (tmp_path / "report.md").read_text()
    stage_that(monkeypatch, "")
    assert check.main(["--tiny", "--out", str(tmp_path), "--stages", "decode"]) == 1
    assert "the code changed while it ran" in capsys.readouterr().out


def test_results_of_other_code_count_for_nothing(tmp_path: Path) -> None:
    check.write(tmp_path / "decode.json", {"ok": True, "of": "older"})
    assert check.stored(tmp_path, "decode", "newer") is None
    assert check.stored(tmp_path, "decode", "older") is not None
    (tmp_path / "decode.json").write_text("{")
    assert check.stored(tmp_path, "decode", "older") is None


def test_wrong_use_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert check.main(["--stages", "kernel"]) == 2
    assert "--stages: got kernel, allowed: kernels, roofline" in capsys.readouterr().err
    monkeypatch.setattr(check, "device", lambda: {"name": "CPU"})
    assert check.main(["--out", str(tmp_path)]) == 2
    assert "there is no GPU here" in capsys.readouterr().err


def test_every_stage_has_a_section() -> None:
    latencies = {"mean": 1.0, "p50": 1.0, "p90": 2.0, "p99": 3.0}
    rate = {"output_tokens_per_second": 100.0, "wall_s": 3.0, "mean_occupancy": 7.5}
    bad_check = {"check": "sample", "ok": False, "error": None, "tolerance": 0.0, "reason": "a | b"}
    stages: dict[str, dict[str, Any]] = {
        "kernels": {"ok": False, "checks": [bad_check, {"check": "silu_mul", "ok": True}]},
        "roofline": {"ok": True, "reached": False, "markdown": "| table |\n"},
        "parity": {"ok": True, "tokens": 100, "identical": 0.99, "largest_gap": 0.01, "tolerance": 0.15},
        "decode": {"ok": True, "reached": True, "goal": 0.75, "copy_gigabytes_per_s": 4000.0,
                   "rows": [{"sequences": 1, "context": 64, "error": "no step"}]},
        "graphs": {"ok": True, "built": True, "start_s": 9.0, "host_waits": "",
                   "capture": {"buckets": [1, 2], "token_buckets": [16], "graphs": 34, "seconds": 1.5}},
        "mixed": {"ok": True, "reached": True, "goal": 1.5, "context": 1024, "graphs": 203, "capture_s": 2.5,
                  "recorded_gib": 0.25, "rows": [{"tokens": 16, "decodes": 8, "launched_ms": 6.0, "replayed_ms": 3.0,
                                                  "factor": 2.0, "largest_gap": 0.0}]},
        "load": {"ok": True, "reached": False, "goal": 0.9, "gigabytes": 5.6,
                 "rows": [{"files": "from disk", "plain_gb_per_s": 6.0, "load_gb_per_s": 4.8, "share": 0.8},
                          {"files": "mapped, cached", "load_gb_per_s": 2.0}]},
        "itl": {"ok": True, "streams": 2, "long_prompts": 1, "long_prompt_tokens": 8192, "longest_step_ms": 30.0,
                "alone_ms": latencies, "beside_long_prompts_ms": latencies},
        "batching": {"ok": True, "requests": 9, "seats": 3, "prompt": 512, "outputs": [32, 1536], "factor": 2.5,
                     "goal": 8.0, "reached": False, "continuous": rate, "static": rate},
    }  # fmt: skip
    text = markdown({"at": "now", "device": {"name": "H200"}, "stages": stages})
    none = {"ok": True, "built": False, "note": "there are no CUDA graphs without CUDA"}
    without = markdown({"at": "now", "device": {}, "stages": {"graphs": none}})
    assert "\nThere are no CUDA graphs without CUDA.\n" in without
    for name in STAGES:
        assert f"\n## {name}\n" in text
    assert "| kernels | bad |" in text
    assert "| roofline | good, goal missed |" in text
    assert "| decode | good, goal reached |" in text
    assert "1 of 2 operators" in text
    assert "| sample |  | 0 | a / b |" in text
    assert "Recording 34 graphs takes 1.5 s of that:" in text
    assert "in a step's operators: nowhere." in text
    assert "| 16 | 8 | 6 | 3 | 2 | 0 |" in text
    assert "203 graphs took 2.5 s and 0.25 GiB" in text
    assert "| load | good, goal missed |" in text
    assert "| mapped, cached |  | 2 |  |" in text
    assert "2.50 times" in text


def test_the_full_plan_is_the_one_that_was_asked_for() -> None:
    """Llama 3 8B in bfloat16, and Anyscale's lengths."""
    config = FULL.config
    assert (config["hidden_size"], config["num_hidden_layers"], config["num_key_value_heads"]) == (4096, 32, 8)
    assert FULL.dtype == "bfloat16"
    assert FULL.batching[2:] == (512, 32, 1536)
    assert max(FULL.mixed[0]) <= 512
    for plan in (FULL, TINY):
        longest = [sum(plan.itl[2:]) + 8, plan.batching[2] + plan.batching[4], max(plan.parity[0]) + plan.parity[1]]
        longest.append(plan.mixed[1] + max(plan.mixed[0]))
        assert max(longest + [prompt + output for _, prompt, output in plan.decode]) <= plan.max_model_len
