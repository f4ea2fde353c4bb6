"""The flags of ``carousel bench`` that are not settings of the engine."""

from __future__ import annotations

import math
from dataclasses import dataclass

from carousel.bench.slo import Slo, bench_slos
from carousel.options import INTEGER, NUMBER, SWITCH, TEXT, Kind, option

_GROUP = "Bench"
MODES = ("continuous", "static")


def _parse_rate(text: str) -> float:
    rate = math.inf if text.strip().lower() in {"inf", "infinity"} else float(text)
    if not rate > 0:
        raise ValueError(text)
    return rate


def _parse_modes(text: str) -> tuple[str, ...]:
    modes = tuple(part.strip() for part in text.split(",") if part.strip())
    if len(modes) < 2 or len(set(modes)) != len(modes) or not set(modes) <= set(MODES):
        raise ValueError(text)
    return modes


RATE = Kind("rate", "R", _parse_rate, lambda value: f"{value:g}", "a number above 0, or inf")
SLO_LIST = Kind(
    "objectives",
    "SLO,SLO",
    lambda text: tuple(bench_slos(text, "--goodput")),
    lambda slos: ",".join(slo.text for slo in slos),
    "objectives, separated by commas",
)
MODE_LIST = Kind("modes", "MODE,MODE", _parse_modes, ",".join, "two batching modes, separated by a comma")


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What to run, against what, how often, and where the figures go."""

    workload: str = option(
        "",
        TEXT,
        """JSON file with a list of requests: id, prompt_ids or prompt, output_len, and for a finite rate unit_gap
        (arrival gaps of mean 1).""",
        group=_GROUP,
        allowed="a file",
        empty="a built-in one",
        env=False,
    )
    requests: int = option(
        0,
        INTEGER,
        "How many requests of the file, from its start, or how many to make for the built-in workload.",
        unit="requests",
        group=_GROUP,
        low=1,
        high=100_000,
        zero="the whole file, 32 of the built-in workload",
        env=False,
    )
    workload_seed: int = option(
        0, INTEGER, "Seed of the built-in workload.", group=_GROUP, low=0, high=2**32 - 1, env=False
    )
    url: str = option(
        "",
        TEXT,
        "Server to measure over its OpenAI API, such as http://127.0.0.1:8080.",
        group=_GROUP,
        pattern=r"https?://[^\s/]+\S*",
        allowed="an http:// or https:// address",
        empty="the engine in this process",
        env=False,
    )
    rate: float = option(
        math.inf,
        RATE,
        "Mean arrival rate; the gaps are the workload's unit_gap divided by it. inf: all arrive at once.",
        unit="requests per second",
        group=_GROUP,
        allowed="a number above 0, or inf",
        env=False,
    )
    concurrency: int = option(
        0,
        INTEGER,
        "Most requests outstanding at once; further ones wait in the bench, uncounted.",
        unit="requests",
        group=_GROUP,
        low=1,
        high=100_000,
        zero="unlimited",
        env=False,
    )
    warmup: int = option(
        2,
        INTEGER,
        "Unmeasured requests before the first run.",
        unit="requests",
        group=_GROUP,
        low=0,
        high=1000,
        env=False,
    )
    repeat: int = option(
        1, INTEGER, "Measured runs; the figures are the medians.", unit="runs", group=_GROUP, low=1, high=100, env=False
    )
    compare: tuple[str, ...] = option(
        (),
        MODE_LIST,
        """Run the workload in these batching modes, alternating, on one loaded model, and show them side by side with
        the ratios of the last to the first.""",
        group=_GROUP,
        allowed="continuous,static or static,continuous",
        empty="one mode, see --batching",
        env=False,
    )
    goodput: tuple[Slo, ...] = option(
        (),
        SLO_LIST,
        """Find by bisection the highest arrival rate at which these objectives hold, such as
        ttft_p99=500ms,itl_p99=100ms; with --compare for each mode.""",
        group=_GROUP,
        allowed="""ttft, tpot, itl, queue or e2e with _mean, _p50, _p90 or _p99 and a time, or a rate such as
        output_tokens_per_second=100: ttft_p99=0.5s,itl_p99=100ms""",
        empty="run at --rate",
        env=False,
    )
    json: str = option(
        "",
        TEXT,
        "Where the figures go as JSON.",
        group=_GROUP,
        allowed="a file, or - for standard output",
        empty="nowhere",
        env=False,
    )
    record: bool = option(
        True,
        SWITCH,
        "Whether the JSON holds what `carousel report` draws: every request, every step and who had which seat.",
        group=_GROUP,
        env=False,
    )
    timeout_seconds: float = option(
        1800.0,
        NUMBER,
        "A request over HTTP that takes longer is an error.",
        unit="seconds",
        group=_GROUP,
        low=1,
        high=86_400,
        env=False,
    )
    profile: bool = option(
        False,
        SWITCH,
        "Whether to show where the time of the engine's steps goes; timing every operator costs some of it.",
        group=_GROUP,
        env=False,
    )
    progress: bool = option(True, SWITCH, "Whether a terminal shows a progress bar.", group=_GROUP, env=False)

    @property
    def keep_record(self) -> bool:
        """Whether the runs are to be recorded: nobody sees a record that is not written."""
        return self.record and bool(self.json)
