"""Run the Dockerfile's install steps without Docker: its COPY lines into an empty folder, its RUN lines in there.

What the image's environment must be is then checked on the result: `carousel --help` answers, everything that serving
needs can be imported, nothing that only tests need is in it, and no cache or source is left.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
IMAGE_VENV = "/opt/venv"
NOT_IN_IMAGE = ("pytest", "hypothesis", "coverage", "ruff", "mypy", "pre_commit", "openai", "tritonclient", "locust")
IMPORTED = (
    "carousel",
    "carousel_kernels",
    "carousel.cli",
    "carousel.server",
    "carousel.engine.engine",
    "torch",
    "kserve",
    "transformers.models.auto.tokenization_auto",
)


@dataclass(frozen=True)
class Instruction:
    """One instruction: its name in capitals, its arguments with continuation lines joined, and its line number."""

    name: str
    arguments: str
    line: int


@dataclass
class Stage:
    """One FROM and what follows it."""

    name: str
    base: str
    instructions: list[Instruction] = field(default_factory=list)

    def all_of(self, name: str) -> list[str]:
        """The arguments of each instruction of this name, in order."""
        return [item.arguments for item in self.instructions if item.name == name]


def parse(text: str) -> tuple[list[Instruction], list[Stage]]:
    """A Dockerfile as the instructions before the first FROM, and the stages.

    Raises:
        ValueError: for what is no instruction.
    """
    head: list[Instruction] = []
    stages: list[Stage] = []
    for number, line in _joined(text):
        match = re.fullmatch(r"([A-Za-z]+)\s+(.*)", line)
        if match is None:
            raise ValueError(f"line {number} of the Dockerfile is no instruction: {line!r}")
        item = Instruction(match[1].upper(), match[2].strip(), number)
        if item.name == "FROM":
            words = item.arguments.split()
            named = len(words) == 3 and words[1].upper() == "AS"
            stages.append(Stage(words[2] if named else str(len(stages)), words[0]))
        elif stages:
            stages[-1].instructions.append(item)
        else:
            head.append(item)
    return head, stages


def _joined(text: str) -> list[tuple[int, str]]:
    """(line number, text) of each instruction: comments and blank lines out, continuations joined."""
    result: list[tuple[int, str]] = []
    pending, start = "", 0
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if line.startswith("#") or not line:
            continue
        start = start if pending else number
        pending += line.removesuffix("\\").rstrip() + " " if line.endswith("\\") else line
        if not line.endswith("\\"):
            result.append((start, pending))
            pending = ""
    return result


def chain_of(stages: list[Stage], target: str) -> list[Stage]:
    """A stage and those it is built on, from the bottom."""
    by_name = {stage.name: stage for stage in stages}
    chain: list[Stage] = []
    while target in by_name:
        chain.insert(0, by_name[target])
        target = by_name[target].base
    return chain


def install_steps(stages: list[Stage], target: str) -> list[Instruction]:
    """The COPY, ARG and RUN instructions that make the environment of a target, in order."""
    copied = [arguments for stage in chain_of(stages, target) for arguments in stage.all_of("COPY")]
    match = re.search(rf"--from=(\S+)\s+{IMAGE_VENV}\s+{IMAGE_VENV}$", copied[0]) if len(copied) == 1 else None
    if match is None:
        raise ValueError(f"the target {target} does not take {IMAGE_VENV} from one builder")
    chain = chain_of(stages, match[1])
    return [item for stage in chain for item in stage.instructions if item.name in {"COPY", "ARG", "RUN"}]


def command_of(arguments: str) -> list[str]:
    """A RUN instruction's words without its --mount options."""
    words = shlex.split(arguments)
    while words and words[0].startswith("--"):
        words.pop(0)
    return words


def perform(steps: list[Instruction], context: Path, folder: Path, venv: Path) -> None:
    """Do the steps in `folder`, with `venv` in place of the image's path."""
    variables: dict[str, str] = {}
    for item in steps:
        if item.name == "ARG":
            name, _, value = item.arguments.partition("=")
            variables[name] = value.strip('"')
        elif item.name == "COPY":
            *sources, target = item.arguments.split()
            for source in sources:
                _copy(context / source, folder / target)
        else:
            words = command_of(re.sub(r"\$\{(\w+)\}", lambda match: variables[match[1]], item.arguments))
            if words[0] == "apt-get":
                print(f"Dockerfile:{item.line}: left out, as it changes the system: {shlex.join(words)}", flush=True)
                continue
            words = [re.sub(rf"^{IMAGE_VENV}\b", str(venv), word) for word in words]
            print(f"Dockerfile:{item.line}: {shlex.join(words)}", flush=True)
            subprocess.run(words, cwd=folder, check=True)


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"), dirs_exist_ok=True)
    else:
        target.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)


def check(venv: Path, elsewhere: Path, target: str = "cpu") -> None:
    """Raise AssertionError or CalledProcessError unless the environment is what the image of a target should hold."""
    environment = {"PATH": f"{venv}/bin:/usr/bin:/bin", "HOME": str(elsewhere)}

    def run(*words: str) -> str:
        return subprocess.run(
            words, cwd=elsewhere, env=environment, check=True, stdout=subprocess.PIPE, text=True
        ).stdout

    assert "carousel COMMAND" in run("carousel", "--help"), "carousel --help does not print its usage"
    run("python", "-m", "pip", "check")
    code = (
        "import importlib, importlib.util, sys\n"
        f"for name in {IMPORTED!r}: importlib.import_module(name)\n"
        "import carousel, carousel_kernels\n"
        "print(carousel.__file__); print(carousel_kernels.__file__)\n"
        f"print([name for name in {NOT_IN_IMAGE!r} if importlib.util.find_spec(name)])\n"
    )
    *files, superfluous = run("python", "-c", code).splitlines()
    assert all(Path(file).is_relative_to(venv) for file in files), f"not installed into the environment: {files}"
    assert superfluous == "[]", f"only tests need these: {superfluous}"
    left = [path for pattern in ("*.whl", "*.egg-info") for path in venv.rglob(pattern)]
    assert not left, f"left over: {left[:5]}"
    code = "from carousel_kernels.cpu import native; print(native.available())"
    compiled = run("python", "-c", code).strip()
    assert compiled == "True" or not shutil.which("cc"), "there is a C compiler, but the compiled operators do not load"
    bill = json.loads((venv / "share" / "sbom" / "sbom.cdx.json").read_text("utf-8"))
    assert {"torch", "kserve"} <= {item["name"] for item in bill["components"]}, "the bill of materials lacks packages"
    headers = list(venv.glob("lib/python3.*/site-packages/torch/include"))
    assert bool(headers) == (target == "cuda"), "torch's headers are for the target cuda, whose kernels need them"
    if target == "cuda":
        code = "import torch, triton; assert torch.version.cuda, torch.__version__"
        run("python", "-c", code)
    typed = [
        path.parent.name for path in venv.rglob("py.typed") if path.parent.name in {"carousel", "carousel_kernels"}
    ]
    assert sorted(typed) == ["carousel", "carousel_kernels"], f"py.typed only in {typed}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="cpu", help="the Dockerfile's target (cpu)")
    options = parser.parse_args(argv)
    started = time.monotonic()
    _, stages = parse((ROOT / "Dockerfile").read_text("utf-8"))
    with tempfile.TemporaryDirectory(prefix="carousel-image-") as name:
        scratch = Path(name).resolve()
        source, elsewhere, venv = scratch / "src", scratch / "elsewhere", scratch / "venv"
        source.mkdir()
        elsewhere.mkdir()
        perform(install_steps(stages, options.target), ROOT, source, venv)
        check(venv, elsewhere, options.target)
    print(f"the install steps of the target {options.target} work ({time.monotonic() - started:.0f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
