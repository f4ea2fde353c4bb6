"""``carousel doctor``: what limits a server, and which setting to change to what."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from carousel.ask import ClientOptions, ask_json
from carousel.doctor import Diagnosis, Run, TimelineUnreadable, diagnose
from carousel.options import NUMBER, TEXT, SettingsError, help_text, option, parse_options

USAGE = """usage: carousel doctor URL|FILE [FLAG ...]

Reads what the last few thousand steps of the server at URL did (its /timeline), or of the run that a file from --save
has, and says what limits it, with the evidence, and which setting to change to what."""


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """What ``carousel doctor`` can be told."""

    seconds: float = option(
        0.0, NUMBER, "Only the last so many seconds.", unit="seconds", group="Which", low=1, high=86_400,
        zero="all that the server remembers", env=False,
    )  # fmt: skip
    save: str = option(
        "", TEXT, "Where the timeline is kept, to be looked at again.", group="Which", empty="nowhere",
        allowed="a file", env=False,
    )  # fmt: skip
    json: str = option(
        "", TEXT, "Where the diagnosis goes as JSON.", group="Which", empty="nowhere", allowed="a file", env=False
    )


def doctor_help() -> str:
    return f"{USAGE}\n\n{help_text([DoctorOptions, ClientOptions])}"


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise TimelineUnreadable(f"{path}: {error.strerror}") from None
    except ValueError:
        raise TimelineUnreadable(f"{path}: it is no JSON") from None
    if not isinstance(found, dict):
        raise TimelineUnreadable(f"{path}: it is no timeline of a Carousel server")
    return found


def show(diagnosis: Diagnosis, out: IO[str]) -> None:
    """The diagnosis in words."""
    figures = diagnosis.figures
    if figures:
        print(
            f"{figures['steps']:.0f} steps in {figures['seconds']:.1f} s: {figures['tokens_per_second']:.0f} tokens/s, "
            f"{figures['step_ms_mean']:.1f} ms a step, {figures['sequences_mean']:.1f} sequences in the batch, "
            f"{figures['waiting_mean']:.1f} waiting, {100 * figures['idle_share']:.0f} % idle",
            file=out,
        )
    for number, finding in enumerate(diagnosis.findings):
        print(f"\n{'limit' if not number else 'also'}: {finding.limit} - {finding.summary}", file=out)
        for line in finding.evidence:
            print(f"  - {line}", file=out)
        for advice in finding.advice:
            flag = "--" + advice.setting.replace("_", "-")
            change = f"{flag}: {advice.now} -> {advice.to}" if advice.setting else advice.to
            print(f"  => {change} ({advice.why})", file=out)


def main(argv: Sequence[str], environ: Mapping[str, str], out: IO[str] | None = None) -> int:
    """Run the command.

    Raises:
        SettingsError: it was called wrongly.
        CarouselError: the server or the file cannot be asked.
    """
    parsed = parse_options((DoctorOptions, ClientOptions), argv, {})
    if len(parsed.positionals) != 1:
        parsed.fail((), f"got {len(parsed.positionals)} places, allowed: one, the URL of a server or a file")
    if parsed.problems:
        raise SettingsError(parsed.problems)
    options = parsed.build(DoctorOptions)
    [place] = parsed.positionals
    if "://" in place:
        timeline = ask_json(place, "/timeline", parsed.build(ClientOptions), environ)
    else:
        timeline = _read(Path(place))
    if options.save:
        Path(options.save).write_text(json.dumps(timeline) + "\n", "utf-8")
    diagnosis = diagnose(Run(timeline, options.seconds or float("inf")))
    if options.json:
        Path(options.json).write_text(json.dumps(diagnosis.as_json(), indent=1) + "\n", "utf-8")
    show(diagnosis, out or sys.stdout)
    return 0
