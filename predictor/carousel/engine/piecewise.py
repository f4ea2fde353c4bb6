"""Steps with prompts, of few tokens: what lies between two attentions is replayed, the attentions are launched.

Such a step takes a device less time than the host needs to launch a hundred operators and more. It cannot be recorded
as a whole: the grid of its attention follows from how its tokens lie in the batch. All else is a function of the token
alone. So for a few numbers of tokens the work from one attention to the next is recorded, a graph per layer: from the
output projection of the layer before to the queries, with the write of keys and values. Past the last attention only
some rows are wanted, how many differs, and so that is launched, too.

Graphs of a bucket share buffers, and all buckets take them from the largest one's: queries, what attention made of
them, the residual stream. Rows between a step's tokens and its bucket's size compute token 0, write to scratch blocks
and are seen by no attention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from carousel.engine.buckets import NumberTable, bucket_sizes, scratch_slots
from carousel.engine.device import Device
from carousel.engine.runner import DecoderLike, KVCache, StepNumbers
from carousel_kernels.layout import BatchLayout

_SECTIONS = 3  # of a bucket's numbers: token ids, positions, slots


def token_buckets(most: int) -> list[int]:
    """Numbers of tokens that are recorded, up to ``most``: up to 64 each twice the one before, then at most 64 or a
    quarter apart. None for 0.

    A step that weights decide takes as long for its bucket's tokens as for its own; few buckets start fast.
    """
    return bucket_sizes(most, first=(16, 32), step=64) if most else []


@dataclass(slots=True, eq=False)
class PieceBucket:
    """The recorded pieces for ``size`` tokens, and their buffers.

    ``queries``, ``attended`` [size, Hq, D] and ``residual`` [size, H] are of the decoder's dtype.
    """

    size: int
    numbers: NumberTable
    queries: torch.Tensor
    attended: torch.Tensor
    residual: torch.Tensor
    replays: list[Callable[[], None]] = field(default_factory=list)

    @property
    def token_ids(self) -> torch.Tensor:
        """int64 [size]."""
        return self.numbers.sections[0]

    @property
    def positions(self) -> torch.Tensor:
        """int64 [size]."""
        return self.numbers.sections[1]

    @property
    def slots(self) -> torch.Tensor:
        """int64 [size]."""
        return self.numbers.sections[2]


class PiecewiseGraphs:
    """The buckets of a decoder; none before :meth:`capture`.

    Args:
        decoder: the model, or a rank's part.
        kv_cache: as its ``forward`` takes it.
        device: where it is.
        sizes: numbers of tokens, ascending.
        scratch: the first scratch block of ``kv_cache``.
    """

    def __init__(self, decoder: DecoderLike, kv_cache: KVCache, device: Device, sizes: list[int], scratch: int) -> None:
        self._decoder = decoder
        self._kv_cache = kv_cache
        self._device = device
        self._scratch = scratch
        self.sizes = sizes
        self._buckets: list[PieceBucket] = []

    def capture(self) -> int:
        """Record every bucket, the largest first. Returns the number of graphs."""
        buckets: list[PieceBucket] = []
        for size in reversed(self.sizes):
            bucket = self._make_bucket(size, buckets[0] if buckets else None)
            for index in range(self._decoder.num_layers):
                replay, _ = self._device.record(partial(self._piece, bucket, index))
                bucket.replays.append(replay)
            buckets.append(bucket)
        self._buckets = buckets[::-1]
        return sum(len(bucket.replays) for bucket in buckets)

    def _make_bucket(self, size: int, largest: PieceBucket | None) -> PieceBucket:
        numbers = NumberTable(self._device, self._decoder.device, _SECTIONS, size)
        numbers.fill(self._padding(size))
        if largest is not None:
            whole = largest.queries, largest.attended, largest.residual
            queries, attended, residual = (buffer[:size] for buffer in whole)
            return PieceBucket(size, numbers, queries, attended, residual)
        # The shapes are the decoder's own affair: a first run tells.
        queries, residual = self._decoder.before_attention(
            0, numbers.sections[0], None, numbers.sections[1], numbers.sections[2], self._kv_cache
        )
        # Queries are a view of a layer's fused product: the buffers are contiguous.
        made = queries.new_zeros(queries.shape), queries.new_zeros(queries.shape)
        return PieceBucket(size, numbers, *made, residual.new_zeros(residual.shape))

    def _padding(self, size: int) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
        numbers = np.zeros((_SECTIONS, size), dtype=np.int64)
        numbers[2] = scratch_slots(self._scratch, size)
        return numbers

    def _piece(self, bucket: PieceBucket, index: int) -> torch.Tensor:
        """From the attention before number ``index``, or the token ids, to its queries."""
        x, residual = (bucket.attended, bucket.residual) if index else (bucket.token_ids, None)
        queries, residual = self._decoder.before_attention(
            index, x, residual, bucket.positions, bucket.slots, self._kv_cache
        )
        # What the next graph reads lies outside of the memory that recordings share.
        bucket.queries.copy_(queries)
        bucket.residual.copy_(residual)
        return bucket.queries

    def bucket(self, num_tokens: int) -> PieceBucket | None:
        """The smallest one that has room for a step; None where none has, or none is recorded."""
        return next((bucket for bucket in self._buckets if bucket.size >= num_tokens), None)

    def fill(self, bucket: PieceBucket, step: StepNumbers) -> None:
        """Put a step's numbers into the bucket's table on the device."""
        numbers, count = self._padding(bucket.size), len(step.token_ids)
        numbers[:, :count] = step.token_ids, step.positions, step.slots
        bucket.numbers.fill(numbers)

    def replay(self, bucket: PieceBucket, layout: BatchLayout, logit_rows: torch.Tensor) -> torch.Tensor:
        """The forward pass of the step in ``bucket``, whose tokens lie as ``layout`` says: logits float32 [R, V]."""
        count, decoder = layout.num_tokens, self._decoder
        queries, attended = bucket.queries[:count], bucket.attended[:count]
        for index, replay in enumerate(bucket.replays):
            replay()
            decoder.attention(index, queries, layout, self._kv_cache, attended)
        return decoder.after_attention(attended, bucket.residual[:count], logit_rows)
