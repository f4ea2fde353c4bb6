"""The highest arrival rate at which objectives hold, found by bisection: ``carousel bench --goodput``.

Goodput as in DistServe (Zhong et al., OSDI 2024): what a server is worth is the rate that it serves within its
objectives. With the same requests in the same order at every rate, more of them at a time only adds to their waits, so
that a rate that fails has none above it that holds; noise can break this by the width of the noise.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from carousel.bench.slo import Slo

TOLERANCE = 0.05
"""Where the search ends: the rate that holds is at most this share below one that does not."""

MOST_PROBES = 9

Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Probe:
    """A rate that was tried (requests/s), whether all objectives held, and the figures."""

    rate: float
    met: bool
    figures: Figures


@dataclass(slots=True)
class Search:
    """``rate``: the highest rate that held, 0 for none. ``bound``: the lowest one that did not; infinite where even all
    requests at once held, and ``rate`` is then the rate at which they were served."""

    slos: Sequence[Slo]
    rate: float = 0.0
    bound: float = math.inf
    probes: list[Probe] = field(default_factory=list)

    @property
    def best(self) -> Probe | None:
        """The probe of the highest rate that held."""
        held = [probe for probe in self.probes if probe.met]
        return max(held, key=lambda probe: probe.rate, default=None)

    def report(self) -> Figures:
        """Plain data, for the JSON."""
        return {
            "slo": [slo.text for slo in self.slos],
            "rate": self.rate,
            "bound": None if math.isinf(self.bound) else self.bound,
            "probes": [
                {
                    "rate": "inf" if math.isinf(probe.rate) else probe.rate,
                    "met": probe.met,
                    "values": {slo.name: slo.figure(probe.figures) for slo in self.slos},
                    "requests_per_second": probe.figures["requests_per_second"],
                    "output_tokens_per_second": probe.figures["output_tokens_per_second"],
                }
                for probe in sorted(self.probes, key=lambda probe: probe.rate)
            ],
        }


async def search(
    measure: Callable[[float], Awaitable[Figures]],
    slos: Sequence[Slo],
    *,
    tolerance: float = TOLERANCE,
    most: int = MOST_PROBES,
) -> Search:
    """Find the goodput.

    All requests at once come first: they tell how many are served a second at most, and rates far above that differ
    from "at once" in nothing.

    Args:
        measure: runs the workload at a rate; ``math.inf`` for all at once.
        slos: what must hold.
        tolerance: how close to come, as a share of the rate.
        most: runs at most.
    """
    found = Search(slos)

    async def holds(rate: float) -> bool:
        figures = await measure(rate)
        met = all(slo.met(slo.figure(figures)) for slo in slos)
        found.probes.append(Probe(rate, met, figures))
        return met

    at_once = await holds(math.inf)
    capacity = float(found.probes[0].figures["requests_per_second"])
    if at_once:
        found.rate = capacity
        return found
    rate = capacity

    def wide() -> bool:
        return math.isinf(found.bound) or found.bound - found.rate > tolerance * found.bound

    while len(found.probes) < most and wide():
        if await holds(rate):
            found.rate = rate
        else:
            found.bound = rate
        rate = 2 * rate if math.isinf(found.bound) else (found.rate + found.bound) / 2
    return found
