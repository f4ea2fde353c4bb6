"""`carousel bench` and other contestants, each in a process of its own, for the scripts that compare them."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["bench", "percentile", "run"]


def run(command: list[str], environment: dict[str, str] | None = None) -> str:
    """What a contestant prints.

    Raises:
        SystemExit: it failed; its own words are in the message.
    """
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\nleft with {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout


def bench(arguments: list[str]) -> dict[str, Any]:
    """The figures of one `carousel bench`.

    Raises:
        SystemExit: it failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        run([sys.executable, "-m", "carousel.cli", "bench", "--json", str(report), *arguments])
        figures: dict[str, Any] = json.loads(report.read_text("utf-8"))
        return figures


def percentile(values: Sequence[float], share: float) -> float:
    """The value of the nearest rank above."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
