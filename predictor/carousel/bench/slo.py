"""Service-level objectives, as ``carousel bench --goodput`` and the load tests take them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from carousel.bench.measure import LATENCIES, STATISTICS

RATES = ("output_tokens_per_second", "total_tokens_per_second", "requests_per_second")
TOTAL = "all"
"""The row of a load test that holds every request."""

_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
_SPEC = re.compile(r"(?P<name>[a-z0-9_.]+)(\[(?P<row>[^\]]+)\])?\s*(<=|>=|=)\s*(?P<limit>\S+)")
_STATISTIC = re.compile(r"(?P<metric>[a-z0-9]+)_(?P<statistic>mean|max|p\d{1,2}(\.\d+)?)")
_TIME = re.compile(r"(\d+\.?\d*|\.\d+)(us|ms|s|min)")


class SloError(ValueError):
    """An objective that cannot be understood; the message says what is allowed."""


@dataclass(frozen=True, slots=True)
class Slo:
    """``name`` must be at most ``limit``, or at least for a rate. ``metric`` and ``statistic`` are the parts of a
    latency's name; ``row`` names the part of a load test that it looks at."""

    text: str
    name: str
    row: str
    limit: float
    metric: str = ""
    statistic: str = ""

    @property
    def at_least(self) -> bool:
        return self.name in RATES

    def met(self, value: float | None) -> bool:
        """No data is a miss: a gate must not open because nothing was measured."""
        if value is None:
            return False
        return value >= self.limit if self.at_least else value <= self.limit

    def shown(self, value: float | None) -> str:
        if value is None:
            return "no data"
        return f"{value * 1000:.1f} ms" if self.metric else f"{value:.4g}"

    def figure(self, figures: Mapping[str, Any]) -> float | None:
        """Its value in the figures of a bench."""
        value: float | None = figures[self.metric][self.statistic] if self.metric else figures[self.name]
        return value


def seconds(text: str) -> float | None:
    """``"200ms" -> 0.2``; None for what is no time with a unit (us, ms, s, min)."""
    time = _TIME.fullmatch(text.strip())
    return None if time is None else float(time[1]) * _UNITS[time[2]]


def parse_slo(text: str, times: Sequence[str] = LATENCIES, flag: str = "--slo") -> Slo:
    """Read one objective, such as ``ttft_p99=0.5s``.

    Args:
        text: of the form ``NAME=LIMIT`` or ``NAME[ROW]=LIMIT``.
        times: the latencies that there are.
        flag: where it was written, for the message.

    Raises:
        SloError: naming what is wrong and what is allowed.
    """

    def refuse(why: str) -> SloError:
        return SloError(
            f"{flag} {text!r}: {why}; allowed is NAME=LIMIT, where NAME is one of {', '.join(times)} with _mean, _max, "
            "_p50, _p99, _p99.9 and so on and LIMIT a time (0.5s, 200ms); or errors=SHARE (0.01 or 1%); or one of "
            f"{', '.join(RATES)} with the least that is enough; NAME[ROW] looks at one row, such as "
            "ttft_p99[chat gold]"
        )

    match = _SPEC.fullmatch(text.strip())
    if match is None:
        raise refuse("not of the form NAME=LIMIT")
    name, row, limit = match["name"], match["row"] or TOTAL, match["limit"]
    if name == "errors" or name in RATES:
        number = re.fullmatch(r"(\d+\.?\d*|\.\d+)(%?)", limit)
        if number is None or (number[2] and name != "errors"):
            raise refuse(f"{limit!r} is not a number")
        value = float(number[1]) / (100 if number[2] else 1)
        if name == "errors" and value > 1:
            raise refuse(f"a share of {limit} is above 1")
        return Slo(text, name, row, value)
    statistic = _STATISTIC.fullmatch(name)
    if statistic is None or statistic["metric"] not in times:
        raise refuse(f"there is no {name!r}")
    time = seconds(limit)
    if time is None:
        raise refuse(f"{limit!r} is not a time with a unit (us, ms, s, min)")
    return Slo(text, name, row, time, statistic["metric"], statistic["statistic"])


def split_slos(texts: Sequence[str]) -> list[str]:
    """The single objectives of options that may each hold several, separated by commas or blanks outside brackets."""
    parts = (part for text in texts for part in re.split(r"[,\s]+(?![^\[]*\])", text))
    return [part for part in parts if part]


def bench_slos(text: str, flag: str) -> list[Slo]:
    """The objectives of an option of the bench, which knows one row and the statistics of its own figures.

    Raises:
        SloError: naming what is wrong and what is allowed.
    """
    slos = [parse_slo(part, flag=flag) for part in split_slos([text])]
    for slo in slos:
        known = not slo.metric or slo.statistic in STATISTICS
        if not known or slo.row != TOTAL or slo.name == "errors":
            allowed = f"{', '.join(LATENCIES)} with _{', _'.join(STATISTICS)}, or one of {', '.join(RATES)}"
            raise SloError(f"{flag} {slo.text!r}: a bench does not measure it; allowed are {allowed}")
    return slos
