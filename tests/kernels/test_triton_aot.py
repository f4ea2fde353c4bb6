"""The compilation ahead of time: what is declared, judged and kept. One small kernel is compiled for real."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from carousel_kernels.triton import aot, config
from carousel_kernels.triton.registry import TARGETS, Spec, Target, specs

BY_NAME = {target.name: target for target in TARGETS}


def run(*arguments: str, interpret: bool = False) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "carousel_kernels.triton.aot", "--jobs", "1", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_every_argument_of_every_variant_is_declared(target: Target) -> None:
    found = specs(target)
    assert {"decode_kernel", "prefill_kernel", "plan_kernel", "rope_kernel"} <= {spec.name for spec in found}
    for spec in found:
        assert {*spec.signature, *spec.constexprs} == set(spec.kernel.arg_names), f"{spec.name} {spec.label}"
        assert not set(spec.signature) & set(spec.constexprs), f"{spec.name} {spec.label}"
        assert set(spec.aligned_arguments()) <= set(spec.signature), f"{spec.name} {spec.label}"


def test_a_small_kernel_compiles_and_is_not_compiled_again(tmp_path: Path) -> None:
    arguments = ("--targets", "sm_90,gfx942", "--kernels", "write_kv", "--cache", str(tmp_path))
    first, second = run(*arguments), run(*arguments)
    assert (first.returncode, second.returncode) == (0, 0), first.stdout + first.stderr
    lines = [line.split() for line in first.stdout.splitlines()]
    rows = [line for line in lines if line and line[0] == "write_kv_kernel"]
    assert [row[3] for row in rows] == ["gfx942", "sm_90"]
    assert all(0 < int(row[6]) < 128 and int(row[7]) == 0 for row in rows), "registers and spills"
    assert "2 variants, 2 compiled, 0 bad" in first.stdout
    assert "2 variants, 0 compiled, 0 bad" in second.stdout
    assert first.stdout.splitlines()[:-1] == second.stdout.splitlines()[:-1]
    assert len(json.loads((tmp_path / "results.json").read_text("utf-8"))) == 2


def test_wrong_calls_are_refused() -> None:
    interpreted = run(interpret=True)
    assert interpreted.returncode == 2
    assert "TRITON_INTERPRET is set" in interpreted.stderr
    unknown = run("--targets", "sm_90,sm_1")
    assert unknown.returncode == 2
    assert "--targets: got sm_1, allowed: sm_80,sm_90,sm_100,gfx942" in unknown.stderr


def example(**changes: object) -> Spec:
    found = next(spec for spec in specs(BY_NAME["sm_90"]) if spec.name == "combine_kernel")
    return dataclasses.replace(found, **changes)  # type: ignore[arg-type]


def test_what_a_device_cannot_run_is_bad() -> None:
    def judged(target: str, shared: int = 0, registers: int = 32, spilled: int = 0, **changes: object) -> list[str]:
        return aot.violations(example(**changes), BY_NAME[target], aot.Result(shared, registers, spilled))

    assert judged("sm_90", 227 * 1024, 255) == []
    assert judged("sm_80", 163 * 1024 + 1) == ["166913 bytes of shared memory, the device has 166912"]
    assert judged("gfx942", 65537) == ["65537 bytes of shared memory, the device has 65536"]
    assert judged("sm_90", registers=256) == ["256 registers, the device has 255"]
    assert judged("sm_90", registers=160, num_warps=16) == ["512 threads of 160 registers do not fit"]
    assert judged("sm_90", spilled=8) == ["spills 8 bytes in a decode step"]
    assert judged("sm_90", spilled=8, decode=False) == []
    assert aot.violations(example(), BY_NAME["sm_90"], aot.Result(error="SyntaxError: x")) == ["SyntaxError: x"]


def test_a_spec_that_does_not_fit_its_kernel_is_an_error() -> None:
    spec = example()
    wrong = dataclasses.replace(spec, signature={"nonsense": "i32"})
    assert "unknown arguments ['nonsense'] and lacks" in aot.compile_spec(wrong, BY_NAME["sm_90"]).error


def test_a_measured_configuration_wins_over_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    device = dataclasses.replace(BY_NAME["sm_90"], name="NVIDIA H200")
    rule = config.decode_config(device, torch.bfloat16, 128, 4)
    measured = {"block_n": 32, "block_m": 16, "num_warps": 2, "num_stages": 7}
    table = {"NVIDIA H200": {"decode": {"bf16 D128": measured}, "prefill": {"bf16 D128": measured}}}
    monkeypatch.setattr(config, "_table", lambda: table)
    assert config.decode_config(device, torch.bfloat16, 128, 4) == config.AttentionConfig(32, 16, 2, 7) != rule
    assert config.prefill_config(device, torch.bfloat16, 128, 4) == config.AttentionConfig(32, 16, 2, 7)
    assert config.decode_config(BY_NAME["sm_90"], torch.bfloat16, 128, 4) == rule
    assert config.decode_config(device, torch.float16, 128, 4) == rule
