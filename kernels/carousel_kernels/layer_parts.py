"""What a decoder's layer consists of, for backends that compute all of them at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

__all__ = ["LayerParts"]

_Linear = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class LayerParts:
    """Norm, attention, norm, gated MLP, and where they are not None, norms of each query's and key's head and of what a
    branch adds. ``activation`` is "silu" or "gelu_tanh"."""

    attention_norm: torch.Tensor
    mlp_norm: torch.Tensor
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    post_attention_norm: torch.Tensor | None
    post_mlp_norm: torch.Tensor | None
    qkv: _Linear
    output: _Linear
    gate_up: _Linear
    down: _Linear
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    softcap: float | None
    window: int | None
    eps: float
    activation: str
