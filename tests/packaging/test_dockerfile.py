"""The Dockerfile, read instruction by instruction; CI also runs its install steps (scripts/prove_image.py)."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from scripts.prove_image import Stage, chain_of, command_of, install_steps, parse, perform

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "Dockerfile").read_text("utf-8")
HEAD, STAGES = parse(TEXT)
BY_NAME = {stage.name: stage for stage in STAGES}


def chain(target: str) -> list[Stage]:
    return chain_of(STAGES, target)


def last(target: str, name: str) -> str:
    return [arguments for stage in chain(target) for arguments in stage.all_of(name)][-1]


def test_targets_and_base() -> None:
    assert [item.name for item in HEAD] == ["ARG"]
    assert STAGES[-1].name == "cpu"  # what `docker build .` makes
    assert {"cuda", "demo"} < set(BY_NAME)
    bases = {stage.base for stage in STAGES if stage.base not in BY_NAME}
    assert bases == {"${BASE}"}
    assert HEAD[0].arguments == "BASE=python:3.11-slim-bookworm"


@pytest.mark.parametrize("target", ["cpu", "cuda", "demo"])
def test_image_runs_unprivileged_and_stops_cleanly(target: str) -> None:
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", last(target, "USER"))  # a number: Kubernetes can check runAsNonRoot
    assert json.loads(last(target, "ENTRYPOINT")) == ["carousel", "serve"]
    assert last(target, "STOPSIGNAL") == "SIGTERM"
    variables = dict(re.findall(r"(\w+)=(\S+)", last(target, "ENV")))
    assert variables["CAROUSEL_HOST"] == "0.0.0.0"
    assert variables["PATH"].startswith("/opt/venv/bin:")
    assert not any(stage.all_of("CMD") for stage in chain(target))


def test_variables_are_settings() -> None:
    from carousel.config import load_settings

    variables = dict(re.findall(r"(CAROUSEL_\w+)=(\S+)", last("cpu", "ENV")))
    settings = load_settings([], variables)
    assert (settings.host, settings.http_port, settings.grpc_port) == ("0.0.0.0", 8080, 8081)
    assert set(last("cpu", "EXPOSE").split()) == {str(settings.http_port), str(settings.grpc_port)}
    assert settings.cache_dir == "/var/cache/carousel"


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_installs_go_through_make_env_with_a_cache_outside_the_layers(target: str) -> None:
    runs = [item.arguments for item in install_steps(STAGES, target) if item.name == "RUN"]
    compiler, deps, slim, runtime, bill = runs
    assert "apt-get install -y --no-install-recommends gcc libc6-dev" in compiler
    assert command_of(slim)[1] == "scripts/slim_env.py"
    assert command_of(bill)[1] == "scripts/sbom.py"
    for arguments, goal in zip((deps, runtime), ("deps", "runtime"), strict=True):
        assert arguments.startswith("--mount=type=cache,target=/root/.cache/pip ")
        words = command_of(arguments)
        assert words[:4] == ["python3", "scripts/make_env.py", "--target", goal]
        assert words[words.index("--torch") + 1] == target
    assert not re.search(r"\bpip3? install|--no-cache|curl |wget ", TEXT)


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_requirements_come_before_sources(target: str) -> None:
    steps = [(item.name, item.arguments) for item in install_steps(STAGES, target)]
    first_run = next(number for number, (name, _) in enumerate(steps) if name == "RUN")
    copied = " ".join(arguments for name, arguments in steps[:first_run] if name == "COPY")
    assert "predictor" not in copied
    assert "kernels" not in copied


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_only_the_environment_gets_into_the_image(target: str) -> None:
    copies = [arguments for stage in chain(target) for arguments in stage.all_of("COPY")]
    assert copies == [f"--from=builder-{'cuda' if target == 'cuda' else 'cpu'} /opt/venv /opt/venv"]
    for stage in chain(target):
        for arguments in stage.all_of("RUN"):
            assert "apt-get install" not in arguments or "rm -rf /var/lib/apt/lists/*" in arguments


def test_the_demo_target_adds_the_model_and_nothing_else() -> None:
    assert BY_NAME["demo"].base == BY_NAME["cpu"].base
    (copied,) = BY_NAME["demo"].all_of("COPY")
    cache = dict(re.findall(r"(\w+)=(\S+)", last("demo", "ENV")))["CAROUSEL_CACHE_DIR"]
    assert copied == f"--from=model --chown=1000:1000 {cache} {cache}"
    (pulled,) = BY_NAME["model"].all_of("RUN")
    assert command_of(pulled) == ["/opt/venv/bin/carousel", "pull", "--cache-dir", cache]


def test_labels_say_what_it_is() -> None:
    labels = last("cpu", "LABEL")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert f"VERSION={project['version']}" in [arguments for stage in chain("cpu") for arguments in stage.all_of("ARG")]
    assert f'org.opencontainers.image.licenses="{project["license"]}"' in labels
    assert f'org.opencontainers.image.base.name="docker.io/library/{HEAD[0].arguments.partition("=")[2]}"' in labels


def test_no_feature_that_older_builders_refuse() -> None:
    assert not re.search(
        r"<<-?\w|^#\s*syntax=|--link|--parents|--exclude|--checksum|--network|\$\{\w+[#%/]", TEXT, re.MULTILINE
    )


def test_context_has_what_is_copied_and_little_else() -> None:
    ignore = (ROOT / ".dockerignore").read_text("utf-8").split("\n")
    assert "*" in ignore
    allowed = {line[1:] for line in ignore if line.startswith("!")}
    copied = {
        word.strip("/").split("/")[0]
        for stage in STAGES
        for arguments in stage.all_of("COPY")
        if "--from" not in arguments
        for word in arguments.split()[:-1]
    }
    assert copied == allowed


def test_hadolint_has_nothing_to_say() -> None:
    tool = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if tool is None:
        pytest.skip("hadolint has no binary for this system")
    done = subprocess.run([tool, str(ROOT / "Dockerfile")], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_steps_are_performed_as_written(tmp_path: Path) -> None:
    _, stages = parse(
        "FROM x AS base\nCOPY a.txt ./\n"
        'FROM base AS builder\nARG EXTRAS="s3"\nCOPY sub sub/\n'
        'RUN --mount=type=cache,target=/c cp a.txt \\\n  # a comment within\n  "out ${EXTRAS}" \nRUN mkdir /opt/venv\n'
        "FROM x AS t\nCOPY --from=builder /opt/venv /opt/venv\n"
    )
    context, folder, venv = tmp_path / "context", tmp_path / "folder", tmp_path / "venv"
    (context / "sub").mkdir(parents=True)
    folder.mkdir()
    (context / "a.txt").write_text("a")
    (context / "sub" / "b.txt").write_text("b")
    perform(install_steps(stages, "t"), context, folder, venv)
    assert (folder / "out s3").read_text() == "a"
    assert (folder / "sub" / "b.txt").read_text() == "b"
    assert venv.is_dir()
    with pytest.raises(ValueError, match="no instruction"):
        parse("FROM x\n???\n")
