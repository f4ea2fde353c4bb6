"""Attention of one new token per sequence to its paged keys and values: FlashDecoding with a plan made on the device.

FlashDecoding (Dao et al., 2023) cuts the keys of a sequence into splits that different programs reduce at once, each
with an online softmax (Milakov and Gimelshein, 2018), and combines the splits' results by their log-sum-exps. Three
kernels, of which the first runs once per step and the others once per layer:

- ``plan``: context lengths -> a work list of (sequence, first token, last token), sized so that the device is filled
  once and no split is longer than needed for it. The list is made on the device and the grid is its upper bound: a
  CUDA graph that holds these launches replays with any lengths.
- ``decode``: one program per item and KV head. All query heads of the KV head's group are rows of one tile, padded to
  the 16 rows that a matrix instruction has, so that keys and values are read once.
- ``combine``: one program per sequence and query head, for sequences of more than one split.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common import E4M3_BIAS, byte_to_e4m3, cdiv, dot, narrowed, tanh

__all__ = ["LOWEST", "NATIVE_FP8", "PLAIN", "UNPACKED_FP8", "attend", "combine_kernel", "decode_kernel", "plan_kernel"]

PLAIN = 0
"""The caches hold what a dot product takes."""
NATIVE_FP8 = 1
"""The caches hold e4m3, which the device converts."""
UNPACKED_FP8 = 2
"""The caches hold e4m3 as bytes, which the kernel unpacks."""

LOWEST = tl.constexpr(-1.0e30)
"""Where running maxima start: finite, so that a row which has seen nothing yet yields no NaN."""
_NATIVE = tl.constexpr(NATIVE_FP8)
_UNPACKED = tl.constexpr(UNPACKED_FP8)
_PAGE = tl.constexpr(16)


@triton.jit
def _tiles(context, window, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr):
    """First tile of BLOCK_N tokens that a sequence's last token sees, and how many."""
    first = context * 0
    if WINDOW:
        first = tl.maximum(context - window, 0) // BLOCK_N
    return first, cdiv(context, BLOCK_N) - first


@triton.jit
def _chunk(
    context_lens, num_sequences, capacity, window, SHORTEST: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_S: tl.constexpr,
):  # fmt: skip
    """The fewest tiles per split, at least SHORTEST, with which at most ``capacity`` splits cover all sequences.

    By bisection: more tiles per split never make more splits. ``capacity`` >= the number of sequences.
    """
    longest = 0
    total = 0
    for start in range(0, num_sequences, BLOCK_S):
        rows = start + tl.arange(0, BLOCK_S)
        context = tl.load(context_lens + rows, mask=rows < num_sequences, other=0)
        _, count = _tiles(context, window, BLOCK_N, WINDOW)
        longest = tl.maximum(longest, tl.max(count, 0))
        total += tl.sum(count, 0)
    low = tl.maximum(cdiv(total, capacity), SHORTEST)
    high = tl.maximum(longest, low)
    while low < high:
        middle = (low + high) // 2
        splits = 0
        for start in range(0, num_sequences, BLOCK_S):
            rows = start + tl.arange(0, BLOCK_S)
            context = tl.load(context_lens + rows, mask=rows < num_sequences, other=0)
            _, count = _tiles(context, window, BLOCK_N, WINDOW)
            splits += tl.sum(cdiv(count, middle), 0)
        fits = splits <= capacity
        high = tl.where(fits, middle, high)
        low = tl.where(fits, low, middle + 1)
    return low


@triton.jit(do_not_specialize=["num_sequences", "capacity", "max_items", "window"])
def plan_kernel(
    context_lens, items, offsets, num_sequences, capacity, max_items, window,
    SHORTEST: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """One program: the work list of a step.

    context_lens int32 [S]; 0 for a row without a sequence -> items int32 [max_items, 4]: sequence (-1: no item), first
    token, end token, whether it is all of the sequence; offsets int32 [S + 1]: the first item of each sequence.
    Splits are as short as ``capacity`` items allow, and of even lengths within a sequence.
    """
    chunk = _chunk(context_lens, num_sequences, capacity, window, SHORTEST, BLOCK_N, WINDOW, BLOCK_S)
    used = 0
    for start in range(0, num_sequences, BLOCK_S):
        rows = start + tl.arange(0, BLOCK_S)
        valid = rows < num_sequences
        context = tl.load(context_lens + rows, mask=valid, other=0)
        first, count = _tiles(context, window, BLOCK_N, WINDOW)
        splits = cdiv(count, chunk)
        length = cdiv(count, tl.maximum(splits, 1))
        position = used + tl.cumsum(splits, 0) - splits
        tl.store(offsets + rows, position, mask=valid)
        for j in range(tl.max(splits, 0)):
            here = valid & (j < splits)
            begin = (first + j * length) * BLOCK_N
            item = items + (position + j) * 4
            tl.store(item, rows, mask=here)
            tl.store(item + 1, begin, mask=here)
            tl.store(item + 2, tl.minimum(begin + length * BLOCK_N, context), mask=here)
            tl.store(item + 3, (splits == 1).to(tl.int32), mask=here)
        used += tl.sum(splits, 0)
    tl.store(offsets + num_sequences, used)
    for start in range(used, max_items, BLOCK_S):
        rest = start + tl.arange(0, BLOCK_S)
        tl.store(items + rest * 4, rest * 0 - 1, mask=rest < max_items)


@triton.jit
def attend(
    q, acc, row_max, row_sum, query_pos, k_head, v_head, table, begin, end, context, window, scale, softcap,
    stride_kb, stride_kt, stride_vb, stride_vt,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, FP8: tl.constexpr, SOFTCAP: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """Online softmax of query rows over the tokens [begin, end) of one KV head, in tiles of BLOCK_N.

    q [M, BLOCK_D] of the type that the products are made in; acc [M, BLOCK_D], row_max and row_sum [M], float32,
    which are updated and returned; maxima are of scores in units of log 2. ``query_pos`` [M] matters with CAUSAL and
    WINDOW; tokens from ``context`` on are neither read nor counted, which BOUNDED = False promises not to need.
    """
    dims = tl.arange(0, BLOCK_D)
    for start in range(begin, end, BLOCK_N):
        tokens = start + tl.arange(0, BLOCK_N)
        inside = tokens < context
        if BOUNDED:
            pages = tl.load(table + tokens // _PAGE, mask=inside, other=0).to(tl.int64)
        else:
            pages = tl.load(table + tokens // _PAGE).to(tl.int64)
        k_rows = k_head + pages * stride_kb + (tokens % _PAGE) * stride_kt
        v_rows = v_head + pages * stride_vb + (tokens % _PAGE) * stride_vt
        k = _load(k_rows[None, :] + dims[:, None], inside[None, :], (dims < DIM)[:, None], DIM, BLOCK_D, BOUNDED)
        v = _load(v_rows[:, None] + dims[None, :], inside[:, None], (dims < DIM)[None, :], DIM, BLOCK_D, BOUNDED)
        scores = dot(q, _widened(k, FP8).to(q.dtype), tl.zeros((q.shape[0], BLOCK_N), tl.float32))
        scores = softcap * tanh(scores * scale) if SOFTCAP else scores * scale
        if CAUSAL or WINDOW:
            distance = query_pos[:, None] - tokens[None, :]
            seen = inside[None, :]
            if CAUSAL:
                seen = seen & (distance >= 0)
            if WINDOW:
                seen = seen & (distance < window)
            scores = tl.where(seen, scores, float("-inf"))
        elif BOUNDED:
            scores = tl.where(inside[None, :], scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        shrink = tl.exp2(row_max - new_max)
        weights = tl.exp2(scores - new_max[:, None])
        row_sum = row_sum * shrink + tl.sum(weights, 1)
        acc = dot(weights.to(q.dtype), _widened(v, FP8).to(q.dtype), acc * shrink[:, None])
        row_max = new_max
    return acc, row_max, row_sum


@triton.jit
def _load(pointers, inside, in_head, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BOUNDED: tl.constexpr):
    """Keys or values; zeros outside of the sequence and of the head. No mask where none is needed."""
    if BOUNDED:
        mask = inside if DIM == BLOCK_D else inside & in_head
        loaded = tl.load(pointers, mask=mask, other=0.0)
    elif DIM == BLOCK_D:
        loaded = tl.load(pointers)
    else:
        loaded = tl.load(pointers, mask=in_head, other=0.0)
    return loaded


@triton.jit
def _widened(x, FP8: tl.constexpr):
    """Bytes become numbers that a product can take; the rest stays."""
    return byte_to_e4m3(x) if FP8 == _UNPACKED else x


@triton.jit
def scales(scale, softcap, k_scale, v_scale, FP8: tl.constexpr, SOFTCAP: tl.constexpr):
    """(scale, soft-cap, output scale) as ``attend`` takes them: scores in units of log 2, biases of FP8 included."""
    if FP8 == _UNPACKED:
        k_scale = k_scale * E4M3_BIAS
        v_scale = v_scale * E4M3_BIAS
    scale = scale * k_scale
    if SOFTCAP:
        scale = scale / softcap
        softcap = softcap * 1.4426950408889634
    else:
        scale = scale * 1.4426950408889634
    return scale, softcap, v_scale


@triton.jit
def with_sink(row_max, row_sum, sinks, heads, in_group):
    """The sum of weights with each head's sink among them, and the factor that adapts what was summed before."""
    sink = tl.load(sinks + heads, mask=in_group, other=0).to(tl.float32) * 1.4426950408889634
    new_max = tl.maximum(row_max, sink)
    shrink = tl.exp2(row_max - new_max)
    return tl.fma(row_sum, shrink, tl.exp2(sink - new_max)), shrink


@triton.jit(do_not_specialize=["window", "stride_table"])
def decode_kernel(
    q, k_cache, v_cache, out, partial, partial_lse, sinks, items, context_lens, block_tables,
    scale, softcap, k_scale, v_scale, window,
    stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh, stride_table,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, FP8: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """One item of the plan for the query heads [part * BLOCK_M, ...) of one KV head's group.

    Grid: (max_items, Hkv * parts). q, out [S, Hq, D], out contiguous; partial float32 [max_items, Hq, D], divided by
    its sum, and partial_lse float32 [max_items, Hq], in units of log 2, for items that are not all of a sequence.
    """
    item = tl.program_id(0)
    sequence = tl.load(items + item * 4)
    if sequence < 0:
        return
    begin = tl.load(items + item * 4 + 1)
    end = tl.load(items + item * 4 + 2)
    whole = tl.load(items + item * 4 + 3)
    parts: tl.constexpr = (GROUP + BLOCK_M - 1) // BLOCK_M
    kv_head = tl.program_id(1) // parts
    in_group = tl.program_id(1) % parts * BLOCK_M + tl.arange(0, BLOCK_M)
    heads = kv_head * GROUP + in_group
    dims = tl.arange(0, BLOCK_D)
    mask = (in_group < GROUP)[:, None] & (dims < DIM)[None, :]
    sequence = sequence.to(tl.int64)
    query = tl.load(q + sequence * stride_qt + heads[:, None] * stride_qh + dims[None, :], mask=mask, other=0)
    if FP8 == 0 and q.dtype != k_cache.dtype:
        query = query.to(tl.float32)
    scale, softcap, out_scale = scales(scale, softcap, k_scale, v_scale, FP8, SOFTCAP)
    context = tl.load(context_lens + sequence)
    row_max = tl.full((BLOCK_M,), LOWEST, tl.float32)
    acc, row_max, row_sum = attend(
        query, tl.zeros((BLOCK_M, BLOCK_D), tl.float32), row_max, tl.zeros((BLOCK_M,), tl.float32),
        tl.zeros((BLOCK_M,), tl.int32) + context - 1,
        k_cache + kv_head * stride_kh, v_cache + kv_head * stride_vh, block_tables + sequence * stride_table,
        begin, end, context, window, scale, softcap, stride_kb, stride_kt, stride_vb, stride_vt,
        DIM, BLOCK_D, BLOCK_N, FP8, SOFTCAP, False, WINDOW, True,
    )  # fmt: skip
    if whole != 0:
        if SINKS:
            row_sum, shrink = with_sink(row_max, row_sum, sinks, heads, in_group < GROUP)
            acc = acc * shrink[:, None]
        places = (sequence * NUM_HEADS + heads)[:, None] * DIM + dims[None, :]
        tl.store(out + places, narrowed(acc * (out_scale / row_sum)[:, None], out.dtype.element_ty), mask=mask)
    else:
        rows = (item * NUM_HEADS + heads).to(tl.int64)
        tl.store(partial + rows[:, None] * DIM + dims[None, :], acc * (out_scale / row_sum)[:, None], mask=mask)
        tl.store(partial_lse + rows, row_max + tl.log2(row_sum), mask=in_group < GROUP)


@triton.jit
def combine_kernel(
    partial, partial_lse, out, sinks, offsets,
    NUM_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_I: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """out[s, h] from the partial results of sequence s, in their order; nothing if ``decode_kernel`` wrote it.

    Grid: (S, Hq). A row without a sequence becomes zeros.
    """
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    first = tl.load(offsets + sequence)
    count = tl.load(offsets + sequence + 1) - first
    if count == 1:
        return
    dims = tl.arange(0, BLOCK_D)
    acc = tl.zeros((BLOCK_D,), tl.float32)
    best = LOWEST + tl.zeros((1,), tl.float32)
    weight_sum = tl.zeros((1,), tl.float32)
    if SINKS:
        best = tl.load(sinks + head + tl.zeros((1,), tl.int32)).to(tl.float32) * 1.4426950408889634
        weight_sum += 1
    for start in range(0, count, BLOCK_I):
        index = start + tl.arange(0, BLOCK_I)
        rows = (first + index).to(tl.int64) * NUM_HEADS + head
        lse = tl.load(partial_lse + rows, mask=index < count, other=float("-inf"))
        mask = (index < count)[:, None] & (dims < DIM)[None, :]
        values = tl.load(partial + rows[:, None] * DIM + dims[None, :], mask=mask, other=0)
        new_best = tl.maximum(best, tl.max(lse, 0))
        weights = tl.exp2(lse - new_best)
        shrink = tl.exp2(best - new_best)
        weight_sum = weight_sum * shrink + tl.sum(weights, 0)
        acc = acc * shrink + tl.sum(values * weights[:, None], 0)
        best = new_best
    acc = acc / tl.where(weight_sum == 0, 1, weight_sum)
    tl.store(out + (sequence * NUM_HEADS + head) * DIM + dims, narrowed(acc, out.dtype.element_ty), mask=dims < DIM)
