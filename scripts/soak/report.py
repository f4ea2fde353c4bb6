"""The report of a soak: JSON for programs, and a page written from that JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from .outcome import OUTCOMES
from .watch import Sample

_POINTS, _COLUMNS, _BLOCKS = 200, 80, "▁▂▃▄▅▆▇█"


def series(samples: Sequence[Sample], points: int = _POINTS) -> dict[str, list[float]]:
    """Time and resident memory (MB), thinned out to at most ``points``."""
    step = max(1, -(-len(samples) // points))
    kept = samples[::step]
    return {
        "seconds": [round(sample.at, 1) for sample in kept],
        "rss_mb": [round(sample.rss_bytes / 1e6, 1) for sample in kept],
        "files": [float(sample.files) for sample in kept],
        "threads": [float(sample.threads) for sample in kept],
    }


def sparkline(values: Sequence[float], columns: int = _COLUMNS) -> str:
    """A series as one line of blocks, lowest to highest, each the largest value of its share of the time."""
    if not values:
        return ""
    low, high = min(values), max(values)
    width = min(columns, len(values))
    edges = [len(values) * column // width for column in range(width + 1)]
    tops = [max(values[begin:end]) for begin, end in pairwise(edges)]
    last = len(_BLOCKS) - 1
    return "".join(_BLOCKS[round((top - low) / (high - low) * last) if high > low else 0] for top in tops)


def _row(cells: Sequence[object]) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    return [_row(head), _row(["---"] * len(head)), *map(_row, rows), ""]


def _milliseconds(values: Mapping[str, float] | None) -> list[str]:
    if values is None:
        return ["-"] * 4
    return [f"{values[name] * 1000:,.0f}" for name in ("p50", "p90", "p99", "max")]


def markdown(report: Mapping[str, Any]) -> str:
    """The page. Everything on it is in the JSON."""
    machine, memory = report["machine"], report["memory"]
    held = all(verdict["holds"] for verdict in report["verdicts"])
    rss, seconds = report["series"]["rss_mb"], max(report["series"]["seconds"], default=0)
    size = f", {machine['memory_bytes'] / 2**30:.0f} GiB" if machine["memory_bytes"] else ""
    offered, saturated = report["offered_rate"], report["saturated_rate"]
    verdict = "All verdicts hold." if held else "NOT all verdicts hold."
    where = f"{machine['cpu']}, {machine['cpus']} CPUs{size}, {machine['system']}, Python {machine['python']}"
    load = f"{report['load_s']:.0f} s in an open loop at {offered:.2f} well-formed requests/s, "
    load += f"{offered / saturated:.2f} times the saturated {saturated:.2f}; "
    load += f"at most {report['max_in_flight']} in flight; seed {report['seed']}"
    tokens = f"{report['generated_tokens']:,.0f}, {report['load_tokens_per_s']:.1f}/s under the load and "
    tokens += f"{report['saturated_tokens_per_s']:.1f}/s saturated; {report['preemptions']:,.0f} preemptions; "
    tokens += f"{report['cache_hits']:,.0f} of {report['prompt_tokens']:,.0f} prompt tokens found in the cache"
    bad = "Bad input over HTTP counts under `http`, whatever protocol it was bad in. Clients that left: "
    lines = [
        "# Soak",
        "",
        f"{verdict} Written by `{report['command']}`, {report['measured_at']}.",
        "",
        f"- Machine: {where}, torch {machine['torch']}; server and clients on the same machine",
        f"- Server: `carousel {report['server']}`",
        f"- Load: {load}",
        f"- Tokens generated: {tokens}",
        "",
        "## Verdicts",
        "",
        *_table(
            ("", "what must hold", "seen"),
            [("ok" if v["holds"] else "**NO**", v["name"], v["text"]) for v in report["verdicts"]],
        ),
        "## Requests by protocol and outcome",
        "",
    ]
    shown = [outcome for outcome in OUTCOMES if report["totals"].get(outcome) or outcome == OUTCOMES[-1]]
    rows = [
        (protocol, *(counts.get(outcome, 0) for outcome in shown), sum(counts.values()))
        for protocol, counts in report["counts"].items()
    ]
    totals = [report["totals"].get(outcome, 0) for outcome in shown]
    lines += _table(("protocol", *shown, "all"), [*rows, ("all", *totals, sum(totals))])
    lines += [
        f"{bad}{report['departures']}.",
        "",
        "## Latencies of complete answers, milliseconds",
        "",
        *_table(
            ("protocol", "n", "p50", "p90", "p99", "max", "first event p50", "p90", "p99", "max"),
            [
                (name, of["n"], *_milliseconds(of["total"]), *_milliseconds(of["first"]))
                for name, of in report["latencies"].items()
            ],
        ),
        "They include the queue: at this load the server is never without one.",
        "",
        "## Resident memory of the server",
        "",
        f"{memory['slope_mb_per_hour']:+.1f} MB/hour over the second half of the load (median slope of all pairs).",
        "",
        "```",
        sparkline(rss),
        f"{min(rss, default=0):.0f} MB lowest, {max(rss, default=0):.0f} MB highest, 0 to {seconds:.0f} s",
        "```",
        "",
    ]
    if report["evidence"]:
        lines += ["## Evidence", "", *(f"- `{item}`" for item in report["evidence"]), ""]
    return "\n".join(lines)
