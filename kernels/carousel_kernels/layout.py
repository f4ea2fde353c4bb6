"""How a step's tokens lie in the batch and in the KV cache: the argument that all attention operators share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

BLOCK_SIZE = 16
"""Tokens per KV block. One size everywhere: it is the prefix cache's grain and divides every kernel's KV tile."""


@dataclass(slots=True)
class BatchLayout:
    """S sequences, T new tokens, flattened without padding; sequence s owns rows ``query_start[s]:query_start[s+1]``.

    The new tokens of a sequence are its last ones: row i of sequence s (0-based) stands at position
    ``context_lens[s] - query_lens[s] + i`` and sees all positions up to and including its own. Sequences with one new
    token (decodes) come first, so that backends can split the batch without looking at the device.

    Shapes and dtypes:
        query_start: int32 [S + 1], cumulative.
        context_lens: int32 [S], tokens in the KV cache once this step's are written.
        block_tables: int32 [S, max_blocks], block ids; entries past a sequence's end are 0 and never read.
        slots: int64 [T], ``block * BLOCK_SIZE + offset`` where each new token's K and V go. The triton backend takes a
            negative slot, and a decode of context length 0, as padding, which CUDA graphs need.
        query_lens_host, context_lens_host: the same lengths as Python ints, so that no backend must synchronise.
        num_decodes: how many leading sequences have exactly one new token.
        deterministic: a token's attention must not depend, not in one bit, on what else is in the batch, nor on which
            of the tokens before it are computed with it. Only the triton backend takes notice; it otherwise splits a
            sequence as the batch asks for.
        plan: what a backend derived from this layout, kept so that it is derived once per step and not once per layer.
    """

    query_start: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    slots: torch.Tensor
    query_lens_host: list[int]
    context_lens_host: list[int]
    num_decodes: int
    deterministic: bool = False
    plan: Any = field(default=None, compare=False, repr=False)

    @property
    def num_sequences(self) -> int:
        return len(self.query_lens_host)

    @property
    def num_tokens(self) -> int:
        return int(self.slots.shape[0])
