"""What the engine refuses, and why. Each protocol renders these in its own form."""

from __future__ import annotations

import reprlib
from typing import Any

_SHOWN = 120
_HUGE_BITS = 512


def _show(value: Any) -> str:
    """A short picture of any value, at little cost however large it is."""
    if isinstance(value, int) and value.bit_length() > _HUGE_BITS:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, (str, bytes)) and len(value) > _SHOWN:
        value = value[:_SHOWN]
        return repr(value)[: _SHOWN - 1] + "…"
    shown = reprlib.repr(value) if isinstance(value, (list, tuple, dict, set, frozenset)) else repr(value)
    return shown if len(shown) <= _SHOWN else shown[: _SHOWN - 1] + "…"


#: The error of an admitted request that the server's stop ended: another server may be asked at once.
SHUT_DOWN = "the server shut down before the end"


class CarouselError(Exception):
    """Base of every error that a caller of the engine may see."""


class InvalidRequest(CarouselError, ValueError):
    """The request can never be served as it is.

    Args:
        field: the name of the offending field, as the engine knows it (protocols may rename it).
        value: the value that was given; shortened in the message.
        allowed: what would have been accepted, as a phrase: ``"a number from 0 to 2"``.
    """

    def __init__(self, field: str, value: Any, allowed: str) -> None:
        self.field = field
        self.value = value
        self.allowed = allowed
        super().__init__(f"{field}: got {_show(value)}, allowed: {allowed}")


class RequestTooLong(InvalidRequest):
    """Prompt plus output cannot fit the context or the KV cache, however long it waits."""


class QueueFull(CarouselError):
    """The waiting queue is at its bound. ``retry_after_s`` comes from the measured drain rate (seconds)."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message)


class EngineUnavailable(CarouselError):
    """The engine takes no work: not started, draining or dead. ``retry_after_s`` in seconds."""

    def __init__(self, message: str, retry_after_s: float = 5.0) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message)


class GenerationFailed(CarouselError):
    """An admitted request could not be finished because the engine failed."""
