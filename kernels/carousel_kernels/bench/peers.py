"""The same attention by other libraries: PyTorch's, FlashAttention's and FlashInfer's, as far as they are installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from carousel_kernels.layout import BLOCK_SIZE, BatchLayout

__all__ = ["decode", "prefill"]

Call = Callable[[], object]

_WORKSPACE = 128 << 20  # bytes, as FlashInfer recommends


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _dense(cache: torch.Tensor, layout: BatchLayout) -> torch.Tensor:
    """The cache of sequences of one length, without pages: [S, context, Hkv, D]."""
    context = layout.context_lens_host[0]
    return cache[layout.block_tables.long()].flatten(1, 2)[:, :context].contiguous()


def decode(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layout: BatchLayout, scale: float
) -> dict[str, Call]:
    """For sequences of one length. PyTorch and FlashAttention read keys and values that lie together, without pages."""
    k, v = _dense(keys, layout), _dense(values, layout)
    by_head = q.unsqueeze(2), k.transpose(1, 2), v.transpose(1, 2)
    found: dict[str, Call] = {
        "sdpa": lambda: F.scaled_dot_product_attention(*by_head, scale=scale, enable_gqa=True),
    }
    flash = _library("flash_attn")
    if flash is not None and q.is_cuda:
        lengths = layout.context_lens
        found["flash-attn"] = lambda: flash.flash_attn_with_kvcache(
            q.unsqueeze(1), k, v, cache_seqlens=lengths, softmax_scale=scale
        )
    infer = _library("flashinfer")
    if infer is not None and q.is_cuda:
        found["flashinfer"] = _flashinfer(infer, q, keys, values, layout, scale)
    return found


def _flashinfer(
    infer: Any, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layout: BatchLayout, scale: float
) -> Call:
    count, pages = layout.block_tables.shape
    context = layout.context_lens_host[0]
    wrapper = infer.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(_WORKSPACE, dtype=torch.uint8, device=q.device), "NHD"
    )
    starts = torch.arange(count + 1, dtype=torch.int32, device=q.device) * pages
    last = torch.full((count,), (context - 1) % BLOCK_SIZE + 1, dtype=torch.int32, device=q.device)
    wrapper.plan(
        starts, layout.block_tables.flatten().contiguous(), last, q.shape[1], keys.shape[2], q.shape[2], BLOCK_SIZE,
        q_data_type=q.dtype, kv_data_type=keys.dtype, sm_scale=scale,
    )  # fmt: skip
    return lambda: wrapper.run(q, (keys, values))


def prefill(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layout: BatchLayout, scale: float
) -> dict[str, Call]:
    """For one sequence whose last tokens are new."""
    k, v = _dense(keys, layout), _dense(values, layout)
    new, context = len(q), k.shape[1]
    by_head = q.transpose(0, 1).unsqueeze(0), k.transpose(1, 2), v.transpose(1, 2)
    mask: torch.Tensor | None = None
    if new < context:
        mask = torch.ones(new, context, dtype=torch.bool, device=q.device).tril(context - new)
    found: dict[str, Call] = {
        "sdpa": lambda: F.scaled_dot_product_attention(
            *by_head, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
        ),
    }
    flash = _library("flash_attn")
    if flash is not None and q.is_cuda:
        found["flash-attn"] = lambda: flash.flash_attn_func(q.unsqueeze(0), k, v, softmax_scale=scale, causal=True)
    return found
