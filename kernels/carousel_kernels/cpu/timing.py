"""Which of several functions is fastest on this CPU, found in a few milliseconds.

Measured in CPU time of one thread, because a pod may start on a busy node, where a thread that waits for a preempted
one tells nothing about a library.
"""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

__all__ = ["Choice", "Choices", "Linear", "by_rows", "choose", "fastest", "one_thread", "race", "remember", "working"]

Linear = Callable[[torch.Tensor], torch.Tensor]

Choice = tuple[tuple[int, str], ...]
"""(rows, implementation) pairs: from how many rows on which is used; the first is from 1."""

Choices = dict[tuple[int, int, bool], Choice]
"""What was measured of layers, by (N, K, whether the compiled kernel ``native`` was a candidate)."""

_lock = threading.Lock()

_SECONDS = 0.03
_MIN_TURNS, _MAX_TURNS = 2, 40
_FAR_BEHIND = 1.5
_SECOND_COPY_GAIN = 0.85  # a second copy of the weights must make the mean time this much shorter


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
    candidates: Mapping[str, Linear],
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


def choose(
    choices: Choices, shape: tuple[int, int], names: Sequence[str], native: bool, measure: Callable[[list[str]], Choice]
) -> Choice:
    """What ``choices`` has of a layer [N, K]; else what ``measure`` finds among ``names``, which is put there.

    ``native``: whether the compiled kernel can be had. Of a single name nothing is measured.
    """
    if len(names) == 1:
        return ((1, names[0]),)
    native = native and "native" in names
    key = (*shape, native)
    with _lock:
        if key not in choices:
            with one_thread():
                choices[key] = measure([name for name in names if native or name != "native"])
        return choices[key]


def remember(choices: Choices, found: Choices, names: Sequence[str]) -> None:
    """Take what was read from elsewhere for measured, unless it is already. What is no choice among ``names`` is left
    out, and so is the compiled kernel where it was no candidate."""
    for key, choice in found.items():
        known = 1 <= len(choice) <= 2 and choice[0][0] == 1 and all(name in names for _, name in choice)
        if known and (key[2] or all(name != "native" for _, name in choice)):
            choices.setdefault(key, choice)


def working(
    names: Iterable[str], prepare: Callable[[str], Linear], checks: Iterable[torch.Tensor],
    expected: Iterable[torch.Tensor], agree: Callable[[torch.Tensor, torch.Tensor], bool],
) -> dict[str, Linear]:  # fmt: skip
    """Of the implementations, made by ``prepare``, those that can be had and give for each check what is expected.

    A library that is told fewer or more rows than it packed for is trusted only as far as it is checked.
    """
    pairs = list(zip(checks, expected, strict=True))
    found: dict[str, Linear] = {}
    for name in names:
        try:
            linear = prepare(name)
            if all(agree(linear(x), y) for x, y in pairs):
                found[name] = linear
        except (AttributeError, NotImplementedError, RuntimeError):
            continue  # not in this build of PyTorch, or not for this CPU or type
    return found


def fastest(times: Mapping[str, Sequence[float]], rows: Sequence[int]) -> Choice:
    """The implementation with the least mean (geometric) time over the numbers of rows; or one for few and another for
    many, if they are enough faster than any alone to be worth a second copy of the weights."""

    def mean(name: str, first: int = 0, end: int | None = None) -> float:
        return math.prod(times[name][first:end]) ** (1 / len(rows))

    best = min(times, key=mean)
    limit = mean(best) * _SECOND_COPY_GAIN
    choice: Choice = ((1, best),)
    for split in range(1, len(rows)):
        few = min(times, key=functools.partial(mean, first=0, end=split))
        many = min(times, key=functools.partial(mean, first=split))
        together = mean(few, 0, split) * mean(many, split)
        if few != many and together < limit:
            limit, choice = together, ((1, few), (math.isqrt(rows[split - 1] * rows[split]), many))
    return choice


def by_rows(choice: Choice, prepare: Callable[[str], Linear]) -> Linear:
    """A layer that hands each x [T, K] to the implementation chosen for T rows, made by ``prepare`` of its name."""
    few = prepare(choice[0][1])
    if len(choice) == 1:
        return few
    limit, many = choice[1][0], prepare(choice[1][1])
    return lambda x: few(x) if x.shape[0] < limit else many(x)
