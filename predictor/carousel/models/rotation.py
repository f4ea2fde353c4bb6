"""A change of basis for the residual stream, which leaves a model's function as it is and spreads its outliers.

A few channels of the residual stream are tens of times as large as the others, so that 8 bits per row leave nothing of
those. In a basis that mixes all channels there are no such channels (Ashkboos et al., QuaRot, 2024). The rotation R is
orthogonal, so that a norm without weights commutes with it: embeddings E become E R; a layer W that reads the stream
behind a norm of weights w becomes W diag(w) R and the norm's weights ones; one that writes to it, W and b, becomes R' W
and R' b. All of it is done once, when weights are prepared.
"""

from __future__ import annotations

import math

import torch

__all__ = ["rotate", "rotate_back"]


def rotate(x: torch.Tensor) -> torch.Tensor:
    """x R for the rows of x [T, n], float32; another tensor. R is signs, then the Kronecker product of the cosine
    transform of n's odd part and the Hadamard matrix of its power of two: n log n steps, the same on every machine."""
    odd, even = _parts(x.shape[1])
    mixed = _hadamard((x * _signs(x.shape[1])).view(-1, odd, even))
    return torch.matmul(_cosines(odd), mixed).view(x.shape)


def rotate_back(x: torch.Tensor) -> torch.Tensor:
    """The inverse of ``rotate``."""
    odd, even = _parts(x.shape[1])
    mixed = torch.matmul(_cosines(odd).t(), x.reshape(-1, odd, even))
    return _hadamard(mixed).view(x.shape) * _signs(x.shape[1])


def _parts(n: int) -> tuple[int, int]:
    even = n & -n
    return n // even, even


def _signs(n: int) -> torch.Tensor:
    """+1 or -1 for each channel, by a hash of its number: without them a constant row would end up in one channel."""
    numbers = torch.arange(1, n + 1, dtype=torch.int64)
    mixed = numbers * 0x9E3779B1 & 0xFFFFFFFF
    mixed = (mixed ^ mixed >> 15) * 0x85EBCA6B & 0xFFFFFFFF
    return 1.0 - 2.0 * ((mixed ^ mixed >> 13) & 1).float()


def _hadamard(x: torch.Tensor) -> torch.Tensor:
    """x [..., p] times the orthonormal Hadamard matrix of p, a power of two."""
    p = x.shape[-1]
    whole = x.reshape(-1, p)
    step = 1
    while step < p:
        pairs = whole.view(-1, p // (2 * step), 2, step)
        whole = torch.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], dim=2)
        step *= 2
    return (whole.reshape(x.shape)) * p**-0.5


def _cosines(m: int) -> torch.Tensor:
    """The orthonormal matrix of the cosine transform (DCT-II) of m values."""
    rows, columns = torch.arange(m, dtype=torch.float64).unsqueeze(1), torch.arange(m, dtype=torch.float64)
    matrix = torch.cos(math.pi / m * (columns + 0.5) * rows) * math.sqrt(2 / m)
    matrix[0] = 1 / math.sqrt(m)
    return matrix.float()
