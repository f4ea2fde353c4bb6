"""The figures of every run, one line of JSON each in a file that grows, and the table of them. `carousel report` draws
such a file."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["Results", "Run", "table"]


@dataclass(frozen=True)
class Run:
    """One contestant's figures of one pass in one round, as those of ``carousel bench``, with the record of its
    requests."""

    round: int
    contestant: str
    name: str
    workload: str
    cpu: str
    figures: dict[str, Any]


class Results:
    """What a file has, and what is added to it. Runs of another workload or CPU are left alone, and not seen.

    Raises:
        ValueError: a line of the file is no run.
    """

    def __init__(self, path: Path, workload: str, cpu: str) -> None:
        self._path, self._workload, self._cpu = path, workload, cpu
        found: list[Run] = []
        if path.exists():
            lines = [line for line in path.read_text("utf-8").splitlines() if line.strip()]
            found = [_run(path, number, line) for number, line in enumerate(lines, 1)]
        self.runs = [run for run in found if (run.workload, run.cpu) == (workload, cpu)]

    def has(self, number: int, contestant: str, name: str) -> bool:
        return any((run.round, run.contestant, run.name) == (number, contestant, name) for run in self.runs)

    def add(self, number: int, contestant: str, name: str, figures: dict[str, Any]) -> None:
        run = Run(number, contestant, name, self._workload, self._cpu, figures)
        self.runs.append(run)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(run)) + "\n")


def _run(path: Path, number: int, line: str) -> Run:
    try:
        run = Run(**json.loads(line))
        if not isinstance(run.figures["ttft"], dict):
            raise TypeError("figures of another layout")
    except (ValueError, TypeError, KeyError) as error:
        what = f"{path}: line {number} is no run that can be gone on with ({error!r})"
        raise ValueError(f"{what}: name another file") from None
    return run


def _milliseconds(runs: Sequence[Run], latency: str, statistic: str) -> str:
    values = [value for run in runs if (value := run.figures[latency][statistic]) is not None]
    return f"{1e3 * statistics.median(values):.0f}" if values else "-"


def speed(run: Run) -> float:
    """What a pass compares: output tokens a second, or, where requests come one at a time, tokens decoded a second."""
    per_token = run.figures["tpot"]["mean"]
    if run.name == "single" and per_token:
        return 1 / per_token
    return float(run.figures["output_tokens_per_second"] or 0.0)


def ratio(own: Iterable[Run], other: Iterable[Run]) -> float | None:
    """The median of how many times faster, round by round; None without a common round."""
    theirs = {run.round: speed(run) for run in other}
    pairs = [speed(run) / theirs[run.round] for run in own if run.round in theirs]
    return statistics.median(pairs) if pairs else None


def table(runs: Sequence[Run], name: str, own: Sequence[str], reasons: Mapping[str, str]) -> str:
    """One pass's contestants side by side, as Markdown: medians, and each of ``own`` against all.

    Args:
        own: Carousel's contestants.
        reasons: why the others that were asked for are not there.
    """
    found: dict[str, list[Run]] = {}
    for run in runs:
        if run.name == name:
            found.setdefault(run.contestant, []).append(run)
    own = [contestant for contestant in own if contestant in found]
    unit = "tokens/s decoded" if name == "single" else "output tokens/s"
    heads = [name, "rounds", unit, "TTFT p50 / p99, ms", "TPOT p50 / p99, ms", *(f"{one} is faster by" for one in own)]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for contestant, taken in found.items():
        cells = [contestant, str(len(taken)), f"{statistics.median(map(speed, taken)):.1f}"]
        cells += [" / ".join(_milliseconds(taken, kind, q) for q in ("p50", "p99")) for kind in ("ttft", "tpot")]
        for one in own:
            factor = ratio(found[one], taken)
            cells.append("" if one == contestant else "-" if factor is None else f"{factor:.2f} x")
        lines.append("| " + " | ".join(cells) + " |")
    lines += [
        f"| {contestant} | not run: {reason} |" for contestant, reason in reasons.items() if contestant not in found
    ]
    return "\n".join(lines)
