"""``python -m scripts.soak``: run a soak and write its report.

Starts ``carousel serve`` on free ports of 127.0.0.1, measures its saturated rate, offers 1.5 times that in an open loop
with every protocol, departures, deadlines and mistakes, and ends with SIGTERM under load. Leaves with 0 when every
verdict holds, 1 when one does not, 2 when the server could not be run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from carousel.bench.report import machine

from . import report
from .plan import Planner
from .run import Shape, Soak
from .server import Server, SoakError
from .tiny import write_tiny_model

ROOT = Path(__file__).resolve().parents[2]
MAX_REQUEST_BYTES = 2**20
#: Small enough for a full queue within seconds, preemptions, and blocks taken from the prefix cache.
DEMO = ("--kv-cache-memory", "256MiB", "--max-batch-sequences", "32", "--max-queue-requests", "48")
TINY = ("--kv-cache-memory", "1MiB", "--max-batch-sequences", "4", "--max-queue-requests", "8", "--threads", "1")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m scripts.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--minutes", type=float, default=30.0, help="length of the load (default 30, at most 1440)")
    made.add_argument("--tiny", action="store_true", help="serve a tiny model of random numbers, not the demo model")
    made.add_argument("--factor", type=float, default=1.5, help="offered rate over the saturated rate (default 1.5)")
    made.add_argument("--max-rate", type=float, default=500.0, help="most requests per second (default 500)")
    made.add_argument("--max-requests", type=int, default=200_000, help="most requests in all (default 200000)")
    made.add_argument("--saturate-seconds", type=float, default=20.0, help="how long the rate is measured (default 20)")
    made.add_argument("--scrape-seconds", type=float, default=1.0, help="time between two scrapes (default 1)")
    made.add_argument("--drain-seconds", type=int, default=30, help="the server's drain time (default 30)")
    made.add_argument("--seed", type=int, default=0, help="of all that is drawn (default 0)")
    made.add_argument("--json", type=Path, default=ROOT / "docs" / "soak.json", help="where the figures go")
    made.add_argument("--report", type=Path, default=ROOT / "docs" / "soak.md", help="where the page goes")
    made.add_argument("--log", type=Path, help="where the server's log goes (default: nowhere, unless a verdict fails)")
    return made


def shape_of(options: argparse.Namespace) -> Shape:
    """The run that the command line asks for."""
    seats = int(flag(options, "--max-batch-sequences"))
    queue = int(flag(options, "--max-queue-requests"))
    load_s = 60 * min(max(options.minutes, 0.01), 1440.0)
    return Shape(
        load_s=load_s,
        saturate_s=options.saturate_seconds,
        burst_s=min(10.0, max(2.0, load_s / 10)),
        factor=options.factor,
        max_rate=options.max_rate,
        max_requests=options.max_requests,
        max_in_flight=4 * (seats + queue),
        workers=seats + queue // 4,
        guard_s=300.0,
        scrape_s=options.scrape_seconds,
        drain_s=options.drain_seconds,
        seed=options.seed,
    )


def flag(options: argparse.Namespace, name: str) -> str:
    flags = TINY if options.tiny else DEMO
    return flags[flags.index(name) + 1]


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run it; the report.

    Raises:
        SoakError: the server cannot be run, or not be used at all.
    """
    flags = [*(TINY if options.tiny else DEMO), "--policy", "fair", "--tenant-weights", "gold=4,free=1"]
    flags += ["--max-request-bytes", str(MAX_REQUEST_BYTES), "--drain-seconds", str(options.drain_seconds)]
    model, shown = "smollm2", []
    if options.tiny:
        model, shown = "tiny", ["--model", "tiny", "--model-name", "tiny"]
        flags = ["--model", str(write_tiny_model(folder / "tiny")), "--model-name", "tiny", *flags]
    shape = shape_of(options)
    log_path = options.log or folder / "server.log"
    with log_path.open("wb") as log, Server([*flags, "--log-format", "json"], log) as server:
        ready_s = server.wait_ready()
        say(f"ready in {ready_s:.1f} s")
        planner = Planner(model, options.seed, 300 if options.tiny else 1600, MAX_REQUEST_BYTES)
        facts = asyncio.run(_soak(server, model, shape, planner))
        samples = facts.pop("samples")
    words = flags[4:] if options.tiny else flags
    head = {
        "command": f"make soak MINUTES={options.minutes:g}" + (" ARGS=--tiny" if options.tiny else ""),
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "server": " ".join(["serve", *shown, *words]),
        "machine": machine(),
    }
    return head | facts | {"series": report.series(samples)}


async def _soak(server: Server, model: str, shape: Shape, planner: Planner) -> dict[str, Any]:
    soak = Soak(server, model, shape, planner)
    facts = await soak.run(say)
    return facts | {"samples": soak.watch.samples}


def say(text: str) -> None:
    print(f"soak: {text}", file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    options = parser().parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="carousel-soak-") as folder:
        try:
            result = run(options, Path(folder))
        except SoakError as error:
            say(str(error))
            return 2
        for path, text in ((options.json, json.dumps(result, indent=1)), (options.report, report.markdown(result))):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n", "utf-8")
        wrong = [verdict for verdict in result["verdicts"] if not verdict["holds"]]
        for verdict in result["verdicts"]:
            say(f"{'ok' if verdict['holds'] else 'NO'}  {verdict['name']}: {verdict['text']}")
        for line in result["complaints"] if wrong else []:
            say(f"the server's log: {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
