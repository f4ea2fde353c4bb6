"""A look at the engine between two steps, taken on its thread. What it costs is bounded by what it lists."""

from __future__ import annotations

import heapq
import time
from collections.abc import Sequence as Items

from carousel.engine.block_pool import BlockPool
from carousel.engine.events import Glance, PoolView, Reason, SequenceView
from carousel.engine.request import Sequence
from carousel.engine.scheduler import Scheduler

MAX_LISTED = 256
"""Running sequences, and as many waiting ones, that a glance lists."""

MAX_CELLS = 1024
"""Cells of the map of the KV pool."""

MAX_RANGES = 1024
"""Ranges of blocks that all running sequences together may name."""


def look(scheduler: Scheduler, now: float) -> Glance:
    """Everything at the moment ``now`` of the engine's clock. On the engine thread."""
    began = time.perf_counter()
    running = scheduler.running[:MAX_LISTED]
    waiting = heapq.nsmallest(MAX_LISTED, scheduler.policy, key=scheduler.policy.key)
    reasons = scheduler.reasons(waiting)
    left = MAX_RANGES
    views = []
    for sequence in running:
        ranges = block_ranges(sequence.block_table, left)
        left -= len(ranges)
        views.append(_view(sequence, ranges=ranges))
    return Glance(
        at=now,
        running=views,
        num_running=len(scheduler.running),
        waiting=[_view(sequence, reason) for sequence, reason in zip(waiting, reasons, strict=True)],
        num_waiting=scheduler.num_waiting,
        idle=[sequence.order for sequence in scheduler.idle[:MAX_LISTED]],
        pool=look_at_pool(scheduler.pool),
        static=scheduler.limits.static,
        cost_s=time.perf_counter() - began,
    )


def _view(sequence: Sequence, reason: Reason | None = None, ranges: tuple[tuple[int, int], ...] = ()) -> SequenceView:
    request = sequence.request
    return SequenceView(
        order=sequence.order,
        request_id=request.request_id,
        index=sequence.index,
        tenant=request.tenant,
        prompt_tokens=sequence.num_prompt_tokens,
        cached_tokens=sequence.num_cached_tokens,
        computed_tokens=sequence.num_computed_tokens,
        output_tokens=sequence.num_output_tokens,
        max_tokens=sequence.max_total_tokens - sequence.num_prompt_tokens,
        num_blocks=len(sequence.block_table),
        num_preemptions=sequence.num_preemptions,
        arrival=request.arrival,
        admitted_at=sequence.admitted_at,
        first_token_at=sequence.first_token_at,
        decoding=sequence.first_token_at is not None and sequence.num_uncomputed_tokens <= 1,
        reason=reason,
        block_ranges=ranges,
    )


def block_ranges(table: Items[int], most: int) -> tuple[tuple[int, int], ...]:
    """A block table as runs of neighbours: (first, count). Empty when there are more than ``most``."""
    ranges: list[tuple[int, int]] = []
    for block in table:
        if ranges and ranges[-1][0] + ranges[-1][1] == block:
            ranges[-1] = (ranges[-1][0], ranges[-1][1] + 1)
        elif len(ranges) == most:
            return ()
        else:
            ranges.append((block, 1))
    return tuple(ranges)


def look_at_pool(pool: BlockPool) -> PoolView:
    """The map of the pool's blocks, as far as they were ever used."""
    references, names = pool.contents()
    width = max(1, -(-len(references) // MAX_CELLS))
    cells = []
    for start in range(0, len(references), width):
        most = max(references[start : start + width])
        if most:
            cells.append("s" if most > 1 else "u")
        else:
            cells.append("c" if any(names[start : start + width]) else ".")
    return PoolView(
        num_blocks=pool.num_blocks,
        num_free=pool.num_free,
        num_cached=pool.num_cached,
        num_shared=len(references) - references.count(0) - references.count(1),
        blocks_per_cell=width,
        cells="".join(cells),
    )
