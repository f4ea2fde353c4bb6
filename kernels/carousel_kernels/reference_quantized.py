"""Quantised linear layers and low-rank adapters in plain PyTorch, part of the ``reference`` backend.

Weights are dequantised to float32 once; what a backend may round differently is only the result.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .weight_formats import GroupedWeight, Linear, ScaledWeight

__all__ = ["add_lora_", "prepare_grouped_linear", "prepare_scaled_linear", "quantize_rows"]

_LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}


def quantize_rows(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, K] -> (q [T, K] of ``dtype``, float32 [T]) with x about q * scale: each row by its largest magnitude."""
    largest = _LARGEST[dtype]
    scale = (x.float().abs().amax(dim=-1) / largest).clamp(min=1e-30)
    q = x.float() / scale.unsqueeze(1)
    return (q.round() if dtype == torch.int8 else q).clamp(-largest, largest).to(dtype), scale


def prepare_grouped_linear(weight: GroupedWeight, bias: torch.Tensor | None) -> Linear:
    dense = weight.dense(torch.float32)
    wide_bias = None if bias is None else bias.float()

    def linear(x: torch.Tensor) -> torch.Tensor:
        return F.linear(x.float(), dense, wide_bias).to(x.dtype)

    return linear


def prepare_scaled_linear(weight: ScaledWeight, bias: torch.Tensor | None) -> Linear:
    dense = weight.dense(torch.float32)
    wide_bias = None if bias is None else bias.float()

    def linear(x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        if weight.activations == "quantize":
            q, scale = quantize_rows(x, weight.q.dtype)
            wide = q.float() * scale.unsqueeze(1)
        return F.linear(wide, dense, wide_bias).to(x.dtype)

    return linear


def add_lora_(
    out: torch.Tensor,
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    scaling: torch.Tensor,
    adapters: torch.Tensor,
) -> None:
    for adapter in range(a.shape[0]):
        rows = torch.nonzero(adapters == adapter).squeeze(1)
        low = x[rows].float() @ a[adapter].float().T
        added = low @ b[adapter].float().T * scaling[adapter]
        out[rows] = (out[rows].float() + added).to(out.dtype)
