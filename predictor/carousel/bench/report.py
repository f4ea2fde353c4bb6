"""The figures for people (a table, a progress bar) and for programs (JSON), with what they were measured on."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from carousel.bench.inprocess import Progress as RunProgress
from carousel.bench.measure import LATENCIES, STATISTICS, BenchError
from carousel.bench.slo import RATES
from carousel.cpus import available_cpus

_PIPE_WIDTH = 200
_NAMES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "queue": "queue time",
    "e2e": "end to end",
}
# (label, path into the figures, whether more is better)
_COMPARED = (
    ("output tokens/s", ("output_tokens_per_second",), True),
    ("wall time", ("wall",), False),
    ("queue time, mean", ("queue", "mean"), False),
    ("queue time, p99", ("queue", "p99"), False),
    ("time to first token, mean", ("ttft", "mean"), False),
    ("time to first token, p99", ("ttft", "p99"), False),
    ("time per output token, mean", ("tpot", "mean"), False),
    ("inter-token latency, p99", ("itl", "p99"), False),
    ("end to end, mean", ("e2e", "mean"), False),
    ("end to end, p99", ("e2e", "p99"), False),
    ("sequences per step, mean", ("batch_occupancy", "mean"), True),
)


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "cpu": _cpu_model(),
        "cpus": available_cpus(),
        "memory_bytes": _memory_bytes(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": _version("torch"),
        "carousel": _version("kserve-carousel"),
    }


def _dump(value: Any, indent: str = "") -> str:
    """JSON with a line for each field of an object; lists, which may be long, stand on one line."""
    if isinstance(value, Mapping) and value:
        deeper = indent + "  "
        lines = (
            f"{deeper}{json.dumps(name, ensure_ascii=False)}: {_dump(item, deeper)}" for name, item in value.items()
        )
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        return "[" + ", ".join(_dump(item, indent) for item in value) + "]"
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def write_json(report: Mapping[str, Any], target: str) -> None:
    """Write the report to a file, or to standard output for ``-``.

    Raises:
        BenchError: when the file cannot be written.
    """
    text = _dump(report) + "\n"
    if target == "-":
        sys.stdout.write(text)
        return
    path = Path(target).expanduser()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BenchError(f"--json {target}: {error.strerror or error}") from None


def seconds(value: float | None) -> str:
    """``0.0123 -> "12.3 ms"``, ``1.5 -> "1.50 s"``; a dash for what is not known."""
    if value is None:
        return "–"
    if value < 0.9995:
        return f"{value * 1e3:.1f} ms"
    return f"{value:.2f} s" if value < 100 else f"{value:.0f} s"


def _console(stream: TextIO) -> Console:
    # Not on a terminal, the width is unknown: nothing may wrap, or the table could not be pasted elsewhere.
    return Console(file=stream, width=None if stream.isatty() else _PIPE_WIDTH, highlight=False)


def _table(stream: TextIO) -> Table:
    # In a file the table is markdown, so that it can be put into a document as it is.
    return Table(box=box.SIMPLE_HEAD if stream.isatty() else box.MARKDOWN)


def print_report(report: Mapping[str, Any], stream: TextIO) -> None:
    """The latencies as a table, with throughput and occupancy above and below."""
    console = _console(stream)
    workload = report["workload"]
    console.print(
        f"{report['requests']} requests of {workload['name']}, rate {report['rate']}: "
        f"{report['prompt_tokens']:,} prompt and {report['output_tokens']:,} output tokens "
        f"in {seconds(report['wall'])}",
        markup=False,
    )
    table = _table(stream)
    table.add_column("latency")
    for name in STATISTICS:
        table.add_column(name, justify="right")
    for name in LATENCIES:
        table.add_row(_NAMES[name], *(seconds(report[name][statistic]) for statistic in STATISTICS))
    console.print(table)
    console.print(
        f"{report['output_tokens_per_second']:.1f} output tokens/s, "
        f"{report['total_tokens_per_second']:.1f} tokens/s in all, {report['requests_per_second']:.2f} requests/s"
    )
    occupancy = report["batch_occupancy"]["mean"]
    if occupancy is None:
        console.print("batch occupancy: unavailable, the server exports no carousel_iteration_sequences")
    else:
        tokens = report["mean_tokens_per_step"]
        per_step = "" if tokens is None else f", {tokens:.1f} tokens"
        console.print(f"batch occupancy: {occupancy:.1f} sequences{per_step} per step, {report['steps']} steps")
    if report["queue_source"] is None:
        console.print("queue time: unavailable, the server exports no request_queue_time_seconds")
    elif report["queue_source"] == "metrics":
        console.print("queue time: from the server's /metrics; its percentiles are interpolated in histogram buckets")
    if "goodput" in report:
        _print_goodput({"": report}, console, stream)
    if "profile" in report:
        console.print(_profile_table(report["profile"], stream))


def _print_goodput(results: Mapping[str, Mapping[str, Any]], console: Console, stream: TextIO) -> None:
    """What was tried at each rate, and the rates that hold."""
    for mode, result in results.items():
        found = result["goodput"]
        table = _table(stream)
        table.add_column(f"{mode} rate, requests/s".strip())
        for text in found["slo"]:
            table.add_column(text, justify="right")
        table.add_column("holds")
        for probe in found["probes"]:
            rate = probe["rate"] if isinstance(probe["rate"], str) else f"{probe['rate']:.3g}"
            values = (
                seconds(value) if name not in RATES else f"{value:.1f}" for name, value in probe["values"].items()
            )
            table.add_row(rate, *values, "yes" if probe["met"] else "no")
        console.print(table)
        label = f"goodput, {mode}" if mode else "goodput"
        if found["bound"] is None:
            console.print(f"{label}: at least {found['rate']:.3g} requests/s: even all at once kept the objectives")
        else:
            console.print(f"{label}: {found['rate']:.3g} requests/s; {found['bound']:.3g} was too much")


def _profile_table(profile: Mapping[str, Any], stream: TextIO) -> Table:
    table = _table(stream)
    table.add_column(f"{profile['steps']} steps")
    for name in ("time", "share", "calls per step"):
        table.add_column(name, justify="right")
    for part, found in profile["parts"].items():
        calls = f"{found['calls_per_step']:.1f}" if found["calls_per_step"] else ""
        table.add_row(part, seconds(found["seconds"]), f"{found['share']:.1%}", calls)
    return table


def _dig(figures: Mapping[str, Any], path: Sequence[str]) -> float | None:
    value: Any = figures
    for key in path:
        value = value[key]
    return value if isinstance(value, (int, float)) else None


def gains(modes: Mapping[str, Mapping[str, Any]]) -> dict[str, float | None]:
    """How many times better the last mode is than the first, such as ``"queue.mean": 7.5``; None: cannot be said."""
    names = list(modes)
    result: dict[str, float | None] = {}
    for _, path, more_is_better in _COMPARED:
        base, other = _dig(modes[names[0]], path), _dig(modes[names[-1]], path)
        upper, lower = (other, base) if more_is_better else (base, other)
        result[".".join(path)] = None if upper is None or not lower else upper / lower
    return result


def print_comparison(report: Mapping[str, Any], stream: TextIO) -> None:
    """The modes side by side, with the ratios of the last to the first; above 1 is better."""
    console = _console(stream)
    modes: Mapping[str, Mapping[str, Any]] = report["compare"]
    names = list(modes)
    table = _table(stream)
    table.add_column(f"{report['requests']:g} requests, rate {report['rate']}")
    for name in names:
        table.add_column(name, justify="right")
    table.add_column("gain", justify="right")
    for label, path, _ in _COMPARED:
        values = [_dig(modes[name], path) for name in names]
        plain = path[0] in {"output_tokens_per_second", "batch_occupancy"}
        cells = ["–" if value is None else f"{value:.1f}" if plain else seconds(value) for value in values]
        gain = report["gains"][".".join(path)]
        table.add_row(label, *cells, "–" if gain is None else f"{gain:.3g} x")
    console.print(table)
    if all("goodput" in modes[name] for name in names):
        _print_goodput(modes, console, stream)


@contextmanager
def progress_bar(label: str, requests: int, *, shown: bool) -> Iterator[RunProgress]:
    """Requests done and tokens/s on a terminal's standard error; nothing elsewhere."""
    if not (shown and sys.stderr.isatty()):
        yield RunProgress()
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("requests, {task.fields[tokens]:,} tokens"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=4) as bar:
        task = bar.add_task(label, total=requests, tokens=0)
        fields = bar.tasks[0].fields

        def on_tokens(count: int) -> None:
            fields["tokens"] += count  # cheaper than an update: this runs for every token that is measured

        yield RunProgress(on_tokens, lambda: bar.advance(task))
