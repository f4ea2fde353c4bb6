"""Where the time goes, operator by operator: backends wrapped so that every call is timed. Not for serving."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["OperatorTimes", "TimedBackend"]


@dataclass(slots=True)
class OperatorTime:
    """Calls of one operator and the seconds that they took."""

    calls: int = 0
    seconds: float = 0.0


def _no_device() -> None:
    """What waiting for no device amounts to."""


class OperatorTimes(dict[str, OperatorTime]):
    """By the operator's name; ``linear`` stands for whatever ``prepare_linear`` and its kind returned.

    On a GPU a call is timed until the device has done it, which makes all of it slower.
    """

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, adding to the operator's time."""
        wait: Callable[[], object] = torch.cuda.synchronize if torch.cuda.is_available() else _no_device
        found = self.setdefault(name, OperatorTime())

        def call(*arguments: Any, **options: Any) -> Any:
            started = time.perf_counter()
            result = function(*arguments, **options)
            wait()
            found.seconds += time.perf_counter() - started
            found.calls += 1
            return result

        return call

    def reset(self) -> None:
        """Count from zero; functions that were wrapped before go on counting."""
        for found in self.values():
            found.calls, found.seconds = 0, 0.0


class TimedBackend:
    """A backend whose operators, and the linear layers that it prepares, add to ``times``."""

    def __init__(self, backend: Any, times: OperatorTimes) -> None:
        self._backend = backend
        self._times = times

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._backend, name)
        if name.startswith("prepare_"):

            def prepare(*arguments: Any, **options: Any) -> Any:
                return self._times.timed("linear", function(*arguments, **options))

            made: Any = prepare
        else:
            made = self._times.timed(name, function)
        setattr(self, name, made)  # looked up once
        return made
