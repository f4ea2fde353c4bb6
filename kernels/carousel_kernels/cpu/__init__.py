"""The CPU backend: compiled operators for what a decoder in float32 needs, library calls for the rest.

The compiled operators are optional (see ``native``). Each takes the layouts that it was made for and declines the
others, which ``fallback`` computes.
"""

from __future__ import annotations

import torch

from carousel_kernels.layout import BatchLayout

from . import fallback, native
from .fallback import (
    add_lora_,
    gelu_tanh_mul_quant,
    gumbel_noise,
    prepare_grouped_linear,
    prepare_linear,
    prepare_scaled_linear,
    rope_,
    sample,
    silu_mul_quant,
    token_logprobs,
    write_kv,
)
from .half import prepare_half_linear
from .quant import prepare_quantized_linear

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


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    out = native.rms_norm(x, weight, eps)
    return fallback.rms_norm(x, weight, eps) if out is None else out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return native.add_rms_norm(x, residual, weight, eps) or fallback.add_rms_norm(x, residual, weight, eps)


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    out = native.silu_mul(x)
    return fallback.silu_mul(x) if out is None else out


def gelu_tanh_mul(x: torch.Tensor) -> torch.Tensor:
    out = native.gelu_tanh_mul(x)
    return fallback.gelu_tanh_mul(x) if out is None else out


def largest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = native.largest(logits)
    return fallback.largest(logits) if tokens is None else (tokens, tokens < 0)


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
    if not native.rope_write_kv(q, k, v, cos_sin, positions, k_cache, v_cache, slots):
        fallback.rope_write_kv(q, k, v, cos_sin, positions, k_cache, v_cache, slots, k_scale=k_scale, v_scale=v_scale)


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
    if sinks is None and k_scale == v_scale == 1.0:
        result = native.paged_attention(q, k_cache, v_cache, layout, scale, sliding_window, softcap)
        if result is not None:
            return result if out is None else out.copy_(result)
    return fallback.paged_attention(
        q, k_cache, v_cache, layout, scale=scale, sliding_window=sliding_window, softcap=softcap,
        sinks=sinks, k_scale=k_scale, v_scale=v_scale, out=out,
    )  # fmt: skip
