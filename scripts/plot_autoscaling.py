"""Draw what `carousel autoscale-sim --json FILE` found: docs/autoscaling-*.svg. Needs nothing but Python.

    python scripts/plot_autoscaling.py FILE docs/autoscaling-signals.svg [--traces step,diurnal]

For each trace one row: on the left the replicas over time, by signal, on the right cost against what was late.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

COLOURS = {"waiting": "#b2182b", "requests": "#2166ac", "tokens": "#1b7837", "queue-seconds": "#e08214"}
WIDTH, ROW, LEFT, GAP = 900, 210, 560, 60


class Panel:
    """A rectangle with axes, in which points are placed by value."""

    def __init__(self, x: float, y: float, width: float, height: float, right: float, top: float) -> None:
        self.x, self.y, self.width, self.height = x, y, width, height
        self.right, self.top = max(right, 1e-9), max(top, 1e-9)
        self.parts: list[str] = []

    def place(self, across: float, up: float) -> tuple[float, float]:
        """Where a value stands on the page."""
        return (
            round(self.x + self.width * across / self.right, 1),
            round(self.y + self.height * (1 - up / self.top), 1),
        )

    def text(self, x: float, y: float, words: str, anchor: str = "start", size: int = 11) -> None:
        self.parts.append(f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}">{escape(words)}</text>')

    def axes(self, title: str, across: str, up: str) -> None:
        """The frame, four ticks a side and the names."""
        self.parts.append(
            f'<rect x="{self.x:g}" y="{self.y:g}" width="{self.width:g}" height="{self.height:g}" fill="none" '
            'stroke="#999"/>'
        )
        for i in range(5):
            x, y = self.place(self.right * i / 4, self.top * i / 4)
            self.text(x, self.y + self.height + 13, f"{self.right * i / 4:.3g}", "middle", 9)
            self.text(self.x - 4, y + 3, f"{self.top * i / 4:.3g}", "end", 9)
            self.parts.append(f'<path d="M{self.x:g} {y:g}h{self.width:g}" stroke="#eee"/>')
        self.text(self.x, self.y - 6, title, size=12)
        self.text(self.x + self.width, self.y + self.height + 26, across, "end", 10)
        self.text(self.x + self.width, self.y - 6, up, "end", 10)

    def steps(self, points: Sequence[tuple[float, float]], colour: str) -> None:
        """A line that changes at once."""
        path, last = "", None
        for across, up in points:
            if up != last:
                x, y = self.place(across, up)
                path += f"H{x:g}V{y:g}" if path else f"M{x:g} {y:g}"
                last = up
        if points:
            path += f"H{self.place(points[-1][0], 0)[0]:g}"
        self.parts.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.4"/>')

    def dot(self, across: float, up: float, colour: str, label: str) -> None:
        x, y = self.place(across, up)
        self.parts.append(f'<circle cx="{x:g}" cy="{y:g}" r="4" fill="{colour}"/>')
        self.text(x + 6, y - 4, label, size=10)


def draw(rows: Sequence[dict[str, Any]], traces: Sequence[str], slo_s: float) -> str:
    """The whole picture as SVG."""
    height = ROW * len(traces) + 30
    parts: list[str] = []
    for index, trace in enumerate(traces):
        found = [row for row in rows if row["trace"] == trace]
        y = 50 + index * ROW
        minutes = max(point[0] for row in found for point in row["timeline"]) / 60
        most = max(point[1] for row in found for point in row["timeline"])
        time = Panel(40, y, LEFT - GAP, ROW - 80, minutes, most)
        time.axes(f"{trace}: replicas wanted", "minutes", "")
        cost = max(row["replicas_mean"] for row in found) * 1.25
        late = max(max(100 * row["missed"] for row in found) * 1.2, 1.0)
        trade = Panel(LEFT + 40, y, WIDTH - LEFT - 60, ROW - 80, cost, late)
        trade.axes(f"% later than {slo_s:g} s", "replicas, mean", "")
        for row in found:
            colour = COLOURS[row["signal"]]
            time.steps([(point[0] / 60, point[1]) for point in row["timeline"]], colour)
            trade.dot(row["replicas_mean"], 100 * row["missed"], colour, row["signal"])
        parts += time.parts + trade.parts
    for index, (name, colour) in enumerate(COLOURS.items()):
        x = 40 + 130 * index
        parts.append(f'<path d="M{x} 18h22" stroke="{colour}" stroke-width="3"/>')
        parts.append(f'<text x="{x + 28}" y="22" font-size="12">{name}</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif">'
    return "\n".join([head, f'<rect width="{WIDTH}" height="{height}" fill="white"/>', *parts, "</svg>\n"])


def main(argv: Sequence[str]) -> int:
    """Run the script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="what autoscale-sim wrote")
    parser.add_argument("svg", type=Path, help="where the picture goes")
    parser.add_argument("--traces", default="", help="which, by commas; default: all in the file")
    options = parser.parse_args(argv)
    data = json.loads(options.data.read_text("utf-8"))
    known = list(dict.fromkeys(row["trace"] for row in data["rows"]))
    traces = [name for name in options.traces.split(",") if name] or known
    if not set(traces) <= set(known):
        parser.error(f"--traces: got {options.traces!r}, allowed: {', '.join(known)}")
    options.svg.write_text(draw(data["rows"], traces, data["options"]["slo_seconds"]), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
