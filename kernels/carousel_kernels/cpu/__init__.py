"""The CPU backend: compiled operators for what a decoder in float32 needs, library calls for the rest.

The compiled operators are optional (see ``native``). Each takes the layouts that it was made for and declines the
others, which ``fallback`` computes.
"""

from __future__ import annotations

import torch

from carousel_kernels.layout import BatchLayout

from . import fallback, native
from .fallback import gumbel_noise, prepare_linear, rope_, sample, write_kv

__all__ = [
    "add_rms_norm",
    "gelu_tanh_mul",
    "gumbel_noise",
    "paged_attention",
    "prepare_linear",
    "rms_norm",
    "rope_",
    "rope_write_kv",
    "sample",
    "silu_mul",
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


def rope_write_kv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    if not native.rope_write_kv(q, k, v, cos_sin, positions, k_cache, v_cache, slots):
        fallback.rope_write_kv(q, k, v, cos_sin, positions, k_cache, v_cache, slots)


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    layout: BatchLayout,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    out = native.paged_attention(q, k_cache, v_cache, layout, scale, sliding_window, softcap)
    if out is not None:
        return out
    return fallback.paged_attention(
        q, k_cache, v_cache, layout, scale=scale, sliding_window=sliding_window, softcap=softcap
    )
