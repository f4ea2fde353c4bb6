"""Which of several functions is fastest on this CPU, found in a few milliseconds.

Measured in CPU time of one thread, because a pod may start on a busy node, where a thread that waits for a preempted
one tells nothing about a library.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

__all__ = ["one_thread", "race"]

_SECONDS = 0.03
_MIN_TURNS, _MAX_TURNS = 2, 40
_FAR_BEHIND = 1.5


@contextmanager
def one_thread() -> Iterator[None]:
    """Measure in this block: torch runs on the calling thread alone, without gradients."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            yield
    finally:
        torch.set_num_threads(threads)


def race(
    candidates: Mapping[str, Callable[[torch.Tensor], torch.Tensor]],
    inputs: Sequence[torch.Tensor],
    seconds: float = _SECONDS,
) -> dict[str, list[float]]:
    """Seconds that each candidate takes for each input; without those that are far behind for every one of them.

    In turns, so that whatever else the machine does meets all alike, and by the least time, since it can only add.
    """
    least = {name: [math.inf] * len(inputs) for name in candidates}
    deadline = time.thread_time() + seconds
    for turn in range(_MAX_TURNS):
        if len(least) == 1 or (turn >= _MIN_TURNS and time.thread_time() > deadline):
            break
        for i, x in enumerate(inputs):
            for name, times in least.items():
                start = time.thread_time()
                candidates[name](x)
                times[i] = min(times[i], time.thread_time() - start)
        if turn + 1 >= _MIN_TURNS:
            best = [min(column) for column in zip(*least.values(), strict=True)]
            least = {
                name: times
                for name, times in least.items()
                if any(own <= _FAR_BEHIND * first for own, first in zip(times, best, strict=True))
            }
    return least
