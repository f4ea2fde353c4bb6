"""How far a download is: a bar on a terminal, a plain line every few seconds elsewhere (a pod's log)."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

log = logging.getLogger("carousel.models.source")

LINE_EVERY_S = 5.0


def megabytes(size: float) -> str:
    """A size in bytes as text: ``98.4 MB``."""
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


class Progress:
    """Context manager around one download.

    Args:
        label: what is being fetched.
        total: its size in bytes, when known.
        done: bytes that are already here (a resumed download).
    """

    def __init__(self, label: str, total: int | None = None, done: int = 0) -> None:
        self.label = label
        self.total = total
        self.done = done
        self._from = done
        self._bar: Any = None
        self._task: Any = None
        self._started = self._last_line = time.monotonic()

    def __enter__(self) -> Self:
        self._started = self._last_line = time.monotonic()
        size = f" ({megabytes(self.total)})" if self.total else ""
        resumed = f", resuming at {megabytes(self.done)}" if self.done else ""
        log.info("fetching %s%s%s", self.label, size, resumed)
        if sys.stderr.isatty():
            self._bar = _bar()
            self._task = self._bar.add_task(self.label, total=self.total, completed=self.done)
            self._bar.start()
        return self

    def update(self, done: int) -> None:
        """Say how many bytes are here now, in all."""
        self.done = done
        if self._bar is not None:
            self._bar.update(self._task, completed=done)
            return
        now = time.monotonic()
        if now - self._last_line >= LINE_EVERY_S:
            self._last_line = now
            rate = (done - self._from) / max(now - self._started, 1e-3)
            if self.total:
                share = f"{100 * done / self.total:.0f} % ({megabytes(done)} of {megabytes(self.total)})"
            else:
                share = megabytes(done)
            log.info("fetching %s: %s, %s/s", self.label, share, megabytes(rate))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        if kind is None:
            log.info("fetched %s in %.1f s", self.label, time.monotonic() - self._started)

    @contextmanager
    def watching(self, folder: Path, every_s: float = 0.5) -> Iterator[None]:
        """Take the bytes under `folder` as what is done, for downloaders that report nothing themselves."""
        stop = threading.Event()

        def poll() -> None:
            while not stop.wait(every_s):
                size = folder_size(folder)
                self.update(min(size, self.total) if self.total else size)

        thread = threading.Thread(target=poll, name="download-progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


def folder_size(folder: Path) -> int:
    """Bytes in the regular files under a folder; files that vanish meanwhile do not count."""
    size = 0
    for path in folder.rglob("*"):
        try:
            if path.is_file() and not path.is_symlink():
                size += path.stat().st_size
        except OSError:
            continue
    return size


def _bar() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as RichProgress

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    return RichProgress(*columns, console=Console(stderr=True))
