"""Paged attention of a batch: decodes by split keys, chunks of prompts by query tiles. See the modules of the kernels.

No grid and no buffer depends on the lengths, only on shapes, so that a CUDA graph that holds these launches replays
with any lengths. The decodes' work list is made once per step and kept on the layout (``layout.plan``). Nothing is
compiled for one step and not for another (see ``attention_prefill.CHANGING``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from carousel_kernels.layout import BLOCK_SIZE, BatchLayout

from . import config
from .attention_decode import NATIVE_FP8, PLAIN, UNPACKED_FP8, combine_kernel, decode_kernel, plan_kernel
from .attention_prefill import prefill_kernel
from .attention_uniform import fold_kernel, uniform_kernel
from .config import AttentionConfig, next_power_of_2
from .registry import Spec, Target

__all__ = ["aot_specs", "paged_attention"]

_RESIDENT = 2
"""Programs per SM that the work list aims at: while one starts or ends, the other keeps the memory busy."""

_PLAN_ROWS = 1024
_COMBINED = 32  # splits that combine_kernel takes at once


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
    """``carousel_kernels.paged_attention``; with ``layout.deterministic``, by the kernels of ``attention_uniform``.

    A leading sequence with ``context_lens`` 0 is padding, as buckets of CUDA graphs need it: its row becomes zeros.
    Heads are contiguous. Raises ValueError for caches of a type that has no kernel.
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    call = _Call(
        q, _readable(k_cache), _readable(v_cache), out, layout, sinks,
        (scale, softcap or 0.0, k_scale, v_scale, sliding_window or 0),
        _cache_mode(k_cache), softcap is not None, sliding_window is not None,
    )  # fmt: skip
    if layout.num_decodes:
        (call.uniform_decode if layout.deterministic else call.decode)(k_cache.dtype)
    if layout.num_decodes < layout.num_sequences:
        (call.uniform_prefill if layout.deterministic else call.prefill)(k_cache.dtype)
    return out


def _cache_mode(cache: torch.Tensor) -> int:
    if not config.is_fp8_cache(cache):
        return PLAIN
    return NATIVE_FP8 if config.target_of(cache.device).fp8 else UNPACKED_FP8


def _readable(cache: torch.Tensor) -> torch.Tensor:
    """A cache as the device can take it: FP8 as bytes where it knows no FP8."""
    return cache.view(torch.uint8) if _cache_mode(cache) == UNPACKED_FP8 else cache


@dataclass(slots=True)
class _Plan:
    """A step's work list, see ``plan_kernel``, and room for partial results, which layers take in turns."""

    items: torch.Tensor
    offsets: torch.Tensor
    partial: torch.Tensor
    partial_lse: torch.Tensor


@dataclass(slots=True)
class _Call:
    """One call of ``paged_attention``: what both kernels take."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    out: torch.Tensor
    layout: BatchLayout
    sinks: torch.Tensor | None
    numbers: tuple[float, float, float, float, int]
    """Scale, soft-cap, scales of K and V, window."""
    fp8: int
    softcap: bool
    window: bool

    def _strides(self) -> tuple[int, ...]:
        return (
            *self.q.stride()[:2], *self.k_cache.stride()[:3], *self.v_cache.stride()[:3],
            self.layout.block_tables.stride(0),
        )  # fmt: skip

    def _shape(self) -> tuple[int, int, int, int]:
        """Query heads, KV heads, query heads per KV head, head size."""
        heads, kv_heads = self.q.shape[1], self.k_cache.shape[2]
        return heads, kv_heads, heads // kv_heads, self.q.shape[2]

    def decode(self, cache: torch.dtype) -> None:
        heads, kv_heads, group, dim = self._shape()
        target = config.target_of(self.q.device)
        chosen = config.decode_config(target, cache, dim, group)
        parts = -(-group // chosen.block_m)
        plan = self._plan(target, chosen, kv_heads * parts)
        block_d = max(next_power_of_2(dim), 16)
        decode_kernel[(len(plan.items), kv_heads * parts)](
            self.q, self.k_cache, self.v_cache, self.out, plan.partial, plan.partial_lse, self.sinks, plan.items,
            self.layout.context_lens, self.layout.block_tables, *self.numbers, *self._strides(),
            NUM_HEADS=heads, GROUP=group, DIM=dim, BLOCK_M=chosen.block_m, BLOCK_D=block_d, BLOCK_N=chosen.block_n,
            FP8=self.fp8, SOFTCAP=self.softcap, WINDOW=self.window, SINKS=self.sinks is not None,
            num_warps=chosen.num_warps, num_stages=chosen.num_stages,
        )  # fmt: skip
        combine_kernel[(self.layout.num_decodes, heads)](
            plan.partial, plan.partial_lse, self.out, self.sinks, plan.offsets,
            NUM_HEADS=heads, DIM=dim, BLOCK_D=block_d, BLOCK_I=_COMBINED, SINKS=self.sinks is not None, num_warps=4,
        )  # fmt: skip

    def _plan(self, target: Target, chosen: AttentionConfig, programs: int) -> _Plan:
        """The step's plan for decodes in which each item has ``programs`` programs."""
        layout, count, window = self.layout, self.layout.num_decodes, self.numbers[4]
        heads, dim, device = self.q.shape[1], self.q.shape[2], self.q.device
        plans: dict[object, Any] = layout.plan if layout.plan is not None else {}
        layout.plan = plans
        # A plan made while recording a graph is remade by each replay; one made before would stay as it was.
        recording = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        key = ("triton", heads, dim, programs, chosen.block_n, window, self.window, recording)
        if key in plans:
            found: _Plan = plans[key]
            return found
        wanted = -(-target.num_units * _RESIDENT // programs)
        capacity = max_items = max(wanted, count + wanted // 4)
        whole = torch.empty(max_items * 4 + count + 1, dtype=torch.int32, device=device)
        results = torch.empty(max_items * heads * (dim + 1), dtype=torch.float32, device=device)
        plan = plans[key] = _Plan(
            whole[: max_items * 4].view(max_items, 4),
            whole[max_items * 4 :],
            results[: max_items * heads * dim],
            results[max_items * heads * dim :],
        )
        plan_kernel[(1,)](
            layout.context_lens, plan.items, plan.offsets, count, capacity, max_items, window,
            SHORTEST=-(-config.SHORTEST_SPLIT // chosen.block_n), BLOCK_N=chosen.block_n, WINDOW=self.window,
            BLOCK_S=_PLAN_ROWS, num_warps=4,
        )  # fmt: skip
        return plan

    def prefill(self, cache: torch.dtype) -> None:
        heads, _, group, dim = self._shape()
        chosen = config.prefill_config(config.target_of(self.q.device), cache, dim, group)
        layout = self.layout
        prefill_kernel[self._tiles(chosen)](
            self.q, self.k_cache, self.v_cache, self.out, self.sinks, layout.query_start, layout.context_lens,
            layout.block_tables, layout.num_sequences - layout.num_decodes, layout.num_decodes, *self.numbers,
            *self._strides(), NUM_HEADS=heads, GROUP=group, HEADS=min(group, chosen.block_m), DIM=dim,
            BLOCK_M=chosen.block_m, BLOCK_D=max(next_power_of_2(dim), 16), BLOCK_N=chosen.block_n, FP8=self.fp8,
            SOFTCAP=self.softcap, WINDOW=self.window, SINKS=self.sinks is not None, num_warps=chosen.num_warps,
            num_stages=chosen.num_stages,
        )  # fmt: skip

    def _tiles(self, chosen: AttentionConfig) -> tuple[int, int]:
        """The grid of what is no decode."""
        _, kv_heads, group, _ = self._shape()
        layout, first = self.layout, self.layout.num_decodes
        per_tile = min(group, chosen.block_m)
        tiles = (layout.num_tokens - first) // (chosen.block_m // per_tile) + layout.num_sequences - first
        return tiles, kv_heads * -(-group // per_tile)

    def uniform_prefill(self, cache: torch.dtype) -> None:
        layout, chosen = self.layout, self._uniform(cache)
        self._launch_uniform(
            chosen, self._tiles(chosen), None, None, layout.num_sequences - layout.num_decodes, layout.num_decodes, 0
        )

    def uniform_decode(self, cache: torch.dtype) -> None:
        heads, kv_heads, group, dim = self._shape()
        layout, count, chosen = self.layout, self.layout.num_decodes, self._uniform(cache)
        splits = -(-layout.block_tables.shape[1] * BLOCK_SIZE // config.DETERMINISTIC_SPLIT)
        partial = torch.empty((count, splits, heads, dim), dtype=torch.float32, device=self.q.device)
        sums = torch.empty((count, splits, heads, 2), dtype=torch.float32, device=self.q.device)
        grid = count, kv_heads * -(-group // min(group, chosen.block_m)), splits
        self._launch_uniform(chosen, grid, partial, sums, count, 0, 1)
        fold_kernel[(count, heads)](
            partial, sums, self.out, self.sinks, layout.context_lens, splits, self.numbers[3], self.numbers[4],
            NUM_HEADS=heads, DIM=dim, BLOCK_D=max(next_power_of_2(dim), 16), BLOCK_N=chosen.block_n,
            SPLIT=config.DETERMINISTIC_SPLIT, FP8=self.fp8, WINDOW=self.window, SINKS=self.sinks is not None,
            num_warps=1,
        )  # fmt: skip

    def _uniform(self, cache: torch.dtype) -> AttentionConfig:
        return config.uniform_config(config.target_of(self.q.device), cache, self.q.shape[2])

    def _launch_uniform(
        self,
        chosen: AttentionConfig,
        grid: tuple[int, ...],
        partial: torch.Tensor | None,
        sums: torch.Tensor | None,
        count: int,
        first: int,
        apart: int,
    ) -> None:
        """``count`` sequences from ``first`` on. One compiled kernel for both kinds of tokens: so nothing is None in
        one launch that is a tensor in another."""
        heads, _, group, dim = self._shape()
        layout = self.layout
        unused = torch.empty(0, dtype=torch.float32, device=self.q.device)
        uniform_kernel[grid](
            self.q, self.k_cache, self.v_cache, self.out, unused if partial is None else partial,
            unused if sums is None else sums, self.sinks, layout.query_start, layout.context_lens,
            layout.block_tables, count, first, apart, *self.numbers, *self._strides(),
            NUM_HEADS=heads, GROUP=group, HEADS=min(group, chosen.block_m), DIM=dim, BLOCK_M=chosen.block_m,
            BLOCK_D=max(next_power_of_2(dim), 16), BLOCK_N=chosen.block_n, SPLIT=config.DETERMINISTIC_SPLIT,
            FP8=self.fp8, SOFTCAP=self.softcap, WINDOW=self.window, SINKS=self.sinks is not None,
            num_warps=chosen.num_warps, num_stages=chosen.num_stages,
        )  # fmt: skip


def aot_specs(target: Target) -> Iterator[Spec]:
    """Decode and prefill for the head sizes and types of the supported families, and the features all at once."""
    from .attention_specs import attention_specs

    yield from attention_specs(target)
