"""Declared options: one declaration gives the flag, the environment variable, the parser, the bounds, the help.

An options class is a frozen dataclass whose fields are made by :func:`option`. :func:`parse_options` fills one or
several such classes from a command line and an environment, and reports everything that is wrong in one go.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

ENV_PREFIX = "CAROUSEL_"
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", re.IGNORECASE)
# Kubernetes adds these for every Service of the namespace (enableServiceLinks). A Service whose name starts with
# "carousel" yields names that look like settings, even CAROUSEL_HTTP_PORT=tcp://10.0.0.7:80.
_SERVICE_LINK_NAME = re.compile(r".*_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)")
_SERVICE_LINK_VALUE = re.compile(r"(tcp|udp|sctp)://.*", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes of ``"1.5GiB"``, ``"512 MB"``, ``"64k"`` or ``"1024"``; units with an i are powers of 1024, others of 1000.

    Raises:
        ValueError: when the text is not a size.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError(text)
    number, unit, binary = match.groups()
    power = " kmgt".index(unit.lower() or " ")
    return int(float(number) * (1024 if binary else 1000) ** power)


def format_size(size: float) -> str:
    """``1610612736 -> "1.5GiB"``: at most two decimals, the largest binary unit that is not below 1."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.2f}".rstrip("0").rstrip(".") + unit
        size /= 1024
    return f"{size:.2f}".rstrip("0").rstrip(".") + "TiB"


def _parse_switch(text: str) -> bool:
    lowered = text.strip().lower()
    if lowered in _TRUE:
        return True
    if lowered in _FALSE:
        return False
    raise ValueError(text)


def _parse_number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return number


def _parse_weights(text: str) -> dict[str, float]:
    weights: dict[str, float] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        name, separator, number = part.rpartition("=")
        if not separator or not name.strip() or name.strip() in weights:
            raise ValueError(part)
        weights[name.strip()] = _parse_number(number)
    return weights


def _show_weights(weights: Mapping[str, float]) -> str:
    return ",".join(f"{name}={number:g}" for name, number in weights.items())


@dataclass(frozen=True)
class Kind:
    """A type of value: how it is read from text, shown again, and what to say when the text is something else."""

    name: str
    placeholder: str
    parse: Callable[[str], Any]
    show: Callable[[Any], str]
    expects: str


TEXT = Kind("text", "TEXT", str.strip, str, "text")
INTEGER = Kind("integer", "N", lambda text: int(text.strip().replace("_", "")), str, "a whole number")
NUMBER = Kind("number", "X", _parse_number, lambda value: f"{value:g}", "a number")
SWITCH = Kind("switch", "", _parse_switch, lambda value: "on" if value else "off", "true or false")
SIZE = Kind("size", "SIZE", parse_size, format_size, "a size such as 32MiB")
WEIGHTS = Kind("weights", "A=X,B=Y", _parse_weights, _show_weights, "name=number pairs, separated by commas")


@dataclass(frozen=True)
class Option:
    """One option, wholly declared. ``zero`` and ``empty`` say what a 0, or nothing, stands for beyond the bounds."""

    name: str
    kind: Kind
    default: Any
    unit: str
    help: str
    group: str
    low: float | None
    high: float | None
    zero: str
    empty: str
    choices: tuple[str, ...]
    pattern: str
    allowed_text: str
    aliases: tuple[str, ...]
    default_text: str
    env: str

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def allowed(self) -> str:
        """What is accepted, as a phrase."""
        if self.choices:
            return ", ".join(self.choices[:-1]) + " or " + self.choices[-1]
        if self.allowed_text:
            phrase = self.allowed_text
        elif self.low is None and self.high is None:
            phrase = self.kind.expects
        else:
            phrase = self._range()
        for word, meaning in (("0", self.zero), ("nothing", self.empty)):
            if meaning:
                phrase = f"{word} ({meaning}), or {phrase}"
        return phrase

    def _range(self) -> str:
        low, high = (None if bound is None else self.kind.show(bound) for bound in (self.low, self.high))
        if high is None:
            return f"{low} or more"
        return f"at most {high}" if low is None else f"{low} to {high}"

    @property
    def shown_default(self) -> str:
        if self.default_text:
            return self.default_text
        if self.default is None or self.default == "" or self.default == {}:
            return self.empty or "none"
        text = self.kind.show(self.default)
        return f"{text} ({self.zero})" if self.zero and self.default == 0 else text

    def read(self, text: str) -> Any:
        """The value of a text.

        Raises:
            ValueError: with the phrase of what is allowed, when the text is no value or out of bounds.
        """
        if self.empty and text.strip().lower() in {"", "none"}:
            return self.default
        try:
            value = self.kind.parse(text)
        except (ValueError, OverflowError):
            raise ValueError(self.allowed) from None
        if not self.accepts(value):
            raise ValueError(self.allowed)
        return value

    def accepts(self, value: Any) -> bool:
        """Whether a typed value is within the declared bounds."""
        if self.empty and (value is None or value == "" or value == {}):
            return True
        if self.choices:
            return value in self.choices
        if self.pattern:
            return re.fullmatch(self.pattern, value) is not None
        numbers: Iterable[float] = value.values() if isinstance(value, Mapping) else (value,)
        if self.zero and value == 0:
            return True
        return all(
            (self.low is None or number >= self.low) and (self.high is None or number <= self.high)
            for number in numbers
        )


def option(
    default: Any,
    kind: Kind,
    help: str,
    *,
    unit: str = "",
    group: str = "",
    low: float | None = None,
    high: float | None = None,
    zero: str = "",
    empty: str = "",
    choices: tuple[str, ...] = (),
    pattern: str = "",
    allowed: str = "",
    aliases: tuple[str, ...] = (),
    default_text: str = "",
    env: bool = True,
) -> Any:
    """Declare a field of an options class. ``default`` may be a function without arguments; see :class:`Option`."""
    declared = {
        "kind": kind,
        "unit": unit,
        "help": " ".join(help.split()),
        "group": group,
        "low": low,
        "high": high,
        "zero": zero,
        "empty": empty,
        "choices": choices,
        "pattern": pattern,
        "allowed_text": allowed,
        "aliases": aliases,
        "default_text": default_text,
        "env": env,
    }
    if callable(default):
        return field(default_factory=default, hash=False, metadata={"option": declared})
    return field(default=default, metadata={"option": declared})


def options_of(cls: type) -> list[Option]:
    """The options that a class declares, in order."""
    found = []
    for item in dataclasses.fields(cls):
        if "option" not in item.metadata:
            continue
        declared = dict(item.metadata["option"])
        env = ENV_PREFIX + item.name.upper() if declared.pop("env") else ""
        default = item.default
        if item.default_factory is not dataclasses.MISSING:
            default = item.default_factory()
        found.append(Option(name=item.name, default=default, env=env, **declared))
    return found


@dataclass(frozen=True)
class Compatibility:
    """A flag of another server that manifests pass: ignored with a notice, refused unless its value is ``accepted``
    (where that is given), or ``refused`` always, where ignoring it would do harm."""

    flag: str
    reason: str
    accepted: tuple[str, ...] = ()
    switch: bool = False
    refused: bool = False


@dataclass(frozen=True)
class Problem:
    """Something wrong. ``names`` are the options concerned, empty for what is not an option at all."""

    names: tuple[str, ...]
    message: str


class SettingsError(ValueError):
    """Everything that is wrong with a command line and an environment, in ``problems``."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = list(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        lines = "\n".join(f"  - {problem.message}" for problem in self.problems)
        super().__init__(f"{count} with the settings:\n{lines}")


@dataclass
class Parsed:
    """What a command line and an environment gave: values by option name, positionals, notices, problems.

    ``from_flags`` maps the options that came from the command line to the spelling that was used.
    """

    values: dict[str, Any] = field(default_factory=dict)
    from_flags: dict[str, str] = field(default_factory=dict)
    positionals: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def build(self, cls: type[_T], **extra: Any) -> _T:
        """An instance of an options class from the values that belong to it."""
        names = {item.name for item in options_of(cls)}
        return cls(**{name: value for name, value in self.values.items() if name in names}, **extra)

    def fail(self, names: tuple[str, ...], message: str) -> None:
        self.problems.append(Problem(names, message))


_T = TypeVar("_T")


def normal_flag(flag: str) -> str:
    """Flags may be spelled with underscores, as KServe does: ``--model_name`` is ``--model-name``."""
    return "--" + flag[2:].replace("_", "-")


def _did_you_mean(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=2, cutoff=0.6)
    return f"; did you mean {' or '.join(close)}?" if close else ""


class _Reader:
    """Walks a command line. Later values win, because KServe appends the service's arguments to the runtime's."""

    def __init__(self, options: Sequence[Option], compatibility: Sequence[Compatibility], parsed: Parsed) -> None:
        self.parsed = parsed
        self.flags: dict[str, tuple[Option, bool]] = {}
        for item in options:
            for flag in (item.flag, *item.aliases):
                self.flags[flag] = (item, False)
                if item.kind is SWITCH:
                    self.flags["--no-" + flag[2:]] = (item, True)
        self.compatibility = {item.flag: item for item in compatibility}

    def walk(self, argv: Sequence[str]) -> dict[str, tuple[Option, str, str]]:
        """``{option name: (option, text, the spelling that gave it)}``."""
        given: dict[str, tuple[Option, str, str]] = {}
        rest = list(argv)
        while rest:
            word = rest.pop(0)
            if word == "--":
                self.parsed.positionals += rest
                break
            if not word.startswith("--"):
                self.parsed.positionals.append(word)
                continue
            spelled, separator, text = word.partition("=")
            flag = normal_flag(spelled)
            attached = text if separator else None
            if flag in self.flags:
                item, negated = self.flags[flag]
                value = self._value(item, negated, spelled, attached, rest)
                if value is not None:
                    given[item.name] = (item, value, spelled)
            elif flag in self.compatibility:
                self._compatible(self.compatibility[flag], spelled, attached, rest)
            else:
                if attached is None and rest and not rest[0].startswith("-"):
                    rest.pop(0)
                hint = _did_you_mean(flag, self.flags)
                self.parsed.fail((), f"{spelled}: there is no such flag{hint or ' (see --help)'}")
        return given

    def _value(self, item: Option, negated: bool, spelled: str, attached: str | None, rest: list[str]) -> str | None:
        if item.kind is SWITCH:
            if attached is None and not negated and rest and rest[0].strip().lower() in _TRUE | _FALSE:
                attached = rest.pop(0)
            if negated and attached is not None:
                self.parsed.fail((item.name,), f"{spelled}: takes no value, got {attached!r}")
                return None
            return "false" if negated else attached if attached is not None else "true"
        if attached is None:
            if not rest or rest[0].startswith("--"):
                self.parsed.fail((item.name,), f"{spelled}: needs a value, allowed: {with_unit(item)}")
                return None
            attached = rest.pop(0)
        return attached

    def _compatible(self, item: Compatibility, spelled: str, attached: str | None, rest: list[str]) -> None:
        takes_next = attached is None and rest and not rest[0].startswith("-")
        if takes_next and (not item.switch or rest[0].strip().lower() in _TRUE | _FALSE):
            attached = rest.pop(0)
        if item.refused:
            self.parsed.fail((), f"{spelled}: is not accepted: {item.reason}")
        elif not item.accepted:
            self.parsed.notices.append(f"{spelled} is ignored: {item.reason}")
        elif attached is None or attached.strip().lower() not in item.accepted:
            allowed = " or ".join(item.accepted)
            self.parsed.fail((), f"{spelled}: got {attached!r}, allowed: {allowed}, because {item.reason}")


def with_unit(item: Option) -> str:
    """What an option accepts, with its unit."""
    plain = not item.unit or item.choices or item.unit in item.allowed or item.kind is SIZE
    return item.allowed if plain else f"{item.allowed} {item.unit}"


def _service_link(name: str, value: str) -> bool:
    return bool(_SERVICE_LINK_NAME.fullmatch(name) or (name.endswith("_PORT") and _SERVICE_LINK_VALUE.match(value)))


def parse_options(
    classes: Sequence[type],
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    compatibility: Sequence[Compatibility] = (),
    other_env: Iterable[str] = (),
) -> Parsed:
    """Read options: a flag beats the environment, which beats the default (absent from ``values``).

    Args:
        classes: options classes; no two may declare the same name.
        argv: the words after the command.
        environ: the environment; every ``CAROUSEL_*`` name in it must be known.
        compatibility: flags of other servers to take or refuse.
        other_env: further ``CAROUSEL_*`` names that are not options but known.

    Returns:
        values, positionals, notices, and all problems; nothing is raised.
    """
    parsed = Parsed()
    options = [item for cls in classes for item in options_of(cls)]
    by_env = {item.env: item for item in options if item.env}
    found: dict[str, tuple[Option, str, str]] = {}
    for name in sorted(environ):
        if not name.startswith(ENV_PREFIX) or name in other_env:
            continue
        if _service_link(name, environ[name]):
            if name in by_env:
                parsed.notices.append(f"{name} is ignored: {environ[name]!r} was put there by a Kubernetes Service")
            continue
        if name in by_env:
            item = by_env[name]
            found[item.name] = (item, environ[name], name)
        else:
            hint = _did_you_mean(name, by_env)
            parsed.fail((), f"{name}: there is no such environment variable{hint or ' (see --help)'}")
    given = _Reader(options, compatibility, parsed).walk(argv)
    parsed.from_flags = {name: spelled for name, (_, _, spelled) in given.items()}
    found |= given
    for item, text, spelled in found.values():
        try:
            parsed.values[item.name] = item.read(text)
        except ValueError as error:
            place = f"{spelled} in the environment" if spelled == item.env else spelled
            names = " / ".join(filter(None, (item.flag, item.env)))
            shown = text if len(text) <= 80 else text[:79] + "…"
            unit = with_unit(item).removeprefix(item.allowed)
            parsed.fail((item.name,), f"{names}: got {shown!r} ({place}), allowed: {error}{unit}")
    return parsed


def help_text(classes: Sequence[type], only: Sequence[str] = (), width: int = 100) -> str:
    """The options of some classes, or ``only`` those named, by group: unit, default, bounds, environment variable."""
    lines: list[str] = []
    group = None
    for item in (item for cls in classes for item in options_of(cls) if not only or item.name in only):
        if item.group != group:
            group = item.group
            lines += ["", f"{group}:"]
        spelled = f"{item.flag} {item.kind.placeholder}"
        if item.kind is SWITCH:
            spelled = f"{item.flag}, --no-{item.flag[2:]}"
        lines.append(f"  {spelled}")
        facts = [f"Default: {item.shown_default}"]
        if item.unit:
            facts.insert(0, f"Unit: {item.unit}")
        if item.kind is not SWITCH:
            facts.append(f"Allowed: {item.allowed}")
        if item.env:
            facts.append(item.env)
        if item.aliases:
            facts.append("Also: " + ", ".join(item.aliases))
        text = f"{item.help} {'. '.join(facts)}."
        lines += textwrap.wrap(text, width, initial_indent=" " * 6, subsequent_indent=" " * 6, break_on_hyphens=False)
    return "\n".join(lines).lstrip("\n")


def markdown_table(cls: type) -> str:
    """A markdown table of the options of a class, for the README."""
    rows = ["| setting | environment | default | unit | bounds | meaning |", "|---|---|---|---|---|---|"]
    for item in options_of(cls):
        spelled = f"`{item.flag}`" + (f" / `--no-{item.flag[2:]}`" if item.kind is SWITCH else "")
        cells = (spelled, f"`{item.env}`", item.shown_default, item.unit or "–", item.allowed, item.help)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)
