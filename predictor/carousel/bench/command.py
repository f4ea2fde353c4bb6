"""``carousel bench``: reads the options, runs what they say, shows and writes the figures."""

from __future__ import annotations

import asyncio
import gc
import math
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from carousel.bench import client, goodput, inprocess, report
from carousel.bench.measure import BenchError, median_figures
from carousel.bench.options import BenchOptions
from carousel.bench.workload import Workload, WorkloadError, built_in_workload, load_workload
from carousel.config import Settings, declared_settings, raise_problems, read_settings
from carousel.options import Parsed, help_text
from carousel.standalone import spare_what_lives

if TYPE_CHECKING:
    from carousel.bench.profile import Profile
    from carousel.engine.engine import Engine

EngineFactory = Callable[[Settings], "Engine"]

USAGE = """usage: carousel bench [--workload FILE] [--url URL] [--rate R] [--compare MODES] [--goodput SLOS]
                      [--json FILE] ...

Runs a workload on the engine in this process, or with --url against a server, and prints throughput, latencies, queue
time and batch occupancy. In-process, every setting of the engine is a flag here too; prefix caching is off unless
--prefix-caching is given, so that requests do not help each other."""

# Prompts must not share anything unless asked: what is measured is the batch, not the cache.
DEFAULTS = Settings(prefix_caching=False, log_level="warning")


def bench_help() -> str:
    """The text of ``carousel bench --help``."""
    return f"{USAGE}\n\n{help_text([BenchOptions, Settings])}"


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[BenchOptions, Settings, Parsed]:
    """Options and settings, validated together.

    Raises:
        SettingsError: with every problem at once.
    """
    settings, parsed = read_settings(argv, environ, BenchOptions, defaults=DEFAULTS)
    options = parsed.build(BenchOptions)
    for word in parsed.positionals:
        parsed.fail((), f"{word!r}: unexpected word; the file of a workload is given as --workload {word}")
    if options.url:
        useless = {name: flag for name, flag in parsed.from_flags.items() if hasattr(settings, name)}
        for name, flag in useless.items():
            if name != "model_name":
                parsed.fail((name,), f"{flag}: has no effect with --url; it is a setting of the server's own")
        if options.compare:
            parsed.fail(("compare",), "--compare runs in this process and cannot be combined with --url")
    if options.goodput and "rate" in parsed.from_flags:
        parsed.fail(("goodput", "rate"), "--goodput looks for the rate: give no --rate")
    if options.profile and (options.url or options.compare):
        parsed.fail(("profile",), "--profile looks at one engine in this process: not with --url or --compare")
    if options.compare and "batching" in parsed.from_flags:
        parsed.fail(("compare", "batching"), "--batching and --compare both choose the batching: give one of them")
    raise_problems(parsed)
    return options, settings, parsed


def main(argv: Sequence[str], environ: Mapping[str, str], make_engines: Callable[[Settings], EngineFactory]) -> int:
    """Run the command.

    Args:
        argv: the words after ``carousel bench``.
        environ: the environment.
        make_engines: loads the model of some settings once and returns a function that starts an engine on it.

    Returns:
        the exit status: 0, or 1 when a run went wrong.

    Raises:
        SettingsError: before anything is loaded.
    """
    options, settings, parsed = parse(argv, environ)
    from carousel.telemetry.logs import configure_logging

    configure_logging(settings.log_level, settings.log_format)
    try:
        if options.url:
            model = settings.model_name if "model_name" in parsed.values else None
            result = asyncio.run(_bench_url(options, model))
        else:
            # A bad file is refused before the weights load; the built-in workload needs the tokenizer.
            workload = _workload(options, None) if options.workload else None
            result = _measure(options, settings, parsed, workload, make_engines)
        result["machine"] = report.machine()
        tables = sys.stderr if options.json == "-" else sys.stdout
        if options.json:
            report.write_json(result, options.json)
    except (BenchError, WorkloadError) as error:
        print(f"carousel bench: {error}", file=sys.stderr)
        return 1
    show = report.print_comparison if options.compare else report.print_report
    show(result, tables)
    return 0


def _measure(
    options: BenchOptions,
    settings: Settings,
    parsed: Parsed,
    workload: Workload | None,
    make_engines: Callable[[Settings], EngineFactory],
) -> dict[str, Any]:
    if not options.profile:
        return _EngineBench(options, settings, parsed, workload, make_engines(settings)).measure()
    from carousel.bench.profile import Profile

    profile = Profile()
    with profile.watching():
        bench = _EngineBench(options, settings, parsed, workload, make_engines(settings), profile)
        return bench.measure() | {"profile": profile.figures()}


def _workload(options: BenchOptions, encode: Callable[[str], list[int]] | None) -> Workload:
    if options.workload:
        workload = load_workload(options.workload, options.requests)
    else:
        workload = built_in_workload(options.workload_seed, options.requests, encode)
    needs = "--goodput" if options.goodput else "" if math.isinf(options.rate) else f"--rate {options.rate:g}"
    if needs and not any(item.unit_gap for item in workload.items):
        raise WorkloadError(f"workload {workload.name}: has no unit_gap, which {needs} needs")
    return workload


def _head(options: BenchOptions, workload: Workload, target: str) -> dict[str, Any]:
    return {
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "target": target,
        "workload": workload.describe(),
        "rate": "inf" if math.isinf(options.rate) else options.rate,
        "concurrency": options.concurrency or None,
        "repeat": options.repeat,
    }


def _finish(head: dict[str, Any], runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The report of one contestant: the medians on top, the single runs below when there are several."""
    if len(runs) == 1:
        return head | runs[0]
    return head | median_figures([_without_record(run) for run in runs]) | {"runs": runs}


def _without_record(run: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in run.items() if name != "record"}


async def _bench_url(options: BenchOptions, model: str | None) -> dict[str, Any]:
    workload = _workload(options, None)
    async with client.Client(options.url, model, options.timeout_seconds) as server:
        await client.warm_up(server, workload, options.warmup)

        async def run(rate: float, turn: int) -> dict[str, Any]:
            with _bar(options, workload, turn, server.model or "", rate) as progress:
                return await client.run(
                    server,
                    workload,
                    rate=rate,
                    concurrency=options.concurrency,
                    progress=progress,
                    keep_record=options.keep_record,
                )

        head = _head(options, workload, options.url) | {"model": server.model, "settings": None}
        if options.goodput:
            return head | await _goodput(options, run)
        return _finish(head, [await run(options.rate, turn) for turn in range(options.repeat)])


async def _goodput(options: BenchOptions, run: Callable[[float, int], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
    """Search, and the figures of the highest rate that held, or where none did of the lowest that was tried."""

    async def measure(rate: float) -> dict[str, Any]:
        return _finish({}, [await run(rate, turn) for turn in range(options.repeat)])

    found = await goodput.search(measure, options.goodput)
    shown = found.best or min(found.probes, key=lambda probe: probe.rate)
    return shown.figures | {"rate": "inf" if math.isinf(shown.rate) else shown.rate, "goodput": found.report()}


def _bar(options: BenchOptions, workload: Workload, turn: int, name: str, rate: float) -> Any:
    label = f"{name}, rate {rate:.3g}" if options.goodput else name
    label += f" {turn + 1}/{options.repeat}" if options.repeat > 1 else ""
    return report.progress_bar(label, len(workload.items), shown=options.progress)


def _unbounded_queue(settings: Settings, parsed: Parsed) -> Settings:
    """All requests may wait at once: nothing is refused that the caller did not ask to be refused."""
    wanted: dict[str, Any] = {
        name: 2**40 for name in ("max_queue_requests", "max_queue_tokens") if name not in parsed.values
    }
    return replace(settings, **wanted)


class _EngineBench:
    """Runs one or several batching modes on one loaded model, one engine at a time."""

    def __init__(
        self,
        options: BenchOptions,
        settings: Settings,
        parsed: Parsed,
        workload: Workload | None,
        start: EngineFactory,
        profile: Profile | None = None,
    ) -> None:
        self.options = options
        self._profile = profile
        self.settings = _unbounded_queue(settings, parsed)
        self.workload = workload
        self.modes: tuple[str, ...] = options.compare or (settings.batching,)
        self._start = start
        self._engine: Engine | None = None
        self._facts: dict[str, Any] = {}

    def measure(self) -> dict[str, Any]:
        """All runs, the modes alternating, and their report."""
        try:
            found = self._search() if self.options.goodput else self._alternate()
        finally:
            self.stop()
        return self._report(found)

    def _alternate(self) -> dict[str, dict[str, Any]]:
        """The modes' figures, measured in turns."""
        runs: dict[str, list[dict[str, Any]]] = {mode: [] for mode in self.modes}
        for turn in range(self.options.repeat):
            for mode in self.modes:
                if self._engine is None or len(self.modes) > 1:
                    self._start_mode(mode)
                runs[mode].append(asyncio.run(self._run_once(mode, self.options.rate, turn)))
        return {mode: _finish({}, runs[mode]) for mode in self.modes}

    def _search(self) -> dict[str, dict[str, Any]]:
        """The modes' figures at the highest rate at which the objectives hold."""
        found: dict[str, dict[str, Any]] = {}
        for mode in self.modes:
            self._start_mode(mode)
            found[mode] = asyncio.run(_goodput(self.options, partial(self._run_once, mode)))
        return found

    def _start_mode(self, mode: str) -> None:
        self.stop()
        gc.collect()  # the next engine measures the free memory
        engine = self._engine = self._start(replace(self.settings, batching=mode))
        if self.workload is None:
            self.workload = _workload(self.options, engine.tokenizer.encode)
        if self.options.warmup:
            asyncio.run(inprocess.warm_up(engine, self.workload, self.options.warmup))
        if self._profile is not None:  # what came before was no measurement
            self._profile.begin()
            engine.timeline.observers.append(self._profile)
        self._facts = {"model": engine.model_name, "max_model_len": engine.max_model_len}
        spare_what_lives()  # as a server does when it is ready

    async def _run_once(self, mode: str, rate: float, turn: int) -> dict[str, Any]:
        options, engine, workload = self.options, self._engine, self.workload
        assert engine is not None
        assert workload is not None
        with _bar(options, workload, turn, mode, rate) as progress:
            return await inprocess.run(
                engine,
                workload,
                rate=rate,
                concurrency=options.concurrency,
                progress=progress,
                keep_record=options.keep_record,
            )

    def stop(self) -> None:
        """Stop the engine that runs, if one does."""
        if self._engine is not None:
            self._engine.stop()
            self._engine = None
            gc.unfreeze()

    def _report(self, found: dict[str, dict[str, Any]]) -> dict[str, Any]:
        assert self.workload is not None
        head = _head(self.options, self.workload, "in-process") | self._facts
        results = {}
        for mode in self.modes:
            settings = replace(self.settings, batching=mode)
            results[mode] = head | {"batching": mode, "settings": settings_of(settings)} | found[mode]
        last = results[self.modes[-1]]
        if not self.options.compare:
            return last
        figures = {name: value for name, value in last.items() if name not in ("record", "runs")}
        return figures | {"compare": results, "gains": report.gains(results)}


def settings_of(settings: Settings) -> dict[str, Any]:
    """All settings as plain data, for the report."""
    values = {item.name: getattr(settings, item.name) for item in declared_settings()}
    return {name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()}
