"""Quantised weights as checkpoints store them, unpacked to one form each that all backends take.

GPTQ (Frantar et al., 2022; the layout of AutoGPTQ) and AWQ (Lin et al., 2023; that of AutoAWQ's "gemm" version) both
quantise groups of consecutive input features with one scale and one zero point per group and output feature:
weight = scale * (q - zero). They differ in how the integers lie in 32-bit words:

- GPTQ: ``qweight`` int32 [K * bits / 32, N]; a word holds consecutive *input* features, the first in its lowest bits.
  ``qzeros`` int32 [G, N * bits / 32] holds consecutive output features likewise, each zero point minus one in the
  original format and as it is in version 2. ``g_idx`` int32 [K] gives every feature's group where the features were
  quantised in another order than they lie ("act order").
- AWQ: 4 bits; ``qweight`` int32 [K, N / 8] and ``qzeros`` int32 [G, N / 8]; a word holds eight *output* features, of
  which the i-th from the lowest bits is number (0, 2, 4, 6, 1, 3, 5, 7)[i]. Zero points are stored as they are.

FP8 and int8 weights are stored plainly, [N, K], with one scale per tensor or per output feature.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

__all__ = ["Activations", "GroupedWeight", "Linear", "ScaledWeight", "grouped_from_awq", "grouped_from_gptq", "scaled"]

Linear = Callable[[torch.Tensor], torch.Tensor]

Activations = Literal["keep", "quantize"]
"""Whether a layer multiplies activations as they are, or rounds each row to the type of the weight first."""

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_GRAIN = 32  # input features that every backend takes at once, with one scale


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """weight[n, order[j]] = scales[j // group_size, n] * (q[n, j] - zeros[j // group_size, n]).

    Attributes:
        q: uint8 [N, K], values below 2^bits.
        scales: float16, bfloat16 or float32 [K / group_size, N].
        zeros: int16 [K / group_size, N].
        order: int64 [K], the input feature of each column of ``q``; None where that is the column's own number.
        group_size: input features per scale; a multiple of 32 that divides K.
        bits: 4 or 8.
    """

    q: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    order: torch.Tensor | None
    group_size: int
    bits: int

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight [N, K] in ``dtype``, computed in float32, its columns in the order of the input features."""
        scales = self.scales.float().repeat_interleave(self.group_size, dim=0).T
        zeros = self.zeros.float().repeat_interleave(self.group_size, dim=0).T
        weight = ((self.q.float() - zeros) * scales).to(dtype)
        if self.order is None:
            return weight
        return torch.empty_like(weight).index_copy_(1, self.order, weight)


@dataclass(frozen=True, slots=True)
class ScaledWeight:
    """weight[n, k] = q[n, k] * scales[n].

    Attributes:
        q: float8_e4m3fn or int8 [N, K].
        scales: float32 [N].
        activations: see ``Activations``.
    """

    q: torch.Tensor
    scales: torch.Tensor
    activations: Activations

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight [N, K] in ``dtype``, computed in float32."""
        return (self.q.float() * self.scales.unsqueeze(1)).to(dtype)


def _require(holds: bool, name: str, value: object, allowed: str) -> None:
    if not holds:
        raise ValueError(f"{name}: got {value}, allowed: {allowed}")


def _unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [A, B] -> uint8 [A, B, 32 / bits], from the lowest bits up."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    parts: torch.Tensor = (words.unsqueeze(-1) >> shifts) & (2**bits - 1)
    return parts.to(torch.uint8)


def _group_size(given: int, features: int) -> int:
    size = features if given == -1 else given
    _require(
        size > 0 and size % _GRAIN == 0 and features % size == 0,
        "group_size", given, f"-1 or a multiple of {_GRAIN} that divides the {features} input features",
    )  # fmt: skip
    return size


def _check_table(name: str, table: torch.Tensor, shape: tuple[int, int]) -> None:
    _require(tuple(table.shape) == shape, f"shape of {name}", tuple(table.shape), str(shape))


def grouped_from_gptq(
    qweight: torch.Tensor,
    qzeros: torch.Tensor,
    scales: torch.Tensor,
    g_idx: torch.Tensor | None,
    *,
    bits: int,
    group_size: int,
    zero_offset: int,
) -> GroupedWeight:
    """Unpack GPTQ; see the module and ``carousel_kernels.prepare_linear_gptq``. Raises ValueError."""
    _require(bits in (4, 8), "bits", bits, "4, 8")
    _require(zero_offset in (0, 1), "zero_offset", zero_offset, "0, 1")
    per_word = 32 // bits
    features, outputs = qweight.shape[0] * per_word, qweight.shape[1]
    size = _group_size(group_size, features)
    _check_table("scales", scales, (features // size, outputs))
    _check_table("qzeros", qzeros, (features // size, outputs // per_word))
    q = _unpack(qweight, bits).permute(1, 0, 2).reshape(outputs, features)
    zeros = _unpack(qzeros, bits).flatten(1).to(torch.int16) + zero_offset
    order = None
    if g_idx is not None:
        groups = torch.arange(features, device=g_idx.device) // size
        _check_table("g_idx", g_idx.unsqueeze(0), (1, features))
        if not torch.equal(g_idx.long(), groups):
            order = g_idx.long().argsort(stable=True)
            same = torch.equal(g_idx.long()[order], groups)
            _require(same, "g_idx", "groups of other sizes", f"every group of {size} features once")
            q = q[:, order]
    return GroupedWeight(q.contiguous(), scales, zeros, order, size, bits)


def grouped_from_awq(
    qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor, *, group_size: int
) -> GroupedWeight:
    """Unpack AWQ; see the module and ``carousel_kernels.prepare_linear_awq``. Raises ValueError."""
    features, outputs = qweight.shape[0], qweight.shape[1] * 8
    size = _group_size(group_size, features)
    _check_table("scales", scales, (features // size, outputs))
    _check_table("qzeros", qzeros, (features // size, outputs // 8))
    place = torch.tensor(_AWQ_ORDER, device=qweight.device).argsort()  # of each feature among the eight of its word
    q = _unpack(qweight, 4)[..., place].flatten(1).T
    zeros = _unpack(qzeros, 4)[..., place].flatten(1).to(torch.int16)
    return GroupedWeight(q.contiguous(), scales, zeros, None, size, 4)


def scaled(weight: torch.Tensor, scale: torch.Tensor, activations: Activations) -> ScaledWeight:
    """FP8 or int8; see ``carousel_kernels.prepare_linear_fp8``. Raises ValueError."""
    outputs = weight.shape[0]
    _require(weight.dtype in (torch.float8_e4m3fn, torch.int8), "dtype of weight", weight.dtype, "float8_e4m3fn, int8")
    _require(activations in ("keep", "quantize"), "activations", repr(activations), "'keep', 'quantize'")
    _require(scale.numel() in (1, outputs), "elements of scale", scale.numel(), f"1, {outputs}")
    scales = scale.float().reshape(-1).expand(outputs).contiguous()
    return ScaledWeight(weight.contiguous(), scales, activations)
