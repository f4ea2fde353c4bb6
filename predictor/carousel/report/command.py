"""``carousel report``: reads runs and writes what they say for people."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import util
from pathlib import Path

from carousel.bench.slo import seconds
from carousel.config import raise_problems
from carousel.options import TEXT, Kind, help_text, option, parse_options
from carousel.report.runs import Experiment, ReportError, read

USAGE = """usage: carousel report RUN... [--out DIR] [--title TEXT] [--limits NAME=TIME,...]

Writes report.html (one file, nothing from elsewhere), report.md and PNG pictures of runs, side by side. RUN is a JSON
file of `carousel bench --json`, of a load test's --tokens-json, of `make compare` or of `make bench-peers`' --results
(.jsonl), or a folder of such files; LABEL=RUN calls it so. The first contestant is what the others are compared to."""

LIMITED = ("ttft", "tpot", "queue", "e2e")


def _parse_limits(text: str) -> tuple[tuple[str, float], ...]:
    found = []
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        name, _, limit = part.partition("=")
        value = seconds(limit)
        if name not in LIMITED or value is None:
            raise ValueError(part)
        found.append((name, value))
    return tuple(found)


LIMIT_LIST = Kind(
    "limits",
    "NAME=TIME,...",
    _parse_limits,
    lambda limits: ",".join(f"{name}={value:g}s" for name, value in limits),
    "limits, separated by commas",
)


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Where the report goes, and what it looks at."""

    out: str = option("report", TEXT, "Folder of the report; made if it is not there.", group="Report", env=False)
    title: str = option("Runs of Carousel", TEXT, "Title of the report.", group="Report", env=False)
    limits: tuple[tuple[str, float], ...] = option(
        (),
        LIMIT_LIST,
        "Draw how many requests/s kept these limits, such as ttft=1s,tpot=100ms.",
        group="Report",
        allowed=f"{', '.join(LIMITED)} with a time (0.5s, 200ms), separated by commas",
        empty="not drawn",
        env=False,
    )


def report_help() -> str:
    """The text of ``carousel report --help``."""
    return f"{USAGE}\n\n{help_text([ReportOptions])}"


def main(argv: Sequence[str]) -> int:
    """Run the command.

    Returns:
        the exit status: 0, or 1 when there is nothing to report on.

    Raises:
        SettingsError: for options that are wrong.
    """
    parsed = parse_options([ReportOptions], argv, {})  # nothing of it comes from the environment
    if not parsed.positionals:
        parsed.fail((), "no RUN: a JSON file of carousel bench --json, or a folder of them")
    raise_problems(parsed)
    options = parsed.build(ReportOptions)
    try:
        written = make(parsed.positionals, Path(options.out).expanduser(), options.title, options.limits)
    except (ReportError, OSError) as error:
        print(f"carousel report: {error}", file=sys.stderr)
        return 1
    print("\n".join(map(str, written)))
    return 0


def make(
    words: Sequence[str], folder: Path, title: str, limits: Sequence[tuple[str, float]] = (), how: str = ""
) -> list[Path]:
    """Read runs and write their report; the files that were written.

    Args:
        words: RUN..., as on the command line.
        folder: where it goes.
        title: its title.
        limits: names and seconds, for the picture of requests that kept them.
        how: a line on how the runs were made.

    Raises:
        ReportError: there is no run, or no library to draw it with.
        OSError: the report cannot be written.
    """
    experiments = read(words)
    if util.find_spec("matplotlib") is None:
        raise ReportError("the pictures need matplotlib: pip install 'kserve-carousel[report]'")
    from carousel.report.document import sections, write

    return write(folder, title, [*filter(None, [how]), *facts(experiments)], sections(experiments, limits))


def facts(experiments: Sequence[Experiment]) -> list[str]:
    """What the runs were measured on, as far as they say so; more than one line where they differ."""
    found: dict[str, None] = {}
    for run in (run for experiment in experiments for run in experiment.runs):
        machine = run.figures.get("machine")
        if machine:
            parts = [
                f"model {run.figures['model']}" if run.figures.get("model") else "",
                f"{machine['cpus']} CPUs of {machine['cpu']}",
                f"torch {machine['torch']}",
                f"Carousel {machine['carousel']}",
                str(run.figures.get("measured_at", ""))[:10],
            ]
            found[", ".join(part for part in parts if part)] = None
    return list(found)
