"""The pictures of a report, drawn by matplotlib without a display: SVG for the page, PNG for pull requests."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from carousel.bench.record import GAP_S
from carousel.report.groups import Group
from carousel.report.runs import Experiment, Figures, Run

# Okabe and Ito's colours, which people tell apart whatever they see of colour.
COLOURS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
USES = {"prefill": "#e69f00", "decode": "#0072b2", "idle": "#c8c8c8"}
STYLE: Any = {
    "svg.fonttype": "none", "svg.hashsalt": "carousel", "font.size": 9, "font.family": "sans-serif",
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#e8e8e8",
    "axes.axisbelow": True, "legend.frameon": False, "figure.constrained_layout.use": True, "svg.image_inline": True,
}  # fmt: skip
_WIDTH = 9.2
_LANE = 0.075  # inches a seat
_NEVER = math.inf


def as_svg(figure: Figure) -> str:
    """The picture as an ``<svg>`` element, the same for the same data."""
    out = io.StringIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    return text[text.index("<svg") :]


def as_png(figure: Figure) -> bytes:
    """The picture as a PNG file."""
    out = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(out, format="png", dpi=110, metadata={"Software": None})
    return out.getvalue()


def drawn(draw: Callable[..., Figure | None]) -> Callable[..., Figure | None]:
    """With the style that the pictures share."""

    def inner(*args: Any, **kwargs: Any) -> Figure | None:
        with matplotlib.rc_context(STYLE):
            return draw(*args, **kwargs)

    return inner


def colour(experiment: Experiment, label: str) -> str:
    return COLOURS[experiment.labels.index(label) % len(COLOURS)]


def line(experiment: Experiment, label: str) -> dict[str, Any]:
    """How a label's line is drawn; one whose colour another has is not whole."""
    strokes = ("-", "--", ":", "-.")
    stroke = strokes[experiment.labels.index(label) // len(COLOURS) % len(strokes)]
    return {"label": label, "color": colour(experiment, label), "linestyle": stroke, "marker": "o", "markersize": 4}


def rate_text(rate: float) -> str:
    return "all at once" if math.isinf(rate) else f"{rate:g}/s"


@drawn
def curves(experiment: Experiment) -> Figure | None:
    """Latency against throughput, a point for each rate; None with fewer than two rates."""
    if len(experiment.rates) < 2:
        return None
    figure = Figure(figsize=(_WIDTH, 3.2))
    panels = figure.subplots(1, 3)
    for axes, (title, metric, statistic) in zip(
        panels,
        (("TTFT, p99", "ttft", "p99"), ("queue time, mean", "queue", "mean"), ("ITL, p99", "itl", "p99")),
        strict=True,
    ):
        for label in experiment.labels:
            found = [
                (run.figures["output_tokens_per_second"], run.figures[metric][statistic], run.rate)
                for run in experiment.of(label)
                if run.figures[metric][statistic] is not None
            ]
            axes.plot([x for x, _, _ in found], [y for _, y, _ in found], **line(experiment, label))
            for x, y, rate in found:
                axes.annotate(
                    rate_text(rate), (x, y), xytext=(3, 3), textcoords="offset points", fontsize=6.5, color="#555"
                )
        axes.set(title=f"{title}, s", xlabel="output tokens/s", xlim=(0, None), ylim=(0, None))
    panels[0].legend()
    return figure


@drawn
def offered(experiment: Experiment) -> Figure | None:
    """Throughput and latency against the rate of arrivals; None with fewer than two of them. Latencies are shown up to
    four times their median, which the slowest leave."""
    rates = [rate for rate in experiment.rates if not math.isinf(rate)]
    if len(rates) < 2:
        return None
    figure = Figure(figsize=(_WIDTH, 3.2))
    panels = figure.subplots(1, 3)
    metrics = (("output tokens/s", None), ("TTFT, p99, s", "ttft"), ("TPOT, p99, s", "tpot"))
    for axes, (title, metric) in zip(panels, metrics, strict=True):
        shown: list[float] = []
        for label in experiment.labels:
            points = [
                (run.rate, run.figures["output_tokens_per_second"] if metric is None else run.figures[metric]["p99"])
                for run in experiment.of(label)
                if not math.isinf(run.rate)
            ]
            known = [(rate, value) for rate, value in points if value is not None]
            shown += [value for _, value in known]
            across, up = [rate for rate, _ in known], [value for _, value in known]
            axes.plot(across, up, **line(experiment, label))
        top = max(shown, default=1.0)
        if metric is not None and shown:
            top = min(top, 4 * float(np.median(shown)))
        axes.set(title=title, xlabel="offered load, requests/s", xlim=(0, None), ylim=(0, 1.05 * top))
    panels[0].legend(fontsize=7)
    return figure


def _cumulated(axes: Axes, values: Any, label: str, tone: str) -> None:
    ordered = np.sort(np.asarray(values, float))
    shares = np.arange(1, len(ordered) + 1) / len(ordered)
    if len(ordered) > 400:  # as many points as can be seen
        places = np.unique(np.linspace(0, len(ordered) - 1, 400).astype(int))
        ordered, shares = ordered[places], shares[places]
    axes.step(ordered, shares, where="post", label=label, color=tone)


def _values(run: Run, metric: str) -> list[float]:
    if metric == "itl":
        return [gap * GAP_S for record in run.records for gaps in record["requests"].get("gaps") or [] for gap in gaps]
    return [value for record in run.records for value in record["requests"].get(metric) or [] if value is not None]


def _from_histogram(axes: Axes, run: Run, metric: str, tone: str) -> bool:
    """Of a load test, which has no single values."""
    from carousel.bench.histogram import Histogram

    wire = (run.figures.get("histograms") or {}).get(metric)
    if not wire or not wire["count"]:
        return False
    points = Histogram.from_wire(wire).cumulated()
    axes.step([value for value, _ in points], [share for _, share in points], where="post", label=run.label, color=tone)
    return True


@drawn
def distributions(experiment: Experiment, runs: Sequence[Run]) -> Figure | None:
    """The shares of requests and of tokens that waited at most so long."""
    names = {"queue": "queue time", "ttft": "time to first token", "itl": "inter-token latency"}
    figure = Figure(figsize=(_WIDTH, 2.9))
    panels = figure.subplots(1, 3, sharey=True)
    drawn_any = False
    for axes, (metric, title) in zip(panels, names.items(), strict=True):
        for run in runs:
            tone = colour(experiment, run.label)
            values = _values(run, metric)
            if values:
                _cumulated(axes, values, run.label, tone)
                drawn_any = True
            else:
                drawn_any = _from_histogram(axes, run, metric, tone) or drawn_any
        axes.set(title=f"{title}, s", ylim=(0, 1.02), xlim=(0, None))
    panels[0].set_ylabel("share")
    if not drawn_any:
        return None
    handles = {label: line for axes in panels for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    panels[0].legend(handles.values(), handles, loc="lower right")
    return figure


def _lanes(axes: Axes, record: Figures) -> int:
    """Seats as lanes: who computed what when. Returns how many seats there were."""
    boxes: dict[str, list[list[tuple[float, float]]]] = {use: [] for use in USES}
    seats = 0
    for seat, _, spans in record["seats"]:
        seats = max(seats, seat + 1)
        for use, start, end, _ in spans:
            low, high = seat + 0.08, seat + 0.92
            boxes[use].append([(start, low), (end, low), (end, high), (start, high)])
        begin = spans[0][1]
        axes.plot([begin, begin], [seat, seat + 1], color="#222", lw=0.5)
    for use, polygons in boxes.items():
        axes.add_collection(PolyCollection(polygons, facecolors=USES[use], linewidths=0))
    return seats


@drawn
def batch(experiment: Experiment, runs: Sequence[Run]) -> Figure | None:
    """The batch over time, contestant by contestant, above the queue and the KV memory of all of them."""
    pictured = [(run, run.records[0]) for run in runs if run.records and run.records[0].get("seats")]
    if not pictured:
        return None
    end = max(record["steps"]["start"][-1] + record["steps"]["duration"][-1] for _, record in pictured)
    most = max(seat for _, record in pictured for seat, _, _ in record["seats"]) + 1
    lanes = min(max(0.8, _LANE * most * 2), 2.2)
    figure = Figure(figsize=(_WIDTH, len(pictured) * (lanes + 0.35) + 2.6))
    panels = figure.subplots(
        len(pictured) + 2, 1, sharex=True, gridspec_kw={"height_ratios": [*[lanes] * len(pictured), 1.0, 1.0]}
    )
    for axes, (run, record) in zip(panels, pictured, strict=False):
        seats = _lanes(axes, record)
        axes.set(title=f"{run.label}, {rate_text(run.rate)}", ylabel="seat", ylim=(seats, 0), xlim=(0, end))
        axes.grid(visible=False)
    patches = [Patch(color=tone, label="computed for nothing" if use == "idle" else use) for use, tone in USES.items()]
    figure.legend(handles=patches, loc="outside upper right", ncols=3)
    waiting, memory = panels[-2], panels[-1]
    for run, record in pictured:
        steps, tone = record["steps"], colour(experiment, run.label)
        waiting.step(steps["start"], steps["waiting"], where="post", color=tone, label=run.label)
        memory.step(steps["start"], [100 * share for share in steps["kv"]], where="post", color=tone)
    waiting.set(ylabel="waiting", ylim=(0, None))
    waiting.legend()
    memory.set(ylabel="KV in use, %", xlabel="seconds", ylim=(0, None))
    figure.align_ylabels(panels)
    return figure


@drawn
def by_group(experiment: Experiment, found: Mapping[str, Sequence[Group]]) -> Figure | None:
    """What each contestant did for each group of requests; None where requests have no groups."""
    names = list(dict.fromkeys(group.name for groups in found.values() for group in groups))
    kinds: dict[str, Callable[[Group], float | None]] = {
        "queue time, p99, s": lambda group: group.queue_p99,
        "later than their deadline, %": lambda group: None if group.missed is None else 100 * group.missed,
        "share of the engine, %": lambda group: None if group.share is None else 100 * group.share,
    }
    known = {
        title: value
        for title, value in kinds.items()
        if any(value(group) is not None for groups in found.values() for group in groups)
    }
    if not known:
        return None
    figure = Figure(figsize=(_WIDTH, 2.9))
    width = 0.8 / len(found)
    for axes, (title, value) in zip(figure.subplots(1, len(known), squeeze=False)[0], known.items(), strict=True):
        for place, (label, groups) in enumerate(found.items()):
            heights = {group.name: value(group) or 0.0 for group in groups}
            across = [names.index(name) + (place - (len(found) - 1) / 2) * width for name in heights]
            axes.bar(across, list(heights.values()), width * 0.92, label=label, color=colour(experiment, label))
        axes.set_xticks(range(len(names)), names)
        axes.set(title=title)
        axes.grid(visible=False, axis="x")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside upper right", ncols=len(found))
    return figure


@drawn
def within_limits(experiment: Experiment, limits: Sequence[tuple[str, float]]) -> Figure | None:
    """Requests/s that kept all of ``limits``, against those that arrived."""
    if not any(run.records for label in experiment.labels for run in experiment.of(label)):
        return None
    figure = Figure(figsize=(_WIDTH / 2, 2.9))
    axes = figure.subplots()
    rates = [rate for rate in experiment.rates if not math.isinf(rate)] or experiment.rates
    for label in experiment.labels:
        runs = [run for run in experiment.of(label) if run.records and run.rate in rates]
        axes.plot(
            [run.figures["requests_per_second"] if math.isinf(run.rate) else run.rate for run in runs],
            [share_within(run, limits) * run.figures["requests_per_second"] for run in runs],
            **line(experiment, label),
        )
    shown = ", ".join(f"{name} <= {limit:g} s" for name, limit in limits)
    axes.set(
        title=f"goodput: {shown}",
        xlabel="requests/s offered",
        ylabel="requests/s within",
        xlim=(0, None),
        ylim=(0, None),
    )
    axes.legend()
    return figure


def share_within(run: Run, limits: Sequence[tuple[str, float]]) -> float:
    """The share of a run's requests that kept every limit: (``ttft``, ``tpot``, ``queue`` or ``e2e``, seconds)."""
    kept = total = 0
    for record in run.records:
        columns = [record["requests"].get(name) or [] for name, _ in limits]
        count = len(record["requests"]["id"])
        total += count
        for place in range(count):
            values = [column[place] if place < len(column) else None for column in columns]
            kept += all(value is None or value <= limit for value, (_, limit) in zip(values, limits, strict=True))
    return kept / total if total else 0.0


@drawn
def searched(experiment: Experiment) -> Figure | None:
    """The rates that the goodput searches tried, and the highest that held."""
    runs = experiment.goodputs
    if not runs:
        return None
    figure = Figure(figsize=(_WIDTH, 0.5 * len(runs) + 1.0))
    axes = figure.subplots()
    for place, run in enumerate(runs):
        assert run.goodput is not None
        axes.barh(place, run.goodput["rate"], height=0.55, color=colour(experiment, run.label))
        for probe in run.goodput["probes"]:
            if probe["rate"] != "inf":
                axes.plot(probe["rate"], place, "o" if probe["met"] else "x", color="#222", ms=4)
    axes.set_yticks(range(len(runs)), [run.label for run in runs])
    axes.set(xlabel="requests/s; o kept the objectives, x did not", xlim=(0, None), ylim=(len(runs) - 0.5, -0.5))
    return figure
