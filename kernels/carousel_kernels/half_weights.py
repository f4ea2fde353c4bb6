"""Weights of linear layers in bfloat16 for the CPU, beside activations in float32: how they lie in memory.

Activations are rounded to bfloat16 as they enter a layer, products are summed in float32, and what leaves is float32:
the residual stream, norms and attention keep their precision, and the weights take half the memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from .blocked import BLOCK_COLUMNS, blocks_of, check_parts, padded_bias, row_major

__all__ = ["HALF_LAYOUT_VERSION", "HalfWeight", "halve_weight"]

HALF_LAYOUT_VERSION = 1
"""Changes with the layout: prepared weights of another version must be made again."""

_DEPTH = 2  # adjacent inputs that a dot-product instruction multiplies and adds at once


@dataclass(frozen=True, slots=True)
class HalfWeight:
    """The weight [N, K] and bias [N] of a layer, N padded to ``BLOCK_COLUMNS`` and K to 2 with zeros.

    Attributes:
        codes: bfloat16 [N / 32, K / 2, 32, 2]; the layout that the compiled kernel reads from one end to the other.
        bias: float32 [N], or None.
        columns, inputs: N and K without padding.
    """

    codes: torch.Tensor
    bias: torch.Tensor | None
    columns: int
    inputs: int

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def tensors(self) -> dict[str, torch.Tensor]:
        """What there is to save, by name."""
        return {"codes": self.codes} if self.bias is None else {"codes": self.codes, "bias": self.bias}

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], columns: int, inputs: int) -> HalfWeight:
        """From what ``tensors`` gave.

        Raises:
            ValueError: a tensor is missing, or not of the shape or type that N and K ask for.
        """
        blocks, depth = blocks_of(columns), -(-inputs // _DEPTH)
        wanted = {
            "codes": ((blocks, depth, BLOCK_COLUMNS, _DEPTH), torch.bfloat16),
            "bias": ((blocks * BLOCK_COLUMNS,), torch.float32),
        }
        check_parts(tensors, wanted)
        return cls(tensors["codes"], tensors.get("bias"), columns, inputs)

    def first(self, columns: int) -> HalfWeight:
        """The layer of its first columns alone, a multiple of ``BLOCK_COLUMNS``."""
        bias = None if self.bias is None else self.bias[:columns]
        return HalfWeight(self.codes[: columns // BLOCK_COLUMNS], bias, columns, self.inputs)

    def row_major(self) -> torch.Tensor:
        """The weight as bfloat16 [N, K], without padding."""
        return row_major(self.codes, self.columns, self.inputs)


def halve_weight(weight: torch.Tensor, bias: torch.Tensor | None = None) -> HalfWeight:
    """Round weight [N, K] of any float dtype to bfloat16 and lay it out; the bias [N] stays float32."""
    columns, inputs = weight.shape
    blocks, depth = blocks_of(columns), -(-inputs // _DEPTH)
    padded = weight.new_zeros((blocks * BLOCK_COLUMNS, depth * _DEPTH), dtype=torch.bfloat16)
    padded[:columns, :inputs] = weight
    codes = padded.view(blocks, BLOCK_COLUMNS, depth, _DEPTH).transpose(1, 2).contiguous()
    return HalfWeight(codes, padded_bias(bias, columns), columns, inputs)
