"""When requests are sent: arrival processes of an open loop, which do not wait for answers.

Every process is a rate over time, lambda(t), and a renewal process that is stretched by it: gaps of mean 1 are drawn
in "operational time" and mapped back through the integral of lambda (time rescaling; Cinlar, Introduction to
Stochastic Processes, 1975, ch. 4). Exponential gaps make a Poisson process, gamma gaps one with bursts.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, count

SHAPES = ("poisson", "uniform", "gamma", "ramp", "step", "spike", "diurnal", "replay", "closed")

#: Relative load of the hours of a day as public traces of chat services show it: low at night, two humps by day.
DAY = (
    0.45, 0.36, 0.30, 0.27, 0.27, 0.31, 0.42, 0.62, 0.90, 1.20, 1.42, 1.50,
    1.42, 1.45, 1.55, 1.56, 1.48, 1.35, 1.22, 1.16, 1.14, 1.02, 0.83, 0.63,
)  # fmt: skip


class ArrivalError(ValueError):
    """An arrival process that cannot be; the message names the option and what is allowed."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A rate over time, piecewise linear. ``times``: seconds, rising from 0; ``rates``: requests/s at them.

    After the last point the rate stays as it was there.
    """

    times: tuple[float, ...]
    rates: tuple[float, ...]

    def rate(self, time: float) -> float:
        place = bisect_right(self.times, time) - 1
        if place >= len(self.times) - 1:
            return self.rates[-1]
        left, right = self.times[place], self.times[place + 1]
        return self.rates[place] + (self.rates[place + 1] - self.rates[place]) * (time - left) / (right - left)

    def _integrals(self) -> list[float]:
        points = zip(self.times, self.times[1:], self.rates, self.rates[1:], strict=False)
        return list(accumulate(((b - a) * (r + s) / 2 for a, b, r, s in points), initial=0.0))

    def inverse(self) -> Callable[[float], float]:
        """The function from requests expected so far to the time at which they are; infinite where never."""
        integrals = self._integrals()

        def at(expected: float) -> float:
            place = min(bisect_right(integrals, expected) - 1, len(self.times) - 1)
            rest, rate = expected - integrals[place], self.rates[place]
            slope = 0.0
            if place < len(self.times) - 1:
                slope = (self.rates[place + 1] - rate) / (self.times[place + 1] - self.times[place])
            # rate * x + slope / 2 * x^2 = rest, in the form that loses no digits for a small slope
            root = math.sqrt(max(rate * rate + 2 * slope * rest, 0.0))
            if rest <= 0:
                return self.times[place]
            return self.times[place] + 2 * rest / (rate + root) if rate + root > 0 else math.inf

        return at


def steps(levels: Sequence[float], seconds: float) -> Curve:
    """Constant levels of ``seconds`` each, as a curve with edges of a millionth of a second."""
    edge = seconds * 1e-6
    times, rates = [0.0], [levels[0]]
    for place, level in enumerate(levels[1:], start=1):
        times += [place * seconds - edge, place * seconds]
        rates += [rates[-1], level]
    return Curve(tuple(times), tuple(rates))


@dataclass(frozen=True, slots=True)
class Shape:
    """What the options say about arrivals.

    Args:
        name: one of :data:`SHAPES`.
        rate: requests/s: the mean of ``poisson``, ``uniform``, ``gamma``, ``diurnal``, the factor's base of the rest.
        duration: seconds in which arrivals fall; infinite for as many as there are requests.
        peak: requests/s at the end of ``ramp``, of ``step``, and during ``spike``.
        burstiness: coefficient of variation of gamma gaps, 1 as Poisson, larger with bursts.
        levels: how many steps ``step`` takes from ``rate`` to ``peak``.
        day: seconds that one day of ``diurnal`` is squeezed into.
        curve: 24 relative loads, by hour, for ``diurnal``.
    """

    name: str
    rate: float = 1.0
    duration: float = math.inf
    peak: float = 0.0
    burstiness: float = 3.0
    levels: int = 4
    day: float = 86400.0
    curve: tuple[float, ...] = DAY

    def __post_init__(self) -> None:
        def need(right: bool, option: str, value: object, allowed: str) -> None:
            if not right:
                raise ArrivalError(f"--{option} {value}: allowed is {allowed}")

        need(self.name in SHAPES, "shape", self.name, ", ".join(SHAPES))
        need(0 < self.rate < math.inf, "rate", self.rate, "a number above 0")
        need(self.duration > 0, "duration", self.duration, "a number of seconds above 0")
        need(0.1 <= self.burstiness <= 100, "burstiness", self.burstiness, "0.1 to 100")
        need(2 <= self.levels <= 1000, "levels", self.levels, "2 to 1000")
        need(0 < self.day < math.inf, "day", self.day, "a number of seconds above 0")
        if self.name in ("ramp", "step", "spike"):
            need(0 < self.peak < math.inf, "peak", self.peak, f"a number above 0, which --shape {self.name} needs")
            need(self.duration < math.inf, "duration", self.duration, f"finite, which --shape {self.name} needs")
        if self.name == "diurnal":
            right = len(self.curve) >= 2 and min(self.curve) >= 0 and max(self.curve) > 0
            need(right, "day-curve", self.curve, "at least two numbers >= 0, not all of them 0")

    def rates(self) -> Curve:
        """The rate over time."""
        if self.name == "ramp":
            return Curve((0.0, self.duration), (self.rate, self.peak))
        if self.name == "step":
            rise = (self.peak - self.rate) / (self.levels - 1)
            return steps([self.rate + rise * level for level in range(self.levels)], self.duration / self.levels)
        if self.name == "spike":  # the middle fifth
            return steps([self.rate, self.rate, self.peak, self.rate, self.rate], self.duration / 5)
        if self.name == "diurnal":
            mean, hour = sum(self.curve) / len(self.curve), self.day / len(self.curve)
            days = 1 if math.isinf(self.duration) else math.ceil(self.duration / self.day)
            loads = [*self.curve] * days + [self.curve[0]]
            return Curve(
                tuple(place * hour for place in range(len(loads))), tuple(self.rate * load / mean for load in loads)
            )
        return Curve((0.0,), (self.rate,))

    def _gap(self, random_: random.Random) -> float:
        if self.name == "uniform":
            return 1.0
        if self.name == "gamma":
            shape = 1 / self.burstiness**2
            return random_.gammavariate(shape, 1 / shape)
        return random_.expovariate(1.0)

    def times(self, seed: int, gaps: Sequence[float] = ()) -> Iterator[float]:
        """Due times, rising, in seconds from the start; without end unless ``duration`` has one.

        Args:
            seed: equal seeds give equal times, in every process of a distributed test.
            gaps: for ``replay``: the workload's own, of mean 1, repeated when they are used up.
        """
        if self.name == "closed":
            raise ArrivalError("--shape closed: a closed loop has no arrival times; it sends when an answer has come")
        if self.name == "replay" and not sum(gaps):
            raise ArrivalError("--shape replay: the workload says nothing about arrivals (unit_gap, or a timestamp)")
        random_, at = random.Random(seed), self.rates().inverse()
        expected = 0.0
        for place in count():
            expected += gaps[place % len(gaps)] if self.name == "replay" else self._gap(random_)
            time = at(expected)
            if time >= self.duration or math.isinf(time):
                return
            yield time
