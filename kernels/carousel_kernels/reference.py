"""Every operator in plain PyTorch, on any device: the specification that the other backends are tested against.

Written to be read, not to be fast: arithmetic in float32, attention one sequence at a time, sampling by a full sort.
Argument names, shapes and dtypes are those of the public operators in ``carousel_kernels``, which document them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from .half_weights import HalfWeight
from .int8_weights import RESTS, QuantizedWeight, quantize_rows, quantize_rows_wide, turn
from .layout import BLOCK_SIZE, BatchLayout
from .reference_quantized import add_lora_, prepare_grouped_linear, prepare_scaled_linear

__all__ = [
    "add_lora_",
    "add_rms_norm",
    "gelu_tanh_mul",
    "gelu_tanh_mul_quant",
    "gumbel_noise",
    "largest",
    "paged_attention",
    "prepare_grouped_linear",
    "prepare_half_linear",
    "prepare_linear",
    "prepare_quantized_linear",
    "prepare_scaled_linear",
    "rms_norm",
    "rope_",
    "rope_write_kv",
    "sample",
    "silu_mul",
    "silu_mul_quant",
    "token_logprobs",
    "write_kv",
]

_GOLDEN = -0x61C8864680B583EB  # 2^64 / golden ratio, as a signed 64-bit number: the increment of splitmix64
_MIX_1 = -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9
_MIX_2 = -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB
_E4M3_MAX = 448.0


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (normed * weight.float()).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    total = x + residual
    return rms_norm(total, weight, eps), total


def _rotate_(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    half = cos.shape[-1]
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    x[..., : 2 * half] = rotated.to(x.dtype)


def rope_(q: torch.Tensor, k: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor) -> None:
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
    _rotate_(q, cos, sin)
    _rotate_(k, cos, sin)


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
    block, offset = slots // BLOCK_SIZE, slots % BLOCK_SIZE
    for x, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        if cache.dtype == torch.float8_e4m3fn:
            # As bytes: torch indexes no FP8.
            cache.view(torch.uint8)[block, offset] = _to_e4m3(x.float() / scale).view(torch.uint8)
        else:
            cache[block, offset] = x.to(cache.dtype)


def _to_e4m3(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn)


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
    if q_norm is not None and k_norm is not None:
        q.copy_(rms_norm(q, q_norm, eps))
        k.copy_(rms_norm(k, k_norm, eps))
    rope_(q, k, cos_sin, positions)
    write_kv(k, v, k_cache, v_cache, slots, k_scale=k_scale, v_scale=v_scale)


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    layout: BatchLayout,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    group = q.shape[1] // k_cache.shape[2]
    start = 0
    for s, (new, context) in enumerate(zip(layout.query_lens_host, layout.context_lens_host, strict=True)):
        blocks = layout.block_tables[s, : -(-context // BLOCK_SIZE)].long()
        keys = k_cache[blocks].flatten(0, 1)[:context].float().repeat_interleave(group, dim=1) * k_scale
        values = v_cache[blocks].flatten(0, 1)[:context].float().repeat_interleave(group, dim=1) * v_scale
        scores = torch.einsum("qhd,khd->hqk", q[start : start + new].float(), keys) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        query_pos = torch.arange(context - new, context, device=q.device).unsqueeze(1)
        key_pos = torch.arange(context, device=q.device)
        hidden = key_pos > query_pos
        if sliding_window is not None:
            hidden |= key_pos <= query_pos - sliding_window
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks.float().view(-1, 1, 1).expand(-1, new, 1)], dim=-1)
        weights = scores.softmax(dim=-1)[..., :context]
        out[start : start + new] = torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
        start += new
    return out


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(x.dtype)


def gelu_tanh_mul(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    return (F.gelu(gate, approximate="tanh") * up).to(x.dtype)


def _quantised(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    limit = _E4M3_MAX if dtype == torch.float8_e4m3fn else 127.0
    largest = x.abs().amax(dim=-1)
    scales = torch.where(largest > 0, largest / limit, 1.0)
    scaled = x / scales.unsqueeze(-1)
    if dtype == torch.float8_e4m3fn:
        return _to_e4m3(scaled), scales
    return (scaled + torch.where(scaled < 0, -0.5, 0.5)).to(dtype), scales


def silu_mul_quant(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return _quantised(silu_mul(x.float()), dtype)


def gelu_tanh_mul_quant(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return _quantised(gelu_tanh_mul(x.float()), dtype)


def prepare_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Callable[[torch.Tensor], torch.Tensor]:
    def linear(x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weight, bias)

    return linear


def _splitmix(x: torch.Tensor) -> torch.Tensor:
    """The finaliser of splitmix64 on int64, whose products wrap; the masks turn arithmetic shifts into logical ones."""
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _MIX_1
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _MIX_2
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def prepare_quantized_linear(
    weight: QuantizedWeight, *, wide: bool = False, turned: bool = False
) -> Callable[[torch.Tensor], torch.Tensor]:
    columns = weight.columns
    # In float64 the sums of products of small integers are exact, on every device.
    codes, scales = weight.row_major().double(), weight.scales[:columns]

    def linear(x: torch.Tensor) -> torch.Tensor:
        if turned:
            x = turn(x)
        if wide:
            quantized, rests, row_scales = quantize_rows_wide(x.float())
            sums = (quantized.double() + rests.double() / RESTS) @ codes.T
        else:
            quantized, row_scales = quantize_rows(x.float())
            sums = quantized.double() @ codes.T
        out = sums.float() * scales * row_scales.unsqueeze(1)
        return (out if weight.bias is None else out + weight.bias[:columns]).to(x.dtype)

    return linear


def prepare_half_linear(weight: HalfWeight) -> Callable[[torch.Tensor], torch.Tensor]:
    exact = weight.row_major().float()
    bias = None if weight.bias is None else weight.bias[: weight.columns]
    return lambda x: torch.nn.functional.linear(x.bfloat16().float(), exact, bias)


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor | int) -> torch.Tensor:
    if isinstance(token_ids, int):
        token_ids = torch.arange(token_ids, device=seeds.device).unsqueeze(0)
    stream = _splitmix(_splitmix(seeds + _GOLDEN) + positions * _GOLDEN).unsqueeze(1)
    bits = (_splitmix(stream + (token_ids + 1) * _GOLDEN) >> 32) & 0xFFFFFFFF
    # The winner of an argmax has a *small* exponential, so the uniform number is kept exact near 0, and off 1.
    uniform = ((bits.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    return -torch.log(-torch.log1p(-uniform))


def largest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # The largest of a row is NaN if anything in it is, and -inf only if everything is.
    values, tokens = logits.max(dim=-1)
    failed = ~values.isfinite()
    return tokens.masked_fill(failed, -1), failed


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    greedy = temperature <= 0
    scaled = logits / torch.where(greedy, 1.0, temperature).unsqueeze(1)
    # Stable: of equal logits the lower token id ranks first, so the kept set is exact and the same on every device.
    ranked, token_ids = scaled.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[1], device=logits.device)
    limit = torch.where(top_k > 0, top_k, logits.shape[1]).unsqueeze(1)
    ranked = ranked.masked_fill(rank >= limit, float("-inf"))
    probs = ranked.softmax(dim=-1)
    before = probs.cumsum(dim=-1) - probs
    dropped = ((before >= top_p.unsqueeze(1)) & (top_p < 1).unsqueeze(1)) | (probs < min_p.unsqueeze(1) * probs[:, :1])
    dropped[:, 0] = False
    noisy = ranked.masked_fill(dropped, float("-inf")) + gumbel_noise(seeds, positions, token_ids)
    chosen = torch.where(greedy, 0, noisy.argmax(dim=-1))
    return token_ids.gather(1, chosen.unsqueeze(1)).squeeze(1)


def token_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    logprobs = logits.log_softmax(dim=-1)
    chosen = token_ids.clamp(min=0).unsqueeze(1)
    ranks = (logits > logits.gather(1, chosen)).sum(dim=-1) + 1
    top_ids = logits.sort(dim=-1, descending=True, stable=True).indices[:, :num_top]
    return logprobs.gather(1, chosen).squeeze(1), ranks, top_ids, logprobs.gather(1, top_ids)
