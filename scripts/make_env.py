"""Make an environment for Carousel: the one way in which `make env`, the Dockerfile and CI install.

Needs nothing but Python >= 3.11 with venv; safe to repeat, and quick when nothing has changed.

    python3 scripts/make_env.py                    .venv, editable, with the tools for tests and checks
    python3 scripts/make_env.py --target runtime --venv /opt/venv --torch cpu
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NATIVE = "kernels/carousel_kernels/cpu/native"
STAMP = ".carousel-env"  # in the environment; what it was made from
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"  # PyTorch's own CPU builds: 0.2 GB instead of 3
PROBE_SECONDS = 3.0
TARGETS = {
    "dev": "editable, with what tests and checks need",
    "runtime": "what serving needs, and Carousel itself",
    "deps": "what serving needs, without Carousel: a layer that source changes leave alone",
}


class EnvironmentFailed(Exception):
    """The environment cannot be made; the message says why and what to try."""


def say(text: str) -> None:
    print(f"make_env: {text}", flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--target", choices=TARGETS, default="dev", help="; ".join(f"{k}: {v}" for k, v in TARGETS.items())
    )
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="where the environment is or goes (.venv)")
    parser.add_argument(
        "--torch",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="which build of PyTorch: auto takes the CPU build if no NVIDIA GPU is here",
    )
    parser.add_argument("--extras", default="", help="further extras of pyproject.toml, by commas: s3,gcs")
    options = parser.parse_args(argv)
    extras = [extra for extra in options.extras.split(",") if extra]
    if options.target == "dev":
        extras += ["test", "dev"]
    started = time.monotonic()
    try:
        check_interpreter()
        made = make(options.venv.absolute(), options.target, extras, options.torch)
    except EnvironmentFailed as error:
        print(f"make_env: {error}", file=sys.stderr)
        return 1
    say(f"{options.venv} is ready ({time.monotonic() - started:.0f} s)" if made else f"{options.venv} is up to date")
    return 0


def check_interpreter() -> None:
    """Refuse a Python that is too old or lacks venv, as Debian's does without a package."""
    if sys.version_info < (3, 11):  # noqa: UP036 - this script is what says so
        raise EnvironmentFailed(
            f"Python >= 3.11 is needed, this is {platform.python_version()}: try make PYTHON=python3.12"
        )
    try:
        import ensurepip  # noqa: F401
    except ImportError as error:
        raise EnvironmentFailed(
            f"this Python has no venv ({error}): on Debian, apt-get install python3-venv"
        ) from error


def make(venv: Path, target: str, extras: list[str], torch: str) -> bool:
    """Bring the environment to its target; False if it was there already."""
    wanted = fingerprint(target, extras, torch)
    library = library_fingerprint() if target == "dev" else ""
    stamp = venv / STAMP
    python = venv / "bin" / "python"
    found = stamp.read_text("utf-8").splitlines() if stamp.exists() and works(python) else []
    current = found[:1] == [wanted]
    if current and target != "runtime" and found[1:] == [library]:
        stamp.touch()  # make compares times
        return False
    if not current:
        install_requirements(venv, python, extras, torch)
    if target != "deps":
        where = ["--editable", str(ROOT)] if target == "dev" else [str(ROOT)]
        shutil.rmtree(ROOT / "build", ignore_errors=True)  # setuptools would pack what an earlier build left there
        install(python, ["--no-deps", "--no-build-isolation", *where], "Carousel", None)
        shutil.rmtree(ROOT / "build", ignore_errors=True)
    stamp.write_text(f"{wanted}\n{library}\n", "utf-8")
    return True


def install_requirements(venv: Path, python: Path, extras: list[str], torch: str) -> None:
    """Make the environment unless it works, and install PyTorch, then the other requirements."""
    import tomllib  # here, so that an old Python reaches check_interpreter

    (venv / STAMP).unlink(missing_ok=True)  # an interrupted run must not look like a finished one
    if not works(python):
        say(f"creating {venv} with Python {platform.python_version()}")
        run([sys.executable, "-m", "venv", "--clear", str(venv)], "the environment could not be created")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    requirements = list(project["dependencies"])
    for extra in extras:
        if extra not in project["optional-dependencies"]:
            known = ", ".join(project["optional-dependencies"])
            raise EnvironmentFailed(f"there is no extra {extra!r}; there are {known}")
        requirements += project["optional-dependencies"][extra]
    with tempfile.TemporaryDirectory() as folder:
        # PyTorch's CUDA builds name the triton that they need, exactly; the pin is for those that need none.
        without = Path(folder) / "constraints.txt"
        lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines(keepends=True)
        without.write_text("".join(line for line in lines if not line.startswith("triton==")), "utf-8")
        install(python, ["setuptools", *torch_arguments(torch)], "PyTorch", without)
        if torch == "cuda":
            check_for_gpus(python)
        pins = without if names_its_triton(python) else ROOT / "constraints.txt"
        install(python, requirements, f"{len(requirements)} requirements and what they need", pins)


def check_for_gpus(python: Path) -> None:
    """Refuse a PyTorch that knows no GPU: in a folder of wheels, where pip may look too, a CPU build goes first."""
    code = "import torch; print(torch.__version__, torch.version.cuda or torch.version.hip or '')"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    version, _, platform_version = done.stdout.strip().partition(" ")
    if done.returncode != 0:
        raise EnvironmentFailed(f"PyTorch does not load: {done.stderr.strip()[-300:]}")
    if not platform_version:
        raise EnvironmentFailed(
            f"--torch cuda: pip found PyTorch {version}, which is built without CUDA: "
            "pip config list shows where it looks (find-links come before an index)"
        )


def names_its_triton(python: Path) -> bool:
    """Whether the environment's PyTorch depends on triton, as its CUDA builds do."""
    code = (
        "from importlib.metadata import requires; print(any(r.startswith('triton') for r in requires('torch') or ()))"
    )
    try:
        asked = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    except OSError:
        return False
    return asked.stdout.strip() == "True"


def fingerprint(target: str, extras: list[str], torch: str) -> str:
    """What an environment is made from, as a line; another one means that it must be brought up to date."""
    digest = hashlib.sha256()
    for name in ("pyproject.toml", "constraints.txt", "scripts/make_env.py"):
        digest.update((ROOT / name).read_bytes())
    # What serving needs is the same without Carousel: the image's second step finds the first one's work done.
    kind = "runtime" if target == "deps" else target
    return f"{digest.hexdigest()} {kind} {','.join(extras)} {torch} {platform.python_version()} {ROOT}"


def library_fingerprint() -> str:
    """What the compiled library is made from, as a line; another one means that Carousel must be installed again."""
    digest = hashlib.sha256()
    for path in [ROOT / "setup.py", *sorted((ROOT / NATIVE).iterdir())]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def works(python: Path) -> bool:
    """Whether the environment's interpreter runs and has pip; not so when the Python below it went away."""
    try:
        return subprocess.run([python, "-c", "import pip"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def torch_arguments(torch: str) -> list[str]:
    """pip's arguments for the wanted build of PyTorch."""
    if torch == "cuda" or (torch == "auto" and has_gpu()):
        say("PyTorch with CUDA" + (", for the NVIDIA GPU that is here" if torch == "auto" else ""))
        return ["torch"]
    if platform.system() != "Linux":
        return ["torch"]  # the package index has CPU builds for the others
    if answers(TORCH_CPU_INDEX, PROBE_SECONDS):
        say("PyTorch's CPU build, from its own index (0.2 GB)")
        # Beside the usual index, not instead of it: pip takes 2.13.0+cpu before 2.13.0.
        return ["torch", "--extra-index-url", TORCH_CPU_INDEX]
    say(f"PyTorch's own index is not reached in {PROBE_SECONDS:.0f} s: taking what pip finds (3 GB if it has CUDA)")
    return ["torch"]


def has_gpu() -> bool:
    """Whether an NVIDIA GPU can be used here."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return Path("/dev/nvidia0").exists()
    try:
        return subprocess.run([tool, "-L"], capture_output=True, timeout=20, check=False).stdout.startswith(b"GPU")
    except (OSError, subprocess.TimeoutExpired):
        return False


def answers(url: str, seconds: float) -> bool:
    """Whether a server answers in time. In a thread, since looking up a name knows no time limit."""
    result: list[bool] = []

    def probe() -> None:
        try:
            with urllib.request.urlopen(urllib.request.Request(url + "/", method="HEAD"), timeout=seconds) as response:
                result.append(response.status < 400)
        except (OSError, ValueError):
            result.append(False)

    thread = threading.Thread(target=probe, daemon=True)
    thread.start()
    thread.join(seconds)
    return result == [True]


def install(python: Path, arguments: list[str], what: str, constraints: Path | None) -> None:
    say(f"installing {what} ...")
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "-qq"]
    if constraints is not None:
        command += ["--constraint", str(constraints)]
    run(
        [*command, *arguments],
        f"{what} could not be installed: see pip's message above (pip config list shows its index)",
    )


def run(command: list[str], failure: str) -> None:
    environment = {key: value for key, value in os.environ.items() if key not in {"PYTHONHOME", "PYTHONPATH"}}
    if subprocess.run(command, env=environment, check=False).returncode != 0:
        raise EnvironmentFailed(failure)


if __name__ == "__main__":
    sys.exit(main())
