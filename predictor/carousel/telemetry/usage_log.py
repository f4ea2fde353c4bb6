"""The usage log: a line of JSON for each request that has ended, in a folder, appended to and never changed.

``usage.jsonl`` grows; when it is large it becomes ``usage-TIME-NUMBER.jsonl`` and a new one begins. A thread of its own
writes a few times a second and has the system put it on the disk (fsync) at most once a second: a process that is
killed loses what it had not written, a tenth of a second, and a machine that loses power what was not synced, a second.
A line that was torn by either is cut off at the next start, and kept in ``usage.torn``.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from carousel.engine.meter import AMOUNTS, RequestUsage
from carousel.telemetry.usage import Price, shown_tenant, stamp

if TYPE_CHECKING:
    from carousel.config import Settings

logger = logging.getLogger("carousel.usage")

NAME, TORN, LOCK = "usage.jsonl", "usage.torn", "usage.lock"
ROTATED = "usage-*.jsonl"
BATCH_SECONDS = 0.1
SYNC_SECONDS = 1.0
RETRY_SECONDS = 1.0
MAX_PENDING = 100_000
"""Lines that wait for a disk that does not take them; beyond, the oldest are lost, and counted."""

_TAIL = 64 * 2**10
VERSION = 1


class UsageLogUnusable(Exception):
    """There can be no log in this folder. The message says why."""


def line_of(usage: RequestUsage, model: str, price: Price, now: float) -> bytes:
    """A line of the log, with its end."""
    times = {"queue_ms": usage.queue_s, "ttft_ms": usage.ttft_s, "e2e_ms": usage.e2e_s}
    entry: dict[str, Any] = {
        "v": VERSION,
        "at": stamp(now),
        "id": usage.request_id,
        "model": model,
        "tenant": shown_tenant(usage.tenant),
        "reason": usage.finish_reason.value,
        "choices": usage.num_choices,
        "preemptions": usage.num_preemptions,
        **{name: getattr(usage.amounts, name) for name in AMOUNTS},
        **{name: None if value is None else round(value * 1000, 3) for name, value in times.items()},
        "cost": price.of(usage.amounts.device_ns),
        "currency": price.currency,
    }
    return json.dumps(entry, separators=(",", ":")).encode() + b"\n"


def _is_entry(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def good_length(file: IO[bytes]) -> tuple[int, bool]:
    """Bytes up to the end of the last line that is one, and whether only that line's end is missing."""
    size = file.seek(0, os.SEEK_END)
    window = _TAIL
    while True:
        start = max(0, size - window)
        file.seek(start)
        tail = file.read(size - start)
        if start:  # it begins somewhere in a line
            first = tail.find(b"\n") + 1
            start, tail = start + first, tail[first:] if first else b""
        end = len(tail)
        while end:
            begin = tail.rfind(b"\n", 0, end - 1) + 1
            if _is_entry(tail[begin:end]):
                return start + end, not tail[begin:end].endswith(b"\n")
            end = begin
        if size <= window:
            return 0, False
        window *= 8


def repair(folder: Path) -> int:
    """Cut off what a kill has torn at the end of the log. Returns how many bytes, which ``usage.torn`` has then.

    Raises:
        OSError: the folder cannot be read or written.
    """
    path = folder / NAME
    if not path.exists():
        return 0
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        length, lacks_end = good_length(file)
        if length < size:
            file.seek(length)
            with (folder / TORN).open("ab") as kept:
                kept.write(file.read() + b"\n")
            file.truncate(length)
        if lacks_end:
            file.seek(0, os.SEEK_END)
            file.write(b"\n")
        file.flush()
        os.fsync(file.fileno())
    return size - length


class UsageLog:
    """Writes the log. Call it with each usage, on any thread: it only puts it down to be written.

    Args:
        folder: made if it is not there. One process at a time: another one is refused.
        model: name of the model, for the lines.
        price: of the node.
        max_bytes: from which size on a new file begins.
        keep_files: full files that are kept, the oldest go; 0: all.
        clock: seconds since 1970.
        sync: puts a file on the disk.

    Raises:
        UsageLogUnusable: the folder cannot be written, or another process has it.
    """

    def __init__(
        self,
        folder: Path,
        model: str,
        price: Price,
        max_bytes: int = 64 * 2**20,
        keep_files: int = 0,
        clock: Callable[[], float] = time.time,
        sync: Callable[[int], None] = os.fsync,
    ) -> None:
        self.folder, self._model, self._price = folder, model, price
        self._max_bytes, self._keep_files = max_bytes, keep_files
        self._clock, self._sync = clock, sync
        self._pending: deque[bytes] = deque()
        self._wake = threading.Event()
        self._closing = False
        self._dirty_since: float | None = None
        self.written = self.lost = self.failures = self.syncs = 0
        self.problem: str | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = (folder / LOCK).open("ab")
            self._take(folder)
            if torn := repair(folder):
                logger.warning("the usage log's end was torn: %d bytes were moved to %s", torn, folder / TORN)
            self._file = (folder / NAME).open("ab", buffering=0)
            self._sync_folder()
        except OSError as error:
            raise UsageLogUnusable(f"{error.filename or folder}: {error.strerror}") from None
        self._size = os.fstat(self._file.fileno()).st_size
        self._thread = threading.Thread(target=self._run, name="carousel-usage", daemon=True)
        self._thread.start()

    def _take(self, folder: Path) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise UsageLogUnusable(f"{folder}: another process writes its usage log here") from None

    def __call__(self, usage: RequestUsage) -> None:
        self._pending.append(line_of(usage, self._model, self._price, self._clock()))
        self._wake.set()

    @property
    def pending(self) -> int:
        """Lines that are not written yet."""
        return len(self._pending)

    def close(self) -> None:
        """Write and sync what is left, and let the folder go."""
        self._closing = True
        self._wake.set()
        self._thread.join(10.0)
        self._file.close()
        self._lock.close()

    # ---- the thread

    def _run(self) -> None:
        while not self._closing:
            self._wake.wait(None if self._dirty_since is None else SYNC_SECONDS)
            self._wake.clear()
            if not self._closing:
                time.sleep(BATCH_SECONDS)  # a few lines at a time, not each on its own
            worked = self._write()
            if self._dirty_since is not None and time.monotonic() - self._dirty_since >= SYNC_SECONDS:
                worked &= self._put_down()
            if not worked and not self._closing:
                time.sleep(RETRY_SECONDS)
                self._wake.set()
        if self._write() and self._dirty_since is not None:
            self._put_down()

    def _write(self) -> bool:
        """Append what waits. Returns whether the disk took it."""
        lines = [self._pending.popleft() for _ in range(len(self._pending))]
        if not lines:
            return True
        data = b"".join(lines)
        try:
            written = self._file.write(data)
            if written != len(data):
                raise OSError(0, "the disk took a part of it only")
        except OSError as error:
            self._failed(error)
            self._undo()
            self._pending.extendleft(reversed(lines))
            while len(self._pending) > MAX_PENDING:
                self._pending.popleft()
                self.lost += 1
            return False
        self._size += len(data)
        self.written += len(lines)
        if self._dirty_since is None:
            self._dirty_since = time.monotonic()
        if self.problem is not None:
            logger.info("the usage log can be written again")
            self.problem = None
        if self._size >= self._max_bytes:
            self._rotate()
        return True

    def _undo(self) -> None:
        """Cut off what was written of a batch that the disk did not take whole: it will be written again."""
        try:
            os.ftruncate(self._file.fileno(), self._size)
        except OSError as error:
            self._failed(error)

    def _put_down(self) -> bool:
        try:
            self._sync(self._file.fileno())
        except OSError as error:
            self._failed(error)
            return False
        self.syncs += 1
        self._dirty_since = None
        return True

    def _rotate(self) -> None:
        """Give the full file a name of its own and begin a new one; where that fails, go on with the old one."""
        if not self._put_down():
            return
        when = stamp(self._clock()).translate({ord(mark): None for mark in ":-."})
        number = 0
        while (target := self.folder / f"usage-{when}-{number:03d}.jsonl").exists():
            number += 1
        try:
            (self.folder / NAME).rename(target)
            fresh = (self.folder / NAME).open("ab", buffering=0)
            self._file.close()
            self._file, self._size = fresh, 0
            self._sync_folder()
            if self._keep_files:
                for old in sorted(self.folder.glob(ROTATED))[: -self._keep_files]:
                    old.unlink()
        except OSError as error:
            self._failed(error)

    def _sync_folder(self) -> None:
        descriptor = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _failed(self, error: OSError) -> None:
        self.failures += 1
        if self.problem is None:
            logger.error("the usage log cannot be written: %s; its lines are kept and tried again", error)
        self.problem = str(error)


def open_usage_log(settings: Settings) -> UsageLog | None:
    """The log that the settings ask for, if they do.

    Raises:
        UsageLogUnusable: it cannot be written. The message names the setting.
    """
    if not settings.usage_log:
        return None
    price = Price(settings.price_per_node_hour, settings.price_currency)
    folder = Path(settings.usage_log).expanduser()
    try:
        return UsageLog(folder, settings.model_name, price, settings.usage_log_file_bytes, settings.usage_log_files)
    except UsageLogUnusable as error:
        raise UsageLogUnusable(f"--usage-log {error}") from None


def read_log(path: Path) -> Iterator[dict[str, Any] | None]:
    """The entries of a log file, or of all files of a folder in their order; None for a line that is none.

    Raises:
        OSError: it cannot be read.
    """
    files = [path]
    if path.is_dir():
        files = sorted(path.glob(ROTATED)) + [file for file in (path / NAME,) if file.exists()]
    for file in files:
        with file.open("rb") as opened:
            for line in opened:
                try:
                    entry = json.loads(line)
                except ValueError:
                    entry = None
                yield entry if isinstance(entry, dict) else None
