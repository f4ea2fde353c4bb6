"""Looks at the server from outside once a second: ``/metrics``, resident memory, open files, threads."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

PREFIX = "carousel_"
#: What a scrape keeps, by its name in ``/metrics`` without prefix.
GAUGES = (
    "requests_live",
    "num_requests_running",
    "num_requests_waiting",
    "num_sequences_running",
    "num_tokens_waiting",
    "oldest_wait_seconds",
    "estimated_queue_seconds",
    "kv_cache_usage_perc",
)
BLOCKS = ("kv_blocks", "kv_blocks_free", "kv_blocks_cached")
COUNTERS = (
    "requests_admitted_total",
    "requests_finished_total",
    "requests_cancelled_total",
    "requests_failed_total",
    "requests_rejected_total",
    "generation_tokens_total",
    "prompt_tokens_total",
    "prefix_cache_hits_total",
    "num_preemptions_total",
)
_KEPT = frozenset((*GAUGES, *BLOCKS, *COUNTERS))


def parse(text: str) -> dict[str, float]:
    """The samples of one scrape that are kept. Each has the model's name as its only label."""
    found = {}
    for line in text.splitlines():
        if line.startswith(PREFIX):
            name = line.partition("{")[0].removeprefix(PREFIX)
            if name in _KEPT:
                found[name] = float(line.rpartition(" ")[2])
    return found


@dataclass(frozen=True, slots=True)
class Sample:
    """The server at one moment. ``at``: seconds since the watch began. ``metrics`` is empty where none could be had."""

    at: float
    phase: str
    rss_bytes: int
    files: int
    threads: int
    metrics: dict[str, float]


@dataclass
class Watch:
    """Samples a process until it is gone. Use :meth:`run` as a task."""

    pid: int
    url: str
    every_s: float
    phase: str = "start"
    samples: list[Sample] = field(default_factory=list)
    missed: int = 0
    started: float = field(default_factory=time.monotonic)

    async def run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=30)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while True:
                before = time.monotonic()
                await self.look(session)
                await asyncio.sleep(max(0.0, before + self.every_s - time.monotonic()))

    async def look(self, session: aiohttp.ClientSession) -> Sample | None:
        """Take one sample; None when the process is gone."""
        metrics: dict[str, float] = {}
        phase = self.phase
        try:
            async with session.get(self.url + "/metrics") as response:
                if response.status == 200:
                    metrics = parse(await response.text())
        except (aiohttp.ClientError, TimeoutError, OSError):
            self.missed += phase != "drain"
        with contextlib.suppress(OSError, IndexError, ValueError):
            sample = Sample(time.monotonic() - self.started, phase, *self._process(), metrics)
            self.samples.append(sample)
            return sample
        return None

    def _process(self) -> tuple[int, int, int]:
        """Resident bytes, open files, threads.

        Raises:
            OSError, IndexError: the process is gone.
        """
        folder = Path(f"/proc/{self.pid}")
        pages = int((folder / "statm").read_text().split()[1])
        if not pages:
            raise OSError("a zombie")
        files = len(os.listdir(folder / "fd"))  # noqa: PTH208  # counted, not read
        return pages * os.sysconf("SC_PAGE_SIZE"), files, len(os.listdir(folder / "task"))  # noqa: PTH208
