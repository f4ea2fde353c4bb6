"""``carousel bench``: reads the options, runs what they say, shows and writes the figures."""

from __future__ import annotations

import asyncio
import gc
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from carousel.bench import client, inprocess, report
from carousel.bench.measure import BenchError, median_figures
from carousel.bench.options import BenchOptions
from carousel.bench.workload import Workload, WorkloadError, built_in_workload, load_workload
from carousel.config import Settings, declared_settings, raise_problems, read_settings
from carousel.options import Parsed, help_text

if TYPE_CHECKING:
    from carousel.bench.profile import Profile
    from carousel.engine.engine import Engine

EngineFactory = Callable[[Settings], "Engine"]

USAGE = """usage: carousel bench [--workload FILE] [--url URL] [--rate R] [--compare MODES] [--json FILE] ...

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
    if not math.isinf(options.rate) and not any(item.unit_gap for item in workload.items):
        raise WorkloadError(f"workload {workload.name}: has no unit_gap, which --rate {options.rate:g} needs")
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
    return head | median_figures(runs) | ({"runs": runs} if len(runs) > 1 else {})


async def _bench_url(options: BenchOptions, model: str | None) -> dict[str, Any]:
    workload = _workload(options, None)
    async with client.Client(options.url, model, options.timeout_seconds) as server:
        await client.warm_up(server, workload, options.warmup)
        runs = []
        for turn in range(options.repeat):
            with _bar(options, workload, turn, server.model or "") as progress:
                runs.append(
                    await client.run(
                        server, workload, rate=options.rate, concurrency=options.concurrency, progress=progress
                    )
                )
        return _finish(_head(options, workload, options.url) | {"model": server.model, "settings": None}, runs)


def _bar(options: BenchOptions, workload: Workload, turn: int, name: str) -> Any:
    label = f"{name} {turn + 1}/{options.repeat}" if options.repeat > 1 else name
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
        runs: dict[str, list[dict[str, Any]]] = {mode: [] for mode in self.modes}
        try:
            for turn in range(self.options.repeat):
                for mode in self.modes:
                    fresh = self._engine is None or len(self.modes) > 1
                    engine, workload = self._start_mode(mode) if fresh else (self._engine, self.workload)
                    assert engine is not None
                    assert workload is not None
                    with _bar(self.options, workload, turn, mode) as progress:
                        run = self._run_once(engine, workload, fresh, progress)
                        runs[mode].append(asyncio.run(run))
        finally:
            self.stop()
        return self._report(runs)

    def _start_mode(self, mode: str) -> tuple[Engine, Workload]:
        self.stop()
        gc.collect()  # the next engine measures the free memory
        engine = self._engine = self._start(replace(self.settings, batching=mode))
        if self.workload is None:
            self.workload = _workload(self.options, engine.tokenizer.encode)
        if self._profile is not None:
            engine.timeline.observers.append(self._profile)
        self._facts = {"model": engine.model_name, "max_model_len": engine.max_model_len}
        return engine, self.workload

    async def _run_once(
        self, engine: Engine, workload: Workload, fresh: bool, progress: inprocess.Progress
    ) -> dict[str, Any]:
        options = self.options
        if fresh:
            if options.warmup:
                await inprocess.warm_up(engine, workload, options.warmup)
            if self._profile is not None:
                self._profile.begin()  # an engine runs a warm-up of its own as it starts
        return await inprocess.run(
            engine, workload, rate=options.rate, concurrency=options.concurrency, progress=progress
        )

    def stop(self) -> None:
        """Stop the engine that runs, if one does."""
        if self._engine is not None:
            self._engine.stop()
            self._engine = None

    def _report(self, runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
        assert self.workload is not None
        head = _head(self.options, self.workload, "in-process") | self._facts
        results = {}
        for mode in self.modes:
            settings = replace(self.settings, batching=mode)
            results[mode] = _finish(head | {"batching": mode, "settings": settings_of(settings)}, runs[mode])
        result = results[self.modes[-1]]
        if self.options.compare:
            result = result | {"compare": results, "gains": report.gains(results)}
        return result


def settings_of(settings: Settings) -> dict[str, Any]:
    """All settings as plain data, for the report."""
    values = {item.name: getattr(settings, item.name) for item in declared_settings()}
    return {name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()}
