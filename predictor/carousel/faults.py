"""Faults on purpose, for tests of what a cluster does about them. Off, unless ``CAROUSEL_FAULTS`` says otherwise.

``on``: SIGUSR1 makes the engine thread hang. A signal and not a route: only who may exec into the pod, or is root on
its node, can send one. A process that dies or freezes needs no help of ours (SIGKILL, SIGSTOP); an engine thread that
hangs while all else answers does.

``slow=SECONDS``: every step takes so much longer, asleep. So a queue grows, and scalers have something to do, on a
machine that has no power to spare.
"""

from __future__ import annotations

import logging
import math
import signal
import threading
import time
from collections.abc import Mapping
from types import FrameType

from carousel.engine.timeline import RequestRecord, StepRecord, Timeline

VARIABLE = "CAROUSEL_FAULTS"
logger = logging.getLogger("carousel.faults")


class BadSwitch(ValueError):
    """The variable has a value that means nothing."""


class HangingThread:
    """An observer that, from the signal on, never returns: the engine thread hangs in the step that it has just done.

    Attributes:
        release: ends the hang, for those who test this in a process that lives on.
    """

    def __init__(self) -> None:
        self._armed = False
        self.release = threading.Event()

    def arm(self, number: int, frame: FrameType | None) -> None:
        """The signal's handler."""
        self._armed = True

    def on_step(self, step: StepRecord, token_latencies_s: list[float]) -> None:
        """Hang, if armed."""
        if self._armed:
            logger.error("the engine thread hangs from now on, as %s allows and SIGUSR1 asked", VARIABLE)
            self.release.wait()

    def on_finish(self, request: RequestRecord) -> None:
        """Nothing."""


class SlowSteps:
    """An observer that sleeps after each step.

    Args:
        seconds: for how long.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_step(self, step: StepRecord, token_latencies_s: list[float]) -> None:
        """Sleep."""
        time.sleep(self.seconds)

    def on_finish(self, request: RequestRecord) -> None:
        """Nothing."""


def install(timeline: Timeline, environ: Mapping[str, str]) -> HangingThread | SlowSteps | None:
    """Install the fault that the environment asks for; on the main thread only. Returns the observer, None without.

    Raises:
        BadSwitch: for a value that means nothing.
    """
    value = environ.get(VARIABLE, "off")
    if value == "off":
        return None
    if value.startswith("slow="):
        slow = SlowSteps(_seconds(value))
        timeline.observers.append(slow)
        logger.warning("%s=%s: every step takes %g s longer. Not for production", VARIABLE, value, slow.seconds)
        return slow
    if value != "on":
        raise BadSwitch(_message(value))
    hanging = HangingThread()
    timeline.observers.append(hanging)
    signal.signal(signal.SIGUSR1, hanging.arm)
    logger.warning("%s=on: SIGUSR1 makes the engine thread hang. Not for production", VARIABLE)
    return hanging


def _seconds(value: str) -> float:
    try:
        seconds = float(value.removeprefix("slow="))
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= 60:
        raise BadSwitch(_message(value))
    return seconds


def _message(value: str) -> str:
    return f"{VARIABLE}: got {value!r}, allowed: on, off, slow=SECONDS with 0 < SECONDS <= 60"
