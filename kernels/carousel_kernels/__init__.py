"""Tensor operators of a decoder with a paged KV cache, usable without the engine; they need nothing but torch.

Every operator runs on the backend of its tensors' device: ``cpu`` for CPU tensors, ``triton`` for GPUs (CUDA and ROCm)
where triton is installed, ``reference`` for all others. ``use_backend`` overrides the choice; ``cpu-torch`` is the CPU
backend without its compiled operators. Operators check no arguments: shapes and dtypes are the caller's duty,
documented with each one. Names of dimensions: T tokens of the step, H hidden size, Hq / Hkv query / KV heads, D head
size, N blocks of the cache, R rows of logits, V vocabulary size.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, cast

import torch

from . import cpu, reference
from .cpu import fallback, fused
from .half_weights import HalfWeight, halve_weight
from .int8_weights import QuantizedWeight, quantize_weight
from .layer_parts import LayerParts
from .layout import BLOCK_SIZE, BatchLayout
from .timed import OperatorTimes, TimedBackend
from .weight_formats import (
    Activations,
    GroupedWeight,
    PackedWeight,
    ScaledWeight,
    grouped_from_awq,
    grouped_from_gptq,
    scaled,
)

__all__ = [
    "BLOCK_SIZE",
    "BatchLayout",
    "GroupedWeight",
    "HalfWeight",
    "LayerParts",
    "OperatorTimes",
    "PackedWeight",
    "QuantizedWeight",
    "ScaledWeight",
    "add_lora_",
    "add_rms_norm",
    "available_backends",
    "fuse_layers",
    "gelu_tanh_mul",
    "gelu_tanh_mul_quant",
    "gumbel_noise",
    "halve_weight",
    "largest",
    "layers_are_fused",
    "paged_attention",
    "prepare_half_linear",
    "prepare_linear",
    "prepare_linear_awq",
    "prepare_linear_fp8",
    "prepare_linear_gptq",
    "prepare_linear_int8",
    "prepare_packed_linear",
    "prepare_quantized_linear",
    "quantize_weight",
    "rms_norm",
    "rope_",
    "rope_write_kv",
    "sample",
    "silu_mul",
    "silu_mul_quant",
    "time_operators",
    "token_logprobs",
    "uniform_linears",
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
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slots: torch.Tensor,
        *,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
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
        *,
        q_norm: torch.Tensor | None = None,
        k_norm: torch.Tensor | None = None,
        eps: float = 0.0,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
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
        sinks: torch.Tensor | None = None,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor: ...
    def silu_mul(self, x: torch.Tensor) -> torch.Tensor: ...
    def gelu_tanh_mul(self, x: torch.Tensor) -> torch.Tensor: ...
    def silu_mul_quant(self, x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]: ...
    def gelu_tanh_mul_quant(self, x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]: ...
    def prepare_linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> Callable[[torch.Tensor], torch.Tensor]: ...
    def prepare_quantized_linear(
        self, weight: QuantizedWeight, *, wide: bool = False, turned: bool = False
    ) -> Callable[[torch.Tensor], torch.Tensor]: ...
    def prepare_half_linear(self, weight: HalfWeight) -> Callable[[torch.Tensor], torch.Tensor]: ...
    def gumbel_noise(
        self, seeds: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor | int
    ) -> torch.Tensor: ...
    def largest(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...
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
    def token_logprobs(
        self, logits: torch.Tensor, token_ids: torch.Tensor, num_top: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]: ...
    def prepare_grouped_linear(
        self, weight: GroupedWeight, bias: torch.Tensor | None
    ) -> Callable[[torch.Tensor], torch.Tensor]: ...
    def prepare_scaled_linear(
        self, weight: ScaledWeight, bias: torch.Tensor | None
    ) -> Callable[[torch.Tensor], torch.Tensor]: ...
    def add_lora_(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        scaling: torch.Tensor,
        adapters: torch.Tensor,
    ) -> None: ...


_BACKENDS: dict[str, _Backend] = {"reference": reference, "cpu": cpu, "cpu-torch": fallback}
_forced: _Backend | None = None
_observed: Callable[[_Backend], _Backend] | None = None
_uniform = False


@functools.cache
def _triton_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _triton() -> _Backend:
    """Imported at first use: it takes a second, and most environments have none."""
    return cast(_Backend, importlib.import_module(".triton", __name__))


def _triton_usable() -> bool:
    """Whether kernels of triton can run here: on a GPU, or in triton's interpreter."""
    return _triton_installed() and (torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1")


def available_backends() -> tuple[str, ...]:
    """Names that ``use_backend`` takes: "triton" is one with a GPU, or with ``TRITON_INTERPRET=1`` from the start."""
    return (*_BACKENDS, "triton") if _triton_usable() else tuple(_BACKENDS)


@contextmanager
def use_backend(name: str | None) -> Iterator[None]:
    """Run all operators on the named backend, in all threads, until the block ends; None restores choice by device.

    Raises ValueError for a name that is not in ``available_backends()``.
    """
    global _forced
    if name is not None and name not in available_backends():
        raise ValueError(f"unknown backend {name!r}; available: {', '.join(available_backends())}")
    before = _forced
    _forced = None if name is None else _triton() if name == "triton" else _BACKENDS[name]
    try:
        yield
    finally:
        _forced = before


@contextmanager
def time_operators(times: OperatorTimes) -> Iterator[None]:
    """Add the time of every operator to ``times``, and that of the linear layers prepared until the block ends."""
    global _observed
    wrapped: dict[int, _Backend] = {}

    def observed(backend: _Backend) -> _Backend:
        if id(backend) not in wrapped:
            wrapped[id(backend)] = cast(_Backend, TimedBackend(backend, times))
        return wrapped[id(backend)]

    before = _observed
    _observed = observed
    try:
        yield
    finally:
        _observed = before


@contextmanager
def uniform_linears() -> Iterator[None]:
    """Linear layers prepared until the block ends, in any thread, give a row the same result, to the last bit, whatever
    the other rows are and however many.

    Only the triton backend has such layers: the others raise ValueError when one is prepared.
    """
    global _uniform
    before, _uniform = _uniform, True
    try:
        if not _triton_usable():
            yield
            return
        with importlib.import_module(".triton.linear", __name__).uniform_layers():
            yield
    finally:
        _uniform = before


def _preparing(weight: torch.Tensor) -> _Backend:
    """The backend that a linear layer is prepared by."""
    if _uniform and not (_triton_usable() and _chosen(weight) is _triton()):
        raise ValueError("uniform_linears: got a weight on the CPU, allowed: weights of the triton backend")
    return _backend(weight)


def _backend(tensor: torch.Tensor) -> _Backend:
    return _chosen(tensor) if _observed is None else _observed(_chosen(tensor))


def _chosen(tensor: torch.Tensor) -> _Backend:
    if _forced is not None:
        return _forced
    if tensor.is_cpu:
        return cpu
    return _triton() if tensor.is_cuda and _triton_installed() else reference


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
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Write k and v [T, Hkv, D] into the caches [N, 16, Hkv, D] at slots int64 [T] = block * 16 + offset, distinct.

    Caches of float8_e4m3fn take k / ``k_scale`` and v / ``v_scale``, saturated at 448; the others take no scale.
    """
    _backend(k).write_kv(k, v, k_cache, v_cache, slots, k_scale=k_scale, v_scale=v_scale)


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
    """``rope_`` followed by ``write_kv``, for layers that have both. What is in k afterwards is not specified.

    ``q_norm`` and ``k_norm`` [D], both or neither: weights of an ``rms_norm`` of every head of q and k, done first.
    """
    _backend(q).rope_write_kv(
        q, k, v, cos_sin, positions, k_cache, v_cache, slots,
        q_norm=q_norm, k_norm=k_norm, eps=eps, k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip


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
    """Causal attention of every new token to its sequence's cached tokens, its own included (written before).

    q [T, Hq, D], caches [N, 16, Hkv, D] with Hq a multiple of Hkv -> [T, Hq, D]. Query head h reads KV head
    h // (Hq / Hkv). Scores are multiplied by ``scale``, then, with ``softcap`` c, become c * tanh(score / c). With
    ``sliding_window`` w a token sees itself and the w - 1 tokens before it. ``sinks`` [Hq]: a logit per query head
    that takes part in the softmax and has no value, so that weights sum to less than 1. Keys are multiplied by
    ``k_scale`` and values by ``v_scale``, with which a cache of float8_e4m3fn was written. The result goes into
    ``out``, contiguous and of q's dtype, if that is given.
    """
    return _backend(q).paged_attention(
        q, k_cache, v_cache, layout, scale=scale, sliding_window=sliding_window, softcap=softcap,
        sinks=sinks, k_scale=k_scale, v_scale=v_scale, out=out,
    )  # fmt: skip


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, where x [T, 2I] holds gate in its first half and up in its second -> [T, I]."""
    return _backend(x).silu_mul(x)


def gelu_tanh_mul(x: torch.Tensor) -> torch.Tensor:
    """gelu(gate), tanh approximation, * up, where x [T, 2I] holds gate first and up second -> [T, I]."""
    return _backend(x).gelu_tanh_mul(x)


def silu_mul_quant(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """``silu_mul`` with its result quantised by row: x [T, 2I] -> values [T, I] of ``dtype``, scales float32 [T].

    dtype is float8_e4m3fn or int8. A row's scale is its largest magnitude / 448 or / 127 (1 for a row of zeros), its
    values are result / scale, rounded to nearest: in e4m3 ties go to even, in int8 away from zero.
    """
    return _backend(x).silu_mul_quant(x, dtype)


def gelu_tanh_mul_quant(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """``gelu_tanh_mul`` with its result quantised as by ``silu_mul_quant``."""
    return _backend(x).gelu_tanh_mul_quant(x, dtype)


def prepare_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function x [T, K] -> x @ weight.T + bias [T, N] for weight [N, K] and bias [N], by the fastest library kernel.

    It may keep a packed copy of the weight instead of the weight itself; do not change ``weight`` later.
    """
    return _preparing(weight).prepare_linear(weight, bias)


def prepare_quantized_linear(
    weight: QuantizedWeight, *, wide: bool = False, turned: bool = False
) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function x [T, K] -> x @ weight.T + bias [T, N] of x's dtype, with activations quantised per row as they come,
    to 8 bits or, if ``wide``, to 16 (see ``int8_weights``), by the fastest implementation. A row's result does not
    depend on the other rows. If ``turned``, rows go through ``int8_weights.turn`` first, as the weight's have.

    Only the CPU's backends are fast; all others compute it as the reference does.
    """
    return _preparing(weight.codes).prepare_quantized_linear(weight, wide=wide, turned=turned)


def prepare_half_linear(weight: HalfWeight) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function x float32 [T, K] -> x @ weight.T + bias, float32 [T, N], with x rounded to bfloat16 and products
    summed in float32, or in what a library's kernel for bfloat16 sums in, by the fastest implementation.

    Only the CPU's backends are fast; all others compute it as the reference does.
    """
    return _preparing(weight.codes).prepare_half_linear(weight)


def fuse_layers(parts: Sequence[LayerParts]) -> fused.FusedLayers | None:
    """The parts of all layers as one function, where the CPU backend can; None elsewhere. See ``layers_are_fused``."""
    return fused.fuse_layers(parts) if _backend(parts[0].attention_norm) is cpu else None


def layers_are_fused() -> bool:
    """Whether fused layers may be called now: not while another backend is wanted, or single operators are timed."""
    return _forced is None and _observed is None


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor | int) -> torch.Tensor:
    """Standard Gumbel noise float32 [R, C], a pure function of each row's seed, its position and the token id.

    seeds, positions int64 [R]; token_ids int64 [R, C] (or [1, C]), or the vocabulary size C for all its ids in order.
    The value for a token does not depend on the other rows, on the other candidates, nor (up to the rounding of log)
    on the device.
    """
    return _backend(seeds).gumbel_noise(seeds, positions, token_ids)


def largest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The id of the largest logit of each row of float32 [R, V], int64 [R], and which rows are unusable, bool [R].

    Unusable are rows that hold NaN or positive infinity, or nothing finite; their id is -1. Of equal logits any may be
    taken; the compiled CPU kernel takes the first.
    """
    return _backend(logits).largest(logits)


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


def token_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Under the log-softmax of logits float32 [R, V]: token_ids int64 [R] (a negative one is read as 0), and the most
    likely tokens.

    Returns the tokens' log-probabilities float32 [R]; their ranks int64 [R], one plus the number of larger logits; the
    ids int64 [R, num_top] of the largest logits, in descending order, and their log-probabilities float32 [R, num_top];
    0 <= num_top <= V. Equal logits may be listed in any order. In a row that holds NaN the log-probabilities are NaN.
    """
    return _backend(logits).token_logprobs(logits, token_ids, num_top)


def prepare_packed_linear(
    weight: PackedWeight, bias: torch.Tensor | None = None
) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function x [T, K] -> x @ weight.T + bias [T, N] of x's dtype, for a weight that is quantised, see
    ``weight_formats``; the CPU keeps it in float32.

    Raises ValueError for FP8 activations on a GPU that cannot multiply e4m3.
    """
    if isinstance(weight, GroupedWeight):
        return _preparing(weight.q).prepare_grouped_linear(weight, bias)
    return _preparing(weight.q).prepare_scaled_linear(weight, bias)


def prepare_linear_gptq(
    qweight: torch.Tensor,
    qzeros: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group_size: int,
    g_idx: torch.Tensor | None = None,
    bits: int = 4,
    zero_offset: int = 1,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function x [T, K] -> x @ weight.T + bias [T, N] of x's dtype, for a weight as GPTQ stores it.

    Args:
        qweight: int32 [K * bits / 32, N], input features from the lowest bits up.
        qzeros: int32 [K / group_size, N * bits / 32], zero points less ``zero_offset``.
        scales: float16 or bfloat16 [K / group_size, N].
        bias: [N], or None.
        group_size: input features with one scale, a multiple of 32; -1: all.
        g_idx: int32 [K], the group of each input feature; None: consecutive groups.
        bits: 4 or 8.
        zero_offset: 1 for the original format, 0 for its second version ("gptq_v2").

    Raises ValueError for shapes and values other than these.
    """
    weight = grouped_from_gptq(
        qweight, qzeros, scales, g_idx, bits=bits, group_size=group_size, zero_offset=zero_offset
    )
    return prepare_packed_linear(weight, bias)


def prepare_linear_awq(
    qweight: torch.Tensor,
    qzeros: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group_size: int,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """As ``prepare_linear_gptq``, for a 4-bit weight as AWQ stores it: qweight int32 [K, N / 8], qzeros int32
    [K / group_size, N / 8], both in AWQ's order of eight output features, scales [K / group_size, N]."""
    return prepare_packed_linear(grouped_from_awq(qweight, qzeros, scales, group_size=group_size), bias)


def prepare_linear_fp8(
    weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None, *, activations: Activations = "keep"
) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function x [T, K] -> x @ (weight * scale).T + bias [T, N] of x's dtype, for weight float8_e4m3fn [N, K].

    scale: of the tensor (one element) or of each output feature ([N] or [N, 1]). activations: "keep" multiplies x as
    it is, "quantize" rounds each row to e4m3 first, with a scale of its own.

    Raises ValueError for other shapes and values, and for "quantize" on a GPU that cannot multiply e4m3.
    """
    return prepare_packed_linear(scaled(weight, scale, activations), bias)


def prepare_linear_int8(
    weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None, *, activations: Activations = "keep"
) -> Callable[[torch.Tensor], torch.Tensor]:
    """As ``prepare_linear_fp8``, for weight int8 [N, K]; "quantize" rounds each row of x to int8."""
    return prepare_packed_linear(scaled(weight, scale, activations), bias)


def add_lora_(
    out: torch.Tensor,
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    scaling: torch.Tensor,
    adapters: torch.Tensor,
) -> None:
    """Add to each row of a layer's result what its low-rank adapter adds: out[t] += scaling[l] * b[l] @ (a[l] @ x[t]).

    out [T, N], changed in place; x [T, K]; a [L, r, K] and b [L, N, r], the L adapters of the layer, ranks below r
    filled up with zeros; scaling float32 [L]; adapters int32 [T], the l of each row, -1 for none.
    """
    _backend(x).add_lora_(out, x, a, b, scaling, adapters)
