"""Whether load generators agree: ours and others' against one Carousel server, the same requests, taking turns.

    .venv/bin/python scripts/bench_clients.py agree --rounds 3        # carousel bench, locust, guidellm, aiperf
    .venv/bin/python scripts/bench_clients.py streams                 # how many streams one locust process can hold

``agree``: OpenAI's text completions, streamed, a fixed number in flight, all answers equally long, so that every
generator sends the same whatever its order. guidellm and aiperf run unchanged, in environments of their own
(`make clients`); without them they are left out. ``streams``: against a server that sends each token at its time, the
time between tokens that locust saw, how late it was itself, and the share of a CPU that it took.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_run import bench, run
from soak.server import Server, free_ports
from soak.tiny import write_tokenizer

ROOT = Path(__file__).resolve().parent.parent
CLIENTS = ROOT / ".clients"
FAKE = ROOT / "tests" / "loadtest" / "fake_server.py"
sys.path.insert(0, str(ROOT))

from loadtest.sources import Limits, open_workload  # noqa: E402

MEASURED = ("output tokens/s", "TTFT, mean", "ITL, mean", "end to end, mean")


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent: files of the same prompts in each generator's own form."""

    url: str
    folder: Path
    requests: int
    concurrency: int
    output: int

    def write(self, prompt_tokens: int) -> None:
        """Write the files."""
        items = open_workload(f"uniform:{prompt_tokens},{self.output}", Limits(self.requests)).items
        entries = [{"prompt": item.prompt, "output_len": self.output} for item in items]
        (self.folder / "bench.json").write_text(json.dumps(entries))
        for name, text, length in (("guidellm", "prompt", "output_tokens_count"), ("aiperf", "text", "output_length")):
            lines = [json.dumps({text: item.prompt, length: self.output}) for item in items]
            (self.folder / f"{name}.jsonl").write_text("\n".join(lines))
        # aiperf loads a tokenizer even where the server counts; any will do, and this one needs no download.
        write_tokenizer(self.folder)


Figures = dict[str, float]


def _ours(figures: Mapping[str, Any]) -> Figures:
    values = [figures["output_tokens_per_second"], *(figures[name]["mean"] for name in ("ttft", "itl", "e2e"))]
    return dict(zip(MEASURED, values, strict=True))


def run_bench(load: Load) -> Figures:
    words = ["--url", load.url, "--workload", str(load.folder / "bench.json"), "--concurrency", str(load.concurrency)]
    return _ours(bench([*words, "--warmup", "0", "--no-record"]))


def locust(options: Sequence[str], out: Path) -> tuple[dict[str, Any], float]:
    """The row of all requests of a closed loop, and the share of a CPU that locust took.

    Raises:
        SystemExit: it failed.
    """
    words = ["--headless", "--only-summary", "--shape", "closed", "--tokens-json", str(out), *options]
    run([sys.executable, "-m", "loadtest", *words], _environment())
    told = json.loads(out.read_text("utf-8"))
    return told["rows"]["all"], told["test"]["generator_cpu"]


def run_locust(load: Load) -> Figures:
    options = [
        *("--host", load.url, "--protocol", "completions", "--workload", str(load.folder / "bench.json")),
        *("--concurrency", str(load.concurrency)),
    ]
    row, share = locust(options, load.folder / "locust.json")
    return _ours(row) | {"CPU share": share}


def run_guidellm(load: Load) -> Figures:
    out = load.folder / "guidellm.json"
    backend = f"kind=openai_http,target={load.url},model=smollm2,request_format=/v1/completions"
    _client(
        "guidellm", "run", "--backend", backend, "--profile", f"kind=concurrent,streams={load.concurrency}",
        "--constraint", f"kind=max_requests,count={load.requests}", "--data", "kind=json_file,path=guidellm.jsonl",
        "--output", f"kind=json,path={out}", "--disable-console", cwd=load.folder,
    )  # fmt: skip
    metrics = json.loads(out.read_text("utf-8"))["benchmarks"][0]["metrics"]

    def mean(name: str) -> float:
        return float(metrics[name]["successful"]["mean"])

    _expect("guidellm", load, metrics["request_totals"]["successful"])
    times = (mean("time_to_first_token_ms") / 1e3, mean("inter_token_latency_ms") / 1e3, mean("request_latency"))
    return dict(zip(MEASURED, (mean("output_tokens_per_second"), *times), strict=True))


def run_aiperf(load: Load) -> Figures:
    _client(
        "aiperf", "profile", "--model", "smollm2", "--url", load.url, "--endpoint-type", "completions", "--streaming",
        "--tokenizer", load.folder, "--use-server-token-count", "--concurrency", load.concurrency,
        "--request-count", load.requests, "--input-file", "aiperf.jsonl", "--custom-dataset-type", "single_turn",
        "--extra-inputs", "ignore_eos:true", "--output-artifact-dir", "aiperf", "--ui", "none", cwd=load.folder,
    )  # fmt: skip
    found = json.loads((load.folder / "aiperf" / "profile_export_aiperf.json").read_text("utf-8"))
    _expect("aiperf", load, found["request_count"]["avg"])
    names = ("time_to_first_token", "inter_token_latency", "request_latency")
    times = (found[name]["avg"] / 1e3 for name in names)
    return dict(zip(MEASURED, (found["output_token_throughput"]["avg"], *times), strict=True))


def _expect(name: str, load: Load, requests: float) -> None:
    if requests != load.requests:
        raise SystemExit(f"{name}: {requests:g} of {load.requests} requests succeeded")


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "LOCUST_", "LOADTEST_"))}


def _client(name: str, *words: object, cwd: Path) -> None:
    """Run a client of others.

    Raises:
        SystemExit: it failed; its last words are in the message.
    """
    environment = {key: value for key, value in _environment().items() if not key.startswith("PYTHON")}
    command = [str(CLIENTS / name / "bin" / name), *map(str, words)]
    done = subprocess.run(
        command, cwd=cwd, env=environment | {"HOME": str(cwd)}, check=False, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\nleft with {done.returncode}:\n{done.stdout[-3000:]}")


GENERATORS: dict[str, Callable[[Load], Figures]] = {
    "carousel bench": run_bench,
    "locust": run_locust,
    "guidellm": run_guidellm,
    "aiperf": run_aiperf,
}


def present() -> list[str]:
    """The generators that are installed."""
    return [
        name for name in GENERATORS if name not in ("guidellm", "aiperf") or (CLIENTS / name / "bin" / name).exists()
    ]


def table(found: Mapping[str, Sequence[Figures]]) -> str:
    """Medians, and each generator's ratio to the first, round by round, as Markdown."""
    names = list(found)
    lines = ["| | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for label in MEASURED:
        cells = []
        for name in names:
            value = statistics.median(figures[label] for figures in found[name])
            shown = f"{value:.1f}" if "tokens" in label else f"{value * 1e3:.1f} ms"
            if name != names[0]:
                pairs = zip(found[name], found[names[0]], strict=True)
                shown += f" ({statistics.median(mine[label] / first[label] for mine, first in pairs):.3f})"
            cells.append(shown)
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def agree(options: argparse.Namespace) -> None:
    names = present()
    if missing := sorted(set(GENERATORS) - set(names)):
        print(f"not installed, left out: {', '.join(missing)} (make clients)", file=sys.stderr)
    found: dict[str, list[Figures]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        flags = ["--no-prefix-caching", "--model-name", "smollm2", "--log-level", "warning"]
        with log.open("wb") as stream, Server(flags, stream) as server:
            server.wait_ready()
            load = Load(server.url, Path(folder), options.requests, options.concurrency, options.output)
            load.write(options.prompt)
            run_bench(load)  # everything is warm afterwards
            for number in range(options.rounds):
                for name in names:
                    found[name].append(GENERATORS[name](load))
                    print(f"round {number + 1}: {name}: {found[name][-1]}", file=sys.stderr, flush=True)
    print(table(found))
    share = statistics.median(figures["CPU share"] for figures in found["locust"])
    print(f"\nlocust took {share:.2f} of a CPU")


def streams(options: argparse.Namespace) -> None:
    http, grpc = free_ports(2)
    print("| streams | ITL, mean | ITL, p99 | lag, p99 | share of a CPU |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, str(FAKE), str(http), str(grpc), f"{folder}/sent", "first=0.2", f"gap={options.gap}"]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as fake:
            try:
                assert fake.stdout is not None
                fake.stdout.readline()
                for count in options.counts:
                    load = ["--host", f"http://127.0.0.1:{http}", "--protocol", options.protocol]
                    load += ["--workload", f"uniform:8,{options.tokens}", "--requests", str(2 * count)]
                    row, share = locust([*load, "--concurrency", str(count)], Path(folder) / "out.json")
                    itl, lag = row["itl"], row["lag"]["p99"]
                    print(
                        f"| {count} | {itl['mean'] * 1e3:.1f} ms | {itl['p99'] * 1e3:.1f} ms | {lag * 1e3:.1f} ms | "
                        f"{share:.2f} |",
                        flush=True,
                    )
            finally:
                fake.kill()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_subparsers(dest="what", required=True)
    one = what.add_parser("agree", help="the same requests from every generator")
    for name, default, text in (
        ("rounds", 3, "rounds"),
        ("requests", 32, "requests a run"),
        ("concurrency", 8, "requests in flight"),
        ("prompt", 64, "prompt tokens, about"),
        ("output", 48, "output tokens"),
    ):
        one.add_argument(f"--{name}", type=int, default=default, help=f"{text} (default %(default)s)")
    two = what.add_parser("streams", help="how many streams one locust process can hold")
    two.add_argument("--counts", type=int, nargs="+", default=[32, 128, 256, 512], help="(default %(default)s)")
    two.add_argument("--gap", type=float, default=0.05, help="seconds between tokens (default %(default)s)")
    two.add_argument("--tokens", type=int, default=100, help="of each answer (default %(default)s)")
    two.add_argument("--protocol", default="completions", help="as --protocol of the load tests (default %(default)s)")
    options = parser.parse_args()
    {"agree": agree, "streams": streams}[options.what](options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
