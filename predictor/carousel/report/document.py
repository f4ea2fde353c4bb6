"""The report as a document: tables and pictures by experiment, written as HTML and as Markdown."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from matplotlib.figure import Figure

from carousel.bench.report import seconds
from carousel.report import plots
from carousel.report.groups import Group, groups_of
from carousel.report.plots import rate_text
from carousel.report.runs import Experiment, Run
from carousel.report.statistics import METRICS, Metric, Ratio, ratio, seat_use

Limits = Sequence[tuple[str, float]]


@dataclass(frozen=True, slots=True)
class Table:
    """Cells as text; the first row is the head, the first column names the rows."""

    rows: Sequence[Sequence[str]]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Picture:
    """``name``: of its file, without the ending."""

    name: str
    figure: Figure
    caption: str


@dataclass(slots=True)
class Section:
    """What there is to see of one experiment."""

    title: str
    about: str
    parts: list[Table | Picture] = field(default_factory=list)


def sections(experiments: Sequence[Experiment], limits: Limits = ()) -> list[Section]:
    """One section an experiment, with what its runs allow to show."""
    return [_section(experiment, limits) for experiment in experiments]


def _section(experiment: Experiment, limits: Limits) -> Section:
    name = experiment.name or "runs"
    section = Section(name, experiment.about)
    slug = "-".join("".join(letter if letter.isalnum() else " " for letter in name.lower()).split())
    groups: dict[float, dict[str, list[Group]]] = {}
    for rate in experiment.rates:
        section.parts.append(_comparison(experiment.at(rate), rate))
        groups[rate] = {run.label: groups_of(run) for run in experiment.at(rate)}
        if any(groups[rate].values()):
            section.parts.append(_group_table(groups[rate]))
    if experiment.goodputs:
        section.parts.append(_goodput_table(experiment.goodputs))
    pictured = _pictured(experiment)
    shown = experiment.at(pictured)
    pictures = (
        ("batch", plots.batch(experiment, shown), "Who sat on the batch when; below, the queue and the KV memory."),
        ("groups", plots.by_group(experiment, groups.get(pictured, {})), "What each did for each group of requests."),
        ("curves", plots.curves(experiment), "Latency against throughput, one point for each rate of arrivals."),
        ("load", plots.offered(experiment), "Throughput and latency against offered load."),
        (
            "times",
            plots.distributions(experiment, shown),
            "Shares of requests, and of tokens, that waited at most so long.",
        ),
        ("within", plots.within_limits(experiment, limits) if limits else None, "Requests that kept the limits."),
        ("goodput", plots.searched(experiment), "The highest rate at which the objectives held."),
    )
    section.parts += [Picture(f"{slug}-{kind}", figure, caption) for kind, figure, caption in pictures if figure]
    return section


def _pictured(experiment: Experiment) -> float:
    """The rate whose runs are drawn: the highest finite one, where there is one."""
    finite = [rate for rate in experiment.rates if not math.isinf(rate)]
    return max(finite, default=math.inf)


def _shown(value: float | None, metric: Metric) -> str:
    if value is None:
        return "–"
    return seconds(value) if metric.unit == "s" else f"{value:.1f}"


def _ratio_text(found: Ratio | None) -> str:
    if found is None:
        return "–"
    if found.low is None or found.high is None:
        return f"{found.value:.3g} x"
    return f"{found.value:.3g} x ({found.low:.3g} to {found.high:.3g})"


def _comparison(runs: Sequence[Run], rate: float) -> Table:
    """The runs of one rate side by side, each but the first with its ratios to the first."""
    base, others = runs[0], runs[1:]
    head = [rate_text(rate), base.label]
    for run in others:
        head += [run.label, f"{run.label}: better by"]
    rows = [head]
    for metric in METRICS:
        if all(metric.of(run.figures) is None for run in runs):
            continue
        row = [metric.label, _shown(metric.of(base.figures), metric)]
        for run in others:
            row += [_shown(metric.of(run.figures), metric), _ratio_text(ratio(base, run, metric))]
        rows.append(row)
    for label, values in (("seats in use", map(_seats, runs)), ("computed for nothing", map(_idle, runs))):
        cells = list(values)
        if any(cells):
            row = [label, cells[0] or "–"]
            for cell in cells[1:]:
                row += [cell or "–", ""]
            rows.append(row)
    rounds = {len(run.rounds) for run in runs}
    counts = [f"{base.figures['requests']:g} requests"] if "requests" in base.figures else []
    return Table(rows, ", ".join([*counts, f"rounds: {' to '.join(map(str, sorted(rounds)))}"]))


def _seats(run: Run) -> str:
    seats = (run.figures.get("settings") or {}).get("max_batch_sequences") or 0
    used = [share for record in run.records if (share := seat_use(record, seats)) is not None]
    return f"{sum(used) / len(used):.0%} of {seats}" if used else ""


def _idle(run: Run) -> str:
    """The share of the computed tokens that nobody asked for."""
    steps = [record["steps"] for record in run.records if record.get("steps")]
    idle = sum(sum(found["idle"]) for found in steps)
    whole = idle + sum(sum(found["prefill"]) + sum(found["decode"]) for found in steps)
    return f"{idle / whole:.0%} of the tokens" if idle else ""


def _group_table(groups: Mapping[str, Sequence[Group]]) -> Table:
    columns = {
        "requests": lambda group: str(group.requests),
        "queue, p99": lambda group: seconds(group.queue_p99),
        "in steps": lambda group: "–" if group.queue_steps_p99 is None else f"{group.queue_steps_p99:.1f}",
        "TTFT, mean": lambda group: seconds(group.ttft_mean),
        "TTFT, p99": lambda group: seconds(group.ttft_p99),
        "deadline missed": lambda group: "–" if group.missed is None else f"{group.missed:.1%}",
        "share": lambda group: "–" if group.share is None else f"{group.share:.1%}",
        "owed": lambda group: "–" if group.owed is None else f"{group.owed:.1%}",
    }
    rows = [
        [f"{label}: {group.name}", *(show(group) for show in columns.values())]
        for label, found in groups.items()
        for group in found
    ]
    kept = [place for place in range(1, len(columns) + 1) if any(row[place] != "–" for row in rows)]
    head = ["group", *columns]
    return Table([[line[0], *(line[place] for place in kept)] for line in [head, *rows]])


def _goodput_table(runs: Sequence[Run]) -> Table:
    found = [run.goodput for run in runs if run.goodput is not None]
    rows = [["goodput, requests/s", *(run.label for run in runs)]]
    rows.append(["holds", *(f"{one['rate']:.3g}" if one["rate"] else "none" for one in found)])
    rows.append(["does not", *("–" if one["bound"] is None else f"{one['bound']:.3g}" for one in found)])
    return Table(rows, f"objectives: {', '.join(found[0]['slo'])}")


NOTE = (
    "Ratios above 1 are better. Intervals: 95 %, bootstrap over rounds and requests, paired; figures that a run has "
    "once have one only where there are several rounds. They tell what other requests of the kind would change, not "
    "what another machine would."
)

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; padding: 0 1rem; color: #222; }
h1 { font-size: 1.6rem; } h2 { margin-top: 2.5rem; border-bottom: 1px solid #ccc; font-size: 1.25rem; }
table { border-collapse: collapse; margin: 1rem 0; font-size: 0.9rem; }
th, td { padding: 0.2rem 0.7rem; border-bottom: 1px solid #e4e4e4; text-align: right; }
th:first-child, td:first-child { text-align: left; } th { border-bottom: 1px solid #888; }
figure { margin: 1.2rem 0; } figure svg { max-width: 100%; height: auto; }
figcaption, .note { color: #555; font-size: 0.85rem; } .scroll { overflow-x: auto; }
"""


def as_html(title: str, facts: Sequence[str], found: Sequence[Section]) -> str:
    """A page that needs nothing from elsewhere."""
    body = [f"<h1>{escape(title)}</h1>", *(f'<p class="note">{escape(fact)}</p>' for fact in [*facts, NOTE])]
    if len(found) > 1:
        links = (f'<li><a href="#s{place}">{escape(section.title)}</a></li>' for place, section in enumerate(found))
        body.append(f"<ul>{''.join(links)}</ul>")
    for place, section in enumerate(found):
        body.append(f'<h2 id="s{place}">{escape(section.title)}</h2>')
        if section.about:
            body.append(f"<p>{escape(section.about)}</p>")
        body += [_html_table(part) if isinstance(part, Table) else _html_picture(part) for part in section.parts]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>\n<body>\n'
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _html_table(table: Table) -> str:
    head, *rows = table.rows
    lines = ["<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in head) + "</tr>"]
    lines += ["<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows]
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    return f'<div class="scroll"><table>{"".join(lines)}</table></div>{note}'


def _html_picture(picture: Picture) -> str:
    # Identifiers of two pictures must not meet on one page.
    svg = plots.as_svg(picture.figure).replace('id="', f'id="{picture.name}-').replace("url(#", f"url(#{picture.name}-")
    svg = svg.replace('xlink:href="#', f'xlink:href="#{picture.name}-')
    return f"<figure>{svg}<figcaption>{escape(picture.caption)}</figcaption></figure>"


def as_markdown(title: str, facts: Sequence[str], found: Sequence[Section]) -> str:
    """For a pull request or ``docs/``; the pictures are PNG files beside it."""
    lines = [f"# {title}", "", *(line for fact in [*facts, NOTE] for line in (fact, ""))]
    for section in found:
        lines += [f"## {section.title}", ""]
        if section.about:
            lines += [section.about, ""]
        for part in section.parts:
            if isinstance(part, Table):
                head, *rows = part.rows
                lines += [_markdown_row(head), "|---" * len(head) + "|", *map(_markdown_row, rows), ""]
                lines += [part.note, ""] if part.note else []
            else:
                lines += [f"![{part.caption}]({part.name}.png)", ""]
    return "\n".join(lines)


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def write(folder: Path, title: str, facts: Sequence[str], found: Sequence[Section]) -> list[Path]:
    """Write ``report.html``, ``report.md`` and a PNG file for each picture.

    Raises:
        OSError: they cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    page, text = folder / "report.html", folder / "report.md"
    page.write_text(as_html(title, facts, found), encoding="utf-8")
    text.write_text(as_markdown(title, facts, found), encoding="utf-8")
    written = [page, text]
    for picture in (part for section in found for part in section.parts if isinstance(part, Picture)):
        file = folder / f"{picture.name}.png"
        file.write_bytes(plots.as_png(picture.figure))
        written.append(file)
    return written
