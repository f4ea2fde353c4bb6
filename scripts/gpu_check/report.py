"""The Markdown report of all stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["markdown"]

Result = dict[str, Any]


def markdown(whole: dict[str, Any]) -> str:
    """The report; ``whole`` as in report.json."""
    device = ", ".join(f"{name} {value}" for name, value in whole["device"].items())
    stages: dict[str, Result] = whole["stages"]
    lines = ["# GPU check", "", f"{whole['at']}: {device}.", ""]
    lines += ["| stage | result | s |", "|---|---|---:|"]
    lines += [f"| {name} | {_verdict(result)} | {result.get('seconds', '')} |" for name, result in stages.items()]
    for name, result in stages.items():
        if "failure" not in result:
            lines += ["", f"## {name}", "", *_SECTIONS[name](result)]
    return "\n".join(lines) + "\n"


def _verdict(result: Result) -> str:
    if "failure" in result:
        return f"no result: {result['failure']}".replace("|", "/")
    reached = result.get("reached")
    goal = "" if reached is None else ", goal reached" if reached else ", goal missed"
    return ("good" if result["ok"] else "bad") + goal


def _table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> list[str]:
    names = list(head)
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    return lines + ["| " + " | ".join(_text(value) for value in row) + " |" for row in rows]


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return "" if value is None else str(value).replace("|", "/")


def _kernels(result: Result) -> list[str]:
    checks = result["checks"]
    bad = [check for check in checks if not check["ok"]]
    lines = [f"{len(checks) - len(bad)} of {len(checks)} operators and shapes agree with the reference."]
    if bad:
        rows = [(c["check"], c["error"], c["tolerance"], c.get("reason", "")) for c in bad]
        lines += ["", *_table(("check", "error", "tolerance", "reason"), rows)]
    return lines


def _roofline(result: Result) -> list[str]:
    return str(result["markdown"]).rstrip().splitlines()


def _parity(result: Result) -> list[str]:
    return [
        f"Of {result['tokens']} greedy tokens {100 * result['identical']:.1f} % are transformers' own choice.",
        f"None is more than {result['largest_gap']:.4f} below its largest logit (allowed: {result['tolerance']}).",
    ]


def _decode(result: Result) -> list[str]:
    head = ("sequences", "context", "step, ms", "run, ms", "sample, ms", "tokens/s", "bound", "share")
    names = ("sequences", "context", "step_ms", "run_ms", "sample_ms", "tokens_per_second",
             "bound_tokens_per_second", "share_of_bound")  # fmt: skip
    rows = [[row.get(name, row.get("error")) for name in names] for row in result["rows"]]
    return [
        f"Bound: a copy of weights, keys and values at {result['copy_gigabytes_per_s']:,.1f} GB/s.",
        f"Goal: {result['goal']} of it.",
        "",
        *_table(head, rows),
    ]


def _graphs(result: Result) -> list[str]:
    if not result["built"]:
        return [result["note"][0].upper() + result["note"][1:] + "."]
    capture = result["capture"]
    return [
        f"The engine starts in {result['start_s']:.1f} s.",
        f"Recording {capture['graphs']} graphs takes {capture['seconds']:.1f} s of that:",
        f"decodes of {capture['buckets']} sequences, steps with prompts of {capture['token_buckets']} tokens.",
        f"Where the host has to wait for the device in a step's operators: {result['host_waits'] or 'nowhere'}.",
    ]


def _mixed(result: Result) -> list[str]:
    head = ("tokens", "decodes", "launched, ms", "replayed, ms", "factor", "largest gap")
    names = ("tokens", "decodes", "launched_ms", "replayed_ms", "factor", "largest_gap")
    return [
        f"Steps of a prompt's chunk beside decodes at a context of {result['context']} tokens, launched operator by",
        f"operator and replayed between attentions (goal with the fewest tokens: {result['goal']} times as fast).",
        f"Recording {result['graphs']} graphs took {result['capture_s']:.1f} s and {result['recorded_gib']:.2f} GiB.",
        "",
        *_table(head, [[row[name] for name in names] for row in result["rows"]]),
    ]


def _load(result: Result) -> list[str]:
    head = ("files", "plain read, GB/s", "load, GB/s", "share")
    names = ("files", "plain_gb_per_s", "load_gb_per_s", "share")
    return [
        f"{result['gigabytes']:.1f} GB of safetensors to the device, against reading them to nowhere with as many",
        f"threads (goal: {result['goal']} of that).",
        "",
        *_table(head, [[row.get(name) for name in names] for row in result["rows"]]),
    ]


def _itl(result: Result) -> list[str]:
    alone, busy = result["alone_ms"], result["beside_long_prompts_ms"]
    rows = [("alone", *alone.values()), ("beside long prompts", *busy.values())]
    return [
        f"Gaps between the tokens of {result['streams']} streams, in ms: alone, and while {result['long_prompts']}",
        f"prompts of {result['long_prompt_tokens']} tokens enter. Longest step: {result['longest_step_ms']:.1f} ms.",
        "",
        *_table(("streams", *alone), rows),
    ]


def _batching(result: Result) -> list[str]:
    rows = [(mode, *result[mode].values()) for mode in ("continuous", "static")]
    least, most = result["outputs"]
    return [
        f"{result['requests']} requests of {result['prompt']} prompt and {least}-{most} output tokens, on",
        f"{result['seats']} seats: continuous batching gives {result['factor']:.2f} times the tokens/s of static",
        f"batching (goal: {result['goal']}).",
        "",
        *_table(("batching", *result["static"]), rows),
    ]


_SECTIONS: dict[str, Callable[[Result], list[str]]] = {
    "kernels": _kernels,
    "roofline": _roofline,
    "parity": _parity,
    "decode": _decode,
    "graphs": _graphs,
    "mixed": _mixed,
    "load": _load,
    "itl": _itl,
    "batching": _batching,
}
