"""Reads what ``carousel bench --json``, the load tests and the comparisons write: files of runs, side by side.

A file may say which ``experiment`` it belongs to, what the experiment is ``about``, and the ``label`` of its
contestant; ``make compare`` writes these. Without them all files are one experiment, and a contestant is called as its
file is.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from carousel.bench.measure import LATENCIES, median_figures

Figures = Mapping[str, Any]
_NOT_MEASURED = ("record", "runs", "settings", "machine", "workload", "goodput", "rate", "repeat", "concurrency")


class ReportError(ValueError):
    """A report cannot be made; the message names the file and what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Run:
    """A contestant at one rate (requests/s; infinite for all at once).

    ``figures``: medians over ``rounds``, which are the single measurements. ``source``: the file. ``goodput``: what the
    search found, where there was one.
    """

    experiment: str
    label: str
    rate: float
    figures: Figures
    rounds: Sequence[Figures]
    source: str
    about: str = ""
    goodput: Figures | None = None

    @property
    def records(self) -> list[Figures]:
        """The records of the rounds that have one."""
        return [found["record"] for found in self.rounds if found.get("record")]


@dataclass(slots=True)
class Experiment:
    """Runs to be looked at side by side. Contestants are in the order in which they came; the first is the baseline."""

    name: str
    about: str = ""
    runs: list[Run] = field(default_factory=list)

    @property
    def labels(self) -> list[str]:
        return list(dict.fromkeys(run.label for run in self.runs))

    @property
    def rates(self) -> list[float]:
        return sorted({run.rate for run in self.runs if run.goodput is None})

    def of(self, label: str) -> list[Run]:
        """A contestant's runs, by rate."""
        mine = (run for run in self.runs if run.label == label and run.goodput is None)
        return sorted(mine, key=lambda run: run.rate)

    def at(self, rate: float) -> list[Run]:
        """All contestants at a rate."""
        found = (next((run for run in self.of(label) if run.rate == rate), None) for label in self.labels)
        return [run for run in found if run is not None]

    @property
    def goodputs(self) -> list[Run]:
        """The contestants whose goodput was searched for."""
        return [run for run in self.runs if run.goodput is not None]


def read(words: Sequence[str]) -> list[Experiment]:
    """The experiments in files, and in folders of files, each perhaps named as ``LABEL=PATH``.

    Raises:
        ReportError: nothing is there, or something is no run.
    """
    experiments: dict[str, Experiment] = {}
    for run in (run for word in words for run in _of_word(word)):
        found = experiments.setdefault(run.experiment, Experiment(run.experiment))
        found.about = found.about or run.about
        found.runs.append(run)
    for found in experiments.values():
        found.runs = _joined(found.runs)
    if not experiments:
        raise ReportError(f"no run in {', '.join(words)}")
    return list(experiments.values())


def _of_word(word: str) -> Iterator[Run]:
    path, label = Path(word).expanduser(), ""
    if not path.exists() and "=" in word:
        label, _, rest = word.partition("=")
        path = Path(rest).expanduser()
    if path.is_dir():
        for file in sorted(path.glob("*.json")):
            yield from _of_file(file, label)
    else:
        yield from _of_file(path, label)


def _of_file(path: Path, label: str) -> Iterator[Run]:
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".jsonl":
            yield from _of_peers([json.loads(line) for line in text.splitlines() if line.strip()], path)
            return
        data = json.loads(text)
    except OSError as error:
        raise ReportError(f"{path}: {error.strerror or error}") from None
    except ValueError as error:
        raise ReportError(f"{path}: not JSON: {error}") from None
    if not isinstance(data, dict):
        raise ReportError(f"{path}: must be an object, as carousel bench --json or --tokens-json of a load test writes")
    if isinstance(data.get("compare"), dict):
        for name, found in data["compare"].items():
            yield _run({**data, **found, "label": f"{label} {name}".strip()}, path, label)
    elif isinstance(data.get("rows"), dict):
        yield _load_test(data, path, label)
    else:
        yield _run(data, path, label)


def _of_peers(lines: Sequence[Any], path: Path) -> Iterator[Run]:
    """The rounds that ``scripts/bench_peers.py --results`` keeps, a line each: one experiment of all rates of arrivals,
    and one of requests that come one at a time."""
    for place, line in enumerate(lines, start=1):
        try:
            name, contestant, figures = line["name"], line["contestant"], line["figures"]
            rate = float(name.removeprefix("rate:")) if name.startswith("rate:") else math.inf
            if not all(isinstance(figures[latency], dict) for latency in LATENCIES):
                raise TypeError("no latencies")
            figures["output_tokens_per_second"] += 0.0
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise ReportError(f"{path}: line {place}: no round of bench_peers ({error!r})") from None
        about = "one request at a time" if name == "single" else "requests by arrival"
        yield Run(f"Engines beside each other: {about}", contestant, rate, figures, [figures], path.name)


def _run(data: Figures, path: Path, label: str) -> Run:
    missing = [name for name in ("output_tokens_per_second", *LATENCIES) if name not in data]
    if missing:
        raise ReportError(f"{path}: has no {', '.join(missing)}: neither a run of carousel bench nor of a load test")
    rate = data.get("rate")
    return Run(
        experiment=data.get("experiment", ""),
        label=data.get("label") or label or path.stem,
        rate=float(rate) if isinstance(rate, (int, float)) else math.inf,
        figures=data,
        rounds=data.get("runs") or [data],
        source=path.name,
        about=data.get("about", ""),
        goodput=data.get("goodput"),
    )


def _load_test(data: Figures, path: Path, label: str) -> Run:
    """Of locust's token statistics: the row of all requests, which has histograms instead of a record."""
    try:
        row, rate = data["rows"]["all"], data["test"].get("rate", math.inf)
    except KeyError:
        raise ReportError(f"{path}: a load test without requests") from None
    return Run("", label or path.stem, float(rate), row, [row], path.name)


def _joined(runs: Sequence[Run]) -> list[Run]:
    """Rounds of one contestant at one rate, written as files of their own, become one run with all of them."""
    groups: dict[tuple[str, float, bool], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.label, run.rate, run.goodput is not None), []).append(run)
    joined = []
    for group in groups.values():
        if len(group) == 1:
            joined.append(group[0])
            continue
        rounds = [found for run in group for found in run.rounds]
        plain = [{name: value for name, value in found.items() if name not in _NOT_MEASURED} for found in rounds]
        first = group[0]
        figures = {**first.figures, **median_figures(plain)}
        source = ", ".join(run.source for run in group)
        joined.append(
            Run(first.experiment, first.label, first.rate, figures, rounds, source, first.about, first.goodput)
        )
    return joined
