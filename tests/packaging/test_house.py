"""Makefile, CI, README and the other files of the house."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from scripts import readme, smoke

ROOT = Path(__file__).resolve().parents[2]
SKIPPED = {
    ".git",
    ".venv",
    ".clients",
    "build",
    "dist",
    "__pycache__",
    ".mypy_cache",
    ".ruff_cache",
    ".pytest_cache",
    ".hypothesis",
    ".aot-cache",
}


def run_make(*arguments: str) -> subprocess.CompletedProcess[str]:
    # The make that runs this test hands its variables on.
    ours = ("MFLAGS", "ARGS", "PYTEST", "VENV")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MAKE") and key not in ours}
    return subprocess.run(["make", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def make(*arguments: str) -> str:
    done = run_make(*arguments)
    done.check_returncode()
    return done.stdout


def files() -> list[Path]:
    """Every text file of the repository, but for caches and environments."""
    found = []
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [name for name in folders if name not in SKIPPED and not name.endswith(".egg-info")]
        found += [Path(folder) / name for name in names if not name.startswith(".coverage")]
    return found


# --- make


def test_make_alone_prints_every_target() -> None:
    printed = re.findall(r"^  ([a-z0-9-]+) +\S", make(), re.MULTILINE)
    text = (ROOT / "Makefile").read_text("utf-8")
    declared = re.findall(r"^\.PHONY: (.*)$", text, re.MULTILINE)[0].split()
    assert sorted(printed) == sorted(declared)
    assert {"env", "serve", "test", "lint", "format", "bench", "clean"} <= set(printed)


def test_make_targets_run_what_others_rely_on() -> None:
    assert ".venv/bin/carousel serve --policy fair" in make("-n", "serve", "ARGS=--policy fair")
    assert ".venv/bin/carousel bench --json x" in make("-n", "bench", "ARGS=--json x")
    whole = make("-n", "test")
    assert whole.count(".venv/bin/python -m pytest") == 2
    assert "--cov --cov-report=term tests/engine tests/protocols;" in whole
    assert "--ignore=tests/engine --ignore=tests/protocols " in whole
    assert "-m pytest tests/engine" in make("-n", "test", "ARGS=tests/engine")
    lint = make("-n", "lint")
    assert all(tool in lint for tool in ("ruff check", "ruff format --check", "mypy", "hadolint", "readme.py --check"))


@pytest.mark.parametrize("failing", ["--cov", "--ignore=tests/engine"])
def test_make_test_fails_when_either_of_its_runs_does_and_runs_both(tmp_path: Path, failing: str) -> None:
    (tmp_path / ".carousel-env").touch()
    runner = tmp_path / "pytest"
    runner.write_text(f'#!/bin/sh\necho "ran $1"\n[ "$1" != {failing} ]\n')
    runner.chmod(0o755)
    done = run_make("test", f"PYTEST={runner}", f"VENV={tmp_path}")
    assert done.returncode != 0
    assert done.stdout.splitlines()[:2] == ["ran --cov", "ran --ignore=tests/engine"]


def test_make_env_runs_only_when_its_inputs_changed(tmp_path: Path) -> None:
    assert f"scripts/make_env.py --venv {tmp_path}" in make("-n", "env", f"VENV={tmp_path}")
    (tmp_path / ".carousel-env").touch()
    assert "make_env.py" not in make("-n", "env", f"VENV={tmp_path}")
    os.utime(tmp_path / ".carousel-env", (1, 1))
    assert "make_env.py" in make("-n", "env", f"VENV={tmp_path}")


def test_coverage_of_engine_and_protocols_is_held() -> None:
    import tomllib

    coverage = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["coverage"]
    assert coverage["run"]["branch"] is True
    assert set(coverage["run"]["source"]) == {"carousel.engine", "carousel.protocols"}
    assert coverage["report"]["fail_under"] >= 85


# --- CI


def test_ci_is_a_strict_script_that_runs_everything() -> None:
    path = ROOT / ".ci" / "run"
    text = path.read_text("utf-8")
    assert os.access(path, os.X_OK)
    assert text.startswith("#!/usr/bin/env bash\n")
    assert "set -euo pipefail" in text
    parts = ("prove_image.py", "smoke.py", "e2e.py --smoke")
    for line in ("make env", "make lint", "make aot ARGS=--quiet", "make test", *(f"scripts/{name}" for name in parts)):
        assert re.search(rf"^[^#\n]*{line}$", text, re.MULTILINE), line
    subprocess.run(["bash", "-n", path], check=True)


def test_pre_commit_downloads_nothing() -> None:
    import yaml

    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))
    assert [repo["repo"] for repo in config["repos"]] == ["local"]
    hooks = config["repos"][0]["hooks"]
    assert {hook["language"] for hook in hooks} == {"system"}
    for hook in hooks:
        assert (ROOT / hook["entry"].split()[0]).exists(), hook["id"]


# --- README


def test_readme_opens_with_the_two_commands() -> None:
    lines = [line.split("#")[0].strip() for line in (ROOT / "README.md").read_text("utf-8").splitlines() if line]
    commands = [line for line in lines if line.startswith("make ")]
    assert commands[:2] == ["make serve", "make test"]
    assert lines.index("make test") <= 3


def test_readme_has_a_call_for_each_protocol_and_its_body_is_json() -> None:
    import json

    calls = smoke.calls((ROOT / "README.md").read_text("utf-8"))
    for path in (":predict", "/infer", "/generate ", "/generate_stream", "/openai/v1/chat/completions", "/metrics"):
        assert any(path in call for call in calls), path
    for call in calls:
        assert smoke.ADDRESS in call
        body = re.search(r"-d '(.*)'$", call, re.DOTALL)
        if body:
            json.loads(body[1])


def test_readme_settings_are_those_of_the_code() -> None:
    from carousel.config import settings_table

    text = (ROOT / "README.md").read_text("utf-8")
    assert settings_table().strip() in text, "make readme refreshes it"
    assert readme.refreshed(text, settings_table()) == text
    assert readme.refreshed(text, "| other |") != text
    with pytest.raises(ValueError, match="once each"):
        readme.refreshed("no markers", "| x |")


# --- the rest


def test_licence_is_apache_unmodified() -> None:
    assert hashlib.md5((ROOT / "LICENSE").read_bytes(), usedforsecurity=False).hexdigest() == (
        "86d3f3a95c324c9479bd8986968f4327"
    )


def test_changelog_has_the_version_or_unreleased() -> None:
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert re.search(r"^## \[(Unreleased|\d+\.\d+\.\d+)\]", text, re.MULTILINE)


def test_no_address_of_a_package_index_but_pytorchs() -> None:
    # Users have their own indexes; pip knows them.
    address = re.compile(r"https?://[\w.-]+(?::\d+)?/(?:[\w./-]*/)?(?:simple|whl)\b[\w./-]*")
    found = {}
    for path in files():
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError:
            continue
        for match in address.findall(text):
            found[match] = str(path.relative_to(ROOT))
    assert list(found.values()) == ["scripts/make_env.py"], found


def test_no_source_file_grows_out_of_hand() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for path in files()
        if path.suffix == ".py" and (lines := len(path.read_text("utf-8").splitlines())) > 700
    }
    assert long == {}


def test_scripts_need_only_the_standard_library_to_start() -> None:
    for name in ("make_env.py", "prove_image.py", "smoke.py"):
        done = subprocess.run(
            [sys.executable, "-I", "-S", ROOT / "scripts" / name, "--help"], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
