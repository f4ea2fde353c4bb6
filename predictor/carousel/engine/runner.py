"""A schedule becomes numbers, these become tensors, one forward pass over all its tokens, and logits for some rows.

The numbers are plain data: what :class:`DecoderRunner` makes of a schedule, an :class:`Executor` runs, in this process
and in those of further ranks alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import torch

from carousel.engine.block_pool import blocks_for
from carousel.engine.device import Device, Readback
from carousel.engine.request import Sequence
from carousel.engine.scheduler import Schedule, ScheduledSequence
from carousel_kernels.layout import BLOCK_SIZE, BatchLayout

KVCache = list[tuple[torch.Tensor, torch.Tensor]]
Ints = np.ndarray[Any, np.dtype[Any]]


class Ranks(Protocol):
    """Of ``carousel.models.parallel.Ranks``."""

    def share(self, x: torch.Tensor) -> None: ...


class DecoderLike(Protocol):
    """What the runner needs of a model (``carousel.models.decoder.Decoder``)."""

    device: torch.device

    @property
    def ranks(self) -> Ranks: ...

    @property
    def num_layers(self) -> int: ...

    def allocate_kv_cache(self, num_blocks: int) -> KVCache: ...

    def reserve_positions(self, length: int) -> None: ...

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        layout: BatchLayout,
        kv_cache: KVCache,
        logit_rows: torch.Tensor,
    ) -> torch.Tensor: ...

    def before_attention(
        self,
        index: int,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        slots: torch.Tensor,
        kv_cache: KVCache,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def attention(
        self, index: int, queries: torch.Tensor, layout: BatchLayout, kv_cache: KVCache, out: torch.Tensor
    ) -> None: ...

    def after_attention(self, x: torch.Tensor, residual: torch.Tensor, logit_rows: torch.Tensor) -> torch.Tensor: ...


class Followers(Protocol):
    """The other ranks of a decoder that is split among several: what the first one does, they do."""

    def tell(self, message: object) -> None:
        """Hand a message of plain data to every one of them, which it acts on in order; does not wait.

        Raises:
            RankLost: one of them has ended.
        """


@dataclass(slots=True)
class NewPool:
    """Message: make an executor, with a KV pool, in place of the one before.

    ``max_rows``: of recorded decodes; ``max_piece_tokens``: of other steps that are recorded in pieces.
    """

    num_blocks: int
    max_sequences: int
    max_model_len: int
    deterministic: bool
    max_rows: int | None = None
    max_piece_tokens: int = 0


@dataclass(slots=True)
class StepNumbers:
    """Message: a step, flattened: T tokens of S sequences, R rows of which logits are wanted.

    ``pending_places`` are flat rows whose token only the device knows, as the last one fed to ``pending_rows``.
    """

    token_ids: Ints  # int64 [T]
    positions: Ints  # int64 [T]
    slots: Ints  # int64 [T]
    query_start: Ints  # int32 [S + 1]
    context_lens: Ints  # int32 [S]
    block_tables: Ints  # int32 [S, W]
    logit_rows: Ints  # int64 [R]
    num_decodes: int
    pending_places: list[int]
    pending_rows: list[int]


@dataclass(slots=True)
class Feed:
    """Message: what was sampled for these rows of the block tables follows, from the first rank's device."""

    rows: list[int]


@dataclass(slots=True)
class PromptLogits:
    """Logits [num_new_tokens, V] of a chunk whose request wants prompt logprobs; row i predicts token ``start+i+1``."""

    entry: ScheduledSequence
    logits: torch.Tensor


@dataclass(slots=True)
class StepResult:
    """``logits`` fp32 [R, V]: one row for each of the R ``sampled`` sequences, in that order. The device may still be
    computing them. ``last_tokens`` int64 [R]: their last tokens, where the sampler needs to know a pending one.
    ``done``: what to wait for where nothing is sampled, so that the host is never more than a step ahead."""

    sampled: list[Sequence]
    logits: torch.Tensor
    prompts: list[PromptLogits]
    last_tokens: torch.Tensor | None = None
    done: Readback | None = None


class Runner(Protocol):
    """Executes schedules in the order of the calls. The engine thread alone calls it."""

    def run(self, step: Schedule) -> StepResult:
        """Start a step; need not wait for it. Pending tokens are those of the last :meth:`feed` of their sequence."""

    def feed(self, sequences: list[Sequence], tokens: torch.Tensor) -> None:
        """Remember on the device what was sampled: ``tokens`` int64 [R], negative where a sequence has failed."""


class BlockTables:
    """The running sequences' block tables as rows of one array, so that a step copies only what changed."""

    def __init__(self, max_sequences: int, max_blocks: int) -> None:
        self._rows = np.zeros((max_sequences, max_blocks), dtype=np.int32)
        self._free = list(range(max_sequences - 1, -1, -1))
        self._held: dict[int, tuple[int, int]] = {}  # sequence.order -> (row, blocks copied)

    def row(self, sequence: Sequence) -> int:
        row, copied = self._held.get(sequence.order) or (self._free.pop(), 0)
        table = sequence.block_table
        if copied < len(table):
            self._rows[row, copied : len(table)] = table[copied:]
            self.written(row, copied, len(table))
            self._held[sequence.order] = (row, len(table))
        return row

    def written(self, row: int, first: int, last: int) -> None:
        """Told of what has changed: ``[row, first:last]``."""

    def blocks(self, rows: list[int], columns: np.ndarray) -> np.ndarray:
        return self._rows[rows, columns].astype(np.int64)

    def gather(self, rows: list[int], max_blocks: int) -> np.ndarray:
        return self._rows[rows, :max_blocks]

    def forget(self, sequence: Sequence) -> None:
        held = self._held.pop(sequence.order, None)
        if held is not None:
            self._rows[held[0]] = 0
            self._free.append(held[0])


class Executor:
    """Runs steps on a decoder, launching every operator of every step, and keeps what lasts from one to the next.

    Args:
        decoder: the model, or a rank's part.
        pool: sizes.
        device: where it is.
    """

    def __init__(self, decoder: DecoderLike, pool: NewPool, device: Device) -> None:
        self._device = device
        self._decoder = decoder
        self._deterministic = pool.deterministic
        self._last_tokens = torch.zeros(pool.max_sequences, dtype=torch.int64, device=decoder.device)
        self.kv_cache = decoder.allocate_kv_cache(pool.num_blocks)

    @torch.inference_mode()
    def run(self, numbers: StepNumbers) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """One forward pass: logits float32 [R, V], token ids [T] and ``logit_rows`` on the device."""
        layout = self._layout(numbers, self._tensor(numbers.slots))
        ids, positions, rows = map(self._tensor, (numbers.token_ids, numbers.positions, numbers.logit_rows))
        self._insert_pending(ids, numbers.pending_places, numbers.pending_rows)
        return self._decoder.forward(ids, positions, layout, self.kv_cache, rows), ids, rows

    def _tensor(self, values: Ints) -> torch.Tensor:
        return self._device.upload(torch.from_numpy(values))

    def _layout(self, numbers: StepNumbers, slots: torch.Tensor) -> BatchLayout:
        return BatchLayout(
            query_start=self._tensor(numbers.query_start),
            context_lens=self._tensor(numbers.context_lens),
            block_tables=self._tensor(numbers.block_tables),
            slots=slots,
            query_lens_host=np.diff(numbers.query_start).tolist(),
            context_lens_host=numbers.context_lens.tolist(),
            num_decodes=numbers.num_decodes,
            deterministic=self._deterministic,
        )

    @torch.inference_mode()
    def feed(self, rows: list[int], tokens: torch.Tensor | None = None) -> None:
        """Remember ``tokens`` int64 [R] under rows of the block tables; the first rank's, where this is another."""
        tokens = torch.zeros(len(rows), dtype=torch.int64, device=self._decoder.device) if tokens is None else tokens
        self._decoder.ranks.share(tokens)
        self._last_tokens.index_copy_(0, self.index(rows), tokens)

    def index(self, rows: list[int]) -> torch.Tensor:
        """Row numbers, on the device."""
        return self._device.upload(torch.tensor(rows, dtype=torch.int64))

    def _insert_pending(self, token_ids: torch.Tensor, places: list[int], table_rows: list[int]) -> None:
        """Put the tokens that only the device knows where they belong."""
        if places:
            fed = self._last_tokens.index_select(0, self.index(table_rows))
            token_ids.index_copy_(0, self.index(places), fed)


class DecoderRunner:
    """Runs a decoder on its device.

    Args:
        decoder: the model.
        num_blocks: size of the KV pool, in blocks.
        max_sequences: most sequences that may hold blocks at once.
        max_model_len: longest context, in tokens.
        max_rows: most sequences of a step, for a runner that replays its decodes.
        max_piece_tokens: most tokens of a step with prompts that such a runner replays in pieces; 0: none.
        device: None: the decoder's own.
        deterministic: attention of a token does not depend on what else is in the step (``BatchLayout``).
        followers: the ranks that run the rest of the decoder; None: it is whole.
    """

    tables_type: ClassVar[type[BlockTables]] = BlockTables
    executor_type: ClassVar[type[Executor]] = Executor

    def __init__(
        self,
        decoder: DecoderLike,
        num_blocks: int,
        max_sequences: int,
        max_model_len: int,
        *,
        max_rows: int | None = None,
        max_piece_tokens: int = 0,
        device: Device | None = None,
        deterministic: bool = False,
        followers: Followers | None = None,
    ) -> None:
        self._device = device or Device.of(decoder.device)
        self._followers = followers
        self._tables = self.tables_type(max_sequences, blocks_for(max_model_len))
        pool = NewPool(num_blocks, max_sequences, max_model_len, deterministic, max_rows, max_piece_tokens)
        self._tell(pool)
        self._executor = self.executor_type(decoder, pool, self._device)

    def _tell(self, message: object) -> None:
        if self._followers is not None:
            self._followers.tell(message)

    @torch.inference_mode()
    def run(self, step: Schedule) -> StepResult:
        """One forward pass over every token of ``step``."""
        rows, sampled, wanted = self._logit_rows(step)
        numbers = self._flatten(step, rows)
        self._tell(numbers)
        logits, token_ids, logit_rows = self._executor.run(numbers)
        last_tokens = None
        if self._wants_last_tokens(sampled):
            last_tokens = token_ids.index_select(0, logit_rows[: len(sampled)])
        prompts, first = [], len(sampled)
        for entry in wanted:
            prompts.append(PromptLogits(entry, logits[first : first + entry.num_new_tokens]))
            first += entry.num_new_tokens
        return StepResult(sampled, logits[: len(sampled)], prompts, last_tokens, self._done(sampled))

    @staticmethod
    def _wants_last_tokens(sampled: list[Sequence]) -> bool:
        return any(sequence.num_pending_tokens and sequence.sampler.penalised for sequence in sampled)

    def _done(self, sampled: list[Sequence]) -> Readback | None:
        return None if sampled else self._device.read()

    def feed(self, sequences: list[Sequence], tokens: torch.Tensor) -> None:
        """See :meth:`Runner.feed`. A failed sequence's row may run once more: its token must be one to look up."""
        rows = [self._tables.row(sequence) for sequence in sequences]
        self._tell(Feed(rows))
        self._executor.feed(rows, tokens.clamp_min(0))

    def forget(self, sequence: Sequence) -> None:
        """The sequence's block table is void: it was preempted or has ended."""
        self._tables.forget(sequence)

    def _flatten(self, step: Schedule, logit_rows: list[int]) -> StepNumbers:
        entries = step.entries
        token_ids: list[int] = []
        rows: list[int] = []
        for entry in entries:
            token_ids += entry.token_ids
            rows.append(self._tables.row(entry.sequence))
        lengths = np.array([entry.num_new_tokens for entry in entries], dtype=np.int64)
        context_lens = np.array([entry.end for entry in entries], dtype=np.int32)
        query_start = np.zeros(len(entries) + 1, dtype=np.int64)
        np.cumsum(lengths, out=query_start[1:])
        # Position of flat row t in sequence s: start[s] + (t - query_start[s]).
        starts = np.array([entry.start for entry in entries], dtype=np.int64)
        positions = np.arange(len(token_ids), dtype=np.int64) + np.repeat(starts - query_start[:-1], lengths)
        tables = self._tables.gather(rows, blocks_for(int(context_lens.max())))
        blocks = tables[np.repeat(np.arange(len(entries)), lengths), positions // BLOCK_SIZE].astype(np.int64)
        pending = [i for i, entry in enumerate(entries) if entry.pending]
        return StepNumbers(
            token_ids=np.array(token_ids, dtype=np.int64),
            positions=positions,
            slots=blocks * BLOCK_SIZE + positions % BLOCK_SIZE,
            query_start=query_start.astype(np.int32),
            context_lens=context_lens,
            block_tables=tables,
            logit_rows=np.array(logit_rows, dtype=np.int64),
            num_decodes=int((lengths == 1).sum()),
            pending_places=[int(query_start[i + 1]) - 1 for i in pending],
            pending_rows=[rows[i] for i in pending],
        )

    @staticmethod
    def _logit_rows(step: Schedule) -> tuple[list[int], list[Sequence], list[ScheduledSequence]]:
        """Flat rows whose logits are needed: first those that sample, then whole chunks that owe prompt logprobs."""
        rows: list[int] = []
        prompt_rows: list[int] = []
        sampled: list[Sequence] = []
        wanted: list[ScheduledSequence] = []
        first = 0
        for entry in step.entries:
            sequence = entry.sequence
            if entry.samples:
                rows.append(first + entry.num_new_tokens - 1)
                sampled.append(sequence)
            if sequence.request.sampling.prompt_logprobs is not None and entry.start < sequence.num_prompt_tokens - 1:
                prompt_rows += range(first, first + entry.num_new_tokens)
                wanted.append(entry)
            first += entry.num_new_tokens
        return rows + prompt_rows, sampled, wanted
