"""A decoder on a device that replays recorded work: decode-only steps in buckets of rows, small ones with prompts piece
by piece (see ``piecewise``), all others as they come.

For each bucket the forward pass is recorded once, at start, on buffers that are made once. A step copies its numbers
into them, in one transfer, fetches on the device what only the device knows (the tokens sampled a moment ago, the block
tables), and replays. Rows between a step's sequences and its bucket's size decode token 0 in scratch blocks that belong
to nobody.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch

from carousel.engine.block_pool import blocks_for
from carousel.engine.buckets import NUM_SCRATCH_BLOCKS, NumberTable, bucket_sizes, scratch_slots
from carousel.engine.device import Device
from carousel.engine.piecewise import PiecewiseGraphs, token_buckets
from carousel.engine.runner import (
    BlockTables,
    DecoderLike,
    DecoderRunner,
    Executor,
    Ints,
    NewPool,
    StepNumbers,
    StepResult,
)
from carousel.engine.scheduler import Schedule, ScheduledSequence
from carousel_kernels.layout import BLOCK_SIZE, BatchLayout

_SECTIONS = 5  # of a bucket's numbers: token ids, positions, slots, context lengths, rows of the block tables
_PADDING_ROW = 0  # of the block tables


@dataclass(frozen=True, slots=True)
class GraphCapture:
    """What recording took.

    Attributes:
        buckets: sequences of the decodes that are recorded.
        token_buckets: tokens of the steps with prompts that are recorded in pieces.
        graphs: how many recordings that makes.
        seconds: the time.
    """

    buckets: tuple[int, ...]
    token_buckets: tuple[int, ...]
    graphs: int
    seconds: float


class _WatchedTables(BlockTables):
    """Block tables that remember what changed, for a copy on the device. Row 0 belongs to padding."""

    def __init__(self, max_sequences: int, max_blocks: int) -> None:
        super().__init__(max_sequences + 1, max_blocks)
        self._free.remove(_PADDING_ROW)
        self._changed: list[Ints] = []  # flat indices

    def written(self, row: int, first: int, last: int) -> None:
        self._changed.append(np.arange(first, last) + row * self._rows.shape[1])

    def changes(self) -> tuple[Ints, Ints] | None:
        """Flat places and what stands there now, of all that was written since the last call; None: nothing was."""
        if not self._changed:
            return None
        # The last word on an index: a row may have changed hands since.
        places = np.unique(np.concatenate(self._changed))
        self._changed.clear()
        return places, self._rows.reshape(-1)[places]


@dataclass(slots=True)
class DecodeNumbers:
    """Message: a step of decodes alone, for a bucket of ``size`` rows.

    ``numbers`` int64 [5, size], see ``_SECTIONS``; ``changes``: of the block tables, as places and values.
    """

    size: int
    numbers: Ints
    changes: tuple[Ints, Ints] | None
    pending_places: list[int]
    pending_rows: list[int]


@dataclass(slots=True)
class Capture:
    """Message: record every bucket."""


@dataclass(slots=True)
class _Bucket:
    """The recorded forward pass of ``size`` rows: its inputs, all views of ``numbers``; and how to run it."""

    size: int
    numbers: NumberTable
    layout: BatchLayout
    token_ids: torch.Tensor
    positions: torch.Tensor
    table_rows: torch.Tensor
    replay: Callable[[], None] = field(default=lambda: None)
    logits: torch.Tensor = field(default_factory=lambda: torch.empty(0))


class GraphExecutor(Executor):
    """An :class:`Executor` that replays decode-only steps, and in pieces those with few tokens.

    ``pool.max_rows`` is the most sequences of a step, ``pool.max_piece_tokens`` the most tokens of one in pieces.
    """

    def __init__(self, decoder: DecoderLike, pool: NewPool, device: Device) -> None:
        super().__init__(decoder, replace(pool, num_blocks=pool.num_blocks + NUM_SCRATCH_BLOCKS), device)
        assert pool.max_rows is not None
        device.forget_recordings()
        self.scratch = pool.num_blocks
        self._max_model_len = pool.max_model_len
        width = blocks_for(pool.max_model_len)
        self._mirror = self._zeros((pool.max_sequences + 1) * width, torch.int32).view(-1, width)
        self._mirror[_PADDING_ROW, 0] = self.scratch
        self._block_tables = self._zeros(pool.max_rows * width, torch.int32).view(pool.max_rows, width)
        self._query_start = device.upload(torch.arange(pool.max_rows + 1, dtype=torch.int32))
        self._all_rows = device.upload(torch.arange(pool.max_rows))
        self.buckets = [self._bucket(size) for size in bucket_sizes(pool.max_rows)]
        self.pieces = PiecewiseGraphs(
            decoder, self.kv_cache, device, token_buckets(pool.max_piece_tokens), self.scratch
        )

    def _zeros(self, size: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, device=self._decoder.device)

    def _bucket(self, size: int) -> _Bucket:
        numbers = NumberTable(self._device, self._decoder.device, _SECTIONS, size)
        token_ids, positions, slots, context, table_rows = numbers.sections
        layout = BatchLayout(
            query_start=self._query_start[: size + 1],
            # int32 where the numbers are int64: the first half of their section.
            context_lens=context.view(torch.int32)[:size],
            block_tables=self._block_tables[:size],
            slots=slots,
            query_lens_host=[1] * size,
            context_lens_host=[1] * size,
            num_decodes=size,
            deterministic=self._deterministic,
        )
        return _Bucket(size, numbers, layout, token_ids, positions, table_rows)

    @torch.inference_mode()
    def capture(self) -> GraphCapture:
        """Record every bucket, the largest first. Takes seconds, and memory for the largest one's activations.

        Recordings share it, be they of decodes or of pieces: only one runs at a time.
        """
        started = time.perf_counter()
        self._decoder.reserve_positions(self._max_model_len)  # growing later would leave the recorded tables behind
        for bucket in reversed(self.buckets):
            self._fill(bucket, DecodeNumbers(bucket.size, padding(bucket.size, self.scratch), None, [], []))
            bucket.replay, bucket.logits = self._device.record(partial(self._forward, bucket))
        graphs = len(self.buckets) + self.pieces.capture()
        self._device.read().wait()
        sizes = tuple(bucket.size for bucket in self.buckets), tuple(self.pieces.sizes)
        return GraphCapture(*sizes, graphs, time.perf_counter() - started)

    def _forward(self, bucket: _Bucket) -> torch.Tensor:
        bucket.layout.plan = None  # what an operator derives from the lengths is part of the work
        return self._decoder.forward(
            bucket.token_ids, bucket.positions, bucket.layout, self.kv_cache, self._all_rows[: bucket.size]
        )

    @torch.inference_mode()
    def replay(self, step: DecodeNumbers) -> _Bucket:
        """Replay the step's bucket, whose ``logits`` and ``token_ids`` are the step's until the next."""
        bucket = next(bucket for bucket in self.buckets if bucket.size == step.size)
        self._fill(bucket, step)
        bucket.replay()
        return bucket

    @torch.inference_mode()
    def run(self, numbers: StepNumbers) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As :meth:`Executor.run`; a step that fits a recorded number of tokens is replayed between its attentions.

        The token ids are the step's until the next. All ranks decide alike: from the number of tokens.
        """
        count = len(numbers.token_ids)
        bucket = self.pieces.bucket(count)
        if bucket is None:
            return super().run(numbers)
        self.pieces.fill(bucket, numbers)
        self._insert_pending(bucket.token_ids, numbers.pending_places, numbers.pending_rows)
        layout, rows = self._layout(numbers, bucket.slots[:count]), self._tensor(numbers.logit_rows)
        return self.pieces.replay(bucket, layout, rows), bucket.token_ids[:count], rows

    def _fill(self, bucket: _Bucket, step: DecodeNumbers) -> None:
        """Put a step's numbers into the bucket's buffers on the device."""
        # For operators that look at the host's copy, as those of the CPU do; a recording does not.
        bucket.layout.context_lens_host[:] = step.numbers[3].view(np.int32)[: bucket.size].tolist()
        bucket.numbers.fill(step.numbers)
        if step.changes is not None:
            places, values = (self._device.upload(torch.from_numpy(part)) for part in step.changes)
            self._mirror.view(-1).index_copy_(0, places, values)
        torch.index_select(self._mirror, 0, bucket.table_rows, out=bucket.layout.block_tables)
        self._insert_pending(bucket.token_ids, step.pending_places, step.pending_rows)


def padding(size: int, scratch: int) -> Ints:
    """The numbers of ``size`` rows that decode token 0 in the scratch blocks from ``scratch`` on."""
    numbers = np.zeros((_SECTIONS, size), dtype=np.int64)
    numbers[2] = scratch_slots(scratch, size)
    numbers[3].view(np.int32)[:size] = 1
    numbers[4] = _PADDING_ROW
    return numbers


class GraphRunner(DecoderRunner):
    """A :class:`DecoderRunner` that replays decode-only steps, and others in pieces. It wants ``max_rows``."""

    tables_type = _WatchedTables
    executor_type = GraphExecutor
    _tables: _WatchedTables
    _executor: GraphExecutor

    def capture(self) -> GraphCapture:
        """See :meth:`GraphExecutor.capture`."""
        self._tell(Capture())
        return self._executor.capture()

    @torch.inference_mode()
    def run(self, step: Schedule) -> StepResult:
        """One forward pass over every token of ``step``, replayed as a whole where it only decodes."""
        rows, sampled, prompts = self._logit_rows(step)
        if prompts or any(entry.num_new_tokens != 1 for entry in step.entries):
            return super().run(step)
        numbers = self._decode_numbers(step.entries)
        self._tell(numbers)
        bucket = self._executor.replay(numbers)
        logits, last_tokens = bucket.logits[: len(rows)], None
        whole = rows == list(range(len(rows)))
        index = None if whole else self._executor.index(rows)
        if index is not None:
            logits = bucket.logits.index_select(0, index)
        if self._wants_last_tokens(sampled):
            # The bucket's own are overwritten by the next step.
            last_tokens = bucket.token_ids[: len(rows)].clone() if index is None else bucket.token_ids[index]
        return StepResult(sampled, logits, [], last_tokens, self._done(sampled))

    def _decode_numbers(self, entries: list[ScheduledSequence]) -> DecodeNumbers:
        count = len(entries)
        table_rows = [self._tables.row(entry.sequence) for entry in entries]
        size = next(bucket.size for bucket in self._executor.buckets if bucket.size >= count)
        numbers = padding(size, self._executor.scratch)
        positions = np.array([entry.start for entry in entries], dtype=np.int64)
        numbers[0, :count] = [0 if entry.pending else entry.token_ids[0] for entry in entries]
        numbers[1, :count] = positions
        blocks = self._tables.blocks(table_rows, positions // BLOCK_SIZE)
        numbers[2, :count] = blocks * BLOCK_SIZE + positions % BLOCK_SIZE
        numbers[3].view(np.int32)[:count] = positions + 1
        numbers[4, :count] = table_rows
        pending = [row for row, entry in enumerate(entries) if entry.pending]
        return DecodeNumbers(size, numbers, self._tables.changes(), pending, [table_rows[row] for row in pending])
