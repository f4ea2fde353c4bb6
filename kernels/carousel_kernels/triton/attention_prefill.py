"""Causal attention of ragged chunks of new tokens to their sequences' paged keys and values, cached prefixes included.

One launch for all chunks of a step, without padding. A program takes a tile of consecutive tokens of one sequence with
all query heads of a KV head's group, so that keys and values are read once per group. Which tile is a program's own it
finds on the device, by bisection over ``query_start``: sequence s (0-based) has room for its tiles from
``query_start[s] // tile + s`` on, so the grid is bounded by tokens / tile + sequences and needs no host copy of the
lengths. The last tiles, which see most keys, run first.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .attention_decode import LOWEST, attend, scales, with_sink
from .common import narrowed

__all__ = ["CHANGING", "prefill_kernel", "query_tile", "sequence_of"]


CHANGING = ["num_sequences", "first_sequence", "window", "stride_table"]
"""Numbers that change from step to step. Triton compiles a kernel anew for numbers that are 1 or that 16 divides, and
nothing is to be compiled while serving. (So no pointer into the middle of a tensor is passed either.)"""


@triton.jit
def sequence_of(tile, query_start, first_sequence, num_sequences, BLOCK_Q: tl.constexpr):
    """The last sequence, counted from ``first_sequence``, whose room for tiles begins at or before ``tile``."""
    query_start += first_sequence
    first_row = tl.load(query_start)
    low = 0
    high = num_sequences - 1
    while low < high:
        middle = (low + high + 1) // 2
        begins = (tl.load(query_start + middle) - first_row) // BLOCK_Q + middle
        fits = begins <= tile
        low = tl.where(fits, middle, low)
        high = tl.where(fits, high, middle - 1)
    return low, first_row


@triton.jit
def query_tile(
    q, row, first, new, stride_qt, stride_qh, GROUP: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """A program's queries: BLOCK_M // HEADS tokens, from number ``first`` of a sequence that has ``new`` from row
    ``row`` on, for HEADS query heads of one KV head, which the grid's second dimension says.

    Returns them [BLOCK_M, BLOCK_D] (as float32 with WIDEN), the KV head; of each row its head, its token's number among
    the new ones and its place in q; the columns; and which rows, and which of their elements, there are.
    """
    parts: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    kv_head = tl.program_id(1) // parts
    rows = tl.arange(0, BLOCK_M)
    tokens = first + rows // HEADS
    in_group = tl.program_id(1) % parts * HEADS + rows % HEADS
    heads = kv_head * GROUP + in_group
    valid = (rows < BLOCK_M // HEADS * HEADS) & (tokens < new) & (in_group < GROUP)
    dims = tl.arange(0, BLOCK_D)
    mask = valid[:, None] & (dims < DIM)[None, :]
    flat = (row + tokens).to(tl.int64)
    query = tl.load(q + flat[:, None] * stride_qt + heads[:, None] * stride_qh + dims[None, :], mask=mask, other=0)
    if WIDEN:
        query = query.to(tl.float32)
    return query, kv_head, heads, tokens, flat, dims, valid, mask


@triton.jit(do_not_specialize=CHANGING)
def prefill_kernel(
    q, k_cache, v_cache, out, sinks, query_start, context_lens, block_tables, num_sequences, first_sequence,
    scale, softcap, k_scale, v_scale, window,
    stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh, stride_table,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, FP8: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
):  # fmt: skip
    """BLOCK_M // HEADS tokens of one sequence for HEADS query heads of one KV head.

    Grid: (tokens // (BLOCK_M // HEADS) + sequences, Hkv * cdiv(GROUP, HEADS)), of the tokens of ``num_sequences``
    sequences from ``first_sequence`` on. q, out [T, Hq, D], out contiguous. Tiles of keys that all rows see whole skip
    the masks.
    """
    BLOCK_Q: tl.constexpr = BLOCK_M // HEADS
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    sequence, first_row = sequence_of(tile, query_start, first_sequence, num_sequences, BLOCK_Q)
    row = tl.load(query_start + first_sequence + sequence)
    new = tl.load(query_start + first_sequence + sequence + 1) - row
    first = (tile - (row - first_row) // BLOCK_Q - sequence) * BLOCK_Q
    if first >= new:
        return
    sequence = (first_sequence + sequence).to(tl.int64)
    context = tl.load(context_lens + sequence)
    query, kv_head, heads, tokens, flat, dims, valid, mask = query_tile(
        q, row, first, new, stride_qt, stride_qh, GROUP, HEADS, DIM, BLOCK_M, BLOCK_D,
        FP8 == 0 and q.dtype != k_cache.dtype,
    )  # fmt: skip
    scale, softcap, out_scale = scales(scale, softcap, k_scale, v_scale, FP8, SOFTCAP)
    position = context - new + tokens
    earliest = context - new + first
    table = block_tables + sequence * stride_table
    k_head = k_cache + kv_head * stride_kh
    v_head = v_cache + kv_head * stride_vh
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    row_max = tl.full((BLOCK_M,), LOWEST, tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    begin = 0
    if WINDOW:
        begin = tl.maximum(earliest - window + 1, 0) // BLOCK_N * BLOCK_N
    if not WINDOW:
        seen_by_all = (earliest + 1) // BLOCK_N * BLOCK_N
        acc, row_max, row_sum = attend(
            query, acc, row_max, row_sum, position, k_head, v_head, table, begin, seen_by_all, context, window,
            scale, softcap, stride_kb, stride_kt, stride_vb, stride_vt,
            DIM, BLOCK_D, BLOCK_N, FP8, SOFTCAP, False, False, False,
        )  # fmt: skip
        begin = seen_by_all
    end = tl.minimum(earliest + BLOCK_Q, context)
    acc, row_max, row_sum = attend(
        query, acc, row_max, row_sum, position, k_head, v_head, table, begin, end, context, window,
        scale, softcap, stride_kb, stride_kt, stride_vb, stride_vt,
        DIM, BLOCK_D, BLOCK_N, FP8, SOFTCAP, True, WINDOW, True,
    )  # fmt: skip
    if SINKS:
        row_sum, shrink = with_sink(row_max, row_sum, sinks, heads, valid)
        acc = acc * shrink[:, None]
    result = acc * (out_scale / tl.where(valid, row_sum, 1))[:, None]
    rows_out = (flat * NUM_HEADS + heads)[:, None] * DIM + dims[None, :]
    tl.store(out + rows_out, narrowed(result, out.dtype.element_ty), mask=mask)
