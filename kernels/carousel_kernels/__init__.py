"""Tensor operators of a decoder with a paged KV cache, usable without the engine; they need nothing but torch.

Every operator runs on the backend of its tensors' device: ``cpu`` for CPU tensors, ``reference`` for all others.
``use_backend`` overrides the choice; ``cpu-torch`` is the CPU backend without its compiled operators. Operators check
no arguments: shapes and dtypes are the caller's duty, documented with each one. Names of dimensions: T tokens of the
step, H hidden size, Hq / Hkv query / KV heads, D head size, N blocks of the cache, R rows of logits, V vocabulary size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from . import cpu, reference
from .cpu import fallback
from .layout import BLOCK_SIZE, BatchLayout

__all__ = [
    "BLOCK_SIZE",
    "BatchLayout",
    "add_rms_norm",
    "available_backends",
    "gelu_tanh_mul",
    "gumbel_noise",
    "paged_attention",
    "prepare_linear",
    "rms_norm",
    "rope_",
    "rope_write_kv",
    "sample",
    "silu_mul",
    "use_backend",
    "write_kv",
]


class _Backend(Protocol):
    """What a backend module offers; the public functions below say what each operator does."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor: ...
    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
    def rope_(self, q: torch.Tensor, k: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor) -> None: ...
    def write_kv(
        self, k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
    ) -> None: ...
    def rope_write_kv(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cos_sin: torch.Tensor,
        positions: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slots: torch.Tensor,
    ) -> None: ...
    def paged_attention(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        layout: BatchLayout,
        *,
        scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor: ...
    def silu_mul(self, x: torch.Tensor) -> torch.Tensor: ...
    def gelu_tanh_mul(self, x: torch.Tensor) -> torch.Tensor: ...
    def prepare_linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> Callable[[torch.Tensor], torch.Tensor]: ...
    def gumbel_noise(
        self, seeds: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor | int
    ) -> torch.Tensor: ...
    def sample(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        min_p: torch.Tensor,
        seeds: torch.Tensor,
        positions: torch.Tensor,
    ) -> torch.Tensor: ...


_BACKENDS: dict[str, _Backend] = {"reference": reference, "cpu": cpu, "cpu-torch": fallback}
_forced: _Backend | None = None


def available_backends() -> tuple[str, ...]:
    """Names that ``use_backend`` takes."""
    return tuple(_BACKENDS)


@contextmanager
def use_backend(name: str | None) -> Iterator[None]:
    """Run all operators on the named backend, in all threads, until the block ends; None restores choice by device.

    Raises ValueError for a name that is not in ``available_backends()``.
    """
    global _forced
    if name is not None and name not in _BACKENDS:
        raise ValueError(f"unknown backend {name!r}; available: {', '.join(_BACKENDS)}")
    before = _forced
    _forced = None if name is None else _BACKENDS[name]
    try:
        yield
    finally:
        _forced = before


def _backend(tensor: torch.Tensor) -> _Backend:
    return _forced or (cpu if tensor.is_cpu else reference)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm over the last dimension, computed in float32: x / sqrt(mean(x^2) + eps) * weight.

    x [..., H] -> [..., H] of x's dtype; weight [H].
    """
    return _backend(x).rms_norm(x, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum x + residual and its ``rms_norm``, as (normed, sum); x and residual [T, H]. The sum may reuse the
    memory of ``residual``, which the caller must not read afterwards."""
    return _backend(x).add_rms_norm(x, residual, weight, eps)


def rope_(q: torch.Tensor, k: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor) -> None:
    """Rotate q [T, Hq, D] and k [T, Hkv, D] in place by their positions (rotary embedding, halves as in GPT-NeoX).

    cos_sin float32 [P, R]: cosines in columns [0, R/2), sines in [R/2, R), for positions [0, P). R <= D is even; dims
    R.. of each head stay as they are. positions int64 [T].
    """
    _backend(q).rope_(q, k, cos_sin, positions)


def write_kv(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Write k and v [T, Hkv, D] into the caches [N, 16, Hkv, D] at slots int64 [T] = block * 16 + offset, distinct."""
    _backend(k).write_kv(k, v, k_cache, v_cache, slots)


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
    """``rope_`` followed by ``write_kv``, for layers that have both. What is in k afterwards is not specified."""
    _backend(q).rope_write_kv(q, k, v, cos_sin, positions, k_cache, v_cache, slots)


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
    """Causal attention of every new token to its sequence's cached tokens, its own included (written before).

    q [T, Hq, D], caches [N, 16, Hkv, D] with Hq a multiple of Hkv -> [T, Hq, D]. Query head h reads KV head
    h // (Hq / Hkv). Scores are multiplied by ``scale``, then, with ``softcap`` c, become c * tanh(score / c). With
    ``sliding_window`` w a token sees itself and the w - 1 tokens before it.
    """
    return _backend(q).paged_attention(
        q, k_cache, v_cache, layout, scale=scale, sliding_window=sliding_window, softcap=softcap
    )


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, where x [T, 2I] holds gate in its first half and up in its second -> [T, I]."""
    return _backend(x).silu_mul(x)


def gelu_tanh_mul(x: torch.Tensor) -> torch.Tensor:
    """gelu(gate), tanh approximation, * up, where x [T, 2I] holds gate first and up second -> [T, I]."""
    return _backend(x).gelu_tanh_mul(x)


def prepare_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function x [T, K] -> x @ weight.T + bias [T, N] for weight [N, K] and bias [N], by the fastest library kernel.

    It may keep a packed copy of the weight instead of the weight itself; do not change ``weight`` later.
    """
    return _backend(weight).prepare_linear(weight, bias)


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor | int) -> torch.Tensor:
    """Standard Gumbel noise float32 [R, C], a pure function of each row's seed, its position and the token id.

    seeds, positions int64 [R]; token_ids int64 [R, C] (or [1, C]), or the vocabulary size C for all its ids in order.
    The value for a token does not depend on the other rows, on the other candidates, nor (up to the rounding of log)
    on the device.
    """
    return _backend(seeds).gumbel_noise(seeds, positions, token_ids)


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Draw one token per row of logits float32 [R, V] -> int64 [R].

    In order: divide by temperature (0: the largest logit, nothing drawn); keep the top_k largest (0: all; of equal
    logits the lower ids); of those the fewest, from the largest down, whose probabilities sum to at least top_p
    (1: all); of those the ones with at least min_p times the largest probability (0: all); then the argmax of logits
    plus ``gumbel_noise(seeds, positions)``, which is a draw from the softmax of what was kept.
    temperature, top_p, min_p float32 [R]; top_k, seeds, positions int64 [R].
    """
    return _backend(logits).sample(logits, temperature, top_k, top_p, min_p, seeds, positions)
