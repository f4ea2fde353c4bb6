"""Random batches over a paged cache, for the tests of attention."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass

import torch

import carousel_kernels as ck
from carousel_kernels import BLOCK_SIZE, BatchLayout

CPU_BACKENDS = [
    name for name in ck.available_backends() if name != "triton" or os.environ.get("TRITON_INTERPRET") == "1"
]
"""Backends that take CPU tensors: Triton's does so in its interpreter."""


@dataclass
class Batch:
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    layout: BatchLayout
    keys: list[torch.Tensor]
    """Per sequence, the dense float keys [context, Hkv, D] that lie scattered over the cache."""
    values: list[torch.Tensor]


def filled_cache(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A cache full of NaN."""
    if dtype == torch.float8_e4m3fn:
        return torch.full(shape, 0x7F, dtype=torch.uint8).view(dtype)
    return torch.full(shape, float("nan"), dtype=dtype)


def make_batch(
    sequences: list[tuple[int, int]],
    *,
    num_heads: int = 6,
    num_kv_heads: int = 2,
    dim: int = 16,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    seed: int = 0,
) -> Batch:
    """A batch of sequences (tokens computed before, new tokens), decodes first.

    Blocks are scattered at random. Whatever no sequence owns, block 0 and the ends of last blocks included, holds NaN,
    so that a backend which reads it cannot go unnoticed. The queries are a view into a wider tensor, as a fused
    projection makes them. The cache has the queries' ``dtype`` unless it is given one.
    """
    cache_dtype = cache_dtype or dtype
    sequences = sorted(sequences, key=lambda s: s[1] != 1)
    torch.manual_seed(seed)
    contexts = [computed + new for computed, new in sequences]
    counts = [-(-c // BLOCK_SIZE) for c in contexts]
    ids = list(range(1, sum(counts) + 4))
    random.Random(seed).shuffle(ids)
    k_cache = filled_cache((len(ids) + 1, BLOCK_SIZE, num_kv_heads, dim), cache_dtype)
    v_cache = k_cache.clone()
    k_rows, v_rows = (cache.view(torch.uint8).view(-1, num_kv_heads, dim * cache.itemsize)
                      for cache in (k_cache, v_cache))  # fmt: skip
    tables = torch.zeros(len(sequences), max(counts) + 1, dtype=torch.int32)
    slots: list[int] = []
    keys, values = [], []
    for s, (computed, _) in enumerate(sequences):
        mine = [ids.pop() for _ in range(counts[s])]
        tables[s, : len(mine)] = torch.tensor(mine)
        own = [mine[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(contexts[s])]
        new_keys, new_values = torch.randn(2, contexts[s], num_kv_heads, dim).to(cache_dtype)
        k_rows[own], v_rows[own] = new_keys.view(torch.uint8), new_values.view(torch.uint8)
        keys.append(new_keys.float())
        values.append(new_values.float())
        slots += own[computed:]
    new_tokens = [new for _, new in sequences]
    layout = BatchLayout(
        query_start=torch.tensor([0, *new_tokens]).cumsum(0).to(torch.int32),
        context_lens=torch.tensor(contexts, dtype=torch.int32),
        block_tables=tables,
        slots=torch.tensor(slots, dtype=torch.int64),
        query_lens_host=new_tokens,
        context_lens_host=contexts,
        num_decodes=sum(new == 1 for new in new_tokens),
    )
    fused = torch.randn(len(slots), (num_heads + 2 * num_kv_heads) * dim).to(dtype)
    q = fused[:, : num_heads * dim].view(-1, num_heads, dim)
    return Batch(q, k_cache, v_cache, layout, keys, values)
