"""What is sent: files and generators, all of them as ``carousel.bench.workload`` knows requests."""

from __future__ import annotations

import csv
import itertools
import json
import math
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from carousel.bench.text import SENTENCES
from carousel.bench.workload import WorkItem, Workload, WorkloadError, built_in_workload, load_workload

DEFAULT_REQUESTS = 256
TOKENS_PER_WORD = 1.35
# What the traces call (time of arrival, prompt tokens, output tokens).
_COLUMNS = {
    "BurstGPT": ("Timestamp", "Request tokens", "Response tokens"),
    "Azure LLM": ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
}
_SPEC = (
    "synthetic, chats, interference, tenants, uniform:PROMPT,OUTPUT (tokens), contest:NAME=COUNT,... (tenants), "
    "fitted:FILE.csv (lengths like those of a trace), FILE.csv (a trace with BurstGPT's or Azure's columns) or "
    "FILE.json (a workload as carousel bench reads it, or ShareGPT conversations)"
)


@dataclass(frozen=True, slots=True)
class Limits:
    """``requests``: how many, 0 for all or ``DEFAULT_REQUESTS``. ``prompt``, ``output``: most tokens of each."""

    requests: int = 0
    prompt: int = 2048
    output: int = 512
    seed: int = 0

    @property
    def count(self) -> int:
        return self.requests or DEFAULT_REQUESTS


def prompt_of(random_: random.Random, tokens: int) -> str:
    """Text of about so many tokens, of sentences drawn at random."""
    wanted, words = max(1, round(tokens / TOKENS_PER_WORD)), list[str]()
    while len(words) < wanted:
        words += random_.choice(SENTENCES).split()
    return " ".join(words[:wanted])


# --- generators


def synthetic(limits: Limits) -> Workload:
    """Long-tailed prompts and answers: those of ``carousel bench`` without a file."""
    made = built_in_workload(limits.seed, limits.count)
    return Workload("synthetic", tuple(replace(i, output_len=min(i.output_len, limits.output)) for i in made.items))


def chats(limits: Limits, turns: int = 4, starts: int = 3) -> Workload:
    """Conversations of several turns. A turn's messages begin with those of the turn before, and conversations share
    one of a few system prompts, so that a prefix cache has what it has in production. Answers within the history are
    written in advance: every turn can be sent at its time, whatever became of the one before it."""
    random_ = random.Random(limits.seed)
    systems = [f"You are assistant {place}. {prompt_of(random_, 120)}" for place in range(starts)]
    open_: list[list[tuple[str, str]]] = []
    items = []
    for place in range(limits.count):
        if len(open_) < 4 or random_.random() < 1 / turns:
            open_.append([("system", random_.choice(systems))])
        chat = random_.choice(open_)
        if len(chat) > 1:
            chat.append(("assistant", prompt_of(random_, random_.randint(20, 80))))
        chat.append(("user", prompt_of(random_, random_.randint(8, 60))))
        if len(chat) >= 2 * turns:
            open_.remove(chat)
        items.append(_chat(str(place), chat, min(random_.randint(16, 96), limits.output), random_.expovariate(1.0)))
    return Workload("chats", tuple(items))


def interference(limits: Limits, every: int = 8) -> Workload:
    """Short requests, and every eighth with the longest prompt: the ``short`` row shows what the long ones do to it."""
    random_ = random.Random(limits.seed)
    items = []
    for place in range(limits.count):
        long = place % every == every - 1
        tokens = limits.prompt if long else random_.randint(16, 64)
        output = min(8 if long else 64, limits.output)
        prompt, gap = prompt_of(random_, tokens), random_.expovariate(1.0)
        items.append(WorkItem(str(place), prompt, (), output, gap, group="long" if long else "short"))
    return Workload("interference", tuple(items))


#: tenant: (share of the requests, priority, longest answer, seconds to the first token aimed at)
TENANTS = {"interactive": (0.2, 0, 48, 1.0), "standard": (0.5, 5, 128, 6.0), "batch": (0.3, 10, 256, 20.0)}


def tenants(limits: Limits) -> Workload:
    """Three tenants with priorities and deadlines of their own: few urgent short requests among many long ones."""
    random_ = random.Random(limits.seed)
    names, shares = list(TENANTS), [share for share, *_ in TENANTS.values()]
    items = []
    for item in built_in_workload(limits.seed, limits.count).items:
        tenant = random_.choices(names, shares)[0]
        _, priority, most, deadline = TENANTS[tenant]
        output = min(item.output_len, most, limits.output)
        items.append(
            replace(item, output_len=output, tenant=tenant, priority=priority, deadline=deadline, group=tenant)
        )
    return Workload("tenants", tuple(items))


def uniform(spec: str, limits: Limits) -> Workload:
    """Prompts and answers that are all equally long: about ``PROMPT`` and just ``OUTPUT`` tokens. A batch of these ends
    as one. Every prompt has the same words in an order of its own: tokenizers cut at blanks, so none is longer."""
    numbers = spec.split(",")
    if len(numbers) != 2 or not all(number.isdecimal() and int(number) for number in numbers):
        raise WorkloadError(f"--workload uniform:{spec}: allowed is uniform:PROMPT,OUTPUT, whole numbers of tokens")
    prompt, output = min(int(numbers[0]), limits.prompt), min(int(numbers[1]), limits.output)
    random_ = random.Random(limits.seed)
    first, *words = prompt_of(random_, prompt).split()
    items = []
    for place in range(limits.count):
        random_.shuffle(words)
        items.append(WorkItem(str(place), " ".join([first, *words]), (), output, random_.expovariate(1.0)))
    return Workload(f"uniform, {prompt} and {output} tokens", tuple(items))


def contest(spec: str, limits: Limits) -> Workload:
    """Tenants with requests of the same kind in numbers such as ``gold=3,free=1``, mixed; for backlogs."""
    try:
        numbers = {name: int(count) for name, count in (part.split("=") for part in spec.split(","))}
    except ValueError:
        numbers = {}
    if not numbers or min(numbers.values()) < 1:
        raise WorkloadError(f"--workload contest:{spec}: allowed is contest:NAME=COUNT,..., whole numbers above 0")
    random_ = random.Random(limits.seed)
    names = [name for name, count in numbers.items() for _ in range(count)]
    items = []
    for item in built_in_workload(limits.seed, limits.count).items:
        tenant = random_.choice(names)
        items.append(replace(item, output_len=min(item.output_len, limits.output), tenant=tenant, group=tenant))
    return Workload(f"contest, {spec}", tuple(items))


def fitted(path: Path, limits: Limits) -> Workload:
    """Prompts and answers whose lengths have the log-normal distributions that fit a trace's best (by maximum
    likelihood: mean and deviation of the logarithms), with exponential gaps."""
    rows = _read_trace(path)
    random_ = random.Random(limits.seed)
    shapes = []
    for lengths in ([prompt for _, prompt, _ in rows], [output for _, _, output in rows]):
        logs = [math.log(length) for length in lengths]
        shapes.append((statistics.fmean(logs), statistics.pstdev(logs), min(lengths), max(lengths)))

    def draw(place: int, most: int) -> int:
        mean, deviation, least, greatest = shapes[place]
        return min(max(round(random_.lognormvariate(mean, deviation)), least, 1), greatest, most)

    items = []
    for place in range(limits.count):
        prompt, output = draw(0, limits.prompt), draw(1, limits.output)
        items.append(WorkItem(str(place), prompt_of(random_, prompt), (), output, random_.expovariate(1.0)))
    return Workload(f"fitted to {path.name}", tuple(items))


def _chat(id_: str, messages: Sequence[tuple[str, str]], output: int, gap: float, group: str = "") -> WorkItem:
    prompt = "\n".join(f"{role}: {content}" for role, content in messages)
    return WorkItem(id_, prompt, (), output, gap, messages=tuple(messages), group=group)


# --- files


def _number(value: str, where: str, name: str) -> int:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0 <= number < 1e9:
        raise WorkloadError(f"{where}: {name} must be a number >= 0, not {value!r}")
    return int(number)


def _time(value: str, where: str) -> float:
    """Seconds, or a date and time."""
    try:
        return float(value)
    except ValueError:
        pass
    try:
        # Azure's timestamps have seven digits after the point, one more than datetime reads.
        head, _, fraction = value.strip().partition(".")
        return datetime.fromisoformat(head).timestamp() + float(f"0.{fraction.rstrip('Z') or 0}")
    except ValueError:
        raise WorkloadError(f"{where}: the timestamp must be seconds or a date and time, not {value!r}") from None


def _rows(path: Path) -> Iterator[tuple[str, Mapping[str, str]]]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            for row in (reader := csv.DictReader(file)):
                yield f"workload {path}: line {reader.line_num}", row
    except OSError as error:
        raise WorkloadError(f"workload {path}: {error.strerror or error}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise WorkloadError(f"workload {path}: not a CSV file: {error}") from None


def _read_trace(path: Path) -> list[tuple[float, int, int]]:
    """(arrival, prompt tokens, output tokens) in order of arrival. Requests without an answer (failed ones) are left
    out, as they are where the traces are used elsewhere."""
    found: list[tuple[float, int, int]] = []
    for where, row in _rows(path):
        columns = next((names for names in _COLUMNS.values() if all(row.get(name) is not None for name in names)), None)
        if columns is None:
            known = "; ".join(f"{name}: {', '.join(columns)}" for name, columns in _COLUMNS.items())
            raise WorkloadError(f"{where}: the columns are {', '.join(filter(None, row))}; known are {known}")
        time, prompt, output = (row[name] for name in columns)
        lengths = _number(prompt, where, columns[1]), _number(output, where, columns[2])
        if min(lengths) > 0:
            found.append((_time(time, where), *lengths))
    if not found:
        raise WorkloadError(f"workload {path}: no request with a prompt and an answer")
    return sorted(found)


def _unit_gaps(times: Sequence[float]) -> list[float]:
    """Gaps before each, of mean 1; the first has the mean itself. All 1 where all came at once."""
    span = times[-1] - times[0]
    if span <= 0:
        return [1.0] * len(times)
    mean = span / (len(times) - 1)
    return [1.0] + [(after - before) / mean for before, after in itertools.pairwise(times)]


def trace(path: Path, limits: Limits) -> Workload:
    """A trace's lengths and gaps, in its order, with invented text."""
    rows = _read_trace(path)[: limits.requests or None]
    random_ = random.Random(limits.seed)
    gaps = _unit_gaps([time for time, _, _ in rows])
    items = [
        WorkItem(str(place), prompt_of(random_, min(prompt, limits.prompt)), (), min(output, limits.output), gap)
        for place, ((_, prompt, output), gap) in enumerate(zip(rows, gaps, strict=True))
    ]
    return Workload(path.name, tuple(items))


def sharegpt(path: Path, entries: Sequence[Any], limits: Limits) -> Workload:
    """Every answer of every conversation is one request, with all that was said before it as its messages and its own
    length as the number of tokens to generate."""
    roles = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
    random_ = random.Random(limits.seed)
    items: list[WorkItem] = []
    for place, entry in enumerate(entries):
        messages: list[tuple[str, str]] = []
        for number, turn in enumerate(entry["conversations"]):
            where = f"workload {path}: conversation {place}: turn {number}"
            if not isinstance(turn, dict) or not isinstance(turn.get("value"), str):
                raise WorkloadError(f"{where}: must be an object with from and value")
            if turn.get("from") not in roles:
                raise WorkloadError(f"{where}: from must be one of {', '.join(roles)}, not {turn.get('from')!r}")
            role, text = roles[turn["from"]], turn["value"]
            if role == "assistant" and messages and messages[-1][0] == "user":
                output = min(max(1, round(len(text.split()) * TOKENS_PER_WORD)), limits.output)
                said = sum(len(content.split()) for _, content in messages) * TOKENS_PER_WORD
                if said <= limits.prompt:
                    items.append(_chat(f"{place}.{number}", messages, output, random_.expovariate(1.0)))
            messages = [*messages, (role, text)]
    if not items:
        raise WorkloadError(f"workload {path}: no conversation with a question of at most {limits.prompt} tokens")
    return Workload(path.name, tuple(items[: limits.requests or None]))


def _json_file(path: Path, limits: Limits) -> Workload:
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return load_workload(path)  # it says what is wrong
    if isinstance(entries, list) and entries and all(isinstance(e, dict) and "conversations" in e for e in entries):
        if not all(isinstance(entry["conversations"], list) for entry in entries):
            raise WorkloadError(f"workload {path}: conversations must be a list of turns")
        return sharegpt(path, entries, limits)
    return load_workload(path, limits.requests)


_GENERATORS: dict[str, Callable[[Limits], Workload]] = {
    "synthetic": synthetic,
    "chats": chats,
    "interference": interference,
    "tenants": tenants,
}


def open_workload(spec: str, limits: Limits) -> Workload:
    """The workload that ``--workload`` names.

    Raises:
        WorkloadError: it cannot be used; the message says where and why.
    """
    if spec in _GENERATORS:
        return _GENERATORS[spec](limits)
    kind, _, rest = spec.partition(":")
    if kind in ("uniform", "contest") and rest:
        return uniform(rest, limits) if kind == "uniform" else contest(rest, limits)
    if kind == "fitted" and rest:
        return fitted(Path(rest).expanduser(), limits)
    path = Path(spec).expanduser()
    if path.suffix == ".csv":
        return trace(path, limits)
    if path.suffix == ".json":
        return _json_file(path, limits)
    raise WorkloadError(f"--workload {spec}: allowed is {_SPEC}")
