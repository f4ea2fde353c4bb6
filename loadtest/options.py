"""The command line beyond locust's own, and what it means."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

from carousel.bench.slo import Slo, SloError, parse_slo, split_slos
from carousel.bench.workload import Workload, WorkloadError
from loadtest.arrivals import SHAPES, ArrivalError, Shape
from loadtest.figures import TIMES
from loadtest.protocols import PROTOCOLS
from loadtest.sources import Limits, open_workload

GRPC_PORT = 8081


def _slos(text: str) -> str:
    """Checked here and kept as text: a master sends its options to its workers as plain data."""
    try:
        for part in split_slos([text]):
            parse_slo(part, TIMES)
    except SloError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _protocols(text: str) -> str:
    wrong = [name for name in text.split(",") if name not in PROTOCOLS]
    if wrong:
        raise argparse.ArgumentTypeError(f"{wrong[0]!r}: allowed are {', '.join(PROTOCOLS)}, several by commas")
    return text


def add_options(parser: Any) -> None:
    """Declare them; ``parser`` is locust's, which knows ``include_in_web_ui``."""

    def add(flag: str, default: Any, help_: str, **more: Any) -> None:
        if default is not None and "type" not in more and "action" not in more:
            more["type"] = type(default)
        more.setdefault("env_var", "LOADTEST_" + flag.strip("-").replace("-", "_").upper())
        shown = "" if default in (None, "", 0) or "action" in more else f" ({default})"
        parser.add_argument(flag, default=default, help=f"{help_}{shown}".replace("%", "%%"), **more)

    add("--protocol", "chat", f"what to speak: {', '.join(PROTOCOLS)}; several by commas", type=_protocols)
    add("--model", "", "the model's name; the server's first one if not given")
    add(
        "--api-key",
        "",
        "sent with every call as a bearer token; in the variable it stays out of the list of processes",
        include_in_web_ui=False,
    )
    add("--openai-path", "/v1", "where OpenAI's API is mounted on the host")
    add("--grpc-target", "", f"HOST:PORT of gRPC; port {GRPC_PORT} of the host if not given")
    add(
        "--plain",
        False,
        "send no field beyond the protocols, for servers that refuse unknown ones",
        action="store_true",
    )
    add("--workload", "synthetic", "synthetic, chats, interference, tenants, fitted:FILE.csv, FILE.csv or FILE.json")
    add("--requests", 0, "how many requests the workload has; 0: all of a file's, 256 of a generator")
    add("--max-prompt-tokens", 2048, "longest prompt of generators, traces and conversations")
    add("--max-output-tokens", 512, "longest answer of generators, traces and conversations")
    add("--workload-seed", 0, "seed of lengths, texts and arrivals")
    add("--shape", "poisson", f"arrivals: {', '.join(SHAPES)}", choices=SHAPES)
    add("--rate", 1.0, "requests/s over all workers; where the load begins under ramp, step and spike")
    add("--peak", 0.0, "requests/s at the end of ramp and step, and during spike")
    add("--duration", 0.0, "seconds of arrivals, the workload repeated as needed; 0: the workload once")
    add("--burstiness", 3.0, "coefficient of variation of gamma gaps; 1 is Poisson")
    add("--levels", 4, "steps from --rate to --peak under step")
    add("--day", 86400.0, "seconds into which diurnal squeezes a day")
    add("--day-curve", "", "relative load by hour under diurnal, numbers by commas")
    add("--concurrency", 8, "requests in flight under closed, over all workers")
    add("--drain", 120.0, "seconds after the last arrival in which answers may still come")
    add("--request-timeout", 600.0, "seconds without a byte after which a request has failed")
    add(
        "--slo", None, "ttft_p99=0.5s and the like: exit code 3 if missed; may be repeated", type=_slos, action="append"
    )
    add("--junit", "", "write the verdicts on --slo as JUnit XML to this file", include_in_web_ui=False)
    add("--tokens-json", "", "write the token statistics, with their histograms, to this file", include_in_web_ui=False)


def authorization(options: Any) -> dict[str, str]:
    """The header of ``--api-key``; lower case, as gRPC's metadata wants it."""
    return {"authorization": f"Bearer {options.api_key}"} if options.api_key else {}


def slos_of(options: Any) -> list[Slo]:
    """Everything that ``--slo`` said."""
    return [parse_slo(text, TIMES) for text in split_slos(options.slo or [])]


def shape_of(options: Any) -> Shape:
    """The arrivals.

    Raises:
        ArrivalError: naming the option.
    """
    more = {}
    if options.day_curve:
        try:
            more["curve"] = tuple(float(number) for number in options.day_curve.split(","))
        except ValueError:
            raise ArrivalError(f"--day-curve {options.day_curve}: allowed are numbers by commas") from None
    return Shape(
        options.shape,
        options.rate,
        options.duration or math.inf,
        options.peak,
        options.burstiness,
        options.levels,
        options.day,
        **more,
    )


def workload_of(options: Any) -> Workload:
    """The workload.

    Raises:
        WorkloadError: it cannot be used.
    """
    if options.requests < 0:
        raise WorkloadError(f"--requests {options.requests}: allowed is 0 or more")
    limits = Limits(options.requests, options.max_prompt_tokens, options.max_output_tokens, options.workload_seed)
    if min(limits.prompt, limits.output) < 1:
        raise WorkloadError("--max-prompt-tokens and --max-output-tokens: allowed is 1 or more")
    return open_workload(options.workload, limits)


def protocols_of(options: Any) -> list[str]:
    """The protocols that take turns."""
    return [name for name in options.protocol.split(",") if name in PROTOCOLS]


def grpc_target(options: Any, host: str) -> str:
    """``HOST:PORT``."""
    return options.grpc_target or f"{urlsplit(host).hostname or host}:{GRPC_PORT}"


def problems(options: Any) -> list[str]:
    """What is wrong with the options, before anything is sent."""
    found = []
    checks: Sequence[Callable[[Any], object]] = (shape_of, workload_of)
    for check in checks:
        try:
            check(options)
        except (ArrivalError, WorkloadError) as error:
            found.append(str(error))
    if wrong := set(options.protocol.split(",")) - set(PROTOCOLS):  # locust's web page checks nothing
        found.append(f"--protocol {', '.join(sorted(wrong))}: allowed are {', '.join(PROTOCOLS)}")
    if options.concurrency < 1:
        found.append(f"--concurrency {options.concurrency}: allowed is 1 or more")
    if not found and options.shape == "replay" and not any(item.unit_gap for item in workload_of(options).items):
        found.append(f"--shape replay: workload {options.workload} says nothing about arrivals")
    return found
