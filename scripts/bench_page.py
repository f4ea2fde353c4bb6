"""What the live page costs: a server of its own under load, with viewers of the page and without, taking turns.

    .venv/bin/python scripts/bench_page.py --workload loadtest/workloads/smollm2-64.json --viewers 5 --repeat 3

Viewers read their streams as a browser does, in this process. A shared machine's speed wanders by more than the page
costs, so beside the throughputs stands what the page takes of the CPU, for 1,000 output tokens: what the main thread,
which is all of HTTP and of the page, takes more than without viewers, and what the engine thread spends on glances.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import urllib.request
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from bench_http import cpu_seconds
from bench_run import bench
from soak.server import Server


@dataclass(frozen=True, slots=True)
class Run:
    """Output tokens per second; for 1,000 of them CPU seconds of the server, of its main thread, and of the engine
    thread for glances; and what all viewers were sent."""

    rate: float
    cpu_s: float
    main_s: float
    glance_s: float
    received_bytes: int


class Viewer:
    """Reads the page's events until the server ends or it is closed."""

    def __init__(self, url: str) -> None:
        self.received = 0
        self.glance_s = 0.0
        self._answer = urllib.request.urlopen(f"{url}/page/events", timeout=60)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            for line in self._answer:
                self.received += len(line)
                if line.startswith(b'data: {"k":"tick"'):
                    self.glance_s += json.loads(line[6:])["cost"]
        except (OSError, ValueError, AttributeError):
            pass  # closed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._answer.close()


def measure(server: Server, arguments: list[str], viewers: int) -> Run:
    """One run of the workload beside so many viewers."""
    whole, main = Path(f"/proc/{server.pid}/stat"), Path(f"/proc/{server.pid}/task/{server.pid}/stat")
    with ExitStack() as stack:
        looking = [stack.enter_context(Viewer(server.url)) for _ in range(viewers)]
        before = cpu_seconds(whole), cpu_seconds(main)
        figures = bench(["--url", server.url, *arguments])
        thousands = figures["output_tokens"] / 1000
        cpu_s, main_s = (cpu_seconds(whole) - before[0]) / thousands, (cpu_seconds(main) - before[1]) / thousands
        received = sum(viewer.received for viewer in looking)
        glance_s = max((viewer.glance_s for viewer in looking), default=0.0) / thousands  # all hear of the same ones
    return Run(figures["output_tokens_per_second"], cpu_s, main_s, glance_s, received)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", type=Path, help="a workload file (default: the built-in one of carousel bench)")
    parser.add_argument("--requests", type=int, help="only so many of its requests")
    parser.add_argument("--viewers", type=int, default=5, help="pages that are open (default 5)")
    parser.add_argument("--repeat", type=int, default=3, help="pairs (default 3)")
    options = parser.parse_args()
    arguments = [] if options.workload is None else ["--workload", str(options.workload)]
    arguments += [] if options.requests is None else ["--requests", str(options.requests)]
    flags = ["--no-prefix-caching", "--max-queue-tokens", str(2**30), "--log-level", "warning", "--page", "always"]
    pairs = []
    with (
        tempfile.TemporaryDirectory() as folder,
        (Path(folder) / "server.log").open("wb") as log,
        Server(flags, log) as server,
    ):
        server.wait_ready()
        measure(server, arguments, 0)  # both halves of the first pair find the server as warm as the later ones do
        for number in range(options.repeat):
            # The one that goes second may find a slower machine: it is each one's turn in every other pair.
            order = [0, options.viewers] if number % 2 else [options.viewers, 0]
            runs = {viewers: measure(server, arguments, viewers) for viewers in order}
            pairs.append((runs[0], runs[options.viewers]))
            alone, seen = pairs[-1]
            print(
                f"pair {number + 1}: {alone.rate:.1f} output tokens/s, with {options.viewers} viewers "
                f"{seen.rate:.1f}; CPU s per 1,000 tokens {alone.cpu_s:.3f}, {seen.cpu_s:.3f}, of the main thread "
                f"{alone.main_s:.3f}, {seen.main_s:.3f}, for glances {seen.glance_s:.4f}; "
                f"{seen.received_bytes / 2**20:.2f} MiB sent to viewers",
                flush=True,
            )
    rate = statistics.median(seen.rate / alone.rate for alone, seen in pairs)
    page = statistics.median((seen.main_s - alone.main_s + seen.glance_s) / alone.cpu_s for alone, seen in pairs)
    print(
        f"with viewers: {rate:.3f} of the throughput; the page takes {page:.2%} of the server's CPU time "
        f"(medians of {len(pairs)} pairs)"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
