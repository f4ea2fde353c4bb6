"""Norms, gated activations, and rotary embedding fused with the norms of Q and K and the write of K and V.

Each of them reads and writes every value once; arithmetic is in float32, rounded where the reference rounds.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from .common import e4m3_to_byte, narrowed, tanh
from .config import is_fp8_cache, next_power_of_2
from .registry import Spec, Target

__all__ = [
    "add_rms_norm",
    "aot_specs",
    "gelu_tanh_mul",
    "gelu_tanh_mul_quant",
    "rms_norm",
    "rope_",
    "rope_write_kv",
    "silu_mul",
    "silu_mul_quant",
    "write_kv",
]

_TILE = 1024  # elements per program of four warps: two 16-byte accesses per thread in bfloat16


@triton.jit(do_not_specialize=["num_rows", "num_heads"])
def rms_norm_kernel(
    x, weight, out, num_rows, num_heads, eps, stride_t, stride_h,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """ROWS rows per program of x [T, num_heads, WIDTH], num_rows = T * num_heads -> out, contiguous."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = (row < num_rows)[:, None] & (columns < WIDTH)[None, :]
    start = row // num_heads * stride_t + row % num_heads * stride_h
    wide = tl.load(x + start[:, None] + columns[None, :], mask=mask, other=0).to(tl.float32)
    scale = tl.load(weight + columns, mask=columns < WIDTH, other=0).to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, 1) / WIDTH + eps)[:, None] * scale[None, :]
    tl.store(out + row[:, None] * WIDTH + columns[None, :], narrowed(normed, out.dtype.element_ty), mask=mask)


@triton.jit
def add_rms_norm_kernel(
    x, residual, weight, out, eps, stride_x, stride_residual, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """A row per program: residual += x, rounded to its type, and the norm of that sum -> out, contiguous."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < WIDTH
    total = tl.load(x + row * stride_x + columns, mask=mask, other=0).to(tl.float32)
    total += tl.load(residual + row * stride_residual + columns, mask=mask, other=0).to(tl.float32)
    rounded = narrowed(total, residual.dtype.element_ty)
    tl.store(residual + row * stride_residual + columns, rounded, mask=mask)
    wide = rounded.to(tl.float32)
    scale = tl.load(weight + columns, mask=mask, other=0).to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps) * scale
    tl.store(out + row * WIDTH + columns, narrowed(normed, out.dtype.element_ty), mask=mask)


@triton.jit
def _gated(gate, up, GELU: tl.constexpr):
    if GELU:
        result = 0.5 * gate * (1 + tanh(0.7978845608028654 * (gate + 0.044715 * gate * gate * gate))) * up
    else:
        result = gate / (1 + tl.exp(-gate)) * up
    return result


@triton.jit
def gated_kernel(x, out, width, stride_x, GELU: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK columns of a row per program: x [T, 2 * width] -> out [T, width], contiguous. Grid: (T, blocks)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    gate = tl.load(x + row * stride_x + columns, mask=mask, other=0).to(tl.float32)
    up = tl.load(x + row * stride_x + width + columns, mask=mask, other=0).to(tl.float32)
    tl.store(out + row * width + columns, narrowed(_gated(gate, up, GELU), out.dtype.element_ty), mask=mask)


@triton.jit
def gated_quant_kernel(
    x, out, row_scales, width, stride_x, GELU: tl.constexpr, FP8: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """A row per program, all of it at once: x [T, 2 * width] -> out bytes (e4m3) or int8 [T, width], scales [T]."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    gate = tl.load(x + row * stride_x + columns, mask=mask, other=0).to(tl.float32)
    up = tl.load(x + row * stride_x + width + columns, mask=mask, other=0).to(tl.float32)
    result = _gated(gate, up, GELU)
    largest = tl.max(tl.abs(result), 0)
    limit: tl.constexpr = 448.0 if FP8 else 127.0
    scale = tl.where(largest > 0, largest / limit, 1.0)
    scaled = result / scale
    if FP8:
        tl.store(out + row * width + columns, e4m3_to_byte(scaled), mask=mask)
    else:
        away = scaled + tl.where(scaled < 0, -0.5, 0.5)  # conversion to an integer cuts off
        tl.store(out + row * width + columns, away.to(tl.int8), mask=mask)
    tl.store(row_scales + row, scale)


@triton.jit
def _store_cached(pointers, x, scale, mask, FP8: tl.constexpr):
    """Into a cache: of its own type, or e4m3 as bytes, divided by the cache's scale."""
    if FP8:
        tl.store(pointers, e4m3_to_byte(x.to(tl.float32) / scale), mask=mask)
    else:
        tl.store(pointers, narrowed(x.to(tl.float32), pointers.dtype.element_ty), mask=mask)


@triton.jit
def _turned(
    rows, inside, cos_row, norm, eps,
    DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Heads at ``rows`` [n], normed and rotated: the two halves [n, BLOCK_HALF] and the rest [n, BLOCK_REST], float32.

    In the order and with the roundings of ``rms_norm`` followed by ``rope_``. Values off the masks are zeros.
    """
    i = tl.arange(0, BLOCK_HALF)
    r = 2 * HALF + tl.arange(0, BLOCK_REST)
    half = inside[:, None] & (i < HALF)[None, :]
    tail = inside[:, None] & (r < DIM)[None, :]
    dtype: tl.constexpr = rows.dtype.element_ty
    first = tl.load(rows[:, None] + i[None, :], mask=half, other=0).to(tl.float32)
    second = tl.load(rows[:, None] + HALF + i[None, :], mask=half, other=0).to(tl.float32)
    rest = tl.load(rows[:, None] + r[None, :], mask=tail, other=0).to(tl.float32)
    if NORM:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1) + tl.sum(rest * rest, 1)
        inverse = tl.rsqrt(squares / DIM + eps)[:, None]
        w_first = tl.load(norm + i, mask=i < HALF, other=0).to(tl.float32)
        w_second = tl.load(norm + HALF + i, mask=i < HALF, other=0).to(tl.float32)
        w_rest = tl.load(norm + r, mask=r < DIM, other=0).to(tl.float32)
        first = narrowed(first * inverse * w_first[None, :], dtype).to(tl.float32)
        second = narrowed(second * inverse * w_second[None, :], dtype).to(tl.float32)
        rest = narrowed(rest * inverse * w_rest[None, :], dtype).to(tl.float32)
    cos = tl.load(cos_row + i, mask=i < HALF, other=0)[None, :]
    sin = tl.load(cos_row + HALF + i, mask=i < HALF, other=0)[None, :]
    turned = narrowed(first * cos - second * sin, dtype), narrowed(second * cos + first * sin, dtype)
    return turned[0], turned[1], narrowed(rest, dtype)


@triton.jit
def rope_kernel(
    q, k, v, cos_sin, positions, k_cache, v_cache, slots, q_norm, k_norm, eps, k_scale, v_scale,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_cos,
    stride_cb, stride_ct, stride_ch, stride_db, stride_dt, stride_dh,
    NUM_HEADS: tl.constexpr, NUM_KV: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr, HEADS: tl.constexpr, NORM: tl.constexpr,
    WRITE: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """HEADS heads of a token per program. Grid: (T, cdiv(NUM_HEADS, HEADS) + cdiv(NUM_KV, HEADS)).

    q is normed (NORM) and rotated in place; so is k, or with WRITE it goes, and v with it, to the caches, whose
    strides are those of block, token and head. A negative slot is padding: nothing is written.
    """
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    q_parts: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    cos_row = cos_sin + tl.load(positions + token) * stride_cos
    i = tl.arange(0, BLOCK_HALF)
    r = 2 * HALF + tl.arange(0, BLOCK_REST)
    n = tl.arange(0, HEADS)
    if part < q_parts:
        heads = part * HEADS + n
        inside = heads < NUM_HEADS
        rows = q + token * stride_qt + heads * stride_qh
        first, second, rest = _turned(rows, inside, cos_row, q_norm, eps, DIM, HALF, BLOCK_HALF, BLOCK_REST, NORM)
        half = inside[:, None] & (i < HALF)[None, :]
        tl.store(rows[:, None] + i[None, :], first, mask=half)
        tl.store(rows[:, None] + HALF + i[None, :], second, mask=half)
        if NORM and BLOCK_REST > 1:
            tl.store(rows[:, None] + r[None, :], rest, mask=inside[:, None] & (r < DIM)[None, :])
    else:
        heads = (part - q_parts) * HEADS + n
        inside = heads < NUM_KV
        rows = k + token * stride_kt + heads * stride_kh
        first, second, rest = _turned(rows, inside, cos_row, k_norm, eps, DIM, HALF, BLOCK_HALF, BLOCK_REST, NORM)
        if WRITE:
            slot = tl.load(slots + token)
            inside = heads < tl.where(slot >= 0, NUM_KV, 0)
            target = k_cache + slot // 16 * stride_cb + slot % 16 * stride_ct + heads * stride_ch
            _write_head(target, first, second, rest, i, r, inside, k_scale, DIM, HALF, FP8, BLOCK_REST > 1)
            dims = tl.arange(0, BLOCK_D)
            mask = inside[:, None] & (dims < DIM)[None, :]
            values = tl.load(v + token * stride_vt + (heads * stride_vh)[:, None] + dims[None, :], mask=mask, other=0)
            target = v_cache + slot // 16 * stride_db + slot % 16 * stride_dt + heads * stride_dh
            _store_cached(target[:, None] + dims[None, :], values, v_scale, mask, FP8)
        else:
            half = inside[:, None] & (i < HALF)[None, :]
            tl.store(rows[:, None] + i[None, :], first, mask=half)
            tl.store(rows[:, None] + HALF + i[None, :], second, mask=half)


@triton.jit
def _write_head(
    target, first, second, rest, i, r, inside, scale,
    DIM: tl.constexpr, HALF: tl.constexpr, FP8: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    half = inside[:, None] & (i < HALF)[None, :]
    _store_cached(target[:, None] + i[None, :], first, scale, half, FP8)
    _store_cached(target[:, None] + HALF + i[None, :], second, scale, half, FP8)
    if REST:
        _store_cached(target[:, None] + r[None, :], rest, scale, inside[:, None] & (r < DIM)[None, :], FP8)


@triton.jit
def write_kv_kernel(
    k, v, k_cache, v_cache, slots, k_scale, v_scale, stride_kt, stride_kh, stride_vt, stride_vh,
    stride_cb, stride_ct, stride_ch, stride_db, stride_dt, stride_dh,
    NUM_KV: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, HEADS: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """HEADS heads of a token per program into the caches; see ``rope_kernel``. Grid: (T, cdiv(NUM_KV, HEADS))."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dims = tl.arange(0, BLOCK_D)
    slot = tl.load(slots + token)
    mask = (heads < tl.where(slot >= 0, NUM_KV, 0))[:, None] & (dims < DIM)[None, :]
    values = tl.load(k + token * stride_kt + (heads * stride_kh)[:, None] + dims[None, :], mask=mask, other=0)
    target = k_cache + slot // 16 * stride_cb + slot % 16 * stride_ct + heads * stride_ch
    _store_cached(target[:, None] + dims[None, :], values, k_scale, mask, FP8)
    values = tl.load(v + token * stride_vt + (heads * stride_vh)[:, None] + dims[None, :], mask=mask, other=0)
    target = v_cache + slot // 16 * stride_db + slot % 16 * stride_dt + heads * stride_dh
    _store_cached(target[:, None] + dims[None, :], values, v_scale, mask, FP8)


def _warps(elements: int, most: int = 16) -> int:
    """Warps for a program that holds so many elements at once: 16 or so per thread."""
    return min(max(elements // 512, 1), most)


def _most_warps(warp_size: int) -> int:
    """Warps of 1,024 threads: a whole row of two inputs in float32 leaves no registers for fewer."""
    return 1024 // warp_size


def _norm_rows(width: int) -> int:
    """Rows of ``rms_norm_kernel`` per program."""
    return max(_TILE // next_power_of_2(width), 1)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    width = x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.dim() != 3:
        x = x.reshape(-1, 1, width)
    if x.stride(2) != 1:
        x = x.contiguous()
    num_rows, rows, block = x.shape[0] * x.shape[1], _norm_rows(width), next_power_of_2(width)
    if num_rows:
        rms_norm_kernel[(-(-num_rows // rows),)](
            x, weight, out, num_rows, x.shape[1], eps, x.stride(0), x.stride(1),
            WIDTH=width, BLOCK=block, ROWS=rows, num_warps=_warps(rows * block),
        )  # fmt: skip
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """In place: the sum is ``residual``, unless the types differ."""
    if x.dtype != residual.dtype or x.stride(-1) != 1 or residual.stride(-1) != 1:
        total = x + residual
        return rms_norm(total, weight, eps), total
    rows, width = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if rows:
        block = next_power_of_2(width)
        add_rms_norm_kernel[(rows,)](
            x, residual, weight, out, eps, x.stride(0), residual.stride(0),
            WIDTH=width, BLOCK=block, num_warps=_warps(block),
        )  # fmt: skip
    return out, residual


def _gate(x: torch.Tensor, gelu: bool) -> torch.Tensor:
    width = x.shape[-1] // 2
    out = torch.empty(*x.shape[:-1], width, dtype=x.dtype, device=x.device)
    flat = x.reshape(-1, 2 * width)
    if out.numel():
        gated_kernel[(len(flat), -(-width // _TILE))](
            flat, out, width, flat.stride(0), GELU=gelu, BLOCK=_TILE, num_warps=4
        )
    return out


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    return _gate(x, False)


def gelu_tanh_mul(x: torch.Tensor) -> torch.Tensor:
    return _gate(x, True)


def _gate_quant(x: torch.Tensor, dtype: torch.dtype, gelu: bool) -> tuple[torch.Tensor, torch.Tensor]:
    rows, width = x.shape[0], x.shape[1] // 2
    out = torch.empty(rows, width, dtype=dtype, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    fp8 = dtype == torch.float8_e4m3fn
    if out.numel():
        block = next_power_of_2(width)
        gated_quant_kernel[(rows,)](
            x, out.view(torch.uint8) if fp8 else out, scales, width, x.stride(0),
            GELU=gelu, FP8=fp8, BLOCK=block, num_warps=_warps(block, _most_warps(64 if torch.version.hip else 32)),
        )  # fmt: skip
    return out, scales


def silu_mul_quant(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return _gate_quant(x, dtype, False)


def gelu_tanh_mul_quant(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return _gate_quant(x, dtype, True)


def _heads_per_program(dim: int) -> int:
    return max(_TILE // next_power_of_2(dim), 1)


def _cache(cache: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """A cache as the kernels write it, and whether that is e4m3 as bytes.

    Raises ValueError for types that have no kernel.
    """
    fp8 = is_fp8_cache(cache)
    return cache.view(torch.uint8) if fp8 else cache, fp8


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """``carousel_kernels.write_kv``; a negative slot is padding and not written."""
    tokens, kv_heads, dim = k.shape
    if not tokens:
        return
    (keys, fp8), (values, _) = _cache(k_cache), _cache(v_cache)
    heads = _heads_per_program(dim)
    write_kv_kernel[(tokens, -(-kv_heads // heads))](
        k, v, keys, values, slots, k_scale, v_scale, *k.stride()[:2], *v.stride()[:2],
        *keys.stride()[:3], *values.stride()[:3],
        NUM_KV=kv_heads, DIM=dim, BLOCK_D=next_power_of_2(dim), HEADS=heads, FP8=fp8, num_warps=4,
    )  # fmt: skip


def rope_(q: torch.Tensor, k: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor) -> None:
    _rope(q, k, None, cos_sin, positions, None, None, None, None, None, 0.0, 1.0, 1.0)


def rope_write_kv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """``carousel_kernels.rope_write_kv``; a negative slot is padding and not written."""
    _rope(q, k, v, cos_sin, positions, k_cache, v_cache, slots, q_norm, k_norm, eps, k_scale, v_scale)


def _rope(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor | None,
    v_cache: torch.Tensor | None,
    slots: torch.Tensor | None,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    k_scale: float,
    v_scale: float,
) -> None:
    tokens, num_heads, dim = q.shape
    if not tokens:
        return
    kv_heads, half, fp8 = k.shape[1], cos_sin.shape[1] // 2, False
    strides = (*q.stride()[:2], *k.stride()[:2])
    if v is None or k_cache is None or v_cache is None:
        strides += (0, 0, cos_sin.stride(0), 0, 0, 0, 0, 0, 0)
    else:
        (k_cache, fp8), (v_cache, _) = _cache(k_cache), _cache(v_cache)
        strides += (*v.stride()[:2], cos_sin.stride(0), *k_cache.stride()[:3], *v_cache.stride()[:3])
    heads = _heads_per_program(dim)
    rope_kernel[(tokens, -(-num_heads // heads) - (-kv_heads // heads))](
        q, k, v, cos_sin, positions, k_cache, v_cache, slots, q_norm, k_norm, eps, k_scale, v_scale, *strides,
        NUM_HEADS=num_heads, NUM_KV=kv_heads, DIM=dim, HALF=half, BLOCK_D=next_power_of_2(dim),
        BLOCK_HALF=next_power_of_2(half), BLOCK_REST=next_power_of_2(max(dim - 2 * half, 1)), HEADS=heads,
        NORM=q_norm is not None, WRITE=v is not None, FP8=fp8, num_warps=4,
    )  # fmt: skip


def aot_specs(target: Target) -> Iterator[Spec]:
    """Norms of 1536 to 8192 columns and of heads, gates of 14336, RoPE and the KV write for heads of 64 to 256."""
    norm = {"x": "*bf16", "weight": "*bf16", "out": "*bf16", "eps": "fp32"}
    for width in (128, 4096, 8192):
        rows, block = _norm_rows(width), next_power_of_2(width)
        signature = norm | {"num_rows": "i32", "num_heads": "i32", "stride_t": "i32", "stride_h": "i32"}
        sizes = {"WIDTH": width, "BLOCK": block, "ROWS": rows}
        yield Spec(rms_norm_kernel, f"bf16 {width}", signature, sizes, _warps(rows * block), decode=True)
    for width in (1536, 4096, 8192):
        signature = norm | {"residual": "*bf16", "stride_x": "i32", "stride_residual": "i32"}
        block = next_power_of_2(width)
        sizes = {"WIDTH": width, "BLOCK": block}
        yield Spec(add_rms_norm_kernel, f"bf16 {width}", signature, sizes, _warps(block), decode=True)
    gate = {"x": "*bf16", "out": "*bf16", "width": "i32", "stride_x": "i32"}
    for gelu in (False, True):
        name = "gelu" if gelu else "silu"
        yield Spec(gated_kernel, f"bf16 {name}", gate, {"GELU": gelu, "BLOCK": _TILE}, decode=True)
        for fp8 in (False, True):
            signature = gate | {"out": "*u8" if fp8 else "*i8", "row_scales": "*fp32"}
            sizes = {"GELU": gelu, "FP8": fp8, "BLOCK": 16384}
            label = f"{name} 14336 -> {'fp8' if fp8 else 'int8'}"
            warps = _warps(16384, _most_warps(target.warp_size))
            yield Spec(gated_quant_kernel, label, signature, sizes, warps, decode=True)
    for dim, half, normed, fp8 in ((64, 32, False, False), (128, 64, True, False), (128, 64, False, True),
                                   (96, 24, False, False), (256, 128, True, True)):  # fmt: skip
        yield _rope_spec(dim, half, normed, fp8)
    yield _write_spec()


_CACHE_STRIDES = {f"stride_{cache}{of}": "i32" for cache in "cd" for of in "bth"}


def _rope_spec(dim: int, half: int, normed: bool, fp8: bool) -> Spec:
    cache = "*u8" if fp8 else "*bf16"
    signature = {"q": "*bf16", "k": "*bf16", "v": "*bf16", "k_cache": cache, "v_cache": cache, "cos_sin": "*fp32"}
    signature |= {"positions": "*i64", "slots": "*i64", "eps": "fp32", "k_scale": "fp32", "v_scale": "fp32"}
    heads = _heads_per_program(dim)
    constexprs: dict[str, object] = {"NUM_HEADS": 32, "NUM_KV": 8, "DIM": dim, "HALF": half, "HEADS": heads}
    constexprs |= {"BLOCK_D": next_power_of_2(dim), "BLOCK_HALF": next_power_of_2(half), "WRITE": True, "FP8": fp8}
    constexprs |= {"BLOCK_REST": next_power_of_2(max(dim - 2 * half, 1)), "NORM": normed}
    if normed:
        signature |= {"q_norm": "*bf16", "k_norm": "*bf16"}
    else:
        constexprs |= {"q_norm": None, "k_norm": None}
    strides = {f"stride_{name}": "i32" for name in ("qt", "qh", "kt", "kh", "vt", "vh", "cos")} | _CACHE_STRIDES
    aligned = tuple(name for name, kind in signature.items() if kind.startswith("*")) + tuple(strides)
    label = f"bf16{'/fp8' if fp8 else ''} D{dim} R{2 * half}" + (" QK-norm" if normed else "")
    return Spec(rope_kernel, label, signature | strides, constexprs, decode=True, aligned=aligned)


def _write_spec() -> Spec:
    signature = {"k": "*bf16", "v": "*bf16", "k_cache": "*bf16", "v_cache": "*bf16", "slots": "*i64"}
    signature |= {"k_scale": "fp32", "v_scale": "fp32"}
    strides = {f"stride_{name}": "i32" for name in ("kt", "kh", "vt", "vh")} | _CACHE_STRIDES
    aligned = tuple(name for name, kind in signature.items() if kind.startswith("*")) + tuple(strides)
    sizes = {"NUM_KV": 8, "DIM": 128, "BLOCK_D": 128, "HEADS": _heads_per_program(128), "FP8": False}
    return Spec(write_kv_kernel, "bf16 D128", signature | strides, sizes, decode=True, aligned=aligned)
