"""Make an environment of its own for a client whose requirements do not go together with Carousel's.

    .venv/bin/python scripts/client_env.py            all of scripts/clients/*.txt, each into .clients/NAME
    .venv/bin/python scripts/client_env.py aiperf

Safe to repeat, and quick when nothing has changed.
"""

from __future__ import annotations

import argparse
import hashlib
import platform
import sys
import time
from pathlib import Path

import make_env

ROOT = Path(__file__).resolve().parent.parent
PINS = Path(__file__).resolve().parent / "clients"
NAMES = sorted(path.stem for path in PINS.glob("*.txt"))
STAMP = ".made-from"  # in the environment


def folder(name: str) -> Path:
    """Where the client's environment is or goes."""
    return ROOT / ".clients" / name


def fingerprint(name: str) -> str:
    """What the environment is made from, as a line."""
    digest = hashlib.sha256((PINS / f"{name}.txt").read_bytes()).hexdigest()
    return f"{digest} {platform.python_version()} {ROOT}\n"


def make(name: str) -> bool:
    """Bring the environment to its pins; False if it was there already."""
    venv = folder(name)
    python = venv / "bin" / "python"
    stamp = venv / STAMP
    if stamp.exists() and stamp.read_text("utf-8") == fingerprint(name) and make_env.works(python):
        return False
    make_env.say(f"creating {venv}")
    make_env.run([sys.executable, "-m", "venv", "--clear", str(venv)], f"{venv} could not be created")
    pins = PINS / f"{name}.txt"
    torch = make_env.torch_arguments("cpu")[1:] if "\ntorch==" in pins.read_text("utf-8") else []
    make_env.install(python, ["--requirement", str(pins), "--no-deps", *torch], name, None)
    stamp.write_text(fingerprint(name), "utf-8")
    return True


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; all if none is given")
    names = parser.parse_args(argv).names or NAMES
    unknown = sorted(set(names) - set(NAMES))
    if unknown:
        parser.error(f"there is no client {unknown[0]!r}; there are {', '.join(NAMES)}")
    for name in names:
        started = time.monotonic()
        try:
            made = make(name)
        except make_env.EnvironmentFailed as error:
            print(f"client_env: {error}", file=sys.stderr)
            return 1
        took = f"ready ({time.monotonic() - started:.0f} s)" if made else "up to date"
        print(f"client_env: {folder(name)} is {took}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
