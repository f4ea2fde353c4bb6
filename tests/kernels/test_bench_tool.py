"""The roofline tool runs on the CPU and in Triton's interpreter, and what it prints follows from what it measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import carousel_kernels as ck
from carousel_kernels.bench import __main__ as tool
from carousel_kernels.bench import report, tune
from carousel_kernels.bench.cases import TINY, Sizes, cases
from carousel_kernels.triton import config

TINY_ON_CPU = ["--tiny", "--device", "cpu", "--seconds", "0.0001"]


def test_every_operator_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures, table = tmp_path / "figures.json", tmp_path / "table.md"
    assert tool.main([*TINY_ON_CPU, "--json", str(figures), "--markdown", str(table)]) == 0
    whole = json.loads(figures.read_text())
    rows = whole["rows"]
    assert {row["operator"] for row in rows} == {
        "paged decode", "prefill", "add_rms_norm", "silu_mul", "rope_write_kv", "sample", "token_logprobs",
        "linear", "linear fp8", "linear int8", "linear gptq",
    }  # fmt: skip
    for row in rows:
        assert row["gigabytes_per_s"] == pytest.approx(row["num_bytes"] / row["microseconds"] / 1e3)
        assert row["share"] == pytest.approx(row["gigabytes_per_s"] / whole["copy_gigabytes_per_s"])
        assert not row["error"]
    assert table.read_text().count("\n| ") == len(rows) + 1
    assert "paged decode" in capsys.readouterr().err


def test_in_the_interpreter(capsys: pytest.CaptureFixture[str]) -> None:
    if "triton" not in ck.available_backends():
        pytest.fail("TRITON_INTERPRET is not set: see tests/conftest.py")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    arguments = ["--tiny", "--device", device, "--backend", "triton", "--only", "add_rms_norm", "--seconds", "0.0001"]
    assert tool.main(arguments) == 0
    assert "| add_rms_norm | 3 x 64 |" in capsys.readouterr().out


def test_an_operator_that_fails_is_a_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no | such kernel")

    monkeypatch.setattr(ck, "silu_mul", broken)
    assert tool.main([*TINY_ON_CPU, "--only", "mul"]) == 1
    assert "failed: RuntimeError: no / such kernel" in capsys.readouterr().out


def test_goals_are_asked_where_memory_is_the_limit() -> None:
    """Decode at 4k tokens with enough sequences for every SM, and elementwise operators on many rows."""
    small = Sizes(
        hidden=32, inner=16, heads=4, kv_heads=2, dim=16, vocabulary=64, rows=(1,), tokens=(1, 2048),
        decodes=((1, 4096), (2, 4096), (4, 64)), chunks=(), samples=(), group=32,
    )  # fmt: skip
    with torch.inference_mode():
        found = [c for c in cases(small, torch.device("cpu"), torch.float32, 4) if not c.operator.startswith("linear")]
    goals = {(c.operator, c.shape.removesuffix(" fp8")): c.goal for c in found}
    assert goals["paged decode", "1 x 4096"] is None
    assert goals["paged decode", "2 x 4096"] == 0.9
    assert goals["paged decode", "4 x 64"] is None
    assert goals["silu_mul", "2048 x 16"] == 0.85
    assert goals["silu_mul", "1 x 16"] is None
    row = report.Row("a", "b", num_bytes=90, flops=0, goal=0.9)
    report._fill(row, 1.0, 100.0)
    assert row.reached
    report._fill(row, 1.1, 100.0)
    assert row.reached is False


def test_bytes_and_operations_are_counted_by_hand() -> None:
    with torch.inference_mode():
        found = {c.operator: c for c in cases(TINY, torch.device("cpu"), torch.float32, 1)}
    assert found["silu_mul"].num_bytes == 3 * 96 * 3 * 4
    assert found["prefill"].num_bytes == 2 * 25 * 2 * 16 * 4 + 2 * 5 * 4 * 16 * 4
    assert found["prefill"].flops == 4 * (21 + 22 + 23 + 24 + 25) * 4 * 16
    assert found["linear"].num_bytes == (64 * 192 + 2 * 64 + 2 * 192) * 4
    assert found["linear gptq"].num_bytes == 64 * 192 // 2 + 64 * 192 // 32 * 2 + (2 * 64 + 2 * 192) * 4


def test_tuning_needs_a_gpu_and_tries_what_a_device_can_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main(["--device", "cpu", "--tune"]) == 2
    assert "--tune: got a CPU" in capsys.readouterr().err
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = json.loads(tune.tune(device, seconds=0.0001, tiny=True, path=None))
    (entries,) = found.values()
    assert set(entries["decode"]["fp32 D16"]) == {"block_n", "num_warps", "num_stages"}
    assert set(entries["prefill"]["fp32 D16"]) == {"block_n", "block_m", "num_warps", "num_stages"}


def test_the_fastest_configurations_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device of made-up times: the fastest wins if it is faster than the rule by more than noise, and what cannot
    run is left out; other devices' entries stay, this one's old ones go."""
    rule = config.decode_config(config.target_of(torch.device("cpu")), torch.bfloat16, 64, 4)
    tried: list[tuple[str, dict[str, int]]] = []

    def timed(timer: object, sizes: Sizes, kernel: str, cache: torch.dtype) -> float | None:
        entry = config.tuned.args[0]  # type: ignore[attr-defined]
        tried.append((kernel, entry))
        if kernel == "prefill" or entry["num_warps"] == 8:
            return None
        if cache != torch.bfloat16:  # nothing is faster than the rule by more than noise
            return 1.0 if entry["block_n"] == rule.block_n and entry["num_warps"] == rule.num_warps else 0.99
        return 0.5 if entry == {"block_n": 32, "num_warps": 2, "num_stages": 5} else 1.0 + sizes.dim

    monkeypatch.setattr(tune, "_time", timed)
    table = tmp_path / "tuned.json"
    table.write_text(json.dumps({"Other": {"decode": {}}, "interpreter": {"decode": {"old": {}}}}))
    before = config.tuned
    tune.tune(torch.device("cpu"), seconds=0.0, tiny=False, path=table)
    assert config.tuned is before
    whole = json.loads(table.read_text())
    assert whole["Other"] == {"decode": {}}
    found = whole["interpreter"]
    assert set(found) == {"decode"}
    assert found["decode"]["bf16 D64"] == {"block_n": 32, "num_warps": 2, "num_stages": 5}
    expected = {"block_n": rule.block_n, "num_warps": rule.num_warps, "num_stages": rule.num_stages}
    assert found["decode"]["fp8 D64"] == expected
    assert len(tried) == len({(kernel, *sorted(entry.items())) for kernel, entry in tried}) * 6
    monkeypatch.setattr(config, "_table", lambda: whole)
    used = config.decode_config(config.target_of(torch.device("cpu")), torch.bfloat16, 64, 4)
    assert (used.block_n, used.num_warps, used.num_stages) == (32, 2, 5)
