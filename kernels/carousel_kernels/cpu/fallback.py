"""The CPU backend without its compiled operators: library calls only, few of them per layer."""

from __future__ import annotations

from collections.abc import Callable

import torch

from carousel_kernels import reference
from carousel_kernels.half_weights import HalfWeight
from carousel_kernels.int8_weights import QuantizedWeight
from carousel_kernels.layout import BatchLayout
from carousel_kernels.reference import gelu_tanh_mul_quant, silu_mul_quant
from carousel_kernels.reference_quantized import add_lora_, prepare_scaled_linear
from carousel_kernels.weight_formats import GroupedWeight

from . import attention, elementwise, half, quant
from .elementwise import add_rms_norm, gelu_tanh_mul, rms_norm, rope_, silu_mul
from .linear import prepare_linear
from .logprobs import token_logprobs
from .sampling import gumbel_noise, largest, sample

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
    if k_cache.dtype == torch.float8_e4m3fn:
        reference.write_kv(k, v, k_cache, v_cache, slots, k_scale=k_scale, v_scale=v_scale)
    else:
        elementwise.write_kv(k, v, k_cache, v_cache, slots)


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
    if sinks is not None or k_cache.dtype == torch.float8_e4m3fn:
        return reference.paged_attention(
            q, k_cache, v_cache, layout, scale=scale, sliding_window=sliding_window, softcap=softcap,
            sinks=sinks, k_scale=k_scale, v_scale=v_scale, out=out,
        )  # fmt: skip
    result = attention.paged_attention(
        q, k_cache, v_cache, layout, scale=scale * k_scale, sliding_window=sliding_window, softcap=softcap
    )
    result = result if v_scale == 1.0 else result * v_scale
    return result if out is None else out.copy_(result)


def prepare_quantized_linear(
    weight: QuantizedWeight, *, wide: bool = False, turned: bool = False
) -> Callable[[torch.Tensor], torch.Tensor]:
    return quant.prepare_quantized_linear(weight, wide=wide, turned=turned, names=("onednn", "torch"))


def prepare_half_linear(weight: HalfWeight) -> Callable[[torch.Tensor], torch.Tensor]:
    return half.prepare_half_linear(weight, names=("onednn", "torch"))


def prepare_grouped_linear(weight: GroupedWeight, bias: torch.Tensor | None) -> Callable[[torch.Tensor], torch.Tensor]:
    """Widened to float32 once, and then as any other."""
    layer = prepare_linear(weight.dense(torch.float32), None if bias is None else bias.float())
    return lambda x: layer(x.float()).to(x.dtype)
