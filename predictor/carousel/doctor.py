"""What limits a server, from what its steps did, and which setting to change to what.

The evidence are the steps of a run. Each was stopped by something from doing more, or by nothing; the share of the time
for which each thing did is what a finding is ranked by:

slots
    Requests waited because all seats of the batch were taken.
kv
    Requests waited because too few KV blocks were free, or lost their seat for want of them.
budget
    Prompts waited because a step computes no more tokens, by ``max_batch_tokens`` or by the latency target.
prefill
    Streams waited: steps with prompts in them took much longer than those without.
group
    Static batching kept others out until the group had finished.
clients
    Nothing of all this: too little was asked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from statistics import linear_regression, median
from typing import Any

from carousel.engine.errors import CarouselError

COLUMNS = (
    "started", "duration_s", "num_sequences", "num_prefill_tokens", "num_decode_tokens", "num_recomputed_tokens",
    "num_preemptions", "num_running", "num_waiting", "kv_cache_usage", "num_left_tokens", "obstacle",
)  # fmt: skip
"""Of a step, in this order, in a timeline as JSON. Times in seconds."""

SETTINGS = (
    "max_batch_tokens", "max_batch_sequences", "kv_cache_memory", "target_step_ms", "protect_streams", "batching",
    "max_queue_requests", "policy", "max_model_len", "prefix_caching",
)  # fmt: skip
FEWEST_STEPS = 20
WORTH_SAYING = 0.15
"""Share of the time from which on something is said to limit."""

LONG_STRETCH = 2.0
"""Steps with prompts that take this many times as long as those without disturb streams."""

FITTED_TOKENS = 64
"""By how much steps must differ in prompt tokens for their times to tell what one without any would take."""

_GRAIN = 16
_FULL = 0.95


class TimelineUnreadable(CarouselError):
    """A timeline lacks what is needed. The message says what."""


@dataclass(frozen=True, slots=True)
class Advice:
    """Change ``setting`` from ``now`` to ``to``; empty for what is no setting of the server."""

    setting: str
    now: str
    to: str
    why: str


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that limits. ``share`` of the time, 0 to 1."""

    limit: str
    share: float
    summary: str
    evidence: tuple[str, ...]
    advice: tuple[Advice, ...]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The findings, what limits most first, and the figures that they rest on."""

    findings: tuple[Finding, ...]
    figures: Mapping[str, float] = field(default_factory=dict)

    @property
    def limit(self) -> str:
        return self.findings[0].limit

    def as_json(self) -> dict[str, Any]:
        return {
            "limit": self.limit,
            "findings": [asdict(finding) for finding in self.findings],
            "figures": dict(self.figures),
        }


@dataclass(frozen=True, slots=True)
class Step:
    """A row of a timeline, see :data:`COLUMNS`."""

    started: float
    duration_s: float
    num_sequences: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_recomputed_tokens: int
    num_preemptions: int
    num_running: int
    num_waiting: int
    kv_cache_usage: float
    num_left_tokens: int
    obstacle: str

    @property
    def num_tokens(self) -> int:
        return self.num_prefill_tokens + self.num_decode_tokens

    @property
    def mixed(self) -> bool:
        return self.num_prefill_tokens > 0 and self.num_decode_tokens > 0


def _span(step: Step, later: Step | None) -> float:
    """How long things stood as the step left them: until the next one, where anybody was there to be served."""
    if later is None or not step.num_running + step.num_waiting:
        return step.duration_s
    return max(step.duration_s, later.started - step.started)


class Run:
    """The steps of a run and the settings it had.

    Args:
        timeline: as ``GET /timeline`` answers.
        seconds: only the last so many.

    Raises:
        TimelineUnreadable: it is no timeline.
    """

    def __init__(self, timeline: Mapping[str, Any], seconds: float = math.inf) -> None:
        try:
            self.settings: dict[str, Any] = dict(timeline["settings"])
            self.slots, self.blocks = int(timeline["slots"]), int(timeline["blocks"])
            columns = list(timeline["columns"])
            places = [columns.index(name) for name in COLUMNS]
            steps = [Step(*(row[place] for place in places)) for row in timeline["steps"]]
            self.now = float(timeline["now"])
        except (KeyError, ValueError, TypeError, IndexError) as error:
            raise TimelineUnreadable(f"this is no timeline of a Carousel server: {error!r}") from None
        missing = [name for name in SETTINGS if name not in self.settings]
        if missing:
            raise TimelineUnreadable(f"the timeline lacks the settings {', '.join(missing)}")
        self.steps = [step for step in steps if step.started >= self.now - seconds]
        self.spans_s = [_span(step, later) for step, later in zip_longest(self.steps, self.steps[1:])]

    @property
    def wall_s(self) -> float:
        """From the first step until the timeline was taken."""
        return max(self.now - self.steps[0].started, 1e-9) if self.steps else 0.0

    def share(self, which: Callable[[Step], bool]) -> float:
        """Share of the time for which this holds."""
        return sum(span for step, span in zip(self.steps, self.spans_s, strict=True) if which(step)) / self.wall_s

    def mean(self, value: Callable[[Step], float], which: Callable[[Step], bool] = lambda step: True) -> float:
        """Weighted by the steps' time; 0 where there is none."""
        chosen = [step for step in self.steps if which(step)]
        whole = sum(step.duration_s for step in chosen)
        return sum(value(step) * step.duration_s for step in chosen) / whole if whole else 0.0


def diagnose(run: Run) -> Diagnosis:
    """What limits the run, the heaviest first; never nothing."""
    if len(run.steps) < FEWEST_STEPS:
        said = f"{len(run.steps)} steps, which is too few to tell anything else (at least {FEWEST_STEPS})"
        return Diagnosis((Finding("clients", 1.0, "hardly anything was asked", (said,), ()),))
    found = [
        finding
        for check in (_slots, _kv, _budget, _prefill, _group)
        if (finding := check(run)) is not None and finding.share >= WORTH_SAYING
    ]
    found.sort(key=lambda finding: -finding.share)
    if not found:
        found = [_clients(run)]
    return Diagnosis(tuple(found), _figures(run))


def _figures(run: Run) -> dict[str, float]:
    tokens = sum(step.num_tokens for step in run.steps)
    return {
        "steps": len(run.steps),
        "seconds": round(run.wall_s, 3),
        "idle_share": round(_idle(run), 4),
        "sequences_mean": round(run.mean(lambda step: step.num_sequences), 2),
        "waiting_mean": round(run.mean(lambda step: step.num_waiting), 2),
        "kv_cache_usage_mean": round(run.mean(lambda step: step.kv_cache_usage), 4),
        "step_ms_mean": round(1000 * sum(step.duration_s for step in run.steps) / len(run.steps), 3),
        "tokens_per_second": round(tokens / run.wall_s, 1),
        "recomputed_share": round(sum(step.num_recomputed_tokens for step in run.steps) / max(tokens, 1), 4),
        "preemptions": sum(step.num_preemptions for step in run.steps),
    }


def _idle(run: Run) -> float:
    return max(0.0, 1.0 - run.share(lambda step: True))


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _kept_out(reason: str) -> Callable[[Step], bool]:
    return lambda step: step.num_waiting > 0 and step.obstacle == reason


def _slots(run: Run) -> Finding | None:
    which = _kept_out("slots")
    share = run.share(which)
    waiting, usage = run.mean(lambda step: step.num_waiting, which), run.mean(lambda step: step.kv_cache_usage, which)
    step_ms, target = 1000 * run.mean(lambda step: step.duration_s, which), float(run.settings["target_step_ms"])
    evidence = (
        f"{_percent(share)} of the time all {run.slots} slots were taken while {waiting:.1f} requests waited",
        f"KV blocks were used to {_percent(usage)} then, and a step took {step_ms:.1f} ms"
        + (f" (target {target:g} ms)" if target else ""),
    )
    wanted = run.slots + max(1, math.ceil(waiting))
    most = math.floor(run.slots * _FULL / usage) if usage else 4 * run.slots
    to = min(wanted, most, 4 * run.slots, int(run.settings["max_batch_tokens"]))
    advice: tuple[Advice, ...]
    if to <= run.slots:
        why = "more sequences would not find KV memory; with as much as it takes, raise max_batch_sequences too"
        advice = (_more_memory(run, wanted / run.slots, why),)
    else:
        why = "the queue comes to the batch; each step then takes a little longer"
        advice = (Advice("max_batch_sequences", str(run.slots), str(to), why),)
    return Finding("slots", share, "requests wait for a seat in the batch", evidence, advice)


def _kv(run: Run) -> Finding | None:
    which = _kept_out("blocks")
    share = run.share(lambda step: which(step) or step.num_preemptions > 0)
    waiting, usage = run.mean(lambda step: step.num_waiting, which), run.mean(lambda step: step.kv_cache_usage, which)
    running = run.mean(lambda step: step.num_sequences, which)
    preemptions = sum(step.num_preemptions for step in run.steps)
    again = sum(step.num_recomputed_tokens for step in run.steps)
    evidence = (
        f"{_percent(share)} of the time the first in the queue lacked KV blocks",
        f"{running:.1f} of {run.slots} slots were taken then, while {waiting:.1f} requests waited",
        f"the {run.blocks} blocks were used to {_percent(usage)} by live sequences",
        f"{preemptions} sequences lost their seat, and {again} tokens were computed twice",
    )
    seated = min(run.slots, running + waiting)
    factor = max(1.25, min(8.0, seated / max(running, 1.0)))
    why = f"{seated:.0f} sequences at a time need about {factor:.1f} times the blocks"
    return Finding("kv", share, "requests wait for KV memory", evidence, (_more_memory(run, factor, why),))


def _more_memory(run: Run, factor: float, why: str) -> Advice:
    now = str(run.settings["kv_cache_memory"])
    try:
        fraction = float(now)
    except ValueError:
        return Advice("kv_cache_memory", now, _times(now, factor), why)
    to = min(_FULL, fraction * factor)
    if to < fraction * 1.05:
        return Advice("kv_cache_memory", now, now, f"{why}; it has all there is: take a node with more memory")
    short = "" if to == fraction * factor else "; that is all there is, and a node with more memory would be better"
    return Advice("kv_cache_memory", now, f"{to:.2f}", why + short)


def _times(size: str, factor: float) -> str:
    from carousel.options import format_size, parse_size

    return format_size(math.ceil(parse_size(size) * factor))


def _budget(run: Run) -> Finding | None:
    most, kept_out = int(run.settings["max_batch_tokens"]), _kept_out("budget")

    def which(step: Step) -> bool:
        return step.num_left_tokens > 0 or kept_out(step)

    def full(step: Step) -> bool:
        return which(step) and step.num_tokens > most - _GRAIN

    share = run.share(which)
    if not share or _stretch(run) >= LONG_STRETCH:  # larger steps are what streams suffer from already
        return None
    left, tokens = run.mean(lambda step: step.num_left_tokens, which), run.mean(lambda step: step.num_tokens, which)
    step_ms, target = 1000 * run.mean(lambda step: step.duration_s, which), float(run.settings["target_step_ms"])
    by_count = run.share(full) >= share / 2
    evidence = (
        f"{_percent(share)} of the time a step had no room for prompts that were there",
        f"{tokens:.0f} tokens were computed then, of at most {most}, and {left:.0f} of the batch's were left",
        f"such a step took {step_ms:.1f} ms" + (f" (target {target:g} ms)" if target else " (no target)"),
    )
    if by_count:
        to = 2 ** math.ceil(math.log2(max(2 * most, min(tokens + left, 8 * most))))
        why = "prompts are computed in fewer steps"
        if target:
            why += f"; target_step_ms {target:g} still keeps steps short"
        advice = Advice("max_batch_tokens", str(most), str(to), why)
    else:
        to = math.ceil(max(1.5 * target, 1.2 * step_ms))
        advice = Advice("target_step_ms", f"{target:g}", str(to), "prompts get larger parts of a step; streams feel it")
    return Finding("budget", share, "prompts wait for room in the steps", evidence, (advice,))


def _alone_s(run: Run) -> float:
    """What a step with nothing but decodes takes; 0 where the run does not tell.

    The median of such steps, or, where there are hardly any, what a straight line through the others' times over their
    prompt tokens says of none.
    """
    decoding = [step for step in run.steps if step.num_decode_tokens]
    alone = [step.duration_s for step in decoding if not step.num_prefill_tokens]
    if len(alone) >= FEWEST_STEPS // 4:
        return median(alone)
    sizes, times = [step.num_prefill_tokens for step in decoding], [step.duration_s for step in decoding]
    if len(decoding) < FEWEST_STEPS or max(sizes) - min(sizes) < FITTED_TOKENS:
        return 0.0
    slope, at_none = linear_regression(sizes, times)
    return max(at_none, min(times)) if slope > 0 else 0.0


def _stretch(run: Run) -> float:
    mixed = [step.duration_s for step in run.steps if step.mixed]
    alone = _alone_s(run)
    return sum(mixed) / len(mixed) / alone if mixed and alone else 1.0


def _prefill(run: Run) -> Finding | None:
    alone, stretch = _alone_s(run), _stretch(run)
    if stretch < LONG_STRETCH:
        return None
    lost = sum(max(0.0, step.duration_s - alone) for step in run.steps if step.mixed) / run.wall_s
    chunk = run.mean(lambda step: step.num_prefill_tokens, lambda step: step.mixed)
    streams = run.mean(lambda step: step.num_decode_tokens, lambda step: step.mixed)
    evidence = (
        f"a step with prompts took {1000 * alone * stretch:.1f} ms, one without {1000 * alone:.1f} ms: {stretch:.1f} x",
        f"{_percent(lost)} of the time {streams:.1f} streams stood still for prompts, {chunk:.0f} tokens a step",
    )
    target = float(run.settings["target_step_ms"])
    wanted = max(1, math.ceil(2000 * alone))
    if not run.settings["protect_streams"]:
        advice = Advice("protect_streams", "off", "on", "prompts then stretch a step by no more than 1.4 times")
    elif not target or target > 1.2 * wanted:
        advice = Advice(
            "target_step_ms", f"{target:g}", str(wanted), "prompts are cut into parts that streams feel less"
        )
    else:
        most = int(run.settings["max_batch_tokens"])
        least = max(int(run.settings["max_batch_sequences"]), most // 2)
        advice = Advice("max_batch_tokens", str(most), str(least), "prompts are cut into smaller parts")
    return Finding("prefill", lost, "streams wait for the prompts of others", evidence, (advice,))


def _group(run: Run) -> Finding | None:
    share = run.share(_kept_out("group"))
    running = run.mean(lambda step: step.num_running, _kept_out("group"))
    evidence = (f"{_percent(share)} of the time others waited for a group of {running:.1f} to finish",)
    advice = (Advice("batching", "static", "continuous", "requests step on as soon as one steps off"),)
    return Finding("group", share, "static batching keeps requests out", evidence, advice)


def _clients(run: Run) -> Finding:
    idle, sequences = _idle(run), run.mean(lambda step: step.num_sequences)
    queued = run.share(lambda step: step.num_waiting > 0)
    evidence = (
        f"{_percent(idle)} of the time nothing was to do; {sequences:.1f} of {run.slots} slots were in use otherwise",
        f"{_percent(queued)} of the time anybody waited",
    )
    if idle >= WORTH_SAYING or sequences < run.slots / 2:
        share = max(idle, 1 - sequences / max(run.slots, 1))
        why = f"the batch has room for {run.slots - math.ceil(sequences)} more at once"
        advice = (Advice("", "", "more requests at once, or fewer replicas", why),)
        return Finding("clients", share, "too little is asked of the server", evidence, advice)
    return Finding("none", 0.0, "nothing is short: the batch is well used and nobody waits for long", evidence, ())


def timeline_of(steps: Sequence[Any], settings: Any, slots: int, blocks: int, now: float, model: str) -> dict[str, Any]:
    """A timeline as ``GET /timeline`` answers it, of an engine's step records and its settings."""
    return {
        "model": model,
        "now": now,
        "slots": slots,
        "blocks": blocks,
        "settings": {name: getattr(settings, name) for name in SETTINGS},
        "columns": list(COLUMNS),
        "steps": [[getattr(step, name) for name in COLUMNS] for step in steps],
    }
