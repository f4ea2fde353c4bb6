"""``carousel autoscale-sim``: the simulator on the command line. Figures as a table, all of it as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from carousel.cluster.demand import Targets
from carousel.cluster.simulate import Policy, Rates, simulate
from carousel.cluster.traces import TRACES, make_trace
from carousel.options import INTEGER, NUMBER, TEXT, Kind, SettingsError, help_text, option, parse_options

_RUN, _SIGNALS, _REPLICA = "Run", "Signals", "Replica"
SIGNALS = ("waiting", "requests", "tokens", "queue-seconds")

USAGE = """usage: carousel autoscale-sim [--traces NAME,...] [--signals NAME,...] [FLAG ...]

Replays arrivals against modelled replicas under Kubernetes' own scaling algorithm, once for each signal, and shows what
each costs (replicas, mean) and lets wait. The same seed gives the same figures. See docs/autoscaling.md."""


def _names(known: Sequence[str]) -> Kind:
    def parse(text: str) -> tuple[str, ...]:
        names = tuple(part.strip() for part in text.split(",") if part.strip())
        if not names or not set(names) <= set(known):
            raise ValueError(text)
        return names

    return Kind("names", "NAME,...", parse, ",".join, "some of " + ", ".join(known))


@dataclass(frozen=True, kw_only=True)
class SimulateOptions:
    """What ``carousel autoscale-sim`` can be told."""

    traces: tuple[str, ...] = option(tuple(TRACES), _names(tuple(TRACES)), "Arrivals to replay.", group=_RUN, env=False)
    signals: tuple[str, ...] = option(
        SIGNALS, _names(SIGNALS), "Signals to compare; waiting is the count of waiting requests alone.",
        group=_RUN, env=False,
    )  # fmt: skip
    rate: float = option(
        3.0,
        NUMBER,
        "Mean arrival rate, roughly.",
        unit="requests per second",
        group=_RUN,
        low=0.01,
        high=1000,
        env=False,
    )
    minutes: float = option(60.0, NUMBER, "Length.", unit="minutes", group=_RUN, low=1, high=1440, env=False)
    warmup_minutes: float = option(
        5.0, NUMBER, "Nothing before this is counted.", unit="minutes", group=_RUN, low=0, high=60, env=False
    )
    seed: int = option(1, INTEGER, "Of arrivals and lengths.", group=_RUN, low=0, high=2**32 - 1, env=False)
    seeds: int = option(
        1, INTEGER, "Runs, each with the next seed; the figures are their means.",
        unit="runs", group=_RUN, low=1, high=100, env=False,
    )  # fmt: skip
    slo_seconds: float = option(
        5.0,
        NUMBER,
        "A first token later than this is a miss.",
        unit="seconds",
        group=_RUN,
        low=0.01,
        high=3600,
        env=False,
    )
    json: str = option(
        "", TEXT, "Where everything goes as JSON.", group=_RUN, empty="nowhere", allowed="a file", env=False
    )

    target_waiting: float = option(
        2.0, NUMBER, "Waiting requests per replica, of the signal waiting.",
        unit="requests", group=_SIGNALS, low=0.1, high=1e6, env=False,
    )  # fmt: skip
    target_requests: float = option(
        10.0, NUMBER, "Requests per replica.", unit="requests", group=_SIGNALS, low=0.1, high=1e6, env=False
    )
    target_tokens: float = option(
        2000.0, NUMBER, "Tokens per replica.", unit="tokens", group=_SIGNALS, low=1, high=1e12, env=False
    )
    target_wait_seconds: float = option(
        5.0, NUMBER, "Queue that a new request may find.", unit="seconds", group=_SIGNALS, low=0.1, high=3600, env=False
    )
    target_occupancy: float = option(
        0.6, NUMBER, "How full a batch is when a replica counts as used up.",
        unit="share", group=_SIGNALS, low=0.05, high=1, env=False,
    )  # fmt: skip
    scale_in_seconds: float = option(
        60.0, NUMBER, "The scaler's own window.", unit="seconds", group=_SIGNALS, low=0, high=3600, env=False
    )
    hpa_window_seconds: float = option(
        180.0,
        NUMBER,
        "The HPA's scale-down stabilisation.",
        unit="seconds",
        group=_SIGNALS,
        low=0,
        high=3600,
        env=False,
    )
    lowest: int = option(1, INTEGER, "Fewest replicas.", unit="replicas", group=_SIGNALS, low=0, high=1000, env=False)
    highest: int = option(20, INTEGER, "Most replicas.", unit="replicas", group=_SIGNALS, low=1, high=1000, env=False)
    cooldown_seconds: float = option(
        300.0,
        NUMBER,
        "KEDA's cooldownPeriod, before zero.",
        unit="seconds",
        group=_SIGNALS,
        low=0,
        high=86_400,
        env=False,
    )

    startup_seconds: float = option(
        20.0, NUMBER, "From the decision to ready.", unit="seconds", group=_REPLICA, low=0, high=3600, env=False
    )
    seats: int = option(
        16, INTEGER, "Sequences of a batch.", unit="sequences", group=_REPLICA, low=1, high=4096, env=False
    )
    step_ms: float = option(
        Rates().step_s * 1000, NUMBER, "A decode step, without its sequences.",
        unit="milliseconds", group=_REPLICA, low=0.01, high=10_000, env=False,
    )  # fmt: skip
    sequence_ms: float = option(
        Rates().sequence_s * 1000, NUMBER, "What each sequence adds to it.",
        unit="milliseconds", group=_REPLICA, low=0.001, high=10_000, env=False,
    )  # fmt: skip
    prefill_rate: float = option(
        Rates().prefill_tokens_per_s, NUMBER, "Prompts.",
        unit="tokens per second", group=_REPLICA, low=1, high=1e7, env=False,
    )  # fmt: skip

    @property
    def rates(self) -> Rates:
        return Rates(self.seats, self.step_ms / 1000, self.sequence_ms / 1000, self.prefill_rate)

    def policy(self, signal: str) -> Policy:
        """The policy that scales on a signal."""
        requests = self.target_waiting if signal == "waiting" else self.target_requests
        targets = Targets(
            signal if signal != "waiting" else "requests",
            self.target_wait_seconds,
            requests,
            self.target_tokens,
            self.target_occupancy,
        )
        return Policy(
            signal,
            targets,
            self.scale_in_seconds,
            self.hpa_window_seconds,
            self.lowest,
            max(self.highest, self.lowest, 1),
            self.cooldown_seconds,
        )


def run(options: SimulateOptions) -> list[dict[str, Any]]:
    """Every trace with every signal; one row each, the mean over the seeds, with the first seed's timeline."""
    rows = []
    for name in options.traces:
        for signal in options.signals:
            found = [
                _figures(name, signal, seed, options) for seed in range(options.seed, options.seed + options.seeds)
            ]
            means = {key: sum(one[key] for one in found) / len(found) for key in found[0] if key != "timeline"}
            rows.append({"trace": name, "signal": signal, **means, "timeline": found[0]["timeline"]})
    return rows


def _figures(name: str, signal: str, seed: int, options: SimulateOptions) -> dict[str, Any]:
    """One run's."""
    seconds = options.minutes * 60
    warmup_s = min(options.warmup_minutes * 60, seconds / 2)
    trace = make_trace(name, options.rate, seconds, seed)
    outcome = simulate(trace, options.policy(signal), options.rates, options.startup_seconds, seconds, warmup_s)
    return {
        "requests": outcome.requests,
        "replica_seconds": outcome.replica_seconds,
        "replicas_mean": outcome.replica_seconds / (seconds - warmup_s),
        "replicas_most": outcome.most,
        "scale_events": outcome.events,
        "missed": outcome.missed(options.slo_seconds),
        "ttft_p50_s": outcome.quantile(0.5),
        "ttft_p99_s": outcome.quantile(0.99),
        "timeline": [[round(value, 2) for value in point] for point in outcome.timeline],
    }


def table(rows: Sequence[Mapping[str, Any]], slo_seconds: float) -> str:
    """The rows as a markdown table."""
    lines = [
        f"| trace | signal | replicas, mean | most | changes | first token p50 | p99 | later than {slo_seconds:g} s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = (
            f"{row['trace']} | {row['signal']} | {row['replicas_mean']:.2f} | {row['replicas_most']:.3g}",
            f"{row['scale_events']:.3g} | {row['ttft_p50_s']:.2f} s | {row['ttft_p99_s']:.1f} s",
            f"{100 * row['missed']:.2f} %",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def simulate_help() -> str:
    """The text of ``--help``."""
    return f"{USAGE}\n\n{help_text([SimulateOptions])}"


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the command.

    Raises:
        SettingsError: the flags are no good.
    """
    parsed = parse_options([SimulateOptions], argv, {})
    for word in parsed.positionals:
        parsed.fail((), f"{word!r}: unexpected word; all are flags (see --help)")
    if parsed.problems:
        raise SettingsError(parsed.problems)
    options = parsed.build(SimulateOptions)
    rows = run(options)
    print(table(rows, options.slo_seconds))
    if options.json:
        Path(options.json).write_text(json.dumps({"options": asdict(options), "rows": rows}), "utf-8")
    return 0
