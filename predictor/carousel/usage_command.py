"""``carousel usage``: who used what, as a table, of a running server or of a usage log."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from carousel.ask import ClientOptions, ask_json
from carousel.engine.errors import CarouselError
from carousel.options import TEXT, SettingsError, help_text, option, parse_options

USAGE = """usage: carousel usage URL|PATH [FLAG ...]

Shows what each tenant used and what it costs: since the start of the server at URL (its /usage), or of what stands in
the usage log at PATH, a file or the folder of --usage-log."""

#: Heading, field of a row, digits behind the point.
COLUMNS = (
    ("requests", "requests", 0),
    ("prompt", "prompt_tokens", 0),
    ("cached", "cached_tokens", 0),
    ("generated", "generated_tokens", 0),
    ("recomputed", "recomputed_tokens", 0),
    ("device s", "device_seconds", 2),
    ("slot s", "slot_seconds", 1),
    ("KV block s", "kv_block_seconds", 0),
    ("cost", "cost", 4),
)
_MOMENT, _MOMENTS = r"\d{4}-\d\d-\d\d(T[\d:.]+Z?)?", "2026-11-30 or 2026-11-30T12:00:00Z"
_COUNTED = (
    "prompt_tokens",
    "cached_tokens",
    "generated_tokens",
    "recomputed_tokens",
    "device_ns",
    "slot_ns",
    "block_ns",
)


@dataclass(frozen=True, kw_only=True)
class UsageOptions:
    """What ``carousel usage`` can be told."""

    since: str = option(
        "", TEXT, "Only what ended at this time or later (log only).", group="Which",
        empty="from the beginning", pattern=_MOMENT, allowed=_MOMENTS, env=False,
    )  # fmt: skip
    until: str = option(
        "", TEXT, "Only what ended before this time (log only).", group="Which",
        empty="to the end", pattern=_MOMENT, allowed=_MOMENTS, env=False,
    )  # fmt: skip
    by: str = option(
        "tenant", TEXT, "What a row of the table is (log only, but for tenant).", group="Which",
        choices=("tenant", "day", "model", "reason"), env=False,
    )  # fmt: skip
    json: str = option(
        "", TEXT, "Where the rows go as JSON.", group="Which", empty="nowhere", allowed="a file", env=False
    )


class LogUnreadable(CarouselError):
    """There is no usage log there. The message says where."""


def usage_help() -> str:
    return f"{USAGE}\n\n{help_text([UsageOptions, ClientOptions])}"


def moment(text: str) -> datetime:
    """The time that ``2026-11-30`` or ``2026-11-30T12:00:00Z`` stand for.

    Raises:
        ValueError: there is no such day or time.
    """
    found = datetime.fromisoformat(text.removesuffix("Z"))
    return found.replace(tzinfo=UTC)


def key_of(entry: Mapping[str, Any], by: str) -> str:
    """Which row of the table an entry of the log belongs to."""
    if by == "day":
        return str(entry.get("at", ""))[:10]
    return str(entry.get(by, ""))


def add_up(path: Path, options: UsageOptions) -> tuple[dict[str, Any], int]:
    """The rows of a log and their total, as the server's summary has them; and how many lines were none.

    Raises:
        LogUnreadable: it cannot be read.
    """
    from carousel.telemetry.usage_log import read_log

    since, until = (moment(text) if text else None for text in (options.since, options.until))
    rows: dict[str, dict[str, Any]] = {}
    bad, currencies = 0, set()
    try:
        for entry in read_log(path):
            if entry is None or not isinstance(entry.get("at"), str):
                bad += 1
                continue
            at = moment(entry["at"])
            if (since and at < since) or (until and at >= until):
                continue
            row = rows.setdefault(key_of(entry, options.by), dict.fromkeys(("requests", "cost", *_COUNTED), 0))
            row["requests"] += 1
            row["cost"] += entry.get("cost", 0)
            currencies.add(str(entry.get("currency", "")))
            for name in _COUNTED:
                row[name] += entry.get(name, 0)
    except OSError as error:
        raise LogUnreadable(f"{error.filename or path}: {error.strerror}") from None
    total = {name: sum(row[name] for row in rows.values()) for name in ("requests", "cost", *_COUNTED)}
    named = [{options.by: name, **row} for name, row in sorted(rows.items())]
    for row in (*named, total):
        row["device_seconds"], row["slot_seconds"] = row["device_ns"] / 1e9, row["slot_ns"] / 1e9
        row["kv_block_seconds"] = row["block_ns"] / 1e9
    return {"currency": "/".join(sorted(currencies)), "tenants": named, "total": total}, bad


def show(summary: Mapping[str, Any], by: str, out: IO[str]) -> None:
    """The table, on ``out``."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column(by, overflow="fold")
    for heading, _, _ in COLUMNS:
        named = f"{heading} {summary['currency']}".rstrip() if heading == "cost" else heading
        table.add_column(named, justify="right", no_wrap=True)
    for row in summary["tenants"]:
        table.add_row(str(row[by]), *_cells(row))
    table.add_section()
    table.add_row("total", *_cells(summary["total"]), style="bold")
    console = Console(file=out, width=None if out.isatty() else 140, highlight=False, markup=False)
    console.print(table)
    engine = summary.get("engine")
    if engine:
        worked, elapsed, idle = (engine[f"{name}_seconds"] for name in ("device", "elapsed", "idle"))
        money = f"{engine['idle_cost']:.4f} {summary['currency']}"
        text = f"since {summary['since']}: {worked:.1f} s of {elapsed:.1f} s worked, {idle:.1f} s idle"
        console.print(f"\n{text} ({money} that nobody is charged)", soft_wrap=True)


def _cells(row: Mapping[str, Any]) -> list[str]:
    return [f"{row[name]:,.{digits}f}" for _, name, digits in COLUMNS]


def main(argv: Sequence[str], environ: Mapping[str, str], out: IO[str] | None = None) -> int:
    """Run the command.

    Raises:
        SettingsError: it was called wrongly.
        CarouselError: the server or the log cannot be asked.
    """
    words = list(argv)
    parsed = parse_options((UsageOptions, ClientOptions), words, {})
    if len(parsed.positionals) != 1:
        parsed.fail((), f"got {len(parsed.positionals)} places, allowed: one, the URL of a server or the path of a log")
    for name in ("since", "until"):
        try:
            moment(str(parsed.values.get(name) or "2026-01-01"))
        except ValueError:
            parsed.fail((name,), f"--{name}: got {parsed.values[name]!r}, allowed: a day or time that there is")
    if parsed.problems:
        raise SettingsError(parsed.problems)
    options, client = parsed.build(UsageOptions), parsed.build(ClientOptions)
    [place] = parsed.positionals
    if "://" in place:
        given = [
            item.name for item in fields(options) if item.name in ("since", "until") and getattr(options, item.name)
        ]
        if given or options.by != "tenant":
            word = given[0] if given else "by"
            parsed.fail((word,), f"--{word} is for logs: a server only knows sums by tenant since its start")
            raise SettingsError(parsed.problems)
        summary = ask_json(place, "/usage", client, environ)
    else:
        summary, bad = add_up(Path(place), options)
        if bad:
            print(f"{bad} lines were no entries and are not counted", file=sys.stderr)
    if options.json:
        Path(options.json).write_text(json.dumps(summary, indent=1) + "\n", "utf-8")
    show(summary, options.by, out or sys.stdout)
    return 0
