"""Norms, rotary embedding, activations and the KV write. Each is a handful of library calls, chosen by measurement."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

__all__ = ["add_rms_norm", "gelu_tanh_mul", "rms_norm", "rope_", "silu_mul", "write_kv"]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    if x.dtype != torch.float32:
        return F.rms_norm(x, (x.shape[-1],), weight.to(x.dtype), eps)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    inverse = torch.addcmul(_constant(eps), norm, norm, value=1 / x.shape[-1]).rsqrt_()
    return torch.mul(x, inverse).mul_(weight)


@functools.cache
def _constant(value: float) -> torch.Tensor:
    return torch.tensor([value])


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    total = x + residual
    return rms_norm(total, weight, eps), total


def rope_(q: torch.Tensor, k: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor) -> None:
    cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
    joint = _joined(q, k)
    for x in (q, k) if joint is None else (joint,):
        half = cos.shape[-1]
        first, second = x[..., :half], x[..., half : 2 * half]
        if x.dtype == torch.float32:
            crossed = first * sin
            first.mul_(cos).addcmul_(second, sin, value=-1)
            second.mul_(cos).add_(crossed)
        else:
            rotated = (first * cos).addcmul_(second.float(), sin, value=-1)
            second.copy_((second * cos).addcmul_(first.float(), sin))
            first.copy_(rotated)


def _joined(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor | None:
    """q and k as one tensor [T, Hq + Hkv, D] if k's heads follow q's in memory, as in a fused projection's output."""
    tokens, heads, dim = q.shape
    if (
        q.stride() == k.stride()
        and q.stride(1) == dim
        and q.dtype == k.dtype
        and k.storage_offset() - q.storage_offset() == heads * dim
        and q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr()
        and q.stride(0) >= (heads + k.shape[1]) * dim
    ):
        return q.as_strided((tokens, heads + k.shape[1], dim), q.stride())
    return None


def write_kv(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    k_cache.view(-1, *k_cache.shape[2:]).index_copy_(0, slots, k.to(k_cache.dtype))
    v_cache.view(-1, *v_cache.shape[2:]).index_copy_(0, slots, v.to(v_cache.dtype))


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gelu_tanh_mul(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)
