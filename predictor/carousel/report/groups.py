"""What a run was like for each group of its requests: the urgent ones, a tenant, those with a deadline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from carousel.engine.policy import OUTPUT_TOKEN_COST, PROMPT_TOKEN_COST
from carousel.report.runs import Figures, Run

_COSTS = {"prefill": PROMPT_TOKEN_COST, "decode": OUTPUT_TOKEN_COST}


@dataclass(frozen=True, slots=True)
class Group:
    """One group of one run. Times in seconds.

    ``queue_steps_p99``: the same wait in steps of the engine that began meanwhile: 1 is a seat in the very next step.
    ``missed``: the share of requests whose first token came after their deadline. ``share``: what it got of the engine,
    in tokens as policy ``fair`` charges them, while every group had something waiting; ``owed``: what its weight says.
    None where a run says nothing about it.
    """

    name: str
    requests: int
    queue_p99: float | None
    queue_steps_p99: float | None
    ttft_mean: float
    ttft_p99: float
    missed: float | None
    share: float | None
    owed: float | None


def groups_of(run: Run) -> list[Group]:
    """The groups of a run, all its rounds together; none where its requests belong to no group."""
    records = run.records
    names: list[list[str]] = []
    for record in records:
        requests = record["requests"]
        column = requests.get("group") or requests.get("tenant")
        if not column or not all(column):
            return []
        names.append(column)
    shares = [contested_shares(record, column)[0] for record, column in zip(records, names, strict=True)]
    weights = (run.figures.get("settings") or {}).get("tenant_weights") or {}
    every = list(dict.fromkeys(name for column in names for name in column))
    whole = sum(weights.get(name, 1.0) for name in every)
    found = []
    for name in every:
        mine = [_columns(record, column, name) for record, column in zip(records, names, strict=True)]
        own = [share[name] for share in shares if name in share]
        owed = weights.get(name, 1.0) / whole if weights else None
        found.append(_group(name, mine, sum(own) / len(own) if own else None, owed))
    return found


def _columns(record: Figures, column: Sequence[str], name: str) -> dict[str, list[Any]]:
    """The columns of one group's requests, and the steps that each of them waited."""
    places = [place for place, found in enumerate(column) if found == name]
    columns = {key: [values[place] for place in places] for key, values in record["requests"].items()}
    steps, seats = record.get("steps"), record.get("seats")
    if steps and seats and None not in columns.get("queue", [None]):
        starts = np.asarray(steps["start"], float)
        seated_at: dict[str, float] = {}
        for _, request_id, spans in seats:
            seated_at[request_id] = min(seated_at.get(request_id, spans[0][1]), spans[0][1])
        if not seated_at.keys() >= set(columns["id"]):
            return columns  # a very long run, of which not all seats were kept
        seated = np.asarray([seated_at[request_id] for request_id in columns["id"]])
        # From the arrival, which was a moment after it was due, to the beginning of the step that seated it.
        arrived = seated - np.asarray(columns["queue"], float)
        columns["steps"] = list(np.searchsorted(starts, seated, "right") - np.searchsorted(starts, arrived, "right"))
    return columns


def _group(name: str, rounds: Sequence[Mapping[str, list[Any]]], share: float | None, owed: float | None) -> Group:
    def pooled(key: str) -> list[float] | None:
        values = [value for columns in rounds for value in columns.get(key, [None])]
        return None if not values or None in values else values

    def p99(values: list[float] | None) -> float | None:
        return None if values is None else float(np.quantile(values, 0.99))

    ttft, deadlines = pooled("ttft") or [0.0], pooled("deadline")
    missed = None
    if deadlines is not None:
        missed = sum(first > aim for first, aim in zip(ttft, deadlines, strict=True)) / len(ttft)
    return Group(
        name,
        len(ttft),
        p99(pooled("queue")),
        p99(pooled("steps")),
        sum(ttft) / len(ttft),
        float(np.quantile(ttft, 0.99)),
        missed,
        share,
        owed,
    )


def contested_shares(record: Figures, column: Sequence[str]) -> tuple[dict[str, float], float]:
    """Each group's share of what the engine computed while all of them had requests waiting, and how long that was.

    A group has something waiting until the last of its requests takes a seat. Nothing where there are no seats.
    """
    group_of = dict(zip(record["requests"]["id"], column, strict=True))
    spans = [(group_of[name], found) for _, name, found in record.get("seats") or [] if name in group_of]
    last = dict.fromkeys(column, 0.0)
    for name, found in spans:
        last[name] = max(last[name], found[0][1])
    until = min(last.values(), default=0.0)
    cost = dict.fromkeys(last, 0.0)
    for name, found in spans:
        for use, start, end, tokens in found:
            part = min(max((until - start) / (end - start), 0.0), 1.0) if end > start else float(start <= until)
            cost[name] += _COSTS.get(use, 0.0) * tokens * part
    whole = sum(cost.values())
    return ({name: value / whole for name, value in cost.items()} if whole and until else {}), until
