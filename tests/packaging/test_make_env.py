"""scripts/make_env.py, without downloading anything."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from scripts import make_env


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What would be run; nothing is."""
    recorded: list[list[str]] = []
    monkeypatch.setattr(make_env, "run", lambda command, failure: recorded.append(command))
    monkeypatch.setattr(make_env, "torch_arguments", lambda torch: [f"torch-{torch}"])
    return recorded


def installs(commands: list[list[str]]) -> list[str]:
    return [" ".join(command[command.index("install") + 1 :]) for command in commands if "install" in command]


def test_dev_target_installs_torch_first_then_all_then_carousel(tmp_path: Path, commands: list[list[str]]) -> None:
    venv = tmp_path / "env"
    venv.mkdir()
    assert make_env.make(venv, "dev", ["test", "dev"], "auto") is True
    assert commands[0][1:3] == ["-m", "venv"]
    torch, rest, carousel = installs(commands)
    assert "torch-auto" in torch
    assert "constraints.txt" in torch
    assert all(name in rest for name in ("kserve==0.21.*", "pytest>=", "ruff>="))
    assert "constraints.txt" in rest
    assert f"--editable {make_env.ROOT}" in carousel
    assert "--no-deps" in carousel


def test_runtime_target_has_no_test_dependency(tmp_path: Path, commands: list[list[str]]) -> None:
    make_env.make(tmp_path, "runtime", [], "cpu")
    _, rest, carousel = installs(commands)
    assert "kserve==0.21.*" in rest
    assert "pytest" not in rest
    assert "--editable" not in carousel


def test_deps_target_leaves_carousel_out(tmp_path: Path, commands: list[list[str]]) -> None:
    make_env.make(tmp_path, "deps", ["s3"], "cpu")
    assert len(installs(commands)) == 2
    assert "s3fs" in installs(commands)[1]


def test_nothing_is_done_twice(tmp_path: Path, commands: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_env, "works", lambda python: True)
    make_env.make(tmp_path, "dev", ["test"], "auto")
    commands.clear()
    assert make_env.make(tmp_path, "dev", ["test"], "auto") is False
    assert commands == []
    assert make_env.make(tmp_path, "dev", ["test", "dev"], "auto") is True  # more is asked for
    commands.clear()
    monkeypatch.setattr(make_env, "works", lambda python: False)  # its Python went away
    assert make_env.make(tmp_path, "dev", ["test", "dev"], "auto") is True
    assert commands[0][1:3] == ["-m", "venv"]


def test_runtime_target_always_takes_the_sources_of_now(
    tmp_path: Path, commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(make_env, "works", lambda python: True)
    make_env.make(tmp_path, "runtime", [], "cpu")
    commands.clear()
    make_env.make(tmp_path, "runtime", [], "cpu")
    assert len(commands) == 1
    assert str(make_env.ROOT) in commands[0]


def test_an_interrupted_install_is_not_taken_for_done(
    tmp_path: Path, commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(command: list[str], failure: str) -> None:
        raise make_env.EnvironmentFailed(failure)

    make_env.make(tmp_path, "dev", [], "auto")
    monkeypatch.setattr(make_env, "run", fail)
    with pytest.raises(make_env.EnvironmentFailed):
        make_env.make(tmp_path, "dev", ["test"], "auto")
    assert not (tmp_path / make_env.STAMP).exists()


@pytest.mark.parametrize(("cuda", "pinned"), [(False, True), (True, False)])
def test_pytorchs_cuda_build_brings_the_triton_that_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuda: bool, pinned: bool
) -> None:
    """torch 2.13.0 with CUDA wants triton 3.7.1, and another pin would leave pip without an answer."""
    given: list[str] = []

    def run(command: list[str], failure: str) -> None:
        if "--constraint" in command:
            given.append(Path(command[command.index("--constraint") + 1]).read_text("utf-8"))

    monkeypatch.setattr(make_env, "run", run)
    monkeypatch.setattr(make_env, "torch_arguments", lambda torch: ["torch"])
    monkeypatch.setattr(make_env, "names_its_triton", lambda python: cuda)
    monkeypatch.setattr(make_env, "check_for_gpus", lambda python: None)
    make_env.make(tmp_path, "deps", ["cuda"], "cuda")
    everything = (make_env.ROOT / "constraints.txt").read_text("utf-8")
    first, second = given
    assert "\ntriton==" in everything
    assert "\ntriton==" not in first
    assert ("\ntriton==" in second) is pinned
    assert set(everything.splitlines()) - set(first.splitlines()) == {
        line for line in everything.splitlines() if line.startswith("triton==")
    }


@pytest.mark.parametrize(
    ("says", "error"), [("2.13.0+cu130 13.0", None), ("2.13.0+cpu ", "PyTorch 2.13.0\\+cpu, which is")]
)
def test_an_image_for_gpus_takes_no_pytorch_without_cuda(tmp_path: Path, says: str, error: str | None) -> None:
    """A folder of wheels that pip is told of may hold a CPU build of the same version, and goes first."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho '{says}'\n")
    python.chmod(0o755)
    with pytest.raises(make_env.EnvironmentFailed, match=error) if error else nullcontext():
        make_env.check_for_gpus(python)


def test_a_pytorch_that_does_not_load_is_told(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'ImportError: libcudart' >&2\nexit 1\n")
    python.chmod(0o755)
    with pytest.raises(make_env.EnvironmentFailed, match=r"does not load: ImportError: libcudart"):
        make_env.check_for_gpus(python)


def test_whether_pytorch_names_its_triton_is_asked_of_its_metadata(tmp_path: Path) -> None:
    folder = tmp_path / "torch-2.13.0.dist-info"
    folder.mkdir()
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n', "utf-8")
    python.chmod(0o755)
    for requirement, named in (("triton==3.7.1; platform_system == 'Linux'", True), ("sympy", False)):
        text = f"Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0\nRequires-Dist: {requirement}\n"
        (folder / "METADATA").write_text(text, "utf-8")
        assert make_env.names_its_triton(python) is named
    assert make_env.names_its_triton(tmp_path / "missing") is False


def test_unknown_extra_is_named(tmp_path: Path, commands: list[list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    assert make_env.main(["--venv", str(tmp_path), "--target", "deps", "--extras", "s4"]) == 1
    assert "no extra 's4'; there are s3, gcs" in capsys.readouterr().err


# --- which PyTorch


@pytest.mark.parametrize(
    ("torch", "gpu", "index", "own_index"),
    [
        ("auto", False, True, True),
        ("auto", False, False, False),
        ("auto", True, True, False),
        ("cpu", True, True, True),
        ("cuda", False, True, False),
    ],
)
def test_pytorchs_cpu_index_is_used_without_a_gpu_if_it_answers(
    monkeypatch: pytest.MonkeyPatch, torch: str, gpu: bool, index: bool, own_index: bool
) -> None:
    monkeypatch.setattr(make_env, "has_gpu", lambda: gpu)
    monkeypatch.setattr(make_env, "answers", lambda url, seconds: index)
    monkeypatch.setattr(make_env.platform, "system", lambda: "Linux")
    wanted = ["torch", "--extra-index-url", make_env.TORCH_CPU_INDEX] if own_index else ["torch"]
    assert make_env.torch_arguments(torch) == wanted


def test_other_systems_need_no_other_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_env, "has_gpu", lambda: False)
    monkeypatch.setattr(make_env, "answers", lambda url, seconds: True)
    monkeypatch.setattr(make_env.platform, "system", lambda: "Darwin")
    assert make_env.torch_arguments("auto") == ["torch"]


class Index(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self.send_response(404 if "missing" in self.path else 200)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


def test_an_index_that_answers_and_one_that_does_not() -> None:
    with HTTPServer(("127.0.0.1", 0), Index) as server, socket.create_server(("127.0.0.1", 0)) as silent:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert make_env.answers(url, 2.0) is True
        assert make_env.answers(f"{url}/missing", 2.0) is False
        assert make_env.answers(f"http://127.0.0.1:{silent.getsockname()[1]}", 0.3) is False
        server.shutdown()
    assert make_env.answers("http://127.0.0.1:1", 1.0) is False


# --- what a user sees when it goes wrong


def test_an_old_python_is_refused_in_words(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(make_env.sys, "version_info", (3, 10, 0))
    assert make_env.main([]) == 1
    assert "Python >= 3.11 is needed" in capsys.readouterr().err


def test_a_python_without_venv_is_refused_in_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ensurepip", None)
    assert make_env.main([]) == 1
    assert "apt-get install python3-venv" in capsys.readouterr().err


def test_a_failed_download_says_what_failed(tmp_path: Path) -> None:
    environment = {"PATH": "/usr/bin:/bin", "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": "/dev/null", "HOME": str(tmp_path)}
    script = make_env.ROOT / "scripts" / "make_env.py"
    done = subprocess.run(
        [sys.executable, script, "--venv", tmp_path / "env", "--target", "deps", "--torch", "cuda"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "creating" in done.stdout
    assert "PyTorch could not be installed" in done.stderr
    assert "ERROR: " in done.stderr  # pip's own words
