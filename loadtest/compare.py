"""``make compare``: measures what a configuration file lists, in this process, and reports on it.

A configuration (TOML) has a ``title``, ``settings`` for all, ``limits`` for the report, and any number of
``[[experiment]]``. An experiment has a ``name``; what it is ``about``; a ``workload`` as ``--workload`` of the load
tests takes it, with ``requests``, ``max_prompt_tokens``, ``max_output_tokens`` and ``seed``; ``rates`` (requests/s, inf
for all at once) or the objectives of a ``goodput`` search; ``rounds`` (default 1); and ``contestants``, each with
settings of its own. Settings are those of ``carousel serve``, under their names.

Contestants take turns, round by round. Each measurement is a file in ``DIR/runs``; what is there and was made from the
same configuration is not measured again, so that a comparison can be stopped at any time and taken up again.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import hashlib
import json
import math
import sys
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from carousel.bench import goodput, inprocess
from carousel.bench.command import settings_of
from carousel.bench.measure import BenchError
from carousel.bench.report import machine, write_json
from carousel.bench.slo import SloError, bench_slos
from carousel.bench.workload import Workload, WorkloadError
from carousel.config import Settings, load_settings
from carousel.options import SettingsError
from carousel.report.command import LIMIT_LIST, make
from carousel.report.runs import ReportError
from carousel.standalone import engines
from loadtest.sources import Limits, open_workload

if TYPE_CHECKING:
    from carousel.engine.engine import Engine

CONFIGURATION = Path(__file__).with_name("compare.toml")
WARM_UP = 2
GUESSED_TOKENS_PER_SECOND = 150.0
GOODPUT_PROBES = 5
GOODPUT_TOLERANCE = 0.1
_LIMITS = {"requests": "requests", "max_prompt_tokens": "prompt", "max_output_tokens": "output", "seed": "seed"}
_TOP = {"title", "limits", "settings", "experiment"}
_EXPERIMENT = {"name", "about", "workload", "rates", "goodput", "rounds", "settings", "contestants", *_LIMITS}


class ConfigurationError(ValueError):
    """The configuration cannot be used; the message names the place, the value and what is allowed."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement. ``rate`` None: a search for the goodput under ``objectives``."""

    experiment: str
    about: str
    label: str
    settings: Settings
    workload: Workload
    rate: float | None
    objectives: str
    round: int

    @property
    def file(self) -> str:
        rate = "goodput" if self.rate is None else f"{self.rate:g}"
        words = f"{self.experiment} {self.label} {rate} {self.round}".lower()
        return "".join(letter if letter.isalnum() or letter == "." else "-" for letter in words) + ".json"

    @property
    def digest(self) -> str:
        """Of what was configured. Settings at their defaults are left out: one that is new makes no difference."""
        usual = settings_of(Settings())
        chosen = {name: value for name, value in settings_of(self.settings).items() if value != usual[name]}
        facts = [self.workload.digest, chosen, self.rate, self.objectives]
        return hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()[:16]

    @property
    def guess_s(self) -> float:
        """How long it may take before anything like it has been measured."""
        served = self.workload.output_tokens / GUESSED_TOKENS_PER_SECOND
        if self.rate is None:
            return GOODPUT_PROBES * served
        return max(served, 0.0 if math.isinf(self.rate) else len(self.workload.items) / self.rate)

    @property
    def name(self) -> str:
        rate = "goodput" if self.rate is None else "all at once" if math.isinf(self.rate) else f"{self.rate:g}/s"
        return f"{self.experiment}: {self.label}, {rate}" + (f", round {self.round + 1}" if self.round else "")


def read_configuration(path: Path) -> dict[str, Any]:
    """The file, checked for its fields.

    Raises:
        ConfigurationError: it cannot be read, or has a field that nobody knows or lacks one.
    """
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigurationError(f"{path}: {error}") from None
    _check_fields(str(path), found, _TOP)
    experiments = found.get("experiment")
    if not isinstance(experiments, list) or not experiments:
        raise ConfigurationError(f"{path}: must have at least one [[experiment]]")
    for place, experiment in enumerate(experiments):
        where = f"{path}: experiment {experiment.get('name', place)}"
        _check_fields(where, experiment, _EXPERIMENT)
        for name in ("name", "workload", "contestants"):
            if not experiment.get(name):
                raise ConfigurationError(f"{where}: {name} is missing")
        rates = experiment.get("rates", [])
        if not all(isinstance(rate, (int, float)) and rate > 0 for rate in rates):
            raise ConfigurationError(f"{where}: rates {rates}: allowed are numbers above 0, and inf")
        if bool(rates) == ("goodput" in experiment):
            raise ConfigurationError(f"{where}: must have either rates or goodput")
    return found


def _check_fields(where: str, found: Mapping[str, Any], known: set[str]) -> None:
    if unknown := sorted(set(found) - known):
        raise ConfigurationError(f"{where}: unknown {', '.join(unknown)}; allowed are {', '.join(sorted(known))}")


def flags_of(settings: Mapping[str, Any]) -> list[str]:
    """Settings as the flags of ``carousel serve``."""
    words = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", str(value)]
    return words


def cells_of(configuration: Mapping[str, Any]) -> list[Cell]:
    """All measurements, contestants in turns.

    Raises:
        ConfigurationError: a setting, a workload or an objective is wrong.
    """
    cells = []
    for experiment in configuration["experiment"]:
        where = f"experiment {experiment['name']}"
        try:
            if "goodput" in experiment:
                bench_slos(experiment["goodput"], f"{where}: goodput")
            given = {ours: experiment[name] for name, ours in _LIMITS.items() if name in experiment}
            workload = open_workload(experiment["workload"], Limits(**given))
            contestants = {
                label: _settings([configuration.get("settings", {}), experiment.get("settings", {}), own])
                for label, own in experiment["contestants"].items()
            }
        except (WorkloadError, SloError, SettingsError) as error:
            raise ConfigurationError(f"{where}: {error}") from None
        for rate in experiment.get("rates", [None]):
            for turn in range(experiment.get("rounds", 1)):
                cells += [
                    Cell(
                        experiment["name"],
                        " ".join(experiment.get("about", "").split()),
                        label,
                        settings,
                        workload,
                        None if rate is None else float(rate),
                        experiment.get("goodput", ""),
                        turn,
                    )
                    for label, settings in contestants.items()
                ]
    return cells


def _settings(parts: Sequence[Mapping[str, Any]]) -> Settings:
    words = [word for part in parts for word in flags_of(part)]
    return load_settings([*words, "--max-queue-requests", "1000000", "--log-level", "warning"], {})


@dataclass(slots=True)
class Times:
    """How long measurements took, and from that how long the others will."""

    taken: dict[str, float] = field(default_factory=dict)

    def add(self, cell: Cell, seconds: float) -> None:
        self.taken[cell.file] = seconds

    def estimate(self, cell: Cell, done: Sequence[Cell]) -> float:
        """Seconds: those of another round, or else the guess, corrected by how wrong it was elsewhere."""
        for other in reversed(done):
            if (other.experiment, other.label, other.rate) == (cell.experiment, cell.label, cell.rate):
                return self.taken[other.file]
        guessed = sum(other.guess_s for other in done)
        factor = sum(self.taken[other.file] for other in done) / guessed if guessed else 1.0
        return cell.guess_s * factor


Measure = Callable[[Cell], dict[str, Any]]


class Comparison:
    """Measures cells into ``folder``, each once.

    Args:
        measure: runs a cell; its figures.
        say: told what goes on, a line at a time.
        clock: seconds.
    """

    def __init__(
        self,
        cells: Sequence[Cell],
        folder: Path,
        measure: Measure,
        say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.cells, self.folder = list(cells), folder
        self._measure, self._say, self._clock = measure, say, clock
        self.times, self.done = Times(), list[Cell]()
        for cell in self.cells:
            if (seconds := self._kept(cell)) is not None:
                self.times.add(cell, seconds)
                self.done.append(cell)

    def _kept(self, cell: Cell) -> float | None:
        """How long the measurement took that is there already; None where there is none of this configuration."""
        try:
            found = json.loads((self.folder / cell.file).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return float(found["took_s"]) if found.get("digest") == cell.digest else None

    @property
    def left(self) -> list[Cell]:
        done = {cell.file for cell in self.done}
        return [cell for cell in self.cells if cell.file not in done]

    def seconds_left(self) -> float:
        return sum(self.times.estimate(cell, self.done) for cell in self.left)

    def run(self, budget_s: float = math.inf) -> bool:
        """Measure what is missing while the next one is thought to end within the budget; whether all is there."""
        began = self._clock()
        while left := self.left:
            cell = left[0]
            spent, needed = self._clock() - began, self.times.estimate(cell, self.done)
            if spent + needed > budget_s:
                again = "run it again to go on" if spent else f"the next one takes {needed / 60:.1f} min or so"
                self._say(f"{len(left)} left, about {self.seconds_left() / 60:.0f} min in all: {again}")
                return False
            self._say(self._line(cell))
            started = self._clock()
            figures = self._measure(cell)
            took = self._clock() - started
            kept = {"digest": cell.digest, "took_s": round(took, 2)} | figures
            write_json(kept, str(self.folder / cell.file))
            self.times.add(cell, took)
            self.done.append(cell)
        return True

    def _line(self, cell: Cell) -> str:
        place, whole = len(self.done), len(self.cells)
        bar = "#" * round(20 * place / whole)
        return f"[{bar:<20}] {place + 1}/{whole}, {self.seconds_left() / 60:.1f} min left: {cell.name}"


class EngineMeasure:
    """Runs cells on engines in this process; an engine serves on while the settings stay the same.

    Args:
        load: loads the model of some settings, once, with the first cell; the result starts engines on it.
    """

    def __init__(self, load: Callable[[Settings], Callable[[Settings], Engine]]) -> None:
        self._load = load
        self._start: Callable[[Settings], Engine] | None = None
        self._engine: Engine | None = None
        self._settings: Settings | None = None

    def __call__(self, cell: Cell) -> dict[str, Any]:
        engine = self._engine_for(cell.settings)
        workload = _encoded(cell.workload, engine)
        asyncio.run(inprocess.warm_up(engine, workload, WARM_UP))
        if cell.rate is None:
            figures = asyncio.run(_search(engine, workload, cell))
        else:
            figures = asyncio.run(inprocess.run(engine, workload, rate=cell.rate, keep_record=True))
        return {
            "experiment": cell.experiment,
            "about": cell.about,
            "label": cell.label,
            "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "model": engine.model_name,
            "machine": machine(),
            "workload": workload.describe(),
            "rate": cell.rate if cell.rate is not None and math.isfinite(cell.rate) else "inf",
            "settings": settings_of(cell.settings),
        } | figures

    def _engine_for(self, settings: Settings) -> Engine:
        if self._engine is None or settings != self._settings or settings.prefix_caching:  # a cache must begin empty
            self.stop()
            gc.collect()  # the next engine measures the free memory
            self._start = self._start or self._load(settings)
            self._engine, self._settings = self._start(settings), settings
        return self._engine

    def stop(self) -> None:
        """Stop the engine that runs, if one does."""
        if self._engine is not None:
            self._engine.stop()
            self._engine = None


def _encoded(workload: Workload, engine: Engine) -> Workload:
    """With token ids, so that nothing is tokenised while it is measured."""
    items = (
        item if item.prompt_ids else replace(item, prompt_ids=tuple(engine.tokenizer.encode(item.prompt)))
        for item in workload.items
    )
    return Workload(workload.name, tuple(items))


async def _search(engine: Engine, workload: Workload, cell: Cell) -> dict[str, Any]:
    async def measure(rate: float) -> dict[str, Any]:
        return await inprocess.run(engine, workload, rate=rate)

    slos = bench_slos(cell.objectives, "goodput")
    found = await goodput.search(measure, slos, tolerance=GOODPUT_TOLERANCE, most=GOODPUT_PROBES)
    shown = found.best or min(found.probes, key=lambda probe: probe.rate)
    return shown.figures | {"goodput": found.report()}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 0 when all was measured and reported, 3 when time ran out before."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=CONFIGURATION, help="what to measure (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("comparison"), help="folder of runs and report (%(default)s)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin nothing that would take longer")
    parser.add_argument("--only", default="", help="experiments whose name has this in it")
    parser.add_argument("--model", default="", help="another model than the demo's, as --model of carousel serve")
    options = parser.parse_args(argv)
    try:
        configuration = read_configuration(options.config)
        if options.model:
            configuration["settings"] = {**configuration.get("settings", {}), "model": options.model}
        limits = LIMIT_LIST.parse(configuration.get("limits", ""))
        cells = [cell for cell in cells_of(configuration) if options.only.lower() in cell.experiment.lower()]
        if not cells:
            raise ConfigurationError(f"--only {options.only}: no experiment is called so")
        measure = EngineMeasure(engines)
        comparison = Comparison(cells, options.out / "runs", measure)
        try:
            whole = comparison.run(options.minutes * 60)
        finally:
            measure.stop()
        files = [str(comparison.folder / cell.file) for cell in cells if cell in comparison.done]
        title, how = configuration.get("title", "A comparison"), f"Made by make compare from {options.config.name}."
        written = make(files, options.out, title, limits, how) if files else []
    except (ConfigurationError, BenchError, ReportError, OSError, ValueError) as error:
        print(f"compare: {error}", file=sys.stderr)
        return 1
    print("\n".join(map(str, written)))
    return 0 if whole else 3


if __name__ == "__main__":
    sys.exit(main())
