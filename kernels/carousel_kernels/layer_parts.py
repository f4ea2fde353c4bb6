"""What a decoder's layer consists of, for backends that compute all of it at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

__all__ = ["LayerParts"]

_Linear = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class LayerParts:
    """Norm, attention with rotary embedding, norm, gated MLP; nothing else. ``activation`` is "silu" or "gelu_tanh"."""

    attention_norm: torch.Tensor
    mlp_norm: torch.Tensor
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
