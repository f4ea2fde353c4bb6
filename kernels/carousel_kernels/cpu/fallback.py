"""The CPU backend without its compiled operators: library calls only, few of them per layer."""

from __future__ import annotations

import torch

from .attention import paged_attention
from .elementwise import add_rms_norm, gelu_tanh_mul, rms_norm, rope_, silu_mul, write_kv
from .linear import prepare_linear
from .sampling import gumbel_noise, sample

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
    rope_(q, k, cos_sin, positions)
    write_kv(k, v, k_cache, v_cache, slots)
