"""What HTTP costs: `carousel bench` in-process and against a server of its own, taking turns on the same workload.

    .venv/bin/python scripts/bench_http.py --workload loadtest/workloads/smollm2-64.json --repeat 3

All requests at time 0, streamed, without prefix cache on either side. Beside the throughputs stands the CPU time that
the server's main thread, which is all of HTTP, takes for 1,000 tokens, the whole server's, and the client's.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from bench_run import bench
from soak.server import Server

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Run:
    """Output tokens per second, and CPU seconds for 1,000 output tokens (0 where nothing of the kind ran)."""

    rate: float
    http_s: float = 0.0
    server_s: float = 0.0
    client_s: float = 0.0


def cpu_seconds(stat: Path) -> float:
    """User and system time in a ``/proc`` stat file of a process or of a thread."""
    fields = stat.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def ended_cpu_seconds() -> float:
    """User and system time of the child processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def in_process(arguments: list[str]) -> Run:
    return Run(bench(arguments)["output_tokens_per_second"])


def over_http(arguments: list[str], log: Path) -> Run:
    flags = ["--no-prefix-caching", "--max-queue-tokens", str(2**30), "--log-level", "warning"]
    with log.open("wb") as stream, Server(flags, stream) as server:
        server.wait_ready()
        process = Path(f"/proc/{server.pid}")
        main, whole = process / f"task/{server.pid}/stat", process / "stat"
        before = cpu_seconds(main), cpu_seconds(whole), ended_cpu_seconds()
        figures = bench(["--url", server.url, *arguments])
        thousands = figures["output_tokens"] / 1000
        http_s, server_s = cpu_seconds(main) - before[0], cpu_seconds(whole) - before[1]
        client_s = ended_cpu_seconds() - before[2]
    return Run(figures["output_tokens_per_second"], http_s / thousands, server_s / thousands, client_s / thousands)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", type=Path, help="a workload file (default: the built-in one of carousel bench)")
    parser.add_argument("--requests", type=int, help="only so many of its requests")
    parser.add_argument("--repeat", type=int, default=3, help="pairs (default 3)")
    options = parser.parse_args()
    arguments = [] if options.workload is None else ["--workload", str(options.workload)]
    arguments += [] if options.requests is None else ["--requests", str(options.requests)]
    pairs = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.repeat):
            pairs.append((in_process(arguments), over_http(arguments, Path(folder) / "server.log")))
            inside, http = pairs[-1]
            print(f"pair {number + 1}: in-process {inside.rate:.1f}, HTTP {http.rate:.1f} output tokens/s", flush=True)
    ratio = statistics.median(http.rate / inside.rate for inside, http in pairs)
    http_s, server_s, client_s = (
        statistics.median(getattr(http, name) for _, http in pairs) for name in ("http_s", "server_s", "client_s")
    )
    print(f"HTTP reaches {ratio:.2f} of the in-process throughput (median of {len(pairs)} pairs)")
    print(f"CPU seconds per 1,000 tokens: HTTP {http_s:.3f} of the server's {server_s:.3f}; client {client_s:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
