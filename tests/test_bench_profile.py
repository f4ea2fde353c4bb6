"""``carousel bench --profile``: what counts, and that its parts are the whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.standalone_fakes import Factory

import carousel_kernels as ck
from carousel.bench.command import main
from carousel.bench.profile import Profile
from carousel.config import Settings
from carousel.engine.timeline import StepRecord


def test_parts_sum_to_the_steps() -> None:
    profile = Profile()
    weight, x = torch.ones(4, 8), torch.ones(3, 8)
    with profile.watching():
        linear = ck.prepare_linear(weight)
        ck.rms_norm(x, torch.ones(8), 1e-5)
        profile.begin()
        for _ in range(2):
            ck.rms_norm(linear(x), torch.ones(4), 1e-5)
            ck.silu_mul(x)
    ck.silu_mul(x)
    for index in range(2):
        profile.on_step(StepRecord(index, 0.0, 2.0, 0.25, 1.5, 0.125, 3, 0, 3, 0, 3, 0, 3, 0), token_latencies_s=[])
    rows = {part: (seconds, calls) for part, seconds, calls in profile.rows()}
    assert [rows[part][1] for part in ("matrix products", "norms", "activations", "attention")] == [1, 1, 1, 0]
    assert rows["matrix products"][0] > 0
    assert rows["scheduling"][0] == 0.5
    assert rows["sampling"][0] == 0.25
    assert sum(seconds for seconds, _ in rows.values()) == pytest.approx(4.0)
    assert profile.figures()["seconds"] == pytest.approx(4.0)


def test_a_profile_leaves_out_how_the_engine_started(tmp_path: Path) -> None:
    factory, target, workload = Factory(), tmp_path / "report.json", tmp_path / "workload.json"
    workload.write_text(json.dumps([{"id": 1, "prompt_ids": [1, 2], "prompt": "ab", "prompt_len": 2, "output_len": 4}]))

    def engines(settings: Settings) -> Callable[[Settings], Any]:
        start = factory(settings)

        def started(settings: Settings) -> Any:
            ck.silu_mul(torch.ones(1, 8))  # as the engine's own warm-up does
            return start(settings)

        return started

    argv = ["--workload", str(workload), "--profile", "--warmup=0", "--json", str(target)]
    assert main(argv, {}, engines) == 0
    profile = json.loads(target.read_text())["profile"]
    assert profile["steps"] > 0
    assert profile["parts"]["activations"] == {"seconds": 0.0, "share": 0.0, "calls_per_step": 0.0}
