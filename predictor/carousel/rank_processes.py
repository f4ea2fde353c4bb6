"""The processes of a decoder that is split among several devices: one per rank, all in one pod.

The process that serves is rank 0. It starts the others, hands them settings and then the engine's messages, each over
a socket of its own, and watches them: when one ends, the engine has failed, the liveness probe says so and why, and the
pod is restarted. The others ignore the signals that a pod or a terminal sends, so that running requests can finish;
they end when rank 0 tells them, and with rank 0, however that ends: the kernel kills them (``PR_SET_PDEATHSIG``), and
elsewhere they find their socket closed.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from carousel.config import Settings

__all__ = ["RankProcesses", "join"]

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_JOIN_S = 300.0
"""How long ranks wait for each other while they start: not for the weights, which each loads by itself."""
_END_S = 5.0


@dataclass(frozen=True)
class _Start:
    """The first message: what a rank is to be."""

    rank: int
    device: str
    meeting: str
    path: Path
    settings: Settings


def _devices(device: str, size: int) -> list[str]:
    return [device if device == "cpu" else f"cuda:{rank}" for rank in range(size)]


def join(rank: int, size: int, device: str, meeting: str) -> Any:
    """Meet the other ranks at the file ``meeting``, and return them as ``carousel.models.parallel.Ranks``."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from carousel.models.parallel import Group

    # All are on this machine; the pod's name need not resolve to anything.
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(variable, "lo")
    backend, here = "gloo", None
    if device != "cpu":
        backend, here = "nccl", torch.device(device)  # told the device, NCCL connects at once and need not guess it
        torch.cuda.set_device(here)
    dist.init_process_group(
        backend,
        store=dist.FileStore(meeting, size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=_JOIN_S),
        device_id=here,
    )
    group = Group()
    group.sum(torch.zeros(1, device=device))  # all are there, or this says so
    return group


class _Rank:
    """A started process, and the thread that started it and waits for it to end.

    The thread is needed for longer than that: the kernel takes the end of the thread that started a process for the
    end of its parent.
    """

    def __init__(self, rank: int, ended: Callable[[int, int], None]) -> None:
        self.rank = rank
        ours, theirs = socket.socketpair()
        self.connection = Connection(ours.detach())
        self.process: subprocess.Popen[bytes] | None = None
        self._started = threading.Event()
        self._ended = ended
        threading.Thread(target=self._live, args=(theirs,), name=f"carousel-rank-{rank}", daemon=True).start()
        self._started.wait()
        if self.process is None:
            raise OSError(f"rank {rank} could not be started")

    def _live(self, theirs: socket.socket) -> None:
        try:
            with theirs:
                command = [sys.executable, "-m", "carousel.rank_processes", str(theirs.fileno()), str(os.getpid())]
                environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
                self.process = subprocess.Popen(
                    command, pass_fds=(theirs.fileno(),), env=environment, stdin=subprocess.DEVNULL
                )
        finally:
            self._started.set()
        self._ended(self.rank, self.process.wait())


class RankProcesses:
    """All ranks but the first; see ``carousel.engine.ranks.RankGroup``.

    Args:
        settings: of the server, ``tensor_parallel_size`` among them.
        path: the model, on the local disk.
        device: "cpu", or "cuda": each rank then takes one of the GPUs, in their order.

    Raises:
        OSError: a process could not be started.
    """

    def __init__(self, settings: Settings, path: Path, device: str) -> None:
        self.size = settings.tensor_parallel_size
        self._devices = _devices(device, self.size)
        self._lost: str | None = None
        self._is_lost = threading.Event()
        self._watcher: Callable[[str], None] | None = None
        self._stopping = self._joined = False
        self._lock = threading.Lock()
        handle, self._meeting = tempfile.mkstemp(prefix="carousel-ranks-")
        os.close(handle)
        atexit.register(self.stop)
        self._ranks: list[_Rank] = []
        for number in range(1, self.size):
            self._ranks.append(_Rank(number, self._ended))
            self._send(self._ranks[-1], _Start(number, self._devices[number], self._meeting, path, settings))

    def join(self) -> Any:
        """Meet them, once they are there to be met. Returns the ranks, as the decoder needs them.

        Raises:
            RankLost: one of them has ended.
        """
        self._answers()
        ranks = join(0, self.size, self._devices[0], self._meeting)
        self._joined = True
        return ranks

    @property
    def device(self) -> str:
        """Of the first rank."""
        return self._devices[0]

    def loaded(self) -> None:
        """Wait until every one of them has loaded its part.

        Raises:
            ModelLoadError: one of them could not.
            RankLost: one of them has ended.
        """
        from carousel.models.errors import ModelLoadError

        for rank, failure in enumerate(self._answers(), 1):
            if failure is not None:
                raise ModelLoadError(f"rank {rank}: {failure}")

    def tell(self, message: object) -> None:
        for rank in self._ranks:
            self._send(rank, message)

    def ask(self, message: object) -> list[Any]:
        self.tell(message)
        return self._answers()

    def watch(self, lost: Callable[[str], None]) -> None:
        with self._lock:
            self._watcher = lost
            reason = self._lost
        if reason is not None:
            lost(reason)

    def lost_within(self, seconds: float) -> str | None:
        self._is_lost.wait(seconds)
        return self._lost

    def stop(self) -> None:
        """End them all; afterwards there is none."""
        from carousel.engine.ranks import Stop

        atexit.unregister(self.stop)
        self._stopping = True
        with contextlib.suppress(Exception):
            self.tell(Stop())
        until = time.monotonic() + _END_S
        for rank in self._ranks:
            assert rank.process is not None
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.process.wait(max(0.0, until - time.monotonic()))
            rank.process.kill()
            rank.connection.close()
        with contextlib.suppress(OSError):
            Path(self._meeting).unlink()
        if self._joined and self._devices[0] == "cpu":  # NCCL would wait for ranks that are gone
            import torch.distributed as dist

            dist.destroy_process_group()

    def _send(self, rank: _Rank, message: object) -> None:
        try:
            rank.connection.send(message)
        except OSError as error:
            raise self._loss(rank) from error

    def _answers(self) -> list[Any]:
        answers = []
        for rank in self._ranks:
            try:
                answers.append(rank.connection.recv())
            except (EOFError, OSError) as error:
                raise self._loss(rank) from error
        return answers

    def _loss(self, rank: _Rank) -> Exception:
        from carousel.engine.ranks import RankLost

        return RankLost(self.lost_within(1.0) or f"rank {rank.rank} does not answer")

    def _ended(self, rank: int, status: int) -> None:
        """In the thread of the rank that has ended."""
        if self._stopping:
            return
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"has ended with status {status}"
        with self._lock:
            first = self._lost is None
            if first:
                self._lost = f"rank {rank} of {self.size} {how}; only a restart helps"
            watcher = self._watcher
        self._is_lost.set()
        if first:
            log.critical("%s", self._lost)
            if watcher is not None:
                watcher(self._lost or "")


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, however that happens (Linux)."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before
        raise SystemExit(1)


@contextlib.contextmanager
def _orphaned() -> Iterator[None]:
    """The first rank's end is no error here: it says itself what happened."""
    try:
        yield
    except (EOFError, ConnectionError):
        raise SystemExit(1) from None


def main() -> None:
    """A further rank, from its start to its end."""
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    _die_with(parent)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    connection = Connection(descriptor)
    with _orphaned():
        _serve(connection.recv(), connection.recv, connection.send)


def _serve(start: _Start, receive: Callable[[], Any], answer: Callable[[object], None]) -> None:
    from carousel.cpus import let_idle_threads_sleep
    from carousel.telemetry.logs import configure_logging

    let_idle_threads_sleep()
    settings = start.settings
    configure_logging(settings.log_level, settings.log_format)
    import torch

    from carousel.engine.device import Device
    from carousel.engine.ranks import follow
    from carousel.standalone import load_part

    if start.device == "cpu":
        torch.set_num_threads(settings.num_threads)
    answer(None)
    ranks = join(start.rank, settings.tensor_parallel_size, start.device, start.meeting)
    try:
        model = load_part(start.path, settings, start.device, ranks)
    except Exception as error:  # whatever it is, the first rank says it
        answer(f"{type(error).__name__}: {error}")
        receive()  # which is the end: the first rank says what happened
        return
    answer(None)
    follow(model.decoder, Device.of(model.decoder.device), receive, answer)


if __name__ == "__main__":
    main()
