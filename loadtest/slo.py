"""Service-level objectives: parsing them, judging a test by them, and JUnit XML for somebody's CI."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from loadtest.figures import TIMES, TOTAL, Row

RATES = ("output_tokens_per_second", "total_tokens_per_second", "requests_per_second")
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
_SPEC = re.compile(r"(?P<name>[a-z0-9_.]+)(\[(?P<row>[^\]]+)\])?\s*(<=|>=|=)\s*(?P<limit>\S+)")
_STATISTIC = re.compile(r"(?P<metric>[a-z0-9]+)_(?P<statistic>mean|max|p\d{1,2}(\.\d+)?)")
_ALLOWED = (
    f"NAME=LIMIT, where NAME is one of {', '.join(TIMES)} with _mean, _max, _p50, _p99, _p99.9 and so on and LIMIT a "
    f"time (0.5s, 200ms); or errors=SHARE (0.01 or 1%); or one of {', '.join(RATES)} with the least that is enough; "
    "NAME[ROW] looks at one row, such as ttft_p99[chat gold]"
)


class SloError(ValueError):
    """An objective that cannot be understood; the message says what is allowed."""


@dataclass(frozen=True, slots=True)
class Slo:
    """``name`` must be at most ``limit``, or at least for a rate. ``share``: of a percentile, else None."""

    text: str
    name: str
    row: str
    limit: float
    metric: str = ""
    statistic: str = ""

    @property
    def at_least(self) -> bool:
        return self.name in RATES

    def value(self, rows: Mapping[str, Row]) -> float | None:
        """What the test showed; None where it showed nothing."""
        row = rows.get(self.row)
        if row is None or not row.counts["requests"]:
            return None
        if not self.metric:
            return row.figures()[self.name]
        histogram = row.times[self.metric]
        if not histogram.count:
            return None
        if self.statistic == "mean":
            return histogram.mean
        if self.statistic == "max":
            return histogram.most
        return histogram.percentile(float(self.statistic[1:]) / 100)

    def shown(self, value: float | None) -> str:
        if value is None:
            return "no data"
        return f"{value * 1000:.1f} ms" if self.metric else f"{value:.4g}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """An objective beside what was measured. No data is a miss: a gate must not open because nothing was measured."""

    slo: Slo
    value: float | None

    @property
    def met(self) -> bool:
        if self.value is None:
            return False
        return self.value >= self.slo.limit if self.slo.at_least else self.value <= self.slo.limit

    def line(self) -> str:
        return f"{'met   ' if self.met else 'MISSED'} {self.slo.text}: {self.slo.shown(self.value)}"


def _refuse(text: str, why: str) -> SloError:
    return SloError(f"--slo {text!r}: {why}; allowed is {_ALLOWED}")


def parse_slo(text: str) -> Slo:
    """Read one objective, such as ``ttft_p99=0.5s``.

    Raises:
        SloError: naming what is wrong and what is allowed.
    """
    match = _SPEC.fullmatch(text.strip())
    if match is None:
        raise _refuse(text, "not of the form NAME=LIMIT")
    name, row, limit = match["name"], match["row"] or TOTAL, match["limit"]
    if name == "errors" or name in RATES:
        number = re.fullmatch(r"(\d+\.?\d*|\.\d+)(%?)", limit)
        if number is None or (number[2] and name != "errors"):
            raise _refuse(text, f"{limit!r} is not a number")
        value = float(number[1]) / (100 if number[2] else 1)
        if name == "errors" and value > 1:
            raise _refuse(text, f"a share of {limit} is above 1")
        return Slo(text, name, row, value)
    statistic = _STATISTIC.fullmatch(name)
    if statistic is None or statistic["metric"] not in TIMES:
        raise _refuse(text, f"there is no {name!r}")
    time = re.fullmatch(r"(\d+\.?\d*|\.\d+)(us|ms|s|min)", limit)
    if time is None:
        raise _refuse(text, f"{limit!r} is not a time with a unit (us, ms, s, min)")
    return Slo(text, name, row, float(time[1]) * _UNITS[time[2]], statistic["metric"], statistic["statistic"])


def split_slos(texts: Sequence[str]) -> list[str]:
    """The single objectives of options that may each hold several, separated by commas or blanks outside brackets."""
    parts = (part for text in texts for part in re.split(r"[,\s]+(?![^\[]*\])", text))
    return [part for part in parts if part]


def judge(slos: Sequence[Slo], rows: Mapping[str, Row]) -> list[Verdict]:
    return [Verdict(slo, slo.value(rows)) for slo in slos]


def write_junit(path: str | Path, verdicts: Sequence[Verdict], seconds: float) -> None:
    """JUnit XML, one case per objective.

    Raises:
        OSError: the file cannot be written.
    """
    missed = [verdict for verdict in verdicts if not verdict.met]
    suite = ElementTree.Element(
        "testsuite",
        name="loadtest",
        tests=str(len(verdicts)),
        failures=str(len(missed)),
        errors="0",
        time=f"{seconds:.3f}",
    )
    for verdict in verdicts:
        case = ElementTree.SubElement(suite, "testcase", classname="loadtest.slo", name=verdict.slo.text, time="0")
        if not verdict.met:
            ElementTree.SubElement(case, "failure", message=verdict.line()).text = verdict.line()
        ElementTree.SubElement(case, "system-out").text = verdict.slo.shown(verdict.value)
    root = ElementTree.Element("testsuites")
    root.append(suite)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    ElementTree.ElementTree(root).write(path, encoding="utf-8", xml_declaration=True)
