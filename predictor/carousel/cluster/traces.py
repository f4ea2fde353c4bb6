"""Arrivals to replay: when, and how many prompt and answer tokens. Deterministic by seed."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

MINUTE = 60.0
HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request: when it arrives (s), how long its prompt and its answer are (tokens)."""

    at: float
    prompt: int
    output: int


def arrivals(rate: Callable[[float], float], highest: float, seconds: float, seed: int) -> list[Arrival]:
    """A Poisson process whose rate changes with time, by thinning one of the highest rate (Lewis and Shedler, 1979).

    Lengths are log-normal, clipped to 16 to 512 prompt and 8 to 256 answer tokens, the ranges of
    ``loadtest/workloads/smollm2-64.json``.

    Args:
        rate: requests per second at a time.
        highest: an upper bound of ``rate``.
        seconds: length of the trace.
        seed: of everything random.
    """
    draw = random.Random(seed)
    found: list[Arrival] = []
    now = draw.expovariate(highest)
    while now < seconds:
        if draw.random() * highest < rate(now):
            prompt = round(min(max(draw.lognormvariate(math.log(120), 0.9), 16), 512))
            output = round(min(max(draw.lognormvariate(math.log(80), 0.8), 8), 256))
            found.append(Arrival(now, prompt, output))
        now += draw.expovariate(highest)
    return found


def _bursts(rate: float) -> Callable[[float], float]:
    """A quarter of the rate, and every 10 minutes three times the rate for 90 s."""
    return lambda now: 3 * rate if now % (10 * MINUTE) < 90 and now >= 90 else rate / 4


def _diurnal(rate: float, seconds: float) -> Callable[[float], float]:
    """A day in the trace's length: from a twentieth of the peak up and back."""
    return lambda now: 2 * rate * (0.05 + 0.95 * 0.5 * (1 - math.cos(2 * math.pi * now / seconds)))


def _step(rate: float, seconds: float) -> Callable[[float], float]:
    """A third of the rate, then twice the rate for the middle third."""
    return lambda now: 2 * rate if seconds / 3 <= now < 2 * seconds / 3 else rate / 3


def _sparse(rate: float) -> Callable[[float], float]:
    """Nothing, but for 2 minutes at the rate every 20 minutes: what scaling to zero is for."""
    return lambda now: rate if now % (20 * MINUTE) < 120 else 0.0


TRACES: dict[str, Callable[[float, float], tuple[Callable[[float], float], float]]] = {
    "poisson": lambda rate, seconds: (lambda now: rate, rate),
    "bursts": lambda rate, seconds: (_bursts(rate), 3 * rate),
    "diurnal": lambda rate, seconds: (_diurnal(rate, seconds), 2 * rate),
    "step": lambda rate, seconds: (_step(rate, seconds), 2 * rate),
    "sparse": lambda rate, seconds: (_sparse(rate), rate),
}


def make_trace(name: str, rate: float, seconds: float, seed: int) -> list[Arrival]:
    """One of :data:`TRACES`.

    Args:
        name: which.
        rate: requests per second, about its mean.
        seconds: length.
        seed: of everything random.
    """
    function, highest = TRACES[name](rate, seconds)
    return arrivals(function, highest, seconds, seed)
