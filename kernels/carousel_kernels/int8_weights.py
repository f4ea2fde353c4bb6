"""Weights of linear layers as 8-bit integers for the CPU: how they are made and how they lie in memory.

W8A8, symmetric: a weight [N, K] has one scale per output, max |row| / 127, and an activation [T, K] gets one scale per
row when it comes, so that the product is one of small integers: y[t, n] = sum_k(a[t, k] * w[n, k]) * scale_t * scale_n.
The sums are exact in 32 bits, so a row's result does not depend on the rows beside it.

Where activations have a few very large values, as before a model's output layer, 8 bits leave too little of the others.
A wide product takes activations of 16 bits as two codes, a + rest / 254, at twice the arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from .blocked import BLOCK_COLUMNS, blocks_of, check_parts, padded_bias, row_major

__all__ = [
    "LAYOUT_VERSION",
    "MAX_INPUTS",
    "RESTS",
    "QuantizedWeight",
    "quantize_rows",
    "quantize_rows_wide",
    "quantize_weight",
    "turn",
    "turns",
]

LAYOUT_VERSION = 3
"""Changes with the layout or the arithmetic: quantised weights of another version must be made again."""

_DEPTH = 4  # adjacent inputs that a dot-product instruction multiplies and adds at once

MAX_INPUTS = 65_536
"""Of a layer: 255 * 127 times as many just fit an int32."""

RESTS = 254.0
"""Steps of the second code of a wide activation within one of the first."""

_RUN, _MOST_RUNS = 16, 32
_TINY = 1e-30  # a row below this everywhere counts as zero: the inverse of its scale would overflow
_CHUNK_ELEMENTS = 1 << 22


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """The weight [N, K] and bias [N] of a layer, N padded to ``BLOCK_COLUMNS`` and K to 4 with zeros.

    Attributes:
        codes: int8 [N / 32, K / 4, 32, 4]; the layout that the compiled kernel reads from one end to the other.
        scales: float32 [N]; NaN for an output whose weights are not all finite.
        shifts: int32 [N], 128 times the sum of an output's codes: the kernel's activations are 128 too large.
        bias: float32 [N], or None.
        columns, inputs: N and K without padding.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    shifts: torch.Tensor
    bias: torch.Tensor | None
    columns: int
    inputs: int

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def tensors(self) -> dict[str, torch.Tensor]:
        """What there is to save, by name."""
        named = {"codes": self.codes, "scales": self.scales, "shifts": self.shifts}
        return named if self.bias is None else named | {"bias": self.bias}

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], columns: int, inputs: int) -> QuantizedWeight:
        """From what ``tensors`` gave.

        Raises:
            ValueError: a tensor is missing, or not of the shape or type that N and K ask for.
        """
        blocks, depth = blocks_of(columns), -(-inputs // _DEPTH)
        padded = (blocks * BLOCK_COLUMNS,)
        wanted = {
            "codes": ((blocks, depth, BLOCK_COLUMNS, _DEPTH), torch.int8),
            "scales": (padded, torch.float32),
            "shifts": (padded, torch.int32),
            "bias": (padded, torch.float32),
        }
        check_parts(tensors, wanted)
        return cls(tensors["codes"], tensors["scales"], tensors["shifts"], tensors.get("bias"), columns, inputs)

    def first(self, columns: int) -> QuantizedWeight:
        """The layer of its first columns alone, a multiple of ``BLOCK_COLUMNS``."""
        parts = {name: tensor[:columns] for name, tensor in self.tensors().items() if name != "codes"}
        return self.of(parts | {"codes": self.codes[: columns // BLOCK_COLUMNS]}, columns, self.inputs)

    def row_major(self) -> torch.Tensor:
        """The codes as int8 [N, K], without padding."""
        return row_major(self.codes, self.columns, self.inputs)


def quantize_weight(weight: torch.Tensor, bias: torch.Tensor | None = None) -> QuantizedWeight:
    """Quantise weight [N, K] and bias [N], any float dtype, in pieces: beside the result there is little else.

    Raises:
        ValueError: K is above ``MAX_INPUTS``.
    """
    columns, inputs = weight.shape
    if inputs > MAX_INPUTS:
        raise ValueError(f"a layer of {inputs} inputs cannot be quantised; at most {MAX_INPUTS}")
    blocks, depth = blocks_of(columns), -(-inputs // _DEPTH)
    padded = blocks * BLOCK_COLUMNS
    codes = weight.new_empty((blocks, depth, BLOCK_COLUMNS, _DEPTH), dtype=torch.int8)
    scales = weight.new_zeros(padded, dtype=torch.float32)
    shifts = weight.new_zeros(padded, dtype=torch.int32)
    step = max(1, _CHUNK_ELEMENTS // (BLOCK_COLUMNS * max(1, inputs)))
    for block in range(0, blocks, step):
        first, end = block * BLOCK_COLUMNS, min((block + step) * BLOCK_COLUMNS, columns)
        quantized, scales[first:end] = quantize_rows(weight[first:end].float())
        shifts[first:end] = quantized.sum(1, dtype=torch.int32) * 128
        count = -(-(end - first) // BLOCK_COLUMNS)
        piece = codes.new_zeros((count * BLOCK_COLUMNS, depth * _DEPTH))
        piece[: end - first, :inputs] = quantized
        codes[block : block + count] = piece.view(count, BLOCK_COLUMNS, depth, _DEPTH).transpose(1, 2)
    return QuantizedWeight(codes, scales, shifts, padded_bias(bias, columns), columns, inputs)


def turns(inputs: int) -> int:
    """Into how many runs ``turn`` cuts what it mixes, for rows of so many values: the most up to 32, a power of two; 1
    for lengths that it leaves as they are."""
    return 1 if inputs % _RUN else min(_MOST_RUNS, inputs // _RUN & -(inputs // _RUN))


def turn(x: torch.Tensor) -> torch.Tensor:
    """x [T, K] with outliers spread: every ``turns(K)`` runs of 16 values times the Hadamard matrix of that order,
    without its scale. Twice is ``turns(K)`` times x. A weight [N, K], turned and divided by that, takes turned rows."""
    runs = turns(x.shape[1])
    out, step = x, 1
    while step < runs:
        pairs = out.reshape(x.shape[0], x.shape[1] // (2 * step * _RUN), 2, step * _RUN)
        out = torch.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], dim=2)
        step *= 2
    return out.reshape(x.shape)


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x float32 [T, K] -> codes int8 [T, K] in [-127, 127] and scales float32 [T] with x close to codes * scale.

    A row with a value that is not finite gets scale NaN and codes 0.
    """
    scaled, scales = _scaled(x)
    return scaled.round().to(torch.int8), scales


def quantize_rows_wide(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Like ``quantize_rows``, with int8 rests [T, K] between: x is close to (codes + rests / ``RESTS``) * scale."""
    scaled, scales = _scaled(x)
    whole = scaled.round()
    return whole.to(torch.int8), ((scaled - whole) * RESTS).round().to(torch.int8), scales


def _scaled(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    largest = x.abs().amax(dim=1)
    finite = largest.isfinite()  # amax hands on NaN
    used = finite & (largest >= _TINY)
    # A division, as in the compiled kernel: a scalar over a tensor would be its reciprocal, multiplied.
    inverse = torch.where(used, torch.full_like(largest, 127.0) / largest, 0.0)
    scales = torch.where(used, largest / 127.0, 0.0)
    return torch.where(used.unsqueeze(1), x * inverse.unsqueeze(1), 0.0), torch.where(finite, scales, torch.nan)
