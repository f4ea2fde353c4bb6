"""Draw what `scripts/bench_peers.py --results FILE --passes rate:1,rate:2,...` found: throughput and latency against
offered load, a line for each contestant. Needs nothing but Python.

    .venv/bin/python scripts/plot_peers.py FILE docs/peers.svg
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from plot_autoscaling import Panel

WIDTH, SIDE, HEIGHT, ROW = 980, 270, 230, 16
COLOURS = ("#b2182b", "#2166ac", "#1b7837", "#e08214", "#542788", "#01665e", "#8c510a", "#c51b7d", "#4d4d4d")
PANELS = (
    ("output tokens per second", "output_tokens_per_second", 1.0),
    ("time to first token, p99, s", "ttft_p99", 1.0),
    ("time per output token, p99, ms", "tpot_p99", 1e3),
)
Points = dict[str, dict[float, dict[str, float]]]


def read(file: Path) -> Points:
    """By contestant and offered load: the medians of the rounds."""
    found: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for line in file.read_text("utf-8").splitlines():
        run = json.loads(line)
        if run["name"].startswith("rate:"):
            found.setdefault((run["contestant"], float(run["name"][5:])), []).append(run["figures"])
    points: Points = {}
    for (contestant, rate), runs in sorted(found.items()):
        figures = {key: statistics.median([run[key] for run in runs if run[key] is not None]) for _, key, _ in PANELS}
        points.setdefault(contestant, {})[rate] = figures
    return points


def line(panel: Panel, points: Sequence[tuple[float, float]], colour: str) -> None:
    """Straight from point to point; what lies above the panel is cut at its edge."""
    places = [panel.place(across, min(up, panel.top)) for across, up in points]
    path = " ".join(f"{x:g},{y:g}" for x, y in places)
    panel.parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
    panel.parts += [f'<circle cx="{x:g}" cy="{y:g}" r="2.5" fill="{colour}"/>' for x, y in places]


def draw(points: Points) -> str:
    """The whole picture as SVG. Latencies are shown up to three times the median of all, which the slowest leave."""
    colours = dict(zip(points, COLOURS * len(points), strict=False))
    most = max(rate for found in points.values() for rate in found)
    parts: list[str] = []
    for index, (title, key, unit) in enumerate(PANELS):
        values = [figures[key] * unit for found in points.values() for figures in found.values()]
        top = max(values) if index == 0 else min(max(values), 3 * statistics.median(values))
        panel = Panel(50 + index * (SIDE + 50), 40, SIDE, HEIGHT, most, 1.05 * top)
        panel.axes(title, "offered load, requests per second", "")
        for contestant, found in points.items():
            line(panel, [(rate, figures[key] * unit) for rate, figures in found.items()], colours[contestant])
        parts += panel.parts
    for index, (contestant, colour) in enumerate(colours.items()):
        x, y = 50 + 180 * (index % 5), 40 + HEIGHT + 50 + ROW * (index // 5)
        parts.append(f'<path d="M{x} {y - 4}h22" stroke="{colour}" stroke-width="3"/>')
        parts.append(f'<text x="{x + 28}" y="{y}" font-size="12">{escape(contestant)}</text>')
    height = 40 + HEIGHT + 50 + ROW * (len(points) // 5 + 1)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif">'
    return head + '<rect width="100%" height="100%" fill="white"/>' + "".join(parts) + "</svg>\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    points = read(options.file)
    if not points:
        parser.error(f"{options.file}: has no pass rate:R")
    options.out.write_text(draw(points), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
