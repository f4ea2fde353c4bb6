"""A schedule becomes tensors, one forward pass over all its tokens, and logits for the rows that sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from carousel.engine.block_pool import blocks_for
from carousel.engine.request import Sequence
from carousel.engine.scheduler import Schedule, ScheduledSequence
from carousel_kernels.layout import BLOCK_SIZE, BatchLayout

KVCache = list[tuple[torch.Tensor, torch.Tensor]]


class DecoderLike(Protocol):
    """What the runner needs of a model (``carousel.models.decoder.Decoder``)."""

    device: torch.device

    def allocate_kv_cache(self, num_blocks: int) -> KVCache: ...

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        layout: BatchLayout,
        kv_cache: KVCache,
        logit_rows: torch.Tensor,
    ) -> torch.Tensor: ...


@dataclass(slots=True)
class PromptLogits:
    """Logits [num_new_tokens, V] of a chunk whose request wants prompt logprobs; row i predicts token ``start+i+1``."""

    entry: ScheduledSequence
    logits: torch.Tensor


@dataclass(slots=True)
class StepResult:
    """``logits`` fp32 [R, V]: one row for each of the R ``sampled`` sequences, in that order."""

    sampled: list[Sequence]
    logits: torch.Tensor
    prompts: list[PromptLogits]


class Runner(Protocol):
    """Executes schedules. The engine thread alone calls it."""

    def run(self, step: Schedule) -> StepResult: ...


class _BlockTables:
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
            self._held[sequence.order] = (row, len(table))
        return row

    def gather(self, rows: list[int], max_blocks: int) -> np.ndarray:
        return self._rows[rows, :max_blocks]

    def forget(self, sequence: Sequence) -> None:
        held = self._held.pop(sequence.order, None)
        if held is not None:
            self._rows[held[0]] = 0
            self._free.append(held[0])


class DecoderRunner:
    """Runs a decoder eagerly on its device.

    Args:
        decoder: the model.
        num_blocks: size of the KV pool, in blocks.
        max_sequences: most sequences that may hold blocks at once.
        max_model_len: longest context, in tokens.
    """

    def __init__(self, decoder: DecoderLike, num_blocks: int, max_sequences: int, max_model_len: int) -> None:
        self._decoder = decoder
        self._kv_cache = decoder.allocate_kv_cache(num_blocks)
        self._tables = _BlockTables(max_sequences, blocks_for(max_model_len))

    def run(self, step: Schedule) -> StepResult:
        """One forward pass over every token of ``step``."""
        device = self._decoder.device
        token_ids, positions, layout = self._flatten(step, device)
        rows, sampled, wanted = self._logit_rows(step)
        with torch.inference_mode():
            logits = self._decoder.forward(
                token_ids, positions, layout, self._kv_cache, torch.tensor(rows, dtype=torch.int64, device=device)
            )
        prompts, first = [], len(sampled)
        for entry in wanted:
            prompts.append(PromptLogits(entry, logits[first : first + entry.num_new_tokens]))
            first += entry.num_new_tokens
        return StepResult(sampled, logits[: len(sampled)], prompts)

    def forget(self, sequence: Sequence) -> None:
        """The sequence's block table is void: it was preempted or has ended."""
        self._tables.forget(sequence)

    def _flatten(self, step: Schedule, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, BatchLayout]:
        entries = step.entries
        token_ids: list[int] = []
        rows: list[int] = []
        for entry in entries:
            token_ids += entry.token_ids
            rows.append(self._tables.row(entry.sequence))
        query_lens = [entry.num_new_tokens for entry in entries]
        context_lens = [entry.end for entry in entries]
        lengths = np.array(query_lens, dtype=np.int64)
        query_start = np.zeros(len(entries) + 1, dtype=np.int64)
        np.cumsum(lengths, out=query_start[1:])
        # Position of flat row t in sequence s: start[s] + (t - query_start[s]).
        starts = np.array([entry.start for entry in entries], dtype=np.int64)
        positions = np.arange(len(token_ids), dtype=np.int64) + np.repeat(starts - query_start[:-1], lengths)
        tables = self._tables.gather(rows, blocks_for(max(context_lens)))
        blocks = tables[np.repeat(np.arange(len(entries)), lengths), positions // BLOCK_SIZE].astype(np.int64)
        slots = blocks * BLOCK_SIZE + positions % BLOCK_SIZE

        def tensor(values: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(values).to(device, non_blocking=True)

        layout = BatchLayout(
            query_start=tensor(query_start.astype(np.int32)),
            context_lens=tensor(np.array(context_lens, dtype=np.int32)),
            block_tables=tensor(tables),
            slots=tensor(slots),
            query_lens_host=query_lens,
            context_lens_host=context_lens,
            num_decodes=sum(1 for length in query_lens if length == 1),
        )
        return tensor(np.array(token_ids, dtype=np.int64)), tensor(positions), layout

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
