"""Faults on purpose, for tests of what a cluster does about them. Off, unless ``CAROUSEL_FAULTS=on``.

A signal and not a route: only who may exec into the pod, or is root on its node, can send one. A process that dies or
freezes needs no help of ours (SIGKILL, SIGSTOP); an engine thread that hangs while all else answers does.
"""

from __future__ import annotations

import logging
import signal
import threading
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


def install(timeline: Timeline, environ: Mapping[str, str]) -> HangingThread | None:
    """Let SIGUSR1 hang the engine thread, if the environment asks for it; on the main thread only.

    Raises:
        BadSwitch: for another value than on and off.
    """
    value = environ.get(VARIABLE, "off")
    if value not in ("on", "off"):
        raise BadSwitch(f"{VARIABLE}: got {value!r}, allowed: on, off")
    if value == "off":
        return None
    hanging = HangingThread()
    timeline.observers.append(hanging)
    signal.signal(signal.SIGUSR1, hanging.arm)
    logger.warning("%s=on: SIGUSR1 makes the engine thread hang. Not for production", VARIABLE)
    return hanging
