"""A decoder on a device that replays recorded work: decode-only steps in buckets of rows, all others as they come.

For each bucket the forward pass is recorded once, at start, on buffers that are made once. A step copies its numbers
into them, in one transfer, fetches on the device what only the device knows (the tokens sampled a moment ago, the block
tables), and replays. Rows between a step's sequences and its bucket's size decode token 0 in scratch blocks that belong
to nobody.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from carousel.engine.block_pool import blocks_for
from carousel.engine.device import Device
from carousel.engine.runner import BlockTables, DecoderLike, DecoderRunner, StepResult
from carousel.engine.scheduler import Schedule, ScheduledSequence
from carousel_kernels.layout import BLOCK_SIZE, BatchLayout

NUM_SCRATCH_BLOCKS = 4
"""Blocks for the rows that fill a bucket up."""

_SECTIONS = 5  # of a bucket's numbers: token ids, positions, slots, context lengths, rows of the block tables
_STAGES = 2  # steps whose numbers may be on their way: the one in flight, and the one that is being launched


def bucket_sizes(max_rows: int) -> list[int]:
    """Numbers of rows for which decodes are recorded, ascending: 1, 2, 4, then at most 8 or a quarter apart.

    Raises:
        ValueError: ``max_rows`` < 1.
    """
    if max_rows < 1:
        raise ValueError(f"max_rows: got {max_rows}, allowed: an integer >= 1")
    sizes, step = [1, 2, 4], 8
    while sizes[-1] < max_rows:
        sizes.append(sizes[-1] // step * step + step)
        if sizes[-1] >= 8 * step:
            step *= 2
    return [size for size in sizes if size < max_rows] + [max_rows]


@dataclass(frozen=True, slots=True)
class GraphCapture:
    """What recording took: the buckets' sizes and seconds."""

    buckets: tuple[int, ...]
    seconds: float


class _MirroredTables(BlockTables):
    """Block tables with a copy on the device, brought up to date by what changed."""

    def __init__(self, max_sequences: int, max_blocks: int, device: Device, scratch_block: int) -> None:
        super().__init__(max_sequences + 1, max_blocks)
        self.padding_row = self._free.pop()
        self._rows[self.padding_row, 0] = scratch_block
        self._device = device
        self._mirror = device.upload(torch.from_numpy(self._rows.copy()))
        self._changed: list[np.ndarray] = []  # flat indices

    def written(self, row: int, first: int, last: int) -> None:
        self._changed.append(np.arange(first, last) + row * self._rows.shape[1])

    def gather_into(self, rows: torch.Tensor, tables: torch.Tensor) -> None:
        """Copy ``rows`` int64 [n] of the tables, on the device, into ``tables`` int32 [n, max_blocks]."""
        if self._changed:
            # The last word on an index: a row may have changed hands since.
            places = np.unique(np.concatenate(self._changed))
            self._changed.clear()
            values = torch.from_numpy(self._rows.reshape(-1)[places])
            where = self._device.upload(torch.from_numpy(places))
            self._mirror.view(-1).index_copy_(0, where, self._device.upload(values))
        torch.index_select(self._mirror, 0, rows, out=tables)


@dataclass(slots=True)
class _Bucket:
    """The recorded forward pass of ``size`` rows: its inputs, all views of ``numbers``; and how to run it."""

    size: int
    numbers: torch.Tensor
    staging: list[torch.Tensor]
    layout: BatchLayout
    token_ids: torch.Tensor
    positions: torch.Tensor
    table_rows: torch.Tensor
    replay: Callable[[], None] = field(default=lambda: None)
    logits: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    turn: int = 0


class GraphRunner(DecoderRunner):
    """A :class:`DecoderRunner` that replays decode-only steps.

    Args:
        decoder, num_blocks, max_sequences, max_model_len: see there.
        max_rows: most sequences of a step.
        device: None: the decoder's own.
    """

    def __init__(
        self,
        decoder: DecoderLike,
        num_blocks: int,
        max_sequences: int,
        max_model_len: int,
        *,
        max_rows: int,
        device: Device | None = None,
    ) -> None:
        super().__init__(decoder, num_blocks + NUM_SCRATCH_BLOCKS, max_sequences, max_model_len, device=device)
        self._scratch = num_blocks
        self._max_model_len = max_model_len
        width = blocks_for(max_model_len)
        self._mirrored = _MirroredTables(max_sequences, width, self._device, self._scratch)
        self._tables = self._mirrored
        self._block_tables = self._zeros(max_rows * width, torch.int32).view(max_rows, width)
        self._query_start = self._device.upload(torch.arange(max_rows + 1, dtype=torch.int32))
        self._all_rows = self._device.upload(torch.arange(max_rows))
        self._buckets = [self._bucket(size) for size in bucket_sizes(max_rows)]

    def _zeros(self, size: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, device=self._decoder.device)

    def _bucket(self, size: int) -> _Bucket:
        numbers = self._zeros(size * _SECTIONS)
        token_ids, positions, slots, context, table_rows = numbers.view(_SECTIONS, size)
        layout = BatchLayout(
            query_start=self._query_start[: size + 1],
            # int32 where the numbers are int64: the first half of their section.
            context_lens=context.view(torch.int32)[:size],
            block_tables=self._block_tables[:size],
            slots=slots,
            query_lens_host=[1] * size,
            context_lens_host=[1] * size,
            num_decodes=size,
        )
        staging = [self._device.staging(size * _SECTIONS) for _ in range(_STAGES)]
        return _Bucket(size, numbers, staging, layout, token_ids, positions, table_rows)

    @torch.inference_mode()
    def capture(self) -> GraphCapture:
        """Record every bucket, the largest first. Takes seconds, and memory for the largest one's activations."""
        started = time.perf_counter()
        self._decoder.reserve_positions(self._max_model_len)  # growing later would leave the recorded tables behind
        for bucket in reversed(self._buckets):
            self._fill(bucket, [], [])
            bucket.replay, bucket.logits = self._device.record(partial(self._forward, bucket))
        self._device.read().wait()
        return GraphCapture(tuple(b.size for b in self._buckets), time.perf_counter() - started)

    def _forward(self, bucket: _Bucket) -> torch.Tensor:
        bucket.layout.plan = None  # what an operator derives from the lengths is part of the work
        return self._decoder.forward(
            bucket.token_ids, bucket.positions, bucket.layout, self._kv_cache, self._all_rows[: bucket.size]
        )

    @torch.inference_mode()
    def run(self, step: Schedule) -> StepResult:
        """One forward pass over every token of ``step``, replayed where it only decodes."""
        rows, sampled, prompts = self._logit_rows(step)
        if prompts or any(entry.num_new_tokens != 1 for entry in step.entries):
            return super().run(step)
        bucket = next(bucket for bucket in self._buckets if bucket.size >= len(step.entries))
        table_rows = [self._tables.row(entry.sequence) for entry in step.entries]
        self._fill(bucket, step.entries, table_rows)
        bucket.replay()
        logits, last_tokens = bucket.logits[: len(rows)], None
        whole = rows == list(range(len(rows)))
        index = None if whole else self._index(rows)
        if index is not None:
            logits = bucket.logits.index_select(0, index)
        if self._wants_last_tokens(sampled):
            # The bucket's own are overwritten by the next step.
            last_tokens = bucket.token_ids[: len(rows)].clone() if index is None else bucket.token_ids[index]
        return StepResult(sampled, logits, [], last_tokens, self._done(sampled))

    def _fill(self, bucket: _Bucket, entries: list[ScheduledSequence], table_rows: list[int]) -> None:
        """Put a step's numbers, and padding, into the bucket's buffers on the device."""
        size, count = bucket.size, len(entries)
        bucket.turn = (bucket.turn + 1) % _STAGES
        stage = bucket.staging[bucket.turn]
        numbers = stage.numpy().reshape(_SECTIONS, size)
        padding = np.arange(size - count)
        numbers[:2] = 0
        numbers[2, count:] = self._scratch * BLOCK_SIZE + padding % (NUM_SCRATCH_BLOCKS * BLOCK_SIZE)
        numbers[4, :count], numbers[4, count:] = table_rows, self._mirrored.padding_row
        context = numbers[3].view(np.int32)[:size]
        context[count:] = 1
        if entries:
            positions = np.array([entry.start for entry in entries], dtype=np.int64)
            numbers[0, :count] = [0 if entry.pending else entry.token_ids[0] for entry in entries]
            numbers[1, :count] = positions
            blocks = self._tables.blocks(table_rows, positions // BLOCK_SIZE)
            numbers[2, :count] = blocks * BLOCK_SIZE + positions % BLOCK_SIZE
            context[:count] = positions + 1
        # For operators that look at the host's copy, as those of the CPU do; a recording does not.
        bucket.layout.context_lens_host[:] = context.tolist()
        bucket.numbers.copy_(stage, non_blocking=True)
        self._mirrored.gather_into(bucket.table_rows, bucket.layout.block_tables)
        pending = [row for row, entry in enumerate(entries) if entry.pending]
        self._insert_pending(bucket.token_ids, pending, [table_rows[row] for row in pending])
