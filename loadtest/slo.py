"""Judging a load test by service-level objectives, and JUnit XML for somebody's CI."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from carousel.bench.slo import Slo
from loadtest.figures import Row


def value_of(slo: Slo, rows: Mapping[str, Row]) -> float | None:
    """What the test showed; None where it showed nothing."""
    row = rows.get(slo.row)
    if row is None or not row.counts["requests"]:
        return None
    if not slo.metric:
        return row.figures()[slo.name]
    histogram = row.times[slo.metric]
    if not histogram.count:
        return None
    if slo.statistic == "mean":
        return histogram.mean
    if slo.statistic == "max":
        return histogram.most
    return histogram.percentile(float(slo.statistic[1:]) / 100)


@dataclass(frozen=True, slots=True)
class Verdict:
    """An objective beside what was measured."""

    slo: Slo
    value: float | None

    @property
    def met(self) -> bool:
        return self.slo.met(self.value)

    def line(self) -> str:
        return f"{'met   ' if self.met else 'MISSED'} {self.slo.text}: {self.slo.shown(self.value)}"


def judge(slos: Sequence[Slo], rows: Mapping[str, Row]) -> list[Verdict]:
    return [Verdict(slo, value_of(slo, rows)) for slo in slos]


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
