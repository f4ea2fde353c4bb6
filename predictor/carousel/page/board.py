"""What the page shows, kept up from the engine's events and glances: lanes, rates, and messages for the viewers.

Plain state without threads or tasks. Everything in it is bounded: by the batch's slots, by what a glance lists, and by
the constants below.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from typing import Any

from carousel.engine.events import Event, Glance, SequenceView, What
from carousel.engine.timeline import StepRecord

MAX_EVENTS = 2000
"""Events that one message holds; of more, the viewers are told that there is a gap."""

MAX_STEPS = 512
"""Steps that one message holds, and that rates look back on."""

RATE_WINDOW_S = 5.0
TTFT_WINDOW_S = 60.0
MAX_TTFTS = 256
MAX_KNOWN = 20_000
"""Sequences whose tenant and arrival are remembered until they have ended."""


class Board:
    """``slots``: rows of the batch. ``epoch``: the engine's time that the page counts from."""

    def __init__(self, slots: int, epoch: float) -> None:
        self.slots = slots
        self.epoch = epoch
        self.glance: Glance | None = None
        self.lanes: dict[int, int] = {}  # order -> row
        self._free: list[int] = list(range(slots))  # a heap: the lowest row goes first
        self._rows = slots
        self._held: set[int] = set()  # ended, but a static batch keeps the row
        self._known: dict[int, tuple[str, float]] = {}  # order -> tenant, arrival
        self._owners: dict[int, str] = {}  # of the orders in ``_events``, which may have ended since
        self._events: list[list[Any]] = []
        self._steps: deque[StepRecord] = deque(maxlen=MAX_STEPS)
        self._recent: deque[StepRecord] = deque(maxlen=MAX_STEPS)
        self._ttfts: deque[tuple[float, float]] = deque(maxlen=MAX_TTFTS)
        self.gap = False

    def time(self, at: float | None) -> float | None:
        """A time of the engine's clock as the page counts: seconds since the epoch, to a tenth of a millisecond."""
        return None if at is None else round(at - self.epoch, 4)

    # ---- what the engine tells

    def take(self, events: list[Event], step: StepRecord | None) -> None:
        """The next events, and the step that brought them."""
        if step is not None:
            self._steps.append(step)
            self._recent.append(step)
            if self._held and not step.num_idle_tokens:
                self._free_held(step.started)
        for event in events:
            self._take(event)

    def _take(self, event: Event) -> None:
        what, order = event.what, event.order
        at = self.time(event.at)
        if what is What.ARRIVED:
            if len(self._known) < MAX_KNOWN:
                self._known[order] = (event.detail, event.at)
            self._say(order, ["a", at, order, event.request_id, event.choice, event.detail, event.tokens, event.left])
        elif what is What.ADMITTED:
            if self._held:  # nobody joins a static group before it has wholly finished
                self._free_held(event.at)
            self._say(order, ["s", at, order, self._seat(order), event.tokens, event.left])
        elif what is What.CHUNK:
            self._say(order, ["c", at, order, self.time(event.since), event.tokens, event.left])
        elif what is What.FIRST_TOKEN:
            if order in self._known:
                self._ttfts.append((event.at, event.at - self._known[order][1]))
            self._say(order, ["f", at, order])
        elif what is What.PREEMPTED:
            self._leave(order)
            self._say(order, ["p", at, order, event.tokens])
        else:
            self._say(order, ["e", at, order, event.tokens, event.detail, event.held])
            self._known.pop(order, None)
            if event.held:
                self._held.add(order)
            else:
                self._leave(order)

    def _say(self, order: int, item: list[Any]) -> None:
        if len(self._events) >= MAX_EVENTS:
            self.gap = True
            return
        self._owners[order] = self._known[order][0] if order in self._known else ""
        self._events.append(item)

    def _seat(self, order: int) -> int:
        if order not in self.lanes:
            if not self._free:  # rows that a static batch keeps are still shown
                self._free.append(self._rows)
                self._rows += 1
            self.lanes[order] = heapq.heappop(self._free)
        return self.lanes[order]

    def _leave(self, order: int) -> None:
        lane = self.lanes.pop(order, None)
        if lane is not None:
            heapq.heappush(self._free, lane)

    def _free_held(self, at: float, kept: frozenset[int] = frozenset()) -> None:
        for order in self._held - kept:
            self._held.discard(order)
            self._leave(order)
            self._say(order, ["r", self.time(at), order])

    def settle(self, glance: Glance) -> None:
        """All that was told so far led to this: correct what was missed."""
        self.glance = glance
        running = {view.order for view in glance.running}
        if len(running) == glance.num_running:
            for order in [order for order in self.lanes if order not in running and order not in self._held]:
                self._leave(order)
        for view in (*glance.running, *glance.waiting):
            if view.order not in self._known and len(self._known) < MAX_KNOWN:
                self._known[view.order] = (view.tenant, view.arrival)
        for view in glance.running:
            self._seat(view.order)
        if self._held:
            self._free_held(glance.at, frozenset(glance.idle))
        live = running | {view.order for view in glance.waiting}
        if len(self._known) > len(live) and glance.num_running + glance.num_waiting == len(live):
            self._known = {order: known for order, known in self._known.items() if order in live}

    def lose(self) -> None:
        """Events were lost: the next glance says how things stand."""
        self.gap = True
        self._held.clear()

    # ---- what the viewers are told

    def message(self, scope: str | None = None, *, summary: bool = False) -> dict[str, Any]:
        """What is new since :meth:`clear`. ``scope``: a tenant, who does not see whose the others' requests are.
        ``summary``: how things stand, without how that came about."""
        glance = self.glance
        assert glance is not None
        events = [] if summary else self._events
        if scope is not None:
            events = [self._hide(event, scope) for event in events]
        pool = glance.pool
        return {
            "k": "tick",
            "t": self.time(glance.at),
            "cost": round(glance.cost_s, 6),
            "gap": summary or self.gap,
            "ev": events,
            "steps": [] if summary else [self.step(step) for step in self._steps],
            "run": [self._view(view, scope) for view in glance.running],
            "wait": [self._view(view, scope) for view in glance.waiting[:64]],
            "running": glance.num_running,
            "waiting": glance.num_waiting,
            "static": glance.static,
            "kv": {
                "cells": pool.cells,
                "per": pool.blocks_per_cell,
                "all": pool.num_blocks,
                "used": pool.num_used,
                "shared": pool.num_shared,
                "cached": pool.num_cached,
                "free": pool.num_free,
            },
            "now": self.rates(glance.at),
        }

    def clear(self) -> None:
        """Every viewer has been told."""
        self._events, self._owners, self.gap = [], {}, False
        self._steps.clear()

    def step(self, step: StepRecord) -> list[float]:
        """A step as the page reads it: index, start, ms, tokens by kind, running, waiting."""
        return [
            step.index,
            round(step.started - self.epoch, 4),
            round(step.duration_s * 1e3, 2),
            step.num_prefill_tokens,
            step.num_decode_tokens,
            step.num_idle_tokens,
            step.num_recomputed_tokens,
            step.num_running,
            step.num_waiting,
        ]

    def _hide(self, event: list[Any], scope: str) -> list[Any]:
        if event[0] != "a" or self._owners.get(event[2]) == scope:
            return event
        return [*event[:3], "", event[4], "", *event[6:]]

    def _view(self, view: SequenceView, scope: str | None) -> list[Any]:
        hidden = scope is not None and view.tenant != scope
        return [
            view.order,
            "" if hidden else view.request_id,
            view.index,
            "" if hidden else view.tenant,
            view.prompt_tokens,
            view.cached_tokens,
            view.computed_tokens,
            view.output_tokens,
            view.max_tokens,
            view.num_blocks,
            view.num_preemptions,
            self.time(view.arrival),
            self.time(view.admitted_at),
            self.time(view.first_token_at),
            int(view.decoding),
            self.lanes.get(view.order, -1),
            view.reason,
            view.block_ranges,
        ]

    def rates(self, now: float) -> dict[str, Any]:
        """Figures of the last seconds. Rates per second; times in seconds, None where nothing was measured."""
        steps = [step for step in self._recent if step.started + step.duration_s > now - RATE_WINDOW_S]
        span = max(now - steps[0].started, 1e-3) if steps else RATE_WINDOW_S
        span = max(min(span, RATE_WINDOW_S), 0.5)
        decodes = sorted((step.duration_s, step.num_decode_tokens) for step in steps if step.num_decode_tokens)
        times = sorted(step.duration_s for step in steps)
        while self._ttfts and self._ttfts[0][0] < now - TTFT_WINDOW_S:
            self._ttfts.popleft()
        ttfts = sorted(value for _, value in self._ttfts)
        return {
            "out": round(sum(step.num_sampled_tokens for step in steps) / span, 1),
            "prompt": round(sum(step.num_prefill_tokens for step in steps) / span, 1),
            "step": [_rank([(value, 1) for value in times], share) for share in (0.5, 0.95)],
            "itl": [_rank(decodes, share) for share in (0.5, 0.95)],
            "ttft": [_rank([(value, 1) for value in ttfts], share) for share in (0.5, 0.95)],
        }


def _rank(ordered: list[tuple[float, int]], share: float) -> float | None:
    """The smallest value (of value, weight) below which at least ``share`` of the weight lies."""
    total = sum(weight for _, weight in ordered)
    if not total:
        return None
    wanted, seen = math.ceil(share * total), 0
    for value, weight in ordered:
        seen += weight
        if seen >= wanted:
            return round(value, 5)
    raise AssertionError("the weights add up to their sum")
