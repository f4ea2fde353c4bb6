"""Timing on a GPU, the CPU or in Triton's interpreter, and the bandwidth that a copy reaches on the same device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

__all__ = ["Timer", "copy_bandwidth"]

_CACHE_BYTES = 1 << 28  # more than any level 2 cache: written between two timings, so that each starts with a cold one
_LEAST_TURNS, _MOST_TURNS = 3, 200


class Timer:
    """Median seconds of a call.

    Args:
        device: on a GPU calls are timed between events on the stream, with the level 2 cache flushed before each.
        seconds: time to spend on each call, about.
    """

    def __init__(self, device: torch.device, seconds: float) -> None:
        self.device = device
        self.seconds = seconds
        self._cold = torch.empty(_CACHE_BYTES, dtype=torch.uint8, device=device) if device.type == "cuda" else None

    def __call__(self, call: Callable[[], object]) -> float:
        call()  # compiles, and chooses algorithms
        self._wait()
        started = time.perf_counter()
        call()
        self._wait()
        once = time.perf_counter() - started
        turns = int(max(_LEAST_TURNS, min(_MOST_TURNS, self.seconds / max(once, 1e-6))))
        return statistics.median(self._gpu(call, turns) if self._cold is not None else self._cpu(call, turns))

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _gpu(self, call: Callable[[], object], turns: int) -> list[float]:
        assert self._cold is not None
        pairs = []
        for _ in range(turns):
            self._cold.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            call()
            end.record()
            pairs.append((begin, end))
        self._wait()
        return [begin.elapsed_time(end) / 1000 for begin, end in pairs]

    @staticmethod
    def _cpu(call: Callable[[], object], turns: int) -> list[float]:
        times = []
        for _ in range(turns):
            started = time.perf_counter()
            call()
            times.append(time.perf_counter() - started)
        return times


def copy_bandwidth(timer: Timer, size: int) -> float:
    """Bytes read and written per second by a copy of ``size`` bytes: what "the speed of the memory" means here."""
    source = torch.zeros(size, dtype=torch.uint8, device=timer.device)
    target = torch.empty_like(source)
    return 2 * size / timer(lambda: target.copy_(source))
