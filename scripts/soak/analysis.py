"""From samples and outcomes to verdicts. Nothing here talks to a server."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .watch import BLOCKS, GAUGES, Sample

MB = 1e6
#: Over the second half, resident memory may grow by this share of itself before it counts as a leak.
RSS_GROWTH_SHARE = 0.01
#: Most points of a series that the slope is taken from: it looks at all pairs.
_SLOPE_POINTS = 400
#: Idle again, so many files or threads more than before are no leak: kept connections, pools that had not been asked.
SPARE_FILES, SPARE_THREADS = 8, 8
#: Share of the intended load that must have been sent; arrivals are drawn, and the clients are bounded.
OFFERED_SHARE = 0.85
_EXACT = ("requests_admitted_total", "requests_finished_total", "requests_cancelled_total", "requests_failed_total")


@dataclass(frozen=True, slots=True)
class Verdict:
    """One thing that must hold."""

    name: str
    holds: bool
    text: str


def slope(times: Sequence[float], values: Sequence[float]) -> float:
    """The median slope of all pairs (Theil and Sen): units per second. Outliers, up to 29 % of the points, do nothing.

    Zero for fewer than two points.
    """
    if len(times) > _SLOPE_POINTS:
        places = np.linspace(0, len(times) - 1, _SLOPE_POINTS).astype(int)
        times, values = [times[i] for i in places], [values[i] for i in places]
    x, y = np.asarray(times, dtype=float), np.asarray(values, dtype=float)
    first, second = np.triu_indices(len(x), 1)
    apart = x[second] - x[first]
    pairs = apart > 0
    if not pairs.any():
        return 0.0
    return float(np.median((y[second] - y[first])[pairs] / apart[pairs]))


def identity_gap(metrics: Mapping[str, float]) -> float:
    """admitted - (finished + cancelled + failed + live) of one scrape; 0 in a sound one."""
    admitted, *ended = (metrics[name] for name in _EXACT)
    return admitted - sum(ended) - metrics["requests_live"]


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """p50, p90, p99 and the largest; None of nothing."""
    if not values:
        return None
    p50, p90, p99 = (float(value) for value in np.percentile(values, (50, 90, 99)))
    return {"p50": p50, "p90": p90, "p99": p99, "max": max(values)}


def second_half(samples: Sequence[Sample], phase: str = "load") -> list[Sample]:
    """The later half, by time, of a phase."""
    chosen = [sample for sample in samples if sample.phase == phase]
    if not chosen:
        return []
    middle = (chosen[0].at + chosen[-1].at) / 2
    return [sample for sample in chosen if sample.at >= middle]


def memory(samples: Sequence[Sample]) -> dict[str, Any]:
    """Resident memory: slope of the second half of the load, what that makes of growth, and what would be allowed."""
    half = second_half(samples)
    per_s = slope([sample.at for sample in half], [sample.rss_bytes for sample in half])
    seconds = half[-1].at - half[0].at if half else 0.0
    level = statistics.median(sample.rss_bytes for sample in half) if half else 0.0
    return {
        "slope_mb_per_hour": per_s * 3600 / MB,
        "growth_mb": per_s * seconds / MB,
        "seconds": seconds,
        "median_mb": level / MB,
        "allowed_growth_mb": RSS_GROWTH_SHARE * level / MB,
    }


def _memory_verdict(samples: Sequence[Sample]) -> Verdict:
    facts = memory(samples)
    text = (
        f"{facts['slope_mb_per_hour']:+.1f} MB/hour over the second half of the load ({facts['seconds']:.0f} s): "
        f"{facts['growth_mb']:+.2f} MB of {facts['median_mb']:.0f} MB; allowed is 1 %, "
        f"{facts['allowed_growth_mb']:.1f} MB"
    )
    return Verdict(
        "memory is flat", bool(facts["median_mb"]) and facts["growth_mb"] <= facts["allowed_growth_mb"], text
    )


def _flat_verdict(name: str, before: int, half: Sequence[int], after: int, spare: int) -> Verdict:
    """Idle again as before; and the level of the load did not creep up through its second half."""
    quarter = max(1, len(half) // 2)
    early, late = max(half[:quarter], default=0), max(half[-quarter:], default=0)
    text = f"{before} before, {after} after; most in the load's third quarter {early}, in its last {late}"
    return Verdict(name, after <= before + spare and late <= early + max(spare, early // 4), text)


def _identity_verdict(samples: Sequence[Sample]) -> Verdict:
    scrapes = [sample for sample in samples if sample.metrics]
    wrong = [(sample.at, gap) for sample in scrapes if (gap := identity_gap(sample.metrics))]
    text = f"admitted = finished + cancelled + failed + live in {len(scrapes) - len(wrong)} of {len(scrapes)} scrapes"
    if wrong:
        text += f"; first at {wrong[0][0]:.0f} s, off by {wrong[0][1]:g}"
    return Verdict("the counts are exact", bool(scrapes) and not wrong, text)


def _idle_verdicts(idle: Sample | None) -> Iterable[Verdict]:
    if idle is None or not idle.metrics:
        yield Verdict("idle again", False, "there is no scrape of the idle server")
        return
    left = {name: idle.metrics[name] for name in GAUGES if idle.metrics[name]}
    yield Verdict("gauges return to 0", not left, f"not 0: {left}" if left else f"all of {', '.join(GAUGES)}")
    blocks, free, cached = (idle.metrics[name] for name in BLOCKS)
    text = f"{free:g} free + {cached:g} cached of {blocks:g}"
    yield Verdict("no block is lost", free + cached == blocks, text)


def verdicts(facts: Mapping[str, Any], samples: Sequence[Sample], before: Sample, idle: Sample | None) -> list[Verdict]:
    """All that must hold.

    Args:
        facts: of the report; see :mod:`scripts.soak.report`.
        samples: of the whole run.
        before: of the idle server before the load.
        idle: of the idle server after it; None when it never became idle.
    """
    half = second_half(samples)
    after = idle or samples[-1]
    threads, files = [sample.threads for sample in half], [sample.files for sample in half]
    return [
        *_request_verdicts(facts),
        _identity_verdict(samples),
        *_idle_verdicts(idle),
        _memory_verdict(samples),
        _flat_verdict("open files are flat", before.files, files, after.files, SPARE_FILES),
        _flat_verdict("threads are flat", before.threads, threads, after.threads, SPARE_THREADS),
        *_server_verdicts(facts),
    ]


def _request_verdicts(facts: Mapping[str, Any]) -> Iterable[Verdict]:
    unexplained, sent = facts["unexplained"], sum(facts["totals"].values())
    text = f"{unexplained} of {sent} requests" + (": see the evidence" if unexplained else "")
    yield Verdict("nothing unexplained", not unexplained, text)
    same = facts["checked"] > 0 and not facts["differing"]
    yield Verdict("greedy texts are the lone ones", same, f"{facts['checked']} compared, {facts['differing']} differ")
    offered, saturated = facts["offered_rate"], facts["saturated_rate"]
    text = f"{offered:.2f} well-formed requests/s, {offered / saturated:.2f} times the saturated {saturated:.2f}/s; "
    text += f"{facts['skipped']} held back at the bound of {facts['max_in_flight']} in flight"
    yield Verdict("the load was offered", offered >= OFFERED_SHARE * facts["factor"] * saturated, text)


def _server_verdicts(facts: Mapping[str, Any]) -> Iterable[Verdict]:
    missed, failed, complaints = facts["missed_scrapes"], facts["failed"], len(facts["complaints"])
    yield Verdict("/metrics always answers", not missed, f"{missed} scrapes without an answer")
    yield Verdict("the engine failed nothing", not failed, f"{failed:g} requests ended with an error of the engine's")
    yield Verdict("the log is clean", not complaints, f"{complaints} errors or tracebacks in it")
    code, exit_s, grace_s = facts["exit_code"], facts["exit_s"], facts["grace_s"]
    text = f"exit code {code} after {exit_s:.1f} s, of {grace_s:.0f} s of grace"
    yield Verdict("SIGTERM under load", code == 0 and exit_s <= grace_s, text)
