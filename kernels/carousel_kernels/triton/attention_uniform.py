"""Attention whose result for a token does not depend, not in one bit, on what else is computed: ``--deterministic``.

Sums of floats depend on their order. Here the order is the same for every token, be it decoded or part of a chunk,
wherever chunks begin and whatever else is in the batch: keys are cut into splits of SPLIT tokens that begin at
multiples of that (a fixed split size, as SGLang's batch-invariant mode has it), each is reduced by itself in tiles that
begin at multiples of BLOCK_N, and the splits' results are folded in their order.

One kernel computes both kinds of tokens, with the same instructions: a program of a chunk walks over all splits, one of
a decode takes a single split, and a second kernel folds what the programs of a decode have left. Where two kernels must
agree, what is rounded when is written out (``tl.fma``) and not left to the compiler.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .attention_decode import LOWEST, attend, scales, with_sink
from .attention_prefill import CHANGING, query_tile, sequence_of
from .common import cdiv, narrowed

__all__ = ["fold_kernel", "uniform_kernel"]


@triton.jit
def _shares(best, more):
    """Two maxima's maximum, and by what sums below either are multiplied when that takes their place."""
    highest = tl.maximum(best, more)
    return highest, tl.exp2(best - highest), tl.exp2(more - highest)


@triton.jit(do_not_specialize=[*CHANGING, "apart"])
def uniform_kernel(
    q, k_cache, v_cache, out, partial, partial_sums, sinks, query_start, context_lens, block_tables, num_sequences,
    first_sequence, apart, scale, softcap, k_scale, v_scale, window,
    stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh, stride_table,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, FP8: tl.constexpr, SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """As ``prefill_kernel``; with ``apart`` the sequences are decodes, and a third dimension of the grid is the splits.

    A decode's program leaves its sums in partial float32 [S, splits, Hq, D], and their maximum and sum of weights in
    partial_sums float32 [S, splits, Hq, 2]; nothing if the split is past the sequence's end or before its window.
    """
    BLOCK_Q: tl.constexpr = BLOCK_M // HEADS
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    if apart != 0:
        sequence = tile
        first = 0
    else:
        sequence, first_row = sequence_of(tile, query_start, first_sequence, num_sequences, BLOCK_Q)
        first = (tile - (tl.load(query_start + first_sequence + sequence) - first_row) // BLOCK_Q - sequence) * BLOCK_Q
    row = tl.load(query_start + first_sequence + sequence)
    new = tl.load(query_start + first_sequence + sequence + 1) - row
    if first >= new:
        return
    sequence = (first_sequence + sequence).to(tl.int64)
    context = tl.load(context_lens + sequence)
    earliest = context - new + first
    end = tl.minimum(earliest + BLOCK_Q, context)
    begin = tl.maximum(earliest - window + 1, 0) // BLOCK_N * BLOCK_N if WINDOW else 0
    split = begin // SPLIT
    last = cdiv(end, SPLIT)
    if apart != 0:
        split = tl.maximum(split, tl.program_id(2))
        last = tl.minimum(last, tl.program_id(2) + 1)
    if split >= last:  # a decode's program that has nothing to do
        return
    query, kv_head, heads, tokens, flat, dims, valid, mask = query_tile(
        q, row, first, new, stride_qt, stride_qh, GROUP, HEADS, DIM, BLOCK_M, BLOCK_D,
        FP8 == 0 and q.dtype != k_cache.dtype,
    )  # fmt: skip
    scale, softcap, out_scale = scales(scale, softcap, k_scale, v_scale, FP8, SOFTCAP)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    best = tl.full((BLOCK_M,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    for part in range(split, last):
        more, more_best, more_total = attend(
            query, tl.zeros((BLOCK_M, BLOCK_D), tl.float32), tl.full((BLOCK_M,), LOWEST, tl.float32),
            tl.zeros((BLOCK_M,), tl.float32), context - new + tokens,
            k_cache + kv_head * stride_kh, v_cache + kv_head * stride_vh, block_tables + sequence * stride_table,
            tl.maximum(part * SPLIT, begin), tl.minimum(part * SPLIT + SPLIT, end), context, window, scale, softcap,
            stride_kb, stride_kt, stride_vb, stride_vt, DIM, BLOCK_D, BLOCK_N, FP8, SOFTCAP, True, WINDOW, True,
        )  # fmt: skip
        best, keep, take = _shares(best, more_best)
        total = tl.fma(total, keep, more_total * take)
        acc = tl.fma(acc, tl.broadcast_to(keep[:, None], acc.shape), more * take[:, None])
    if apart != 0:
        place = (sequence * tl.num_programs(2) + tl.program_id(2)) * NUM_HEADS + heads
        tl.store(partial + place[:, None] * DIM + dims[None, :], acc, mask=mask)
        tl.store(partial_sums + place * 2, best, mask=valid)
        tl.store(partial_sums + place * 2 + 1, total, mask=valid)
    else:
        if SINKS:
            total, shrink = with_sink(best, total, sinks, heads, valid)
            acc = acc * shrink[:, None]
        result = acc * (out_scale / tl.where(valid, total, 1))[:, None]
        rows_out = (flat * NUM_HEADS + heads)[:, None] * DIM + dims[None, :]
        tl.store(out + rows_out, narrowed(result, out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["window", "splits"])
def fold_kernel(
    partial, partial_sums, out, sinks, context_lens, splits, v_scale, window,
    NUM_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
    FP8: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """out[s, h] from what the programs of decode s have left, folded as ``uniform_kernel`` folds. Grid: (S, Hq).

    A row without a sequence (context length 0) becomes zeros.
    """
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    context = tl.load(context_lens + sequence)
    begin = tl.maximum(context - window, 0) // BLOCK_N * BLOCK_N if WINDOW else 0
    dims = tl.arange(0, BLOCK_D)
    acc = tl.zeros((BLOCK_D,), tl.float32)
    best = tl.full((1,), LOWEST, tl.float32)
    total = tl.zeros((1,), tl.float32)
    for split in range(begin // SPLIT, cdiv(context, SPLIT)):
        place = (sequence * splits + split) * NUM_HEADS + head
        more = tl.load(partial + place * DIM + dims, mask=dims < DIM, other=0)
        more_best = tl.load(partial_sums + place * 2 + tl.zeros((1,), tl.int32))
        more_total = tl.load(partial_sums + place * 2 + 1 + tl.zeros((1,), tl.int32))
        best, keep, take = _shares(best, more_best)
        total = tl.fma(total, keep, more_total * take)
        acc = tl.fma(acc, tl.broadcast_to(keep, acc.shape), more * take)
    if SINKS:
        total, shrink = with_sink(best, total, sinks, head + tl.zeros((1,), tl.int32), tl.full((1,), 1, tl.int1))
        acc = acc * shrink
    _, _, out_scale = scales(0.0, 1.0, 1.0, v_scale, FP8, False)
    result = acc * (out_scale / tl.where(total == 0, 1, total))
    tl.store(out + (sequence * NUM_HEADS + head) * DIM + dims, narrowed(result, out.dtype.element_ty), mask=dims < DIM)
