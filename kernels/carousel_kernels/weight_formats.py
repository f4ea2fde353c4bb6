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

FP8 and int8 weights are stored plainly, [N, K], with one scale per tensor, per output feature or, as in DeepSeek-V3's
checkpoints, per block of 128 output and 128 input features. compressed-tensors packs integers of 4 bits as int32
[N, K / 8], each plus 8, the first input feature in the lowest bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

__all__ = [
    "Activations",
    "GroupedWeight",
    "Linear",
    "PackedWeight",
    "ScaledWeight",
    "grouped_from_awq",
    "grouped_from_gptq",
    "grouped_from_packed",
    "scaled",
    "scaled_by_blocks",
]

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

    def part(self, dim: int, begin: int, end: int) -> GroupedWeight:
        """Output features (``dim`` 0) or input features (1) [begin, end).

        Raises ValueError for input features that are no whole groups, or that were quantised in another order.
        """
        if dim == 0:
            scales, zeros = self.scales[:, begin:end].contiguous(), self.zeros[:, begin:end].contiguous()
            return replace(self, q=self.q[begin:end].contiguous(), scales=scales, zeros=zeros)
        if (begin, end) == (0, self.q.shape[1]):
            return self
        _require(self.order is None, "input features", "a part of a weight in act order", "all of them")
        groups = _groups(begin, end, self.group_size)
        q = self.q[:, begin:end].contiguous()
        return replace(self, q=q, scales=self.scales[groups].contiguous(), zeros=self.zeros[groups].contiguous())

    def times(self, factor: float) -> GroupedWeight:
        """The weight times a number."""
        return self if factor == 1.0 else replace(self, scales=self.scales.float() * factor)

    @staticmethod
    def stacked(weights: Sequence[GroupedWeight]) -> GroupedWeight | None:
        """Output features of several weights; None if they do not go together."""
        first = weights[0]
        for other in weights[1:]:
            alike = (other.group_size, other.bits, other.scales.dtype) == (
                first.group_size, first.bits, first.scales.dtype)  # fmt: skip
            same = other.order is first.order or (
                other.order is not None and first.order is not None and torch.equal(other.order, first.order)
            )
            if not (alike and same):
                return None
        return replace(
            first,
            q=torch.cat([weight.q for weight in weights]),
            scales=torch.cat([weight.scales for weight in weights], dim=1),
            zeros=torch.cat([weight.zeros for weight in weights], dim=1),
        )


@dataclass(frozen=True, slots=True)
class ScaledWeight:
    """weight[n, k] = q[n, k] * scales[n], or, with a group size, * scales[k // group_size, n].

    Attributes:
        q: float8_e4m3fn or int8 [N, K].
        scales: float32 [N], or [K / group_size, N].
        activations: see ``Activations``.
        group_size: input features per scale, a multiple of 32 that divides K; 0: all.
    """

    q: torch.Tensor
    scales: torch.Tensor
    activations: Activations
    group_size: int = 0

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight [N, K] in ``dtype``, computed in float32."""
        if self.group_size:
            return (self.q.float() * self.scales.repeat_interleave(self.group_size, dim=0).T).to(dtype)
        return (self.q.float() * self.scales.unsqueeze(1)).to(dtype)

    def part(self, dim: int, begin: int, end: int) -> ScaledWeight:
        """As ``GroupedWeight.part``."""
        if dim == 0:
            scales = self.scales[..., begin:end].contiguous()
            return replace(self, q=self.q[begin:end].contiguous(), scales=scales)
        q = self.q[:, begin:end].contiguous()
        if not self.group_size:
            return replace(self, q=q)
        return replace(self, q=q, scales=self.scales[_groups(begin, end, self.group_size)].contiguous())

    def times(self, factor: float) -> ScaledWeight:
        """The weight times a number."""
        return self if factor == 1.0 else replace(self, scales=self.scales * factor)

    @staticmethod
    def stacked(weights: Sequence[ScaledWeight]) -> ScaledWeight | None:
        """As ``GroupedWeight.stacked``."""
        first = weights[0]
        kinds = {(weight.q.dtype, weight.activations, weight.group_size) for weight in weights}
        if len(kinds) > 1:
            return None
        q = torch.cat([weight.q.view(torch.uint8) for weight in weights]).view(first.q.dtype)
        return replace(first, q=q, scales=torch.cat([weight.scales for weight in weights], dim=-1))


PackedWeight = GroupedWeight | ScaledWeight


def _groups(begin: int, end: int, size: int) -> slice:
    whole = begin % size == 0 and end % size == 0
    _require(whole, "input features", f"{begin} to {end}", f"whole groups of {size}")
    return slice(begin // size, end // size)


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


def scaled_by_blocks(weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> ScaledWeight:
    """FP8 with a scale per block: scale [N / block[0], K / block[1]], rounded up. Raises ValueError."""
    outputs, features = weight.shape
    rows, columns = block
    _require(weight.dtype == torch.float8_e4m3fn, "dtype of weight", weight.dtype, "float8_e4m3fn")
    size = _group_size(columns, features)
    _check_table("scale", scale, (-(-outputs // rows), features // size))
    scales = scale.float().repeat_interleave(rows, dim=0)[:outputs].T.contiguous()
    return ScaledWeight(weight.contiguous(), scales, "keep", size)


def grouped_from_packed(
    packed: torch.Tensor, scales: torch.Tensor, *, bits: int, group_size: int, features: int
) -> GroupedWeight:
    """Unpack compressed-tensors' symmetric integers: packed int32 [N, K * bits / 32], scales [N, K / group_size].

    ``features`` is K. Raises ValueError.
    """
    _require(bits in (4, 8), "bits", bits, "4, 8")
    outputs = packed.shape[0]
    size = _group_size(group_size, features)
    _check_table("weight_packed", packed, (outputs, -(-features * bits // 32)))
    _check_table("weight_scale", scales, (outputs, features // size))
    q = _unpack(packed, bits).flatten(1)[:, :features].contiguous()
    table = scales.T.contiguous()
    return GroupedWeight(q, table, torch.full_like(table, 2 ** (bits - 1), dtype=torch.int16), None, size, bits)
