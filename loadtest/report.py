"""The token statistics for people and programs: a table, CSV, JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loadtest.figures import TIMES, Row

_QUANTITIES = ("mean", "p50", "p90", "p99", "max")
COLUMNS = (
    "name",
    "requests",
    "failures",
    "unfinished",
    "prompt_tokens",
    "output_tokens",
    "requests_per_second",
    "output_tokens_per_second",
    *(f"{metric}_{quantity}" for metric in TIMES for quantity in _QUANTITIES),
)
_TABLE = (
    ("requests", "requests"),
    ("failed", "failures"),
    ("tokens/s", "output_tokens_per_second"),
    ("TTFT p50", "ttft_p50"),
    ("p99", "ttft_p99"),
    ("ITL p50", "itl_p50"),
    ("p99", "itl_p99"),
    ("TPOT p50", "tpot_p50"),
    ("queue p99", "queue_p99"),
    ("E2E p50", "e2e_p50"),
    ("p99", "e2e_p99"),
    ("lag p99", "lag_p99"),
)


def flat(name: str, row: Row) -> dict[str, Any]:
    """A row as :data:`COLUMNS`; times in seconds, None where nothing was measured."""
    figures = row.figures()
    values = {"name": name} | {key: figures[key] for key in COLUMNS[1:8]}
    return values | {f"{metric}_{key}": figures[metric][key] for metric in TIMES for key in _QUANTITIES}


def to_csv(rows: Mapping[str, Row]) -> str:
    """A line for each row; times in seconds."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat(name, row) for name, row in rows.items())
    return out.getvalue()


def to_json(rows: Mapping[str, Row], test: Mapping[str, Any]) -> str:
    """``test`` says what was run. Each row: the figures under ``carousel bench``'s names, and its histograms."""
    all_rows = {name: row.figures() | {"histograms": row.to_wire()["times"]} for name, row in rows.items()}
    return json.dumps({"test": dict(test), "rows": all_rows}, indent=1)


def write(path: str | Path, text: str) -> None:
    """Raises ``OSError`` where it cannot be written."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _cell(key: str, value: float | None) -> str:
    if value is None:
        return "–"
    if key in ("requests", "failures"):
        return str(value)
    return f"{value:.1f}" if key.endswith("per_second") else f"{value * 1000:.1f}"


def table(rows: Mapping[str, Row]) -> str:
    """Text for a console; times in milliseconds."""
    lines = [["token statistics, ms", *(title for title, _ in _TABLE)]]
    for name, row in rows.items():
        values = flat(name, row)
        lines.append([name, *(_cell(key, values[key]) for _, key in _TABLE)])
    widths = [max(len(line[place]) for line in lines) for place in range(len(lines[0]))]
    shown = []
    for line in lines:
        cells = [
            line[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)),
        ]
        shown.append("  ".join(cells))
    return "\n".join(shown)
