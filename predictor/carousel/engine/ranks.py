"""What a further rank of a decoder does: what the first one tells it, in the order in which it is told.

The first rank alone has a scheduler, a sampler and clients. Each of its steps goes to the others as plain data
(:class:`~carousel.engine.runner.StepNumbers` and its kind), and each of them runs it on its part of the weights and of
the KV pool; within the forward pass the ranks meet in the sums of :mod:`carousel.models.parallel`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from carousel.engine.device import Device
from carousel.engine.graph_runner import Capture, DecodeNumbers, GraphExecutor
from carousel.engine.runner import DecoderLike, Executor, Feed, Followers, NewPool, StepNumbers


class RankLost(RuntimeError):
    """A rank has ended, or does not answer; without it the others can do nothing."""


class RankGroup(Followers, Protocol):
    """All further ranks, as the first one's engine sees them."""

    @property
    def size(self) -> int:
        """How many ranks there are, the first included."""

    def ask(self, message: object) -> list[Any]:
        """Hand a message to every one of them and wait for their answers, in the order of ranks.

        Raises:
            RankLost: one of them has ended.
        """

    def watch(self, lost: Callable[[str], None]) -> None:
        """Call ``lost``, and no function given before, with the reason when a rank ends that was not told to: in some
        thread."""

    def lost_within(self, seconds: float) -> str | None:
        """Why a rank is lost, if one is, or is found to be within ``seconds``: an error of ours may be no more than
        how we hear of it."""


@dataclass(slots=True)
class FreeMemory:
    """Message: drop the pool, and answer how many bytes this rank may still take on its device."""


@dataclass(slots=True)
class Stop:
    """Message: end."""


def follow(
    decoder: DecoderLike, device: Device, receive: Callable[[], object], answer: Callable[[object], None]
) -> None:
    """Act on messages until :class:`Stop`.

    Args:
        decoder: this rank's part.
        device: where it is.
        receive: waits for the next message. Raises EOFError when the first rank is gone.
        answer: replies to a message that asks.

    Raises:
        EOFError: the first rank is gone.
    """
    device.bind()
    executor: Executor | None = None
    while True:
        message = receive()
        if isinstance(message, NewPool):
            executor = None  # the one before makes room
            executor = _make(decoder, message, device)
        elif isinstance(message, FreeMemory):
            executor = None
            answer(device.free_bytes())
        elif isinstance(message, Stop):
            return
        elif executor is None:
            raise AssertionError(f"{type(message).__name__} before there is a pool")
        elif isinstance(message, StepNumbers):
            executor.run(message)
        elif isinstance(message, Feed):
            executor.feed(message.rows)
        elif isinstance(executor, GraphExecutor) and isinstance(message, DecodeNumbers):
            executor.replay(message)
        elif isinstance(executor, GraphExecutor) and isinstance(message, Capture):
            executor.capture()
        else:
            raise AssertionError(f"{type(message).__name__} is no message for {type(executor).__name__}")


def _make(decoder: DecoderLike, pool: NewPool, device: Device) -> Executor:
    return Executor(decoder, pool, device) if pool.max_rows is None else GraphExecutor(decoder, pool, device)
