"""Linear layers for few rows, whose time is that of reading the weight: it is read once, packed, and widened in
registers.

One program takes a strip of output features, all rows (padded to the 16 that a matrix instruction has) and a share of
the input features. The shares' sums go to memory and are added by a second kernel in a fixed order, so that results do
not depend on timing (split-K as in NVIDIA's CUTLASS, without atomics).

Integers become floats without a conversion, which GPUs do at a quarter of their rate: put into the mantissa of a number
whose unit is 1 they are that number plus themselves, exactly (the trick of Kim et al., "Who Says Elephants Can't Run",
2022, and FasterTransformer).

The number of rows is not specialised on: nothing is to be compiled while serving because a batch grew to 16.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl

from .common import E4M3_BIAS, INTERPRETED, byte_to_e4m3, dot, e4m3_to_byte

__all__ = [
    "FP8",
    "FP8_BYTES",
    "INT8",
    "PLAIN",
    "QUANTIZED_ROWS",
    "UINT8_GROUPED",
    "byte_kernel",
    "dequantize_kernel",
    "int4_kernel",
    "lora_expand_kernel",
    "lora_shrink_kernel",
    "quantize_rows_kernel",
    "sum_kernel",
]

INT8 = 0
"""The weight holds int8."""
UINT8_GROUPED = 1
"""The weight holds uint8, with a scale and a zero point per group."""
FP8 = 2
"""The weight holds e4m3, which the device converts."""
FP8_BYTES = 3
"""The weight holds e4m3 as bytes, which the kernel unpacks."""
QUANTIZED_ROWS = 4
"""Weight and rows are of the same 8-bit type, and the device multiplies that."""
PLAIN = 5
"""The weight is of a type that a dot product takes, without scales."""

_INT8 = tl.constexpr(INT8)
_PLAIN = tl.constexpr(PLAIN)
_UINT8_GROUPED = tl.constexpr(UINT8_GROUPED)
_FP8_BYTES = tl.constexpr(FP8_BYTES)
_QUANTIZED_ROWS = tl.constexpr(QUANTIZED_ROWS)


@triton.jit
def _minus(q, zero, DTYPE: tl.constexpr):
    """q - zero in DTYPE, exactly, for uint8 q and small integers ``zero`` that broadcast to it."""
    if tl.float16 == DTYPE:
        number = (q.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True)  # 1024 + q
        result = number - (zero.to(tl.float16) + 1024.0)
    else:
        number = (q.to(tl.uint32) | 0x4B000000).to(tl.float32, bitcast=True)  # 2^23 + q
        result = (number - (zero.to(tl.float32) + 8388608.0)).to(DTYPE)
    return result


@triton.jit
def _minus4(q, zero, DTYPE: tl.constexpr):
    """As ``_minus``, for q < 16."""
    if tl.bfloat16 == DTYPE and not INTERPRETED:
        number = (q.to(tl.uint16) | 0x4300).to(tl.bfloat16, bitcast=True)  # 128 + q
        result = number - (zero.to(tl.bfloat16) + 128.0)
    else:
        result = _minus(q, zero, DTYPE)
    return result


@triton.jit
def _write(acc, out, bias, rows, columns, num_rows, num_columns, split, FINAL: tl.constexpr, HAS_BIAS: tl.constexpr):
    """The finished tile, or, unless FINAL, this split's part of it in float32."""
    inside = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    if FINAL and HAS_BIAS:
        acc += tl.load(bias + columns, mask=columns < num_columns, other=0.0).to(tl.float32)[None, :]
    place = (split.to(tl.int64) * num_rows + rows[:, None]) * num_columns + columns[None, :]
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def int4_kernel(
    x, packed, scales, zeros, bias, out, num_rows, num_columns, num_features, x_stride, num_blocks, blocks_per_split,
    num_groups, GROUP: tl.constexpr, HALF: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    FINAL: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """x [num_rows, num_features] times a 4-bit weight; ``packed`` uint8 [num_blocks, num_columns, HALF].

    Byte i of a block of 2 * HALF input features holds feature i in its lower half and feature HALF + i in its upper,
    so that unpacked halves meet contiguous activations. HALF divides GROUP. scales, zeros [num_groups, num_columns].
    """
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1)
    rows = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    half = tl.arange(0, HALF)
    dtype: tl.constexpr = x.dtype.element_ty
    held = columns < num_columns
    x_rows = x + rows.to(tl.int64)[:, None] * x_stride
    first = split * blocks_per_split
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for block in range(first, tl.minimum(first + blocks_per_split, num_blocks)):
        place = (block * num_columns + columns.to(tl.int64))[None, :] * HALF + half[:, None]
        words = tl.load(packed + place, mask=held[None, :], other=0)
        low_k = block * (2 * HALF) + half
        high_k = low_k + HALF
        low = tl.load(
            x_rows + low_k[None, :], mask=(rows < num_rows)[:, None] & (low_k < num_features)[None, :], other=0
        )
        high = tl.load(
            x_rows + high_k[None, :], mask=(rows < num_rows)[:, None] & (high_k < num_features)[None, :], other=0
        )
        group = block * (2 * HALF) // GROUP
        scale = tl.load(scales + group * num_columns + columns, mask=held, other=0).to(tl.float32)
        zero = tl.load(zeros + group * num_columns + columns, mask=held, other=0)
        part = dot(low, _minus4(words & 15, zero[None, :], dtype), tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
        if GROUP % (2 * HALF) == 0:
            part = dot(high, _minus4(words >> 4, zero[None, :], dtype), part)
            acc += part * scale[None, :]
        else:
            acc += part * scale[None, :]
            group = tl.minimum((block * (2 * HALF) + HALF) // GROUP, num_groups - 1)
            scale = tl.load(scales + group * num_columns + columns, mask=held, other=0).to(tl.float32)
            zero = tl.load(zeros + group * num_columns + columns, mask=held, other=0)
            part = dot(high, _minus4(words >> 4, zero[None, :], dtype), tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
            acc += part * scale[None, :]
    _write(acc, out, bias, rows, columns, num_rows, num_columns, split, FINAL, HAS_BIAS)


@triton.jit
def dequantize_kernel(
    packed, scales, zeros, out, num_columns, num_features, num_groups,
    GROUP: tl.constexpr, HALF: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """``packed`` as in ``int4_kernel`` -> the weight [num_columns, num_features] in the type of ``out``."""
    block = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    half = tl.arange(0, HALF)
    held = columns < num_columns
    place = (block * num_columns + columns.to(tl.int64))[:, None] * HALF + half[None, :]
    words = tl.load(packed + place, mask=held[:, None], other=0)
    for upper in tl.static_range(2):
        first = block * (2 * HALF) + upper * HALF
        group = tl.minimum(first // GROUP, num_groups - 1)
        scale = tl.load(scales + group * num_columns + columns, mask=held, other=0).to(tl.float32)
        zero = tl.load(zeros + group * num_columns + columns, mask=held, other=0)
        k = first + half
        weight = _minus((words >> (4 * upper)) & 15, zero[:, None], tl.float32) * scale[:, None]
        inside = held[:, None] & (k < num_features)[None, :]
        target = out + columns.to(tl.int64)[:, None] * num_features + k[None, :]
        tl.store(target, weight.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _widen(weight, zero, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """A tile of the weight as the dot product takes it, without its scale."""
    if KIND == _INT8:
        wide = _minus(weight.to(tl.uint8, bitcast=True) ^ 0x80, tl.full([1, 1], 128, tl.int16), DTYPE)
    elif KIND == _UINT8_GROUPED:
        wide = _minus(weight, zero, DTYPE)
    elif KIND == _FP8_BYTES:
        wide = byte_to_e4m3(weight).to(DTYPE)
    elif KIND == _QUANTIZED_ROWS:
        wide = weight
    else:
        wide = weight.to(DTYPE)
    return wide


@triton.jit(do_not_specialize=["num_rows"])
def byte_kernel(
    x, weight, scales, zeros, row_scales, bias, out, num_rows, num_columns, num_features, x_stride, num_tiles,
    tiles_per_split, KIND: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, FINAL: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """x [num_rows, num_features] times a weight [num_columns, num_features] of some KIND.

    scales [num_columns], or with GROUP [num_features / GROUP, num_columns], and BLOCK_K divides GROUP; UINT8_GROUPED
    has zeros of that shape too. row_scales float32 [num_rows], read with QUANTIZED_ROWS.
    """
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1)
    rows = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    dtype: tl.constexpr = x.dtype.element_ty
    held = columns < num_columns
    first = split * tiles_per_split
    integers: tl.constexpr = dtype == tl.int8
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.int32 if integers else tl.float32)
    for tile in range(first, tl.minimum(first + tiles_per_split, num_tiles)):
        k = tile * BLOCK_K + tl.arange(0, BLOCK_K)
        place = columns.to(tl.int64)[None, :] * num_features + k[:, None]
        tile_w = tl.load(weight + place, mask=held[None, :] & (k < num_features)[:, None], other=0.0)
        x_place = rows.to(tl.int64)[:, None] * x_stride + k[None, :]
        tile_x = tl.load(x + x_place, mask=(rows < num_rows)[:, None] & (k < num_features)[None, :], other=0.0)
        if GROUP > 0:
            group = tile * BLOCK_K // GROUP * num_columns + columns
            scale = tl.load(scales + group, mask=held, other=0).to(tl.float32)
            if KIND == _UINT8_GROUPED:
                zero = tl.load(zeros + group, mask=held, other=0)
                wide = _widen(tile_w, zero[None, :], KIND, dtype)
            else:
                wide = _widen(tile_w, 0, KIND, dtype)
            if KIND == _FP8_BYTES:
                scale *= E4M3_BIAS
            acc += dot(tile_x, wide, tl.zeros([BLOCK_M, BLOCK_N], tl.float32)) * scale[None, :]
        elif integers:
            acc = tl.dot(tile_x, tile_w, acc, out_dtype=tl.int32)
        else:
            acc = dot(tile_x, _widen(tile_w, 0, KIND, dtype), acc)
    result = acc.to(tl.float32)
    if GROUP == 0 and KIND != _PLAIN:
        scale = tl.load(scales + columns, mask=held, other=0.0)
        if KIND == _FP8_BYTES:
            scale *= E4M3_BIAS
        result *= scale[None, :]
    if KIND == _QUANTIZED_ROWS:
        result *= tl.load(row_scales + rows, mask=rows < num_rows, other=0.0)[:, None]
    _write(result, out, bias, rows, columns, num_rows, num_columns, split, FINAL, HAS_BIAS)


@triton.jit(do_not_specialize=["size"])
def sum_kernel(parts, bias, out, size, num_columns, SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr):
    """The splits' parts float32 [SPLITS, size] added in order, and the bias; size = rows * num_columns."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    total = tl.load(parts + place, mask=inside, other=0.0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(parts + split * size.to(tl.int64) + place, mask=inside, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + place % num_columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def quantize_rows_kernel(x, q, scales, num_features, x_stride, INTEGERS: tl.constexpr, BLOCK: tl.constexpr):
    """x [T, num_features] -> q, int8 or bytes of e4m3, and float32 scales [T], by each row's largest magnitude."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    largest = tl.zeros([BLOCK], tl.float32)
    for start in range(0, num_features, BLOCK):
        k = start + lanes
        value = tl.load(x + row * x_stride + k, mask=k < num_features, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(value))
    scale = tl.maximum(tl.max(largest, 0) / (127.0 if INTEGERS else 448.0), 1e-30)
    tl.store(scales + row, scale)
    for start in range(0, num_features, BLOCK):
        k = start + lanes
        value = tl.load(x + row * x_stride + k, mask=k < num_features, other=0.0).to(tl.float32) / scale
        if INTEGERS:
            # Adding 1.5 * 2^23 rounds to the nearest integer, ties to even.
            rounded = (tl.minimum(tl.maximum(value, -127.0), 127.0) + 12582912.0) - 12582912.0
            tl.store(q + row * num_features + k, rounded.to(tl.int8), mask=k < num_features)
        else:
            tl.store(q + row * num_features + k, e4m3_to_byte(value), mask=k < num_features)


@triton.jit
def lora_shrink_kernel(
    x, a, adapters, low, num_features, x_stride, rank, tiles_per_split,
    SPLITS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One split's part of x[t] @ a[adapters[t]].T -> low float32 [T, SPLITS, BLOCK_R]; a [L, rank, num_features]."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    adapter = tl.load(adapters + row).to(tl.int64)
    if adapter >= 0:
        ranks = tl.arange(0, BLOCK_R)
        acc = tl.zeros([BLOCK_R], tl.float32)
        first = split * tiles_per_split * BLOCK_K
        last = tl.minimum(first + tiles_per_split * BLOCK_K, num_features)
        for start in range(first, last, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            value = tl.load(x + row * x_stride + k, mask=k < last, other=0.0).to(tl.float32)
            place = (adapter * rank + ranks[:, None]) * num_features + k[None, :]
            tile = tl.load(a + place, mask=(ranks < rank)[:, None] & (k < last)[None, :], other=0.0).to(tl.float32)
            acc += tl.sum(tile * value[None, :], 1)
        tl.store(low + (row * SPLITS + split) * BLOCK_R + ranks, acc)


@triton.jit
def lora_expand_kernel(
    low, b, scaling, adapters, out, num_columns, out_stride, rank,
    SPLITS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out[t] += scaling[l] * b[l] @ low[t], the splits of ``low`` added in order, l = adapters[t]; b [L, N, rank]."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    adapter = tl.load(adapters + row).to(tl.int64)
    if adapter >= 0:
        ranks = tl.arange(0, BLOCK_R)
        total = tl.zeros([BLOCK_R], tl.float32)
        for split in tl.static_range(SPLITS):
            total += tl.load(low + (row * SPLITS + split) * BLOCK_R + ranks)
        held = columns < num_columns
        place = (adapter * num_columns + columns[:, None]) * rank + ranks[None, :]
        tile = tl.load(b + place, mask=held[:, None] & (ranks < rank)[None, :], other=0.0).to(tl.float32)
        added = tl.sum(tile * total[None, :], 1) * tl.load(scaling + adapter)
        target = out + row * out_stride + columns
        before = tl.load(target, mask=held, other=0.0).to(tl.float32)
        tl.store(target, (before + added).to(out.dtype.element_ty), mask=held)
