"""How the compiled CPU kernels want weights [N, K] to lie in memory: blocks of outputs, inputs in adjacent groups.

A tensor [N / 32, K / depth, 32, depth], N and K padded with zeros, is read from one end to the other.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

__all__ = ["BLOCK_COLUMNS", "blocks_of", "check_parts", "padded_bias", "row_major"]

BLOCK_COLUMNS = 32


def blocks_of(columns: int) -> int:
    """Blocks that so many outputs take."""
    return -(-columns // BLOCK_COLUMNS)


def row_major(codes: torch.Tensor, columns: int, inputs: int) -> torch.Tensor:
    """Blocks as [N, K], without padding."""
    blocks, groups, _, depth = codes.shape
    rows = codes.transpose(1, 2).reshape(blocks * BLOCK_COLUMNS, groups * depth)
    return rows[:columns, :inputs].contiguous()


def padded_bias(bias: torch.Tensor | None, columns: int) -> torch.Tensor | None:
    """A bias [N] in float32, padded with zeros to whole blocks."""
    if bias is None:
        return None
    whole = bias.new_zeros(blocks_of(columns) * BLOCK_COLUMNS, dtype=torch.float32)
    whole[:columns] = bias
    return whole


def check_parts(tensors: Mapping[str, torch.Tensor], wanted: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
    """Hold a layer's saved tensors against the shapes and types that they must have; ``bias`` may be missing.

    Raises:
        ValueError: a tensor is missing, or not of that shape or type.
    """
    for name, (shape, dtype) in wanted.items():
        tensor = tensors.get(name)
        if tensor is None and name == "bias":
            continue
        if tensor is None or tuple(tensor.shape) != shape or tensor.dtype != dtype or not tensor.is_contiguous():
            raise ValueError(f"{name}: not {dtype} {list(shape)}")
