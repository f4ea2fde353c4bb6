"""``scripts/e2e.py``: what of a failure is the kit's, and that nothing goes on when the time is up."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "e2e.py"


@pytest.fixture(scope="module")
def e2e() -> ModuleType:
    spec = importlib.util.spec_from_file_location("e2e_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_a_failure_is_the_kits_or_the_projects(e2e: ModuleType) -> None:
    steps = e2e.Steps(None, dict(os.environ))
    assert steps.run("fine", "true") == 0
    assert steps.run("tests", "false", check=False) == 1
    with pytest.raises(e2e.KitFailed, match="start: exit code 1"):
        steps.run("start", "false", of_kit=True)
    with pytest.raises(e2e.Failed) as failed:
        steps.run("build", "false")
    assert not isinstance(failed.value, e2e.KitFailed)


@pytest.mark.parametrize("tests", [False, True])
def test_what_takes_too_long_is_ended_with_all_that_it_started(e2e: ModuleType, tests: bool, tmp_path: Path) -> None:
    steps = e2e.Steps(0.01, dict(os.environ))
    with pytest.raises(e2e.Failed, match="not done within") as failed:
        steps.run("slow", "sh", "-c", f"sleep 60 & echo $! > {tmp_path}/pid; wait", check=not tests)
    assert isinstance(failed.value, e2e.KitFailed) is not tests
    child = int((tmp_path / "pid").read_text())
    end = time.monotonic() + 10
    while Path(f"/proc/{child}/stat").exists() and time.monotonic() < end:
        if Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            break
        time.sleep(0.02)
    else:
        assert not Path(f"/proc/{child}").exists()


def test_without_a_kit_the_smoke_says_so_and_the_whole_fails() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "KUBECONFIG"}
    environment["CAROUSEL_CLUSTER_KIT"] = "/nowhere"
    for arguments, code in (["--smoke"], 0), ([], 2):
        done = subprocess.run(
            [sys.executable, SCRIPT, *arguments], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == code
        assert "no cluster kit in /nowhere" in done.stdout
